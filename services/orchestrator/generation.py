"""The actor of one generation: feeds the state machine, performs its effects, tells the client."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from structlog.contextvars import bound_contextvars

from services.orchestrator.directory import Offer
from services.orchestrator.drafter_link import DrafterLink
from services.orchestrator.round_clock import RoundClock
from services.orchestrator.stats import Stats
from services.orchestrator.text import TextStream
from services.runtime.actor import Actor, ActorStopped, log_incident
from services.runtime.bus import Bus
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import (
    Drafted,
    FinishReason,
    History,
    PortError,
    Prefilled,
    TokenLogProbs,
    ToVerifier,
    Verdict,
    Verify,
)
from services.speculation.ports import VerifierStream
from services.speculation.session import (
    Cancel,
    DrafterJoined,
    DraftLate,
    DropDrafter,
    Effect,
    Emit,
    Event,
    Fail,
    Finish,
    ReopenDrafter,
    Start,
    State,
    StopFound,
    ToDrafterEffect,
    ToVerifierEffect,
    VerifierLost,
    apply,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """What one round gave: text may lag behind tokens by an incomplete character or a possible stop string.

    ``depths[i]`` is the tree depth at which token i was accepted, 0 for a token of the target's own (bonus).
    """

    text: str
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    log_probs: tuple[TokenLogProbs, ...] = ()


@dataclass(frozen=True)
class Done:
    """The end of a generation; ``stats`` are final."""

    finish_reason: FinishReason
    seed: int
    stats: Stats
    drafter_lost: str | None = None


class Supply(Protocol):
    """Where a session finds its drafters."""

    def pick(self, without: set[Offer]) -> Offer | None:
        """One that the session may use, or None."""
        ...

    def gone(self, offer: Offer) -> None:
        """A stream to this one broke."""
        ...

    def on_join(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` when a drafter joins; calling what is returned takes that back."""
        ...


@dataclass(frozen=True)
class _FromLink:
    """An event of a drafter's link; those of a link that is closed count for nothing."""

    link: DrafterLink
    event: Event


@dataclass(frozen=True)
class _DrafterThere:
    """A drafter has joined: maybe this session wants it."""


Mail = Event | _FromLink | _DrafterThere


