"""How a client reaches its service."""

from collections.abc import Callable

import grpc

Dial = Callable[[str], grpc.aio.Channel]
"""Address -> channel. Called on the event loop that uses the channel."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", 16 * 2**20),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Soon again: a request that is tried again would else find a connection that waits, and fail by that.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel without TLS or keys, for services of this machine."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
