"""The event bus: lifecycle changes and one summary a round, to whoever listens.

Publishing never waits and never fails: what a full queue cannot take is dropped and counted. Here in memory, for one
event loop; ``redis_bus`` carries the same events between processes.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.runtime.json_object import read_object, write_object

CLAIM_SECONDS = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BusEvent:
    """Something that happened.

    Attributes:
        topic: A dotted name such as ``session.opened``.
        data: JSON values.
        unix_ms: When it was published; events that say the same are equal whenever that was.
    """

    topic: str
    data: Mapping[str, Any] = field(default_factory=dict)
    unix_ms: int = field(default=0, compare=False)


class Bus(Protocol):
    """Publishers and consumer groups.

    Attributes:
        dropped: Events lost because a queue was full or their data was not JSON.
    """

    @property
    def dropped(self) -> int: ...

    def publish(self, topic: str, /, **data: Any) -> None:
        """Tell every group. Returns at once and never raises; called on the bus's event loop."""

    def consume(self, group: str, consumer: str, prefix: str = "") -> AsyncIterator[BusEvent]:
        """Take part in a group. Each of its events goes to one of its consumers, if none dies to no other.

        A group hears what is published after its first consumer first asked for an event. An event is done when its
        consumer asks for the next one; one that is not done for a while goes to another consumer, so that a slow or
        dying consumer means events that come twice.

        Args:
            group: Its name.
            consumer: The name of one consumer, unique in the group.
            prefix: Receive topics that begin so. A group has one prefix: its other events are done unseen.
        """
        ...


class Subscription:
    """One listener's bounded queue. ``dropped`` counts what it lost."""

    def __init__(self, prefix: str, capacity: int) -> None:
        self.prefix = prefix
        self.dropped = 0
        self._queue: asyncio.Queue[BusEvent] = asyncio.Queue(capacity)

    def offer(self, event: BusEvent) -> bool:
        """Queue an event that is wanted; False when it is lost."""
        if not event.topic.startswith(self.prefix):
            return True
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            self.dropped += 1
            return False
        return True

    async def __aiter__(self) -> AsyncIterator[BusEvent]:
        while True:
            yield await self.get()

    async def get(self) -> BusEvent:
        """The oldest event, once there is one."""
        return await self._queue.get()

    def get_nowait(self) -> BusEvent | None:
        """The oldest waiting event, or None."""
        return None if self._queue.empty() else self._queue.get_nowait()


class MemoryBus:
    """A bus within one event loop.

    Args:
        claim_after: Seconds that a consumer may spend on an event before another one gets it.
        capacity: Most events that wait for a consumer of a group.
    """

    def __init__(self, claim_after: float = CLAIM_SECONDS, capacity: int = 1024) -> None:
        self._claim_after = claim_after
        self._capacity = capacity
        self._subscriptions: list[Subscription] = []
        self._groups: dict[str, _Group] = {}
        self._dropped = DropCounter()

    @property
    def dropped(self) -> int:
        return self._dropped.count

    def subscribe(self, prefix: str = "", capacity: int = 256) -> Subscription:
        """Receive events whose topic starts with ``prefix``, from now on."""
        subscription = Subscription(prefix, capacity)
        self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.remove(subscription)

    def publish(self, topic: str, /, **data: Any) -> None:
        if not self._subscriptions:
            return
        try:
            event = read_event(write_event(topic, data))
        except ValueError as error:
            self._dropped.refused(topic, error)
            return
        for subscription in self._subscriptions:
            if not subscription.offer(event):
                self._dropped.count += 1

    def consume(self, group: str, consumer: str, prefix: str = "") -> AsyncIterator[BusEvent]:
        """See ``Bus``; here a consumer has no use for its name."""
        return _Consumer(lambda: self._group(group), prefix)

    def _group(self, name: str) -> "_Group":
        if name not in self._groups:
            self._groups[name] = _Group(self.subscribe(capacity=self._capacity), self._claim_after)
        return self._groups[name]


class _Group:
    """What a group has not done: events that wait, and those that some consumer has."""

    def __init__(self, waiting: Subscription, claim_after: float) -> None:
        self._waiting = waiting
        self._claim_after = claim_after
        self._taken: dict[int, tuple[BusEvent, float]] = {}  # by number, the longest taken first
        self._number = 0

    async def take(self) -> tuple[int, BusEvent]:
        """An event that its consumer gave up, or the next one, and its number."""
        while True:
            now = time.monotonic()
            for number, (event, since) in self._taken.items():
                if now < since + self._claim_after:
                    break
                del self._taken[number]
                return self._hand_out(number, event)
            try:
                async with asyncio.timeout(self._claim_after):
                    event = await self._waiting.get()
            except TimeoutError:
                continue
            self._number += 1
            return self._hand_out(self._number, event)

    def done(self, number: int) -> None:
        self._taken.pop(number, None)

    def _hand_out(self, number: int, event: BusEvent) -> tuple[int, BusEvent]:
        self._taken[number] = (event, time.monotonic())
        return number, event


class _Consumer:
    """One consumer of a group, as an iterator that outlives a cancelled ``anext``."""

    def __init__(self, join: Callable[[], _Group], prefix: str) -> None:
        self._join = join
        self._prefix = prefix
        self._held: int | None = None

    def __aiter__(self) -> "_Consumer":
        return self

    async def __anext__(self) -> BusEvent:
        group = self._join()
        while True:
            if self._held is not None:
                group.done(self._held)
                self._held = None
            self._held, event = await group.take()
            if event.topic.startswith(self._prefix):
                return event


class DropCounter:
    """Events that a bus lost. Those that no bus can carry are a publisher's mistake: the first one is logged."""

    def __init__(self) -> None:
        self.count = 0
        self._logged = False

    def refused(self, topic: str, error: ValueError) -> None:
        if not self._logged:
            log.warning("events are dropped, %r first: %s", topic, error)
        self._logged = True
        self.count += 1


def write_event(topic: str, data: Mapping[str, Any]) -> str:
    """An event of now, as JSON.

    Raises:
        ValueError: Its data is not JSON.
    """
    return write_object({"topic": topic, "data": data, "unix_ms": time.time_ns() // 1_000_000})


def read_event(text: str | bytes) -> BusEvent:
    """The event that ``write_event`` wrote.

    Raises:
        ValueError: It wrote no such thing.
    """
    values = read_object(text)
    topic, data, unix_ms = (values.get(key) for key in ("topic", "data", "unix_ms"))
    if not (isinstance(topic, str) and isinstance(data, dict) and isinstance(unix_ms, int)):
        raise ValueError("not an event")
    return BusEvent(topic, data, unix_ms)
