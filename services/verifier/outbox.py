"""Histories that wait to be sent, one outbox a session: sent by credit, so that a slow drafter holds back its own."""

import asyncio
from collections.abc import AsyncIterator

from services.speculation.messages import History
from services.wire.values import wire_bytes
from services.wire.verifier import CREDIT_BYTES, split_history

Key = tuple[str, int]
"""Session and epoch."""


class Outbox:
    """One session's history on its way to the orchestrator.

    Attributes:
        waiting: Bytes that are not acknowledged, sent or not.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._queue: asyncio.Queue[History | None] = asyncio.Queue()
        self._credit = CREDIT_BYTES
        self._more = asyncio.Event()

    def put(self, history: History) -> None:
        self.waiting += wire_bytes(history.features)
        self._queue.put_nowait(history)

    def close(self) -> None:
        self._queue.put_nowait(None)
        self.acknowledge(self.waiting)

    def acknowledge(self, size: int) -> None:
        """``size`` bytes have gone on."""
        size = min(size, self.waiting)  # what was never sent cannot be acknowledged
        self.waiting -= size
        self._credit += size
        self._more.set()

    async def slices(self) -> AsyncIterator[History]:
        """What there is, in slices, as credit allows; ends when the outbox is closed."""
        while (history := await self._queue.get()) is not None:
            for part in split_history(history):
                size = wire_bytes(part.features)
                # A slice larger than the whole credit goes when nothing else is under way.
                while self._credit < min(size, CREDIT_BYTES):
                    self._more.clear()
                    await self._more.wait()
                self._credit -= size
                yield part


class Outboxes:
    """The outboxes of a service: one lives while its session or its reader does."""

    def __init__(self) -> None:
        self._boxes: dict[Key, tuple[Outbox, int]] = {}

    def hold(self, key: Key) -> Outbox:
        """The outbox of a session, made if need be, until ``release``."""
        box, holders = self._boxes.get(key, (Outbox(), 0))
        self._boxes[key] = (box, holders + 1)
        return box

    def release(self, key: Key) -> None:
        box, holders = self._boxes.pop(key)
        if holders > 1:
            self._boxes[key] = (box, holders - 1)

    def waiting(self, key: Key) -> int:
        """Bytes of a session's features that are not acknowledged."""
        return self._boxes[key][0].waiting if key in self._boxes else 0

    @property
    def total(self) -> int:
        """Bytes of all sessions' features that are not acknowledged."""
        return sum(box.waiting for box, _ in self._boxes.values())

    def __len__(self) -> int:
        return len(self._boxes)
