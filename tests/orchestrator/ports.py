"""Ports that play a script: each message to a side is answered by a function of it."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from services.orchestrator.directory import Offer
from services.orchestrator.generation import Generation, Supply
from services.orchestrator.pace import DraftPace
from services.orchestrator.text import TextStream
from services.runtime.bus import MemoryBus
from services.speculation.feed import Feed
from services.speculation.growth import Budget
from services.speculation.messages import (
    Attach,
    Draft,
    Drafted,
    DrafterInfo,
    DrafterStatus,
    Features,
    History,
    Open,
    Prefilled,
    Verdict,
    Verify,
)
from services.speculation.session import State
from services.speculation.trees import DraftTree
from services.speculation.warpers import Sampler
from tests.tiny import tiny_tokenizer

PROMPT = (7, 8, 9)
FIRST = 64  # "a"; the next ones are "b", "c", ...
NO_ROWS = Features(0, {})


class Script:
    """A stream whose other side is a function: message -> answers. Exceptions among them are raised."""

    def __init__(self, answer: Callable[[Any], Iterable[Any]]) -> None:
        self.sent: list[Any] = []
        self.closed = self.acknowledged = 0
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._answer = answer

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        for answer in self._answer(message):
            if isinstance(answer, SendFails):
                raise answer.error
            self.inbox.put_nowait(answer)

    async def receive(self) -> Any:
        message = await self.inbox.get()
        if isinstance(message, BaseException):
            raise message
        return message

    def acknowledge(self, size: int) -> None:
        self.acknowledged += size

    async def close(self) -> None:
        self.closed += 1


class SendFails:
    def __init__(self, error: Exception) -> None:
        self.error = error


class Target:
    """Emits FIRST, FIRST + 1, ...; accepts the drafts that say so; reports fixed seconds.

    Args:
        last: Its final token; the sequence ends with it.
    """

    def __init__(self, last: int = FIRST + 11) -> None:
        self.last = last
        self.taps: tuple[Any, ...] = ()
        self.committed = len(PROMPT) + 1

    def __call__(self, message: Any) -> list[Any]:
        match message:
            case Open():
                self.taps = message.taps
                return [*self._history(message.session, 3, 0), Prefilled(message.session, 0, FIRST, None, 0.5)]
            case Attach():
                self.taps = message.taps
                return self._history(message.session, self.committed - 1, message.number)
            case Verify():
                token = int(message.tree.tokens[0])
                path = [0]
                while token + 1 < self.last and token + 1 in message.tree.tokens.tolist():
                    token += 1
                    path.append(message.tree.tokens.tolist().index(token))
                tokens = (*(int(message.tree.tokens[n]) for n in path[1:]), token + 1)
                finish = "length" if tokens[-1] >= self.last else None
                place = (message.session, 0, message.round, message.base_len)
                self.committed = message.base_len + len(tokens)
                rows = self._rows(message.base_len - 1, len(tokens))
                return [Verdict(*place, tuple(path), tokens, finish, rows, 0.25)]
        return []

    def _rows(self, base: int, count: int) -> Features:
        return Features(base, {tap: np.zeros((count, 1), np.float32) for tap in self.taps})

    def _history(self, session: str, stop: int, number: int) -> list[Any]:
        tokens = (*PROMPT, *range(FIRST, FIRST + stop))[1 : stop + 1]
        return [History(session, 0, self._rows(0, stop), tokens, number)] if self.taps else []


def chain_of(pending: int, *following: int) -> DraftTree:
    return DraftTree.build([pending, *following], range(-1, len(following)))


def right_drafter(length: int = 2) -> Callable[[Any], list[Any]]:
    """Drafts the next ``length`` tokens rightly, in 0.125 s."""

    def answer(message: Any) -> list[Any]:
        if not isinstance(message, Draft):
            return []
        pending = FIRST + message.base_len - len(PROMPT) - 1
        tree = chain_of(pending, *range(pending + 1, pending + 1 + length))
        return [Drafted(message.session, 0, message.round, message.base_len, tree, 0.125)]

    return answer


class Port:
    """A drafter's port: each stream is the next script."""

    def __init__(self, *streams: Script, name: str = "d") -> None:
        self._streams = list(streams)
        self.info = DrafterInfo(name, "f", (1,), None, 0)

    async def status(self) -> DrafterStatus:
        return DrafterStatus(self.info)

    def connect(self, seconds: float | None = None) -> Script:
        return self._streams.pop(0)


def offer_of(*streams: Script, name: str = "d", pace: DraftPace | None = None) -> Offer:
    port = Port(*streams, name=name)
    return Offer(name, name, port, DrafterStatus(port.info), pace)


def generation(
    verifier: Script,
    drafter: Script | Offer | None,
    stop: tuple[str, ...] = (),
    supply: Supply | None = None,
    bus: MemoryBus | None = None,
    max_tokens: int = 12,
) -> Generation:
    """One that drafts from the start when there is a drafter: a script for a drafter that is awaited, or an offer."""
    offer = offer_of(drafter) if isinstance(drafter, Script) else drafter
    opened = Open("s", PROMPT, len(PROMPT), max_tokens, Sampler(), 5, taps=(1,) if offer else ())
    state = State(opened, 1000, Budget(8, 4, 4), Feed.from_start(opened) if offer else None)
    return Generation(state, verifier, offer, supply, TextStream(tiny_tokenizer(), stop), bus or MemoryBus())
