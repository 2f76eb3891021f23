"""``Client``: the same for code that waits, with or without an event loop around it."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import CancelledError
from typing import Any, TypeVar, Unpack

from services.client.client import ASK_SECONDS, RETRIES, AsyncClient, Generation, Item, ServiceInfo, closed
from services.client.requests import Options, Prompt
from services.runtime.security import OPEN, ChannelSecurity
from services.speculation.errors import AerieError
from services.wire.orchestrator import DrafterLine

T = TypeVar("T")
CLOSE_SECONDS = 10.0
"""``close`` waits no longer for the loop's thread."""


class Client:
    """An ``AsyncClient`` on an event loop in a thread of its own.

    Thread-safe: any number of threads may use one client at the same time. It can be used where an event loop runs
    already, as in notebooks, and holds that loop up until the answer is there. Use as a context manager, or ``close``.

    Args:
        address, security, retries: As for ``AsyncClient``.
    """

    def __init__(self, address: str, *, security: ChannelSecurity = OPEN, retries: int = RETRIES) -> None:
        self._loop = _Loop()
        # Also for clients that are dropped, or still open at the end: a loop must not outlive the interpreter.
        self._end = weakref.finalize(self, self._loop.close)

        async def make() -> AsyncClient:
            return AsyncClient(address, security=security, retries=retries)

        try:
            self._client = self._loop.call(make())
        except BaseException:
            self._end()
            raise
        self._loop.client = self._client

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs; whoever waits for it gets ENGINE_CLOSED. A second time changes nothing."""
        self._end()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """See ``AsyncClient.generate``."""
        return self._loop.call(self._client.generate(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> "Stream":
        """See ``AsyncClient.stream``. Closing the iterator cancels the generation."""
        return Stream(self, self._client.stream(prompt, **options))

    def info(self, deadline: float = ASK_SECONDS) -> ServiceInfo:
        """See ``AsyncClient.info``."""
        return self._loop.call(self._client.info(deadline))

    def drafters(self, deadline: float = ASK_SECONDS) -> list[DrafterLine]:
        """See ``AsyncClient.drafters``."""
        return self._loop.call(self._client.drafters(deadline))


class Stream(Iterator[Item]):
    """Chunks as they come, then the end. One thread reads; any thread may ``close``, which ends the reading.

    A stream that is dropped unread is closed when it is collected; as a context manager it is closed on leaving.
    """

    def __init__(self, client: Client, items: AsyncGenerator[Item, None]) -> None:
        self._client = client  # which ends when nobody holds it
        self._items = items
        self._reader: asyncio.Task[Any] | None = None
        self._closed = False

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> Item:
        if self._closed:
            raise StopIteration
        try:
            item = self._client._loop.call(self._next())
        except CancelledError:  # by ``close`` on another thread
            raise StopIteration from None
        if item is None:
            raise StopIteration
        return item

    def close(self) -> None:
        """Cancel the generation, if it still runs."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(AerieError):  # the client has ended it
                self._client._loop.call(self._aclose())

    async def _next(self) -> Item | None:
        self._reader = asyncio.current_task()
        try:
            return await anext(self._items, None)
        finally:
            self._reader = None

    async def _aclose(self) -> None:
        if self._reader:
            self._reader.cancel()
            await asyncio.wait((self._reader,))
        await self._items.aclose()


class _Loop:
    """An event loop in a thread of its own, with the client that lives there."""

    def __init__(self) -> None:
        self.client: AsyncClient | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="aerie-client", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for it; an interrupted wait cancels it.

        Raises:
            AerieError: ENGINE_CLOSED, before or meanwhile.
        """
        with self._lock:
            if self._closed:
                coroutine.close()
                raise closed()
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            if self._closed:
                raise closed() from None
            raise
        finally:
            future.cancel()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if threading.current_thread() is not self._thread:  # where the garbage collector may run, too
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> None:
        if self.client:
            await self.client.close()
        if running := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        await self._loop.shutdown_asyncgens()
        self._loop.stop()
