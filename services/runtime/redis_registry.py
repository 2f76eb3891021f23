"""The registry over Redis: one key an instance, which expires with its lease."""

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from services.runtime.redis_client import REDIS_ERRORS, cancellable
from services.runtime.registry import KINDS, Entry, read_entry, write_entry

CALL_SECONDS = 3.0
_SCAN_COUNT = 10_000  # keys a round trip, of all that the database holds: some milliseconds of Redis

log = logging.getLogger(__name__)


class RedisRegistry:
    """Entries of every process that uses the same Redis and prefix.

    Args:
        client: From ``connect_redis``; whoever made it closes it.
        prefix: Begins every key: ``PREFIX:registry:KIND:NAME``.
        timeout: Seconds that a call may take before it raises ConnectionError, however many answers it needs.
    """

    def __init__(self, client: Redis, prefix: str = "aerie", timeout: float = CALL_SECONDS) -> None:
        self._redis = client
        self._prefix = f"{prefix}:registry:"
        self._timeout = timeout
        self._damaged: set[str] = set()

    async def join(self, entry: Entry, lease: float | None = None) -> None:
        text = write_entry(entry)
        others = [self._key(kind, entry.name) for kind in KINDS if kind != entry.kind]
        async with self._call(), self._redis.pipeline() as pipe:
            pipe.set(self._key(entry.kind, entry.name), text, px=None if lease is None else _milliseconds(lease))
            pipe.delete(*others)
            await pipe.execute()

    async def renew(self, name: str, lease: float) -> bool:
        keys = [self._key(kind, name) for kind in KINDS]
        async with self._call(), self._redis.pipeline() as pipe:
            pipe.exists(*keys)
            for key in keys:
                pipe.pexpire(key, _milliseconds(lease), xx=True)  # what has no lease gets none
            found, *_ = await pipe.execute()
        return bool(found)

    async def leave(self, name: str) -> None:
        async with self._call():
            await self._redis.delete(*(self._key(kind, name) for kind in KINDS))

    async def list(self, kind: str | None = None) -> list[Entry]:
        pattern = _literally(self._prefix if kind is None else self._key(kind, "")) + "*"
        async with self._call():
            # A scan may name a key twice.
            keys = list({key async for key in self._redis.scan_iter(match=pattern, count=_SCAN_COUNT)})
            values = await self._redis.mget(keys) if keys else []
        # A lease may end between the two, or the key hold no string.
        found = [(_text(key), value) for key, value in zip(keys, values, strict=True) if value is not None]
        entries = [self._read(key, value) for key, value in found]
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.name)

    def _key(self, kind: str, name: str) -> str:
        # No kind has a colon, so that any name may have some.
        return f"{self._prefix}{kind}:{name}"

    def _read(self, key: str, value: str | bytes) -> Entry | None:
        try:
            entry = read_entry(value)
            if self._key(entry.kind, entry.name) != key:
                raise ValueError(f"an entry of {entry.name!r}")
        except ValueError as error:
            if key not in self._damaged:
                log.warning("key %r of the registry is ignored, it holds no entry: %s", key, error)
            self._damaged.add(key)
            return None
        self._damaged.discard(key)
        return entry

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout):
                with cancellable():
                    yield
        except REDIS_ERRORS as error:
            raise ConnectionError(f"the registry does not answer: {str(error) or type(error).__name__}") from error


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(1000 * seconds))


def _text(key: str | bytes) -> str:
    return key.decode(errors="backslashreplace") if isinstance(key, bytes) else key


def _literally(text: str) -> str:
    """A glob that matches ``text`` alone."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)
