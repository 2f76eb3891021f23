"""The HTTP server: uvicorn on the caller's event loop, without its signal handlers and its prints."""

import asyncio
import contextlib
import copy
import logging
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from services.runtime.addresses import make_way
from services.speculation.errors import AerieError, Reason

log = logging.getLogger(__name__)

IDLE_SECONDS = 60
"""Connections without a request stay open that long: longer than clients keep them, who would meet a closed one."""
TELL_SECONDS = 1.0
"""Requests that are cut off have that long to say so."""
CUT_SECONDS = 2.0
"""Requests whose connection was cut free their sessions within that time."""
_TICK = 0.02


class _Relay(logging.Handler):
    """uvicorn's records under our own name, so that they go where ours go."""

    def emit(self, record: logging.LogRecord) -> None:
        if log.isEnabledFor(record.levelno):
            ours = copy.copy(record)
            ours.name = log.name
            log.handle(ours)


_relay = _Relay()


class HttpServer:
    """Serves one application at one address.

    Args:
        app: ASGI, without a lifespan of its own.
        certificate, key: PEM files; with a certificate it speaks TLS.
        client_ca: Whose certificates clients must show.
    """

    def __init__(
        self,
        app: ASGIApp,
        certificate: Path | None = None,
        key: Path | None = None,
        client_ca: Path | None = None,
    ) -> None:
        self._app = app
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._address: str | None = None
        self._server: uvicorn.Server | None = None
        self._clock: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where it listens: ``host:port`` or ``unix:PATH``."""
        if self._address is None:
            raise RuntimeError("the server has not started")
        return self._address

    async def start(self, address: str) -> None:
        """Listen, and serve until ``drain``.

        Args:
            address: ``host:port`` (port 0 picks one) or ``unix:PATH``.

        Raises:
            AerieError: INVALID_ARGUMENT, it cannot listen there, or the certificate or key is none.
        """
        config = self._configured()
        listener, self._address = await _listen(address)
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup([listener])
        self._server = server
        self._clock = asyncio.create_task(server.main_loop(), name="http clock")  # keeps the Date header right

    async def drain(self, deadline: float, cut_off: Callable[[], None] = lambda: None) -> None:
        """Take no more requests, let those that run finish within ``deadline`` seconds, cut the others.

        Args:
            deadline: Seconds.
            cut_off: Ends what they wait for with an error, which their clients still read.
        """
        server, clock = self._server, self._clock
        if server is None or clock is None:
            return
        self._server = None
        for listener in server.servers:
            listener.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()  # at once where it idles, else after its answer
        if not await _quiet(server, deadline):
            cut_off()
            await _quiet(server, TELL_SECONDS)
            for connection in list(server.server_state.connections):
                connection.transport.abort()  # as if the clients hung up
            if not await _quiet(server, CUT_SECONDS):
                log.warning("%d requests did not end", len(server.server_state.tasks))
                for task in list(server.server_state.tasks):
                    task.cancel()
        server.should_exit = True
        await clock
        if self.address.startswith("unix:"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix("unix:"))

    def _configured(self) -> uvicorn.Config:
        logger = logging.getLogger("uvicorn")
        logger.propagate = False
        logger.addHandler(_relay)
        logging.getLogger("uvicorn.access").disabled = True
        try:
            config = uvicorn.Config(
                self._app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=IDLE_SECONDS,
                ssl_certfile=self._certificate,
                ssl_keyfile=self._key,
                ssl_ca_certs=str(self._client_ca) if self._client_ca else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if self._client_ca else ssl.CERT_NONE,
            )
            config.load()
        except OSError as error:  # ssl's are OSErrors
            message = f"the certificate {self._certificate} or its key: {error}"
            raise AerieError(Reason.INVALID_ARGUMENT, message) from None
        return config


async def _quiet(server: uvicorn.Server, seconds: float) -> bool:
    """Wait until no connection is open and no request runs; says whether that is so."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while server.server_state.connections or server.server_state.tasks:
                await asyncio.sleep(_TICK)
    return not server.server_state.connections and not server.server_state.tasks


async def _listen(address: str) -> tuple[socket.socket, str]:
    """A bound socket, and the address it has. Raises AerieError (INVALID_ARGUMENT)."""
    try:
        if address.startswith("unix:"):
            return _listen_unix(address.removeprefix("unix:")), address
        host, colon, port = address.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535:
            raise AerieError(Reason.INVALID_ARGUMENT, f"an address is host:port or unix:PATH, not {address!r}")
        name = host.removeprefix("[").removesuffix("]")
        found = await asyncio.get_running_loop().getaddrinfo(
            name or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, place = found[0]
        listener = socket.create_server(place[:2], family=family, dualstack_ipv6=family == socket.AF_INET6 and not name)
        return listener, f"{host}:{listener.getsockname()[1]}"
    except OSError as error:
        raise AerieError(Reason.INVALID_ARGUMENT, f"cannot listen on {address}: {error}") from None


def _listen_unix(path: str) -> socket.socket:
    """A socket file, in place of one that nobody listens on any more."""
    make_way(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        listener.listen(2048)
    except BaseException:
        listener.close()
        raise
    return listener
