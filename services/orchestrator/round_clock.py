"""Where the time of one round went: the data of ``round.committed``."""

import time
from typing import Any

from services.speculation.messages import Drafted, Verdict, Verify


class RoundClock:
    """One session's clock: told of each step, it sums up every round.

    Attributes:
        attached: A drafter was attached when the round was verified.
        drafted: The drafter's tree has come in time, if only a root.
        late: The round's draft has not come in time.
    """

    def __init__(self, session: str) -> None:
        self._session = session
        self._began = time.perf_counter()
        self._sent = self._began
        self._nodes = 1
        self.attached = False
        self._begin()

    def _begin(self) -> None:
        self._draft = self._queue = self._network = 0.0
        self.drafted = self.late = False

    @property
    def verify_wait(self) -> float:
        """Seconds since the tree was sent."""
        return time.perf_counter() - self._sent

    def on_prefilled(self) -> None:
        """The first round begins when the prompt has been read."""
        self._began = time.perf_counter()

    def on_drafted(self, message: Drafted, wait: float) -> None:
        self.drafted = True
        self._draft = message.seconds
        self._add(message.seconds, message.queue_seconds, wait)

    def on_verify(self, message: Verify, attached: bool) -> None:
        self._sent, self._nodes, self.attached = time.perf_counter(), len(message.tree), attached

    def on_verdict(self, message: Verdict) -> dict[str, Any]:
        """The round's summary; the next one begins."""
        self._add(message.seconds, message.queue_seconds, self.verify_wait)
        now = time.perf_counter()
        summary = {
            "session": self._session,
            "round": message.round,
            "tokens": len(message.tokens),
            "nodes": self._nodes,
            "accepted": len(message.tokens) - 1,
            "draft_seconds": self._draft,
            "verify_seconds": message.seconds,
            "network_seconds": self._network,
            "queue_seconds": self._queue,
            "round_seconds": now - self._began,
            "drafted": self.drafted,
            "attached": self.attached,
            "late": self.late,
        }
        self._began = now
        self._begin()
        return summary

    def _add(self, seconds: float, queued: float, wait: float) -> None:
        self._queue += queued
        self._network += max(0.0, wait - seconds - queued)
