"""Clients of Redis that give up soon: who waits for Redis decides himself whether to try again."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

SOCKET_SECONDS = 2.0

# What a call raises while Redis is away, loads its data, or cannot serve (out of memory, a replica, a wrong type).
REDIS_ERRORS = (RedisError, OSError)


def connect_redis(url: str, timeout: float = SOCKET_SECONDS) -> Redis:
    """A client for ``redis://``, ``rediss://`` or ``unix://PATH``; it connects when it is first used.

    Args:
        url: Where Redis is, and the database: ``redis://:PASSWORD@HOST:PORT/0``, ``unix:///PATH?db=0``.
        timeout: Seconds that connecting, or one answer, may take.

    Raises:
        ValueError: No such URL.
    """
    # RESP2 and no driver info: a new connection then costs no round trip before its first command.
    return Redis.from_url(
        url,
        protocol=2,
        driver_info=None,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=Retry(NoBackoff(), 0),
    )


@contextmanager
def cancellable() -> Iterator[None]:
    """Calls of Redis from which a cancellation comes through, if late.

    redis-py sends with ``asyncio.wait_for``, which before Python 3.12 loses a cancellation that comes once it is done:
    a task that calls Redis for ever could not be stopped.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
