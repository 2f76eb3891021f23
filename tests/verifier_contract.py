"""What a session on a verifier must be like behind any port. A test module gives a port and runs ``CHECKS``."""

import asyncio
from typing import Any

import numpy as np

from services.speculation.errors import Reason
from services.speculation.messages import Attach, History, Open, PortError, Prefilled, Truncate, Verdict, Verify
from services.speculation.trees import DraftTree
from services.speculation.warpers import Sampler
from tests.port_contract import DEADLINE, Service, until
from tests.verifier.client import chain

PROMPT = (5, 6, 7, 100, 31)


class Session:
    """One session behind a port; ``plain`` is what the target itself writes after PROMPT."""

    def __init__(self, service: Service, plain: list[int], name: str = "s") -> None:
        self.service, self.plain, self.name = service, plain, name
        self.stream = service.port.connect()
        self.tokens = list(PROMPT)
        self.round = 0
        self.history: list[History] = []

    async def open(self, **fields: Any) -> Prefilled:
        asked = {"prompt_len": len(PROMPT), "max_tokens": 40, "sampler": Sampler(), "seed": 0, **fields}
        await self.stream.send(Open(self.name, tuple(self.tokens), **asked))
        first = await self.next(Prefilled)
        self.tokens.append(first.token)
        return first

    async def next(self, kind: type) -> Any:
        async with asyncio.timeout(DEADLINE):
            while isinstance(message := await self.stream.receive(), History):
                self.history.append(message)
                self.stream.acknowledge(message.features.nbytes)
        assert isinstance(message, kind), message
        return message

    async def histories(self, stop: int) -> None:
        async with asyncio.timeout(DEADLINE):
            while not self.history or self.history[-1].features.base + len(self.history[-1].tokens) < stop:
                message = await self.stream.receive()
                assert isinstance(message, History)
                self.history.append(message)
                self.stream.acknowledge(message.features.nbytes)

    def verify(self, tree: DraftTree | None = None, **place: Any) -> Verify:
        at = {"epoch": 0, "round": self.round, "base_len": len(self.tokens), **place}
        return Verify(self.name, tree=tree or self.tree(), **at)

    def tree(self, right: int = 2) -> DraftTree:
        """The pending token and the next ones that the target will choose."""
        at = len(self.tokens) - len(PROMPT)
        return chain(self.tokens[-1], self.plain[at : at + right])

    async def play(self, tree: DraftTree | None = None) -> Verdict:
        await self.stream.send(self.verify(tree))
        verdict = await self.next(Verdict)
        self.tokens += verdict.tokens
        self.round += 1
        return verdict


async def check_rounds_emit_what_the_target_writes(service: Service, plain: list[int]) -> None:
    session = Session(service, plain)
    await session.open()
    verdict = await session.play()
    assert (verdict.path, verdict.tokens) == ((0, 1, 2), tuple(plain[1:4]))
    wrong = await session.play(chain(session.tokens[-1], [(plain[4] + 1) % 290]))
    assert (wrong.path, wrong.tokens) == ((0,), (plain[4],))
    assert session.tokens[len(PROMPT) :] == plain[:5]
    assert min(verdict.seconds, verdict.queue_seconds) >= 0
    await session.stream.close()


async def check_a_repeat_gets_its_verdict_again(service: Service, plain: list[int]) -> None:
    session = Session(service, plain)
    await session.open()
    verdict = await session.play()
    for tree in (session.tree(), DraftTree.root(1)):
        await session.stream.send(session.verify(tree, round=0, base_len=len(PROMPT) + 1))
        again = await session.next(Verdict)
        assert (again.round, again.path, again.tokens) == (0, verdict.path, verdict.tokens)
    assert (await session.play()).tokens == tuple(plain[4:7])
    await session.stream.close()


