"""A proxy that makes a server slow: what passes it arrives later, and in order."""

import asyncio


class Proxy:
    """Listens on a port of 127.0.0.1 while it is entered.

    Args:
        target: ``host:port`` or ``unix:PATH`` of the server.
        delay: Seconds added to every round trip, half each way; set it whenever you like.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, target: str, delay: float = 0.0) -> None:
        self.target = target
        self.delay = delay
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """End all connections; new ones are welcome."""
        for task in self._tasks:
            task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            server_reader, server_writer = await self._connect()
            writers.append(server_writer)
            pumps = {
                asyncio.create_task(pump)
                for ends in ((reader, server_writer), (server_reader, writer))
                for pump in self._pumps(*ends)
            }
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # the server is away: so is the connection to it
        finally:
            for end in writers:
                end.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.target.startswith("unix:"):
            return await asyncio.open_unix_connection(self.target.removeprefix("unix:"))
        host, port = self.target.rsplit(":", 1)
        return await asyncio.open_connection(host, int(port))

    def _pumps(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        """One coroutine that reads, one that writes when it is time, so that delays do not add up."""
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        now = asyncio.get_running_loop().time

        async def read() -> None:
            while chunk := await reader.read(1 << 16):
                due.put_nowait((now() + self.delay / 2, chunk))
            due.put_nowait((now() + self.delay / 2, b""))
            await asyncio.Event().wait()

        async def write() -> None:
            while True:
                when, chunk = await due.get()
                await asyncio.sleep(max(0.0, when - now()))
                if not chunk:
                    return
                writer.write(chunk)
                await writer.drain()

        return read(), write()
