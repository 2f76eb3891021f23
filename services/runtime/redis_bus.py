"""The event bus over Redis: one stream that every process appends to, and consumer groups that read it."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.runtime.bus import CLAIM_SECONDS, BusEvent, DropCounter, read_event, write_event
from services.runtime.outage import Outage
from services.runtime.redis_client import REDIS_ERRORS, cancellable

BATCH = 128
BLOCK_SECONDS = 0.5  # less than a client's socket timeout, or a quiet stream would look like Redis away
_FIELD = "event"

log = logging.getLogger(__name__)


class RedisBus:
    """A bus between processes.

    ``start`` it before its events are to arrive, ``drain`` or ``stop`` it at the end. What is published while Redis
    is away waits, as far as the capacity goes. A connection lost in mid-batch means events that arrive twice.

    Args:
        client: From ``connect_redis``; whoever made it closes it.
        stream: The stream's key.
        maxlen: About how many events the stream keeps.
        capacity: Most events that wait to be sent.
        claim_after: Seconds that a consumer may spend on an event before another one gets it.
    """

    def __init__(
        self,
        client: Redis,
        stream: str = "aerie:events",
        maxlen: int = 10_000,
        capacity: int = 1024,
        claim_after: float = CLAIM_SECONDS,
    ) -> None:
        self._redis = client
        self._stream = stream
        self._maxlen = maxlen
        self._capacity = capacity
        self._claim_after = claim_after
        self._dropped = DropCounter()
        self._waiting: deque[str] = deque()
        self._published = asyncio.Event()
        self._sent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def dropped(self) -> int:
        return self._dropped.count

    def start(self) -> None:
        """Send what is published, in a task of its own."""
        self._task = asyncio.create_task(self._send(), name=f"bus {self._stream}")

    async def drain(self, deadline: float) -> None:
        """Wait until all is sent, ``deadline`` seconds at most, then stop."""
        try:
            async with asyncio.timeout(deadline):
                while self._waiting and self._task:
                    self._sent.clear()
                    await self._sent.wait()
        except TimeoutError:
            log.warning("bus %s: %d events were not sent", self._stream, len(self._waiting))
        await self.stop()

    async def stop(self) -> None:
        """Send nothing more; what waits, or is published from now on, is dropped."""
        self._capacity = 0
        self._dropped.count += len(self._waiting)
        self._waiting.clear()
        if self._task:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def publish(self, topic: str, /, **data: Any) -> None:
        if len(self._waiting) >= self._capacity:
            self._dropped.count += 1
            return
        try:
            self._waiting.append(write_event(topic, data))
        except ValueError as error:
            self._dropped.refused(topic, error)
        self._published.set()

    def consume(self, group: str, consumer: str, prefix: str = "") -> AsyncIterator[BusEvent]:
        """See ``Bus``. While Redis is away a consumer waits."""
        return _Consumer(self._redis, self._stream, group, consumer, prefix, self._claim_after)

    async def _send(self) -> None:
        outage = Outage(log, f"bus {self._stream}")
        while True:
            await self._published.wait()
            self._published.clear()
            while batch := list(islice(self._waiting, BATCH)):
                try:
                    with cancellable():
                        await self._append(batch)
                except REDIS_ERRORS as error:
                    await asyncio.sleep(outage.failed(error))
                    continue
                outage.over()
                for _ in batch:
                    self._waiting.popleft()
            self._sent.set()

    async def _append(self, batch: list[str]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for text in batch:
                pipe.xadd(self._stream, {_FIELD: text}, maxlen=self._maxlen, approximate=True)
            await pipe.execute()


class _Consumer:
    """One consumer of a group, as an iterator that outlives a cancelled ``anext``.

    It takes one event at a time: what it has not asked for stays with the group.
    """

    def __init__(self, client: Redis, stream: str, group: str, name: str, prefix: str, claim_after: float) -> None:
        self._redis = client
        self._stream = stream
        self._group = group
        self._name = name
        self._prefix = prefix
        self._claim_after = claim_after
        self._outage = Outage(log, f"consumer {name} of {group}")
        self._in_group = False
        self._start = "$"  # from now on
        self._held: Any = None  # the stream's id of the event that the consumer has
        self._claim_from: Any = "0-0"
        self._claim_at = 0.0
        self._damaged = False

    def __aiter__(self) -> "_Consumer":
        return self

    async def __anext__(self) -> BusEvent:
        while True:
            try:
                with cancellable():
                    found = await self._take()
            except REDIS_ERRORS as error:
                if isinstance(error, ResponseError):
                    self._in_group = False  # gone with all data: Redis was restarted, or the stream removed
                await asyncio.sleep(self._outage.failed(error))
                continue
            self._outage.over()
            if found is None:
                continue
            self._held, fields = found
            event = self._read(fields)
            if event and event.topic.startswith(self._prefix):
                return event

    async def _take(self) -> tuple[Any, dict[Any, Any]] | None:
        """The id and fields of an event; None when there was none for a moment."""
        if not self._in_group:
            await self._join_group()
        if self._held is not None:
            await self._redis.xack(self._stream, self._group, self._held)
            self._held = None
        return await self._claim() or await self._next()

    async def _join_group(self) -> None:
        try:
            await self._redis.xgroup_create(self._stream, self._group, self._start, mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        self._in_group = True
        self._start = "0"  # a group that got lost misses nothing of the stream that came after it

    async def _claim(self) -> tuple[Any, dict[Any, Any]] | None:
        """An event that some consumer did not finish."""
        if time.monotonic() < self._claim_at:
            return None
        self._claim_from, found, *_ = await self._redis.xautoclaim(
            self._stream, self._group, self._name, round(1000 * self._claim_after), self._claim_from, count=1
        )
        if found:
            return found[0]
        self._claim_at = time.monotonic() + self._claim_after
        return None

    async def _next(self) -> tuple[Any, dict[Any, Any]] | None:
        block = max(1, round(1000 * min(BLOCK_SECONDS, self._claim_after)))
        streams: Any = await self._redis.xreadgroup(self._group, self._name, {self._stream: ">"}, count=1, block=block)
        return streams[0][1][0] if streams else None

    def _read(self, fields: dict[Any, Any]) -> BusEvent | None:
        try:
            return read_event(fields.get(_FIELD.encode()) or fields.get(_FIELD) or "")
        except ValueError as error:
            if not self._damaged:
                log.warning("consumer %s of %s skips what is no event: %s", self._name, self._group, error)
            self._damaged = True
            return None
