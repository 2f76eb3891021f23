"""Clients of Redis that give up soon: who waits for Redis decides himself whether to try again."""

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
