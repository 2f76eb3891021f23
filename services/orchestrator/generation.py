"""The actor of one generation: feeds the state machine, performs its effects, tells the client."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from services.orchestrator.stats import Stats
from services.orchestrator.text import TextStream
from services.runtime.actor import Actor, ActorStopped, log_incident
from services.runtime.bus import MemoryBus
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import (
    Drafted,
    FinishReason,
    FromDrafter,
    FromVerifier,
    NeedFeatures,
    PortError,
    Prefilled,
    ToDrafter,
    TokenLogProbs,
    ToVerifier,
    Verdict,
)
from services.speculation.ports import Stream
from services.speculation.session import (
    Cancel,
    DrafterLost,
    DropDrafter,
    Effect,
    Emit,
    Event,
    Fail,
    Finish,
    Start,
    State,
    StopFound,
    ToDrafterEffect,
    ToVerifierEffect,
    VerifierLost,
    apply,
)

log = logging.getLogger(__name__)
M = TypeVar("M")


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


class Generation(Actor[Event]):
    """Runs one session to its end.

    Args:
        state: The machine's initial state.
        verifier, drafter: Open streams; no drafter is plain decoding.
        text: Collects tokens into text.
        bus: Receives one ``round.committed`` a round.
    """

    def __init__(
        self,
        state: State,
        verifier: Stream[ToVerifier, FromVerifier],
        drafter: Stream[ToDrafter, FromDrafter] | None,
        text: TextStream,
        bus: MemoryBus,
    ) -> None:
        super().__init__(f"session {state.open.session}")
        self._state = state
        self._verifier, self._drafter = verifier, drafter
        self._text = text
        self._bus = bus
        self._stats = Stats(prompt_tokens=state.open.prompt_len)
        self._out: asyncio.Queue[Chunk | Done | AerieError] = asyncio.Queue()
        self._readers: list[asyncio.Task[None]] = []
        self._lost: str | None = None

    async def chunks(self) -> AsyncIterator[Chunk | Done]:
        """Run the generation. Leaving the iterator early cancels it and frees both sides.

        Raises:
            AerieError: The session was refused or failed.
        """
        self.start()
        self.on_stop(lambda: self._out.put_nowait(AerieError(Reason.INTERNAL, "the session's actor stopped")))
        try:
            while True:
                item = await self._out.get()
                if isinstance(item, AerieError):
                    raise item
                yield item
                if isinstance(item, Done):
                    return
        finally:
            try:
                await self.stop()
            finally:  # here, not in ``stopped``: an actor that is cancelled before it runs has no end
                for stream in (self._verifier, self._drafter):
                    if stream:
                        await stream.close()

    async def started(self) -> None:
        self._read(self._verifier, lambda message: message, VerifierLost)
        if self._drafter:
            self._read(self._drafter, _from_drafter, DrafterLost)
        await self.handle(Start())

    async def stopped(self) -> None:
        for reader in self._readers:
            reader.cancel()
        if self._state.phase != "finished":
            self._state, _ = apply(self._state, Cancel())

    async def handle(self, message: Event) -> None:
        before = self._state
        self._state, effects = apply(before, message)
        if self._state is not before:  # messages of other rounds, or after the end, count for nothing
            self._count(message, before.pending)
        for effect in effects:
            await self._perform(effect)

    def _count(self, message: Event, pending: int) -> None:
        match message:
            case Prefilled():
                self._stats.on_prefilled(message)
            case Drafted() if self._state.drafting:  # else its tree was none
                self._stats.on_drafted(message, pending)
            case Verdict():
                self._stats.on_verdict(message)
                self._bus.publish("round.committed", session=message.session, tokens=len(message.tokens))

    async def on_error(self, message: Event, error: Exception) -> None:
        # Not an event: the machine may have finished already, with its end not yet told.
        self._out.put_nowait(AerieError(Reason.INTERNAL, log_incident(log, f"{self.name} failed", error)))

    def _read(self, stream: Stream[Any, M], event_of: Callable[[M], Event], lost: Callable[[str], Event]) -> None:
        """Bring what a stream delivers to the mailbox, and its end, however it comes."""

        async def pump() -> None:
            with contextlib.suppress(ActorStopped):  # this actor's own end
                try:
                    while True:
                        self.post(event_of(await stream.receive()))
                except ConnectionError as error:
                    self.post(lost(str(error)))
                except Exception as error:
                    self.post(lost(log_incident(log, f"a stream of {self.name} failed", error)))

        self._readers.append(asyncio.create_task(pump(), name=f"{self.name} reader"))

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case ToVerifierEffect():
                try:
                    await self._verifier.send(effect.message)
                except ConnectionError as error:
                    await self.handle(VerifierLost(str(error)))
                except AerieError as error:
                    await self.handle(PortError(effect.message.session, error.reason, error.message))
            case ToDrafterEffect() if self._drafter:
                try:
                    await self._drafter.send(effect.message)
                except (ConnectionError, AerieError) as error:
                    await self.handle(DrafterLost(str(error)))
            case DropDrafter():
                log.warning("plain decoding goes on: %s", effect.message)
                self._lost = effect.message
                if self._drafter:
                    lost, self._drafter = self._drafter, None
                    await lost.close()
            case Emit():
                await self._emit(effect)
            case Finish():
                if text := self._text.flush():
                    self._out.put_nowait(Chunk(text, (), ()))
                self._finish(effect.reason)
            case Fail():
                self._out.put_nowait(AerieError(effect.reason, effect.message))

    async def _emit(self, emit: Emit) -> None:
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
        await self.handle(StopFound(length))

    def _finish(self, reason: FinishReason) -> None:
        self._out.put_nowait(Done(reason, self._state.open.seed, self._stats.snapshot(), self._lost))


def _from_drafter(message: object) -> Event:
    """The verifier alone decides a session's fate: whatever else comes from a drafter only ends its drafting."""
    match message:
        case Drafted() | NeedFeatures():
            return message
        case PortError():
            return DrafterLost(f"{message.reason}: {message.message}")
    return DrafterLost(f"the drafter sent a {type(message).__name__}")
