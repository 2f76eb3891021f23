"""Supervision: an actor that fails is made anew, a few times, then whoever is above must act."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from services.runtime.actor import Actor

A = TypeVar("A", bound=Actor[Any])
log = logging.getLogger(__name__)

BACKOFF = (0.1, 0.5, 2.0)
STEADY_SECONDS = 60.0
"""An actor that has run for so long has recovered: its next failure counts as the first."""


class Supervisor(Generic[A]):
    """Keeps one actor running; the mailbox of one that failed is lost with it.

    Args:
        make: Builds a fresh actor.
        backoff: Seconds before each restart; its length bounds the restarts in a row.

    Attributes:
        actor: The one that runs, or ran last.
        failure: Why it gave up, or None.
    """

    def __init__(self, make: Callable[[], A], backoff: tuple[float, ...] = BACKOFF) -> None:
        self.actor = make()
        self.failure: str | None = None
        self._make = make
        self._backoff = backoff
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Messages in the actor's mailbox."""
        return self.actor.waiting

    def start(self) -> None:
        self.actor.start()
        self._task = asyncio.create_task(self._run(), name=f"supervisor of {self.actor.name}")

    async def stop(self) -> None:
        """Stop the actor for good."""
        if self._task:
            self._task.cancel()
            await asyncio.wait((self._task,))
        await self.actor.stop()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        failed, since = 0, loop.time()
        while (error := await self.actor.ended()) is not None:
            failed = 1 if loop.time() - since > STEADY_SECONDS else failed + 1
            if failed > len(self._backoff):
                self.failure = f"{self.actor.name} failed {failed} times: {error}"
                log.error(self.failure)
                return
            delay = self._backoff[failed - 1]
            log.warning("%s restarts in %g s", self.actor.name, delay)
            await asyncio.sleep(delay)
            self.actor, since = self._make(), loop.time()
            self.actor.start()
