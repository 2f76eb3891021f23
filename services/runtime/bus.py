"""An in-memory event bus: lifecycle changes and one summary a round, to whoever listens.

Publishing never waits: a subscriber that does not keep up loses events, and the loss is counted.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BusEvent:
    """``topic`` is a dotted name such as ``session.opened``; ``data`` holds plain values."""

    topic: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Subscription:
    """One listener's bounded queue. ``dropped`` counts what it lost."""

    def __init__(self, prefix: str, capacity: int) -> None:
        self.prefix = prefix
        self.dropped = 0
        self._queue: asyncio.Queue[BusEvent] = asyncio.Queue(capacity)

    def offer(self, event: BusEvent) -> None:
        if not event.topic.startswith(self.prefix):
            return
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            self.dropped += 1

    async def __aiter__(self) -> AsyncIterator[BusEvent]:
        while True:
            yield await self._queue.get()

    def get_nowait(self) -> BusEvent | None:
        """The oldest waiting event, or None."""
        return None if self._queue.empty() else self._queue.get_nowait()


class MemoryBus:
    """Publish and subscribe within one event loop."""

    def __init__(self) -> None:
        self._subscriptions: list[Subscription] = []

    def subscribe(self, prefix: str = "", capacity: int = 256) -> Subscription:
        """Receive events whose topic starts with ``prefix``, from now on."""
        subscription = Subscription(prefix, capacity)
        self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.remove(subscription)

    def publish(self, topic: str, **data: Any) -> None:
        for subscription in self._subscriptions:
            subscription.offer(BusEvent(topic, data))