class Generation(Actor[Mail]):
    """Runs one session to its end.

    Args:
        state: The machine's initial state.
        verifier: An open stream.
        offer: The drafter that ``state.feed`` is for; None is plain decoding.
        supply: Where other drafters come from; None when none is wanted.
        text: Collects tokens into text.
        bus: Receives the session's events.
        ends_at: When its drafters' streams end, ``time.monotonic``; None is never.
        arrived: When the request came, ``time.perf_counter``; None is now. It may have waited for its turn.
    """

    def __init__(
        self,
        state: State,
        verifier: VerifierStream,
        offer: Offer | None,
        supply: Supply | None,
        text: TextStream,
        bus: Bus,
        ends_at: float | None = None,
        arrived: float | None = None,
    ) -> None:
        super().__init__(f"session {state.open.session}")
        self._state = state
        self._verifier = verifier
        self._offer = offer
        self._supply = supply
        self._link: DrafterLink | None = None
        self._tried: set[Offer] = set()
        self._text = text
        self._ends_at = ends_at
        self._arrived = time.perf_counter() if arrived is None else arrived
        self._bus = bus
        self._stats = Stats(prompt_tokens=state.open.prompt_len)
        self._clock = RoundClock(state.open.session)
        self._out: asyncio.Queue[Chunk | Done | AerieError] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._lost: str | None = None

    async def chunks(self) -> AsyncIterator[Chunk | Done]:
        """Run the generation. Leaving the iterator early cancels it and frees both sides.

        Raises:
            AerieError: The session was refused or failed.
        """
        ended = "cancelled"
        with bound_contextvars(session=self._state.open.session):  # its logs name it
            self.start()
        self.on_stop(lambda: self._out.put_nowait(AerieError(Reason.INTERNAL, "the session's actor stopped")))
        try:
            while True:
                item = await self._out.get()
                if isinstance(item, AerieError):
                    ended = "error"
                    raise item
                if isinstance(item, Done):
                    ended = item.finish_reason
                yield item
                if isinstance(item, Done):
                    return
        finally:
            try:
                await self.stop()
            finally:  # here, not in ``stopped``: an actor that is cancelled before it runs has no end
                if self._link:
                    await self._link.close()
                await self._verifier.close()
                self._publish_end(ended)

    def fail(self, error: AerieError) -> None:
        """End with ``error``; whoever iterates over ``chunks`` gets it."""
        self._out.put_nowait(error)

    async def started(self) -> None:
        self._reader = asyncio.create_task(self._read_verifier(), name=f"{self.name} reader")
        if self._supply:
            self._unsubscribe = self._supply.on_join(lambda: self._hear(_DrafterThere()))
        if self._offer:
            self._connect(self._offer)
        drafter = self._offer.name if self._offer else "off"
        self._bus.publish(
            "session.opened",
            session=self._state.open.session,
            prompt_tokens=self._state.open.prompt_len,
            drafter=drafter,
        )
        await self._feed(Start())

    async def stopped(self) -> None:
        self._unsubscribe()
        if self._reader:
            self._reader.cancel()
        if self._state.phase != "finished":
            self._state, _ = apply(self._state, Cancel())

    async def handle(self, message: Mail) -> None:
        match message:
            case _FromLink():
                if message.link is self._link:
                    await self._feed(message.event)
            case _DrafterThere():
                await self._seek()
            case _:
                await self._feed(message)

    async def on_error(self, message: Mail, error: Exception) -> None:
        # Not an event: the machine may have finished already, with its end not yet told.
        self._out.put_nowait(AerieError(Reason.INTERNAL, log_incident(log, f"{self.name} failed", error)))

    async def _feed(self, event: Event) -> None:
        before = self._state
        self._state, effects = apply(before, event)
        # Messages of other rounds, or after the end, count for nothing.
        committed = self._count(event, before) if self._state is not before else None
        for effect in effects:
            await self._perform(effect)
        if committed:
            self._bus.publish("round.committed", **committed)
        if isinstance(event, History):
            if self._link:
                self._link.acknowledge(event.features.nbytes)
            else:
                self._verifier.acknowledge(event.features.nbytes)

    def _count(self, event: Event, before: State) -> dict[str, Any] | None:
        """Keep the statistics; returns the summary of the round that has ended."""
        match event:
            case Prefilled():
                self._stats.on_prefilled(event)
                self._clock.on_prefilled()
            case Drafted() if before.phase == "drafting" and self._state.feed and self._link:  # else its tree was none
                self._stats.on_drafted(event, self._link.draft_wait)
                self._clock.on_drafted(event, self._link.draft_wait)
            case DraftLate():
                self._stats.late_rounds += 1
                self._clock.late = True
            case Verdict():
                self._stats.on_verdict(event, self._clock.verify_wait)
                self._stats.fallback_rounds += self._clock.attached and not self._clock.drafted
                return self._clock.on_verdict(event)
        return None

    async def _read_verifier(self) -> None:
        """Bring what the verifier sends to the mailbox, and its end, however it comes."""
        with contextlib.suppress(ActorStopped):  # this actor's own end
            try:
                while True:
                    self.post(await self._verifier.receive())
            except ConnectionError as error:
                self.post(VerifierLost(str(error)))
            except Exception as error:
                self.post(VerifierLost(log_incident(log, f"a stream of {self.name} failed", error)))

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case ToVerifierEffect():
                await self._send(effect.message)
            case ToDrafterEffect() if self._link:
                self._link.send(effect.message)
            case ReopenDrafter():
                log.info("the drafter is primed again: %s", effect.message)
                if self._link:
                    offer = self._link.offer
                    self._bus.publish("drafter.resynced", drafter=offer.name, session=self._state.open.session)
                    await self._disconnect()
                    self._connect(offer)
            case DropDrafter():
                await self._drop(effect.message)
            case Emit():
                await self._emit(effect)
            case Finish():
                if text := self._text.flush():
                    self._out.put_nowait(Chunk(text, (), ()))
                self._finish(effect.reason)
            case Fail():
                self._out.put_nowait(AerieError(effect.reason, effect.message))

    async def _send(self, message: ToVerifier) -> None:
        if isinstance(message, Verify):
            self._clock.on_verify(message, attached=self._state.feed is not None)
        try:
            await self._verifier.send(message)
        except ConnectionError as error:
            await self._feed(VerifierLost(str(error)))
        except AerieError as error:
            await self._feed(PortError(message.session, error.reason, error.message))

    async def _drop(self, message: str) -> None:
        """The drafter is lost to this session: plain decoding goes on until another one is there."""
        log.warning("plain decoding goes on: %s", message)
        self._lost = message
        if self._link is None:
            return
        offer, broken = self._link.offer, self._link.broken
        self._bus.publish("drafter.lost", drafter=offer.name, session=self._state.open.session, message=message)
        self._tried.add(offer)
        await self._disconnect()
        if broken and self._supply:
            self._supply.gone(offer)
        self._hear(_DrafterThere())  # another one may be there already

    async def _seek(self) -> None:
        """Attach a drafter, if the session wants one and one is there."""
        if self._supply is None or self._link or not self._state.wants_drafter:
            return
        if offer := self._supply.pick(self._tried):
            self._connect(offer)
            self._bus.publish("drafter.attached", drafter=offer.name, session=self._state.open.session)
            await self._feed(DrafterJoined(offer.info.taps))

    def _connect(self, offer: Offer) -> None:
        left = None if self._ends_at is None else self._ends_at - time.monotonic()

        def post(event: Event) -> None:
            self._hear(_FromLink(link, event))

        self._link = link = DrafterLink(offer, post, self._verifier.acknowledge, left)

    async def _disconnect(self) -> None:
        if self._link:
            link, self._link = self._link, None
            await link.close()

    def _hear(self, mail: Mail) -> None:
        with contextlib.suppress(ActorStopped):  # this actor's own end
            self.post(mail)

    async def _emit(self, emit: Emit) -> None:
        await asyncio.sleep(0)  # what was given to the drafter's line goes out first: text can wait
        delta = self._text.push(emit.tokens)
        kept = len(emit.tokens) if delta.stopped_at is None else delta.stopped_at + 1
        self._out.put_nowait(Chunk(delta.text, emit.tokens[:kept], emit.depths[:kept], emit.log_probs[:kept]))
        if delta.stopped_at is None:
            return
        dropped = len(emit.tokens) - kept
        self._stats.completion_tokens -= dropped
        length = self._state.open.prompt_len + self._stats.completion_tokens
        if self._state.phase == "finished":
            # The round ended the sequence anyway; its Finish follows with another reason.
            self._finish("stop")
            return
        await self._feed(StopFound(length))

    def _finish(self, reason: FinishReason) -> None:
        self._out.put_nowait(Done(reason, self._state.open.seed, self._stats.snapshot(), self._lost))

    def _publish_end(self, reason: str) -> None:
        stats, now = self._stats, time.perf_counter()
        self._bus.publish(
            "session.finished",
            session=self._state.open.session,
            reason=reason,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            first_token_seconds=stats.first_token - self._arrived if stats.first_token else None,
            seconds=now - self._arrived,
        )
