"""Keys and TLS: what a server demands, and what a client shows."""

import hmac
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from services.runtime.bridge import FILE_BYTES, MESSAGE_BYTES
from services.runtime.rich_status import rich_status
from services.speculation.errors import AerieError, Reason

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # how long one attempt may take: a busy service accepts late
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
BULK_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", FILE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # channels to one address would share their connection
)
"""What a channel for files and history has besides."""
_OPEN = ("/grpc.health.v1.Health/",)
"""What needs no key: probes have none."""


class Key:
    """A secret that shows itself to nobody who prints it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def matches(self, shown: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self._text.encode(), shown.encode())

    def __repr__(self) -> str:
        return "Key(...)"

    __str__ = __repr__


Keys = tuple[Key, ...]


def read_keys(variable: str, file: Path | None) -> Keys:
    """Keys from an environment variable (separated by commas) and from a file (one a line).

    Raises:
        AerieError: INVALID_ARGUMENT, the file cannot be read, or a key is empty or not printable ASCII.
    """
    given = os.environ.get(variable, "")
    texts = given.split(",") if given else []
    if file is not None:
        texts += _read(file, "a key file").decode(errors="replace").splitlines()
    texts = [text.strip() for text in texts]
    if any(not text or not text.isascii() or not text.isprintable() or " " in text for text in texts):
        raise AerieError(Reason.INVALID_ARGUMENT, f"a key of {variable} or its file is empty, or no printable ASCII")
    if file is not None and not texts:
        raise AerieError(Reason.INVALID_ARGUMENT, f"{file} holds no key")
    return tuple(Key(text) for text in texts)


@dataclass(frozen=True)
class ServerSecurity:
    """What a server demands: one of ``keys`` of every call, and TLS with ``cert`` and ``cert_key`` (PEM files).

    With ``client_ca``, clients must show a certificate of it, too.
    """

    keys: Keys = ()
    cert: Path | None = None
    cert_key: Path | None = None
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials | None:
        """TLS, or None for none. Raises AerieError: INVALID_ARGUMENT, a file is missing or cannot be read."""
        if not self.cert and not self.cert_key and not self.client_ca:
            return None
        if not self.cert or not self.cert_key:
            raise AerieError(Reason.INVALID_ARGUMENT, "TLS needs both a certificate and its key")
        pair = (_read(self.cert_key, "the TLS key"), _read(self.cert, "the TLS certificate"))
        ca = _read(self.client_ca, "the clients' CA") if self.client_ca else None
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)


@dataclass(frozen=True)
class ChannelSecurity:
    """What a client shows: a key, and over TLS (``ca``) its own certificate where servers demand one."""

    key: Key | None = None
    ca: Path | None = None
    cert: Path | None = None
    cert_key: Path | None = None

    def open(self, address: str, options: Iterable[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """A channel. Raises AerieError: INVALID_ARGUMENT, a file is missing or cannot be read."""
        all_options = list({**dict(CHANNEL_OPTIONS), **dict(options)}.items())  # of two values gRPC takes the first
        interceptors = _showing(self.key) if self.key else []
        if self.ca is None:
            if self.cert or self.cert_key:
                raise AerieError(Reason.INVALID_ARGUMENT, "a certificate is shown over TLS alone: give the servers' CA")
            return grpc.aio.insecure_channel(address, options=all_options, interceptors=interceptors)
        if (self.cert is None) != (self.cert_key is None):
            raise AerieError(Reason.INVALID_ARGUMENT, "a certificate and its key come together")
        credentials = grpc.ssl_channel_credentials(
            _read(self.ca, "the CA"),
            _read(self.cert_key, "the certificate's key") if self.cert_key else None,
            _read(self.cert, "the certificate") if self.cert else None,
        )
        return grpc.aio.secure_channel(address, credentials, options=all_options, interceptors=interceptors)


OPEN = ChannelSecurity()


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls in that show one of the keys; health is open.

    Args:
        keys: At least one.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN) or self._knows(details.invocation_metadata):
            return handler
        return _refusing(handler)

    def _knows(self, metadata: Sequence[Any]) -> bool:
        for name, value in metadata or ():
            if name == "authorization" and isinstance(value, str) and value.lower().startswith("bearer "):
                shown = value[len("bearer ") :].strip()
                return sum(key.matches(shown) for key in self._keys) > 0  # all of them: no early end tells which
        return False


def _refusing(handler: Any) -> Any:
    """A handler of the same kind that refuses."""

    status = rich_status(AerieError(Reason.UNAUTHENTICATED, "a key is missing or wrong"))

    async def refuse(_: Any, context: Any) -> None:
        await context.abort_with_status(status)

    async def refuse_stream(_: Any, context: Any) -> Any:
        await context.abort_with_status(status)
        yield

    name = {
        (False, False): "unary_unary",
        (False, True): "unary_stream",
        (True, False): "stream_unary",
        (True, True): "stream_stream",
    }[handler.request_streaming, handler.response_streaming]
    return handler._replace(**{name: refuse_stream if handler.response_streaming else refuse})


def _showing(key: Key) -> list[Any]:
    """Interceptors that add the key to calls of every kind."""

    def shown(details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add("authorization", f"Bearer {key.reveal()}")
        rest = (details.credentials, details.wait_for_ready)
        return grpc.aio.ClientCallDetails(details.method, details.timeout, metadata, *rest)

    class UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            return await continuation(shown(details), request)

    class UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
        async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
            return await continuation(shown(details), request)

    class StreamUnary(grpc.aio.StreamUnaryClientInterceptor):
        async def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
            return await continuation(shown(details), requests)

    class StreamStream(grpc.aio.StreamStreamClientInterceptor):
        async def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
            return await continuation(shown(details), requests)

    return [UnaryUnary(), UnaryStream(), StreamUnary(), StreamStream()]


def _read(file: Path, what: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise AerieError(Reason.INVALID_ARGUMENT, f"{what} {file} cannot be read: {error.strerror}") from None
