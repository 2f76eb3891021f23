"""A session's line to its drafter: sends in order, reads what comes, and watches the clock."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from services.orchestrator.directory import Offer
from services.orchestrator.pace import LOST_SECONDS, PRIMING_SECONDS
from services.runtime.actor import log_incident
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import Draft, Drafted, NeedFeatures, Observe, PortError, ToDrafter
from services.speculation.session import DrafterBehind, DrafterLost, DraftLate, Event

log = logging.getLogger(__name__)


class DrafterLink:
    """Open until ``close``; a task sends, so that a slow drafter never holds up its session.

    Args:
        offer: The drafter.
        post: Takes events.
        acknowledge: Told of bytes of history that have been sent on.
        seconds: Left to the session; None is no deadline.

    Attributes:
        broken: Its stream broke: the drafter is not there any more.
        draft_wait: Seconds between the last answered draft and its answer.
    """

    def __init__(
        self,
        offer: Offer,
        post: Callable[[Event], None],
        acknowledge: Callable[[int], None],
        seconds: float | None = None,
    ) -> None:
        self.offer = offer
        self.broken = False
        self.draft_wait = 0.0
        self._post = post
        self._acknowledge = acknowledge
        self._stream = offer.port.connect(seconds)
        self._outbox: deque[ToDrafter | int] = deque()
        self._filled = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self._asked: Draft | None = None  # the last one
        self._owed = 0  # answers of earlier rounds are owed no more
        self._asked_at = 0.0
        self._answers = 0
        offer.sessions += 1
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._read())]

    def send(self, message: ToDrafter) -> None:
        if isinstance(message, Draft):
            self._watch(message)
        self._put(message)

    def acknowledge(self, size: int) -> None:
        """Once all that was to be sent is on its way, ``size`` bytes of history have gone on."""
        self._put(size)

    def _put(self, message: ToDrafter | int) -> None:
        self._outbox.append(message)
        self._filled.set()

    async def close(self) -> None:
        """End the session at the drafter. What waits is not sent, and counts as gone on."""
        self._forget_draft()
        self.offer.sessions -= 1
        for task in self._tasks:
            task.cancel()
        for waiting in self._outbox:
            if isinstance(waiting, int):
                self._acknowledge(waiting)
        self._outbox.clear()
        await self._stream.close()

    def _watch(self, draft: Draft) -> None:
        self._asked, self._owed, self._asked_at = draft, draft.round, time.perf_counter()
        if self.offer.pace is None:
            return
        deadline = self.offer.pace.deadline
        lost = deadline + (LOST_SECONDS if self._answers else PRIMING_SECONDS)
        later = asyncio.get_running_loop().call_later
        why = f"drafter {self.offer.name} did not answer within {lost:.1f} s"
        self._timers = [
            later(deadline, self._post, DraftLate(draft.round)),
            later(lost, self._post, DrafterLost(why)),
        ]

    def _forget_draft(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    async def _send(self) -> None:
        try:
            while True:
                while not self._outbox:
                    self._filled.clear()
                    await self._filled.wait()
                message = self._outbox.popleft()
                if isinstance(message, int):
                    self._acknowledge(message)
                else:
                    await self._stream.send(self._with_draft(message))
        except ConnectionError as error:
            self._lose(str(error))
        except AerieError as error:
            self._post(DrafterLost(str(error)))
        except Exception as error:
            self._post(DrafterLost(log_incident(log, "sending to a drafter failed", error)))

    def _with_draft(self, message: ToDrafter) -> ToDrafter:
        """Rows and the draft that follows them as one message: each costs a wake-up on the way."""
        if isinstance(message, Observe) and self._outbox and isinstance(following := self._outbox[0], Draft):
            self._outbox.popleft()
            return replace(following, observe=message)
        return message

    async def _read(self) -> None:
        try:
            while True:
                message = await self._stream.receive()
                if isinstance(message, Drafted | NeedFeatures):
                    if not self._was_asked(message):
                        self._post(DrafterLost("the drafter answered what it was not asked"))
                        continue
                    if message.round < self._owed:  # a repeat; the clocks of the draft that is owed go on
                        continue
                    self._answered()
                self._post(_event_of(message))
        except ConnectionError as error:
            self._lose(str(error))
        except Exception as error:
            self._post(DrafterLost(log_incident(log, "a drafter's stream failed", error)))

    def _was_asked(self, message: Drafted | NeedFeatures) -> bool:
        """It is of a draft that was asked for, now or before."""
        asked = self._asked
        if asked is None or message.round > asked.round:
            return False
        return (message.session, message.epoch) == (asked.session, asked.epoch)

    def _answered(self) -> None:
        self._forget_draft()
        self._owed += 1
        self.draft_wait = time.perf_counter() - self._asked_at
        # The first answer of a session waited for its prompt to be read: that says nothing of the next ones.
        if self.offer.pace and self._answers:
            self.offer.pace.observe(self.draft_wait)
        self._answers += 1

    def _lose(self, why: str) -> None:
        self.broken = True
        self._post(DrafterLost(why))


def _event_of(message: object) -> Event:
    """The verifier alone decides a session's fate: whatever else comes from a drafter only ends its drafting."""
    match message:
        case Drafted() | NeedFeatures():
            return message
        case PortError(reason=Reason.FEATURE_GAP):
            return DrafterBehind(message.message)
        case PortError():
            return DrafterLost(f"{message.reason}: {message.message}")
    return DrafterLost(f"the drafter sent a {type(message).__name__}")
