"""The actor of one generation: feeds the state machine, performs its effects, tells the client."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.orchestrator.stats import Stats
from services.orchestrator.text import TextStream
from services.runtime.actor import Actor, ActorStopped, MailboxFull
from services.runtime.bus import MemoryBus
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import (
    Drafted,
    FinishReason,
    FromDrafter,
    FromVerifier,
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
    """The end of a generation."""

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
            await self.stop()

    async def started(self) -> None:
        self._readers.append(asyncio.create_task(self._pump_verifier(self._verifier)))
        if self._drafter:
            self._readers.append(asyncio.create_task(self._pump_drafter(self._drafter)))
        await self.handle(Start())

    async def stopped(self) -> None:
        for reader in self._readers:
            reader.cancel()
        if self._state.phase != "finished":
            self._state, _ = apply(self._state, Cancel())
        for stream in (self._verifier, self._drafter):
            if stream:
                with contextlib.suppress(ConnectionError):
                    await stream.close()

    async def handle(self, message: Event) -> None:
        match message:
            case Prefilled():
                self._stats.on_prefilled(message)
            case Drafted():
                self._stats.on_drafted(message)
            case Verdict() if message.round == self._state.round:
                self._stats.on_verdict(message)
                self._bus.publish("round.committed", session=message.session, tokens=len(message.tokens))
        self._state, effects = apply(self._state, message)
        for effect in effects:
            await self._perform(effect)

    async def on_error(self, message: Event, error: Exception) -> None:
        if isinstance(error, ConnectionError | MailboxFull):
            await self.handle(VerifierLost(str(error)))
            return
        raise error

    async def _pump_verifier(self, stream: Stream[ToVerifier, FromVerifier]) -> None:
        with contextlib.suppress(ActorStopped):
            try:
                while True:
                    self.tell(await stream.receive())
            except ConnectionError as error:
                self.tell(VerifierLost(str(error)))

    async def _pump_drafter(self, stream: Stream[ToDrafter, FromDrafter]) -> None:
        with contextlib.suppress(ActorStopped):
            try:
                while True:
                    message = await stream.receive()
                    # The verifier alone decides a session's fate: a drafter's error only ends its drafting.
                    if isinstance(message, PortError):
                        self.tell(DrafterLost(f"{message.reason}: {message.message}"))
                    else:
                        self.tell(message)
            except ConnectionError as error:
                self.tell(DrafterLost(str(error)))

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case ToVerifierEffect():
                await self._verifier.send(effect.message)
            case ToDrafterEffect() if self._drafter:
                try:
                    await self._drafter.send(effect.message)
                except ConnectionError as error:
                    await self.handle(DrafterLost(str(error)))
            case DropDrafter():
                log.warning("plain decoding goes on: %s", effect.message)
                self._lost = effect.message
                if self._drafter:
                    await self._drafter.close()
                    self._drafter = None
            case Emit():
                await self._emit(effect)
            case Finish():
                if text := self._text.flush():
                    self._out.put_nowait(Chunk(text, (), ()))
                self._out.put_nowait(Done(effect.reason, self._state.open.seed, self._stats, self._lost))
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
            self._out.put_nowait(Done("stop", self._state.open.seed, self._stats, self._lost))
            return
        await self.handle(StopFound(length))
