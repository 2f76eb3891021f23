"""Ports that play a script: each message to a side is answered by a function of it."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from services.orchestrator.generation import Generation
from services.orchestrator.text import TextStream
from services.runtime.bus import MemoryBus
from services.speculation.growth import Budget
from services.speculation.messages import Draft, Drafted, Features, Open, Prefilled, Verdict, Verify
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
        self.closed = 0
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

    def __call__(self, message: Any) -> list[Any]:
        match message:
            case Open():
                return [Prefilled(message.session, 0, FIRST, None, 0.5)]
            case Verify():
                token = int(message.tree.tokens[0])
                path = [0]
                while token + 1 < self.last and token + 1 in message.tree.tokens.tolist():
                    token += 1
                    path.append(message.tree.tokens.tolist().index(token))
                tokens = (*(int(message.tree.tokens[n]) for n in path[1:]), token + 1)
                finish = "length" if tokens[-1] >= self.last else None
                place = (message.session, 0, message.round, message.base_len)
                return [Verdict(*place, tuple(path), tokens, finish, NO_ROWS, 0.25)]
        return []


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


def generation(verifier: Script, drafter: Script | None, stop: tuple[str, ...] = ()) -> Generation:
    opened = Open("s", PROMPT, len(PROMPT), 12, Sampler(), 5)
    state = State(opened, 1000, Budget(8, 4, 4), drafting=drafter is not None)
    return Generation(state, verifier, drafter, TextStream(tiny_tokenizer(), stop), MemoryBus())