async def check_another_round_is_refused_with_the_one_expected(service: Service, plain: list[int]) -> None:
    session = Session(service, plain)
    await session.open()
    await session.play()
    for place in ({"round": 5}, {"epoch": 1}, {"base_len": 3}):
        await session.stream.send(session.verify(**place))
        error = await session.next(PortError)
        assert error.reason is Reason.STALE_ROUND
        assert error.expected == (0, 1, len(session.tokens))
    assert (await session.play()).tokens == tuple(plain[4:7])
    await session.stream.close()


async def check_a_late_drafter_gets_its_taps_and_their_history(service: Service, plain: list[int]) -> None:
    session = Session(service, plain)
    await session.open(taps=(0,))
    await session.histories(len(PROMPT))
    assert {tuple(h.features.rows) for h in session.history} == {(0,)}
    assert set((await session.play()).features.rows) == {0}
    session.history.clear()
    await session.stream.send(Attach(session.name, 0, 1, (1, "final")))
    verdict = await session.play()
    rows = verdict.features.base
    await session.histories(rows)
    assert [h.number for h in session.history] == [1] * len(session.history)
    tokens = sum((h.tokens for h in session.history), ())
    assert list(tokens) == session.tokens[1 : rows + 1]
    assert set(verdict.features.rows) == {1, "final"}
    assert all(np.isfinite(_floats(r)).all() for h in session.history for r in h.features.rows.values())
    await session.stream.close()


async def check_a_cut_session_is_shorter(service: Service, plain: list[int]) -> None:
    session = Session(service, plain)
    await session.open()
    await session.play()
    length = len(PROMPT) + 2
    await session.stream.send(Truncate(session.name, 0, length))
    del session.tokens[length:]
    await session.stream.send(session.verify(DraftTree.root(session.tokens[-1]), round=1))
    verdict = await session.next(Verdict)
    assert (verdict.base_len, verdict.tokens) == (length, (plain[2],))
    await session.stream.close()


async def check_limits_are_refused_and_cost_no_session(service: Service, plain: list[int]) -> None:
    for fields, reason in (
        ({"max_tokens": 0}, Reason.INVALID_ARGUMENT),
        ({"taps": (77,)}, Reason.INVALID_ARGUMENT),
        ({"prompt_len": 0}, Reason.PROMPT_EMPTY),
    ):
        refused = Session(service, plain, "refused")
        await refused.stream.send(
            Open("refused", PROMPT, **{"prompt_len": 5, "max_tokens": 4, "sampler": Sampler(), "seed": 0, **fields})
        )
        assert (await refused.next(PortError)).reason is reason
        await refused.stream.close()
    session = Session(service, plain)
    await session.open()
    for tree in (chain(session.tokens[-1], [1] * 64), chain(session.tokens[-1], [299999]), chain(1, [2])):
        await session.stream.send(session.verify(tree))
        assert (await session.next(PortError)).reason is Reason.INVALID_TREE
    assert (await session.play()).tokens == tuple(plain[1:4])
    await session.stream.close()
    await until(lambda: not service.sessions())


async def check_cancelling_frees_the_session_in_every_state(service: Service, plain: list[int]) -> None:
    async def prefilling(session: Session) -> None:
        await session.stream.send(Open(session.name, PROMPT, 5, 40, Sampler(), 0, taps=(0,)))

    async def idle(session: Session) -> None:
        await session.open()

    async def verifying(session: Session) -> None:
        await session.open()
        await session.stream.send(session.verify())

    async def attaching(session: Session) -> None:
        await session.open()
        await session.stream.send(Attach(session.name, 0, 1, (0, 1)))

    async def finished(session: Session) -> None:
        await session.open(max_tokens=1)

    for number, state in enumerate((prefilling, idle, verifying, attaching, finished)):
        session = Session(service, plain, f"c{number}")
        await state(session)
        await session.stream.close()
        await session.stream.close()
        await until(lambda: not service.sessions())


def _floats(rows: Any) -> Any:
    return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
