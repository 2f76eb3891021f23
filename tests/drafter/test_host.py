"""The drafter host with a real drafter on the device thread; trees are checked against the float64 oracle."""

import asyncio
import gc
import logging
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from services.drafter.eagle3.model import Eagle3Drafter
from services.drafter.host import Closed, DrafterHost, FromClient
from services.runtime.device import Priority, device_thread
from services.speculation.errors import Reason
from services.speculation.growth import Budget, grow_exact
from services.speculation.messages import (
    Draft,
    Drafted,
    Features,
    FromDrafter,
    NeedFeatures,
    Observe,
    OpenDraft,
    PortError,
    ToDrafter,
)
from services.speculation.warpers import Sampler
from tests.drafter.eagle3 import checkpoints
from tests.drafter.eagle3.reference import Design, Reference, draw_weights

DESIGN = Design()
WEIGHTS = draw_weights(DESIGN)
BUDGET = Budget(max_nodes=8, max_depth=4, top_k=8)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Eagle3Drafter:
    folder = tmp_path_factory.mktemp("drafter")

    def load() -> Eagle3Drafter:
        checkpoints.write(folder, checkpoints.specforge(DESIGN), checkpoints.tensors_of(WEIGHTS))
        return checkpoints.load(folder, DESIGN, WEIGHTS)

    return device_thread().submit(load).result()


@dataclass(eq=False)
class Stream:
    """One client's stream: what it sends, and what comes back."""

    host: DrafterHost
    answers: "asyncio.Queue[FromDrafter]" = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.reply = self.answers.put_nowait

    def send(self, *messages: ToDrafter) -> None:
        for message in messages:
            self.host.tell(FromClient(message, self.reply))

    async def ask(self, *messages: ToDrafter) -> FromDrafter:
        self.send(*messages)
        async with asyncio.timeout(20):
            return await self.answers.get()


@asynccontextmanager
async def running(drafter: Eagle3Drafter) -> AsyncIterator[DrafterHost]:
    host = DrafterHost(drafter, device_thread())
    host.start()
    try:
        yield host
    finally:
        await host.stop()


def run(drafter: Eagle3Drafter, scenario: Callable[[DrafterHost], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running(drafter) as host:
            await scenario(host)

    asyncio.run(main())


async def settle(host: DrafterHost) -> None:
    """Wait until the mailbox is empty and the device idle."""
    await host._mailbox.join()
    await device_thread().run(lambda: None, Priority.SLICE)


def opened(session: str = "s", epoch: int = 0) -> OpenDraft:
    return OpenDraft(session, epoch, Sampler(), 0)


def observed(features: Features, tokens: list[int], start: int, stop: int, session: str = "s") -> Observe:
    return Observe(session, 0, checkpoints.cut(features, start, stop), tuple(tokens[start:stop]))


def draft(rows: int, round: int = 0, session: str = "s", epoch: int = 0) -> Draft:
    """With ``rows`` rows observed, one more token is committed: the pending one."""
    return Draft(session, epoch, round, rows + 1, BUDGET)


def assert_is_oracle_tree(answer: FromDrafter, features: Features, tokens: list[int], rows: int) -> None:
    reference = Reference(DESIGN, WEIGHTS)
    seen = checkpoints.cut(features, 0, rows).rows

    def expand(path: tuple[int, ...]) -> Any:
        return reference.log_probs(reference.outputs(seen, tokens[:rows], list(path))[-1:])[0]

    expected = grow_exact(tokens[rows - 1], expand, BUDGET)
    assert isinstance(answer, Drafted)
    assert (answer.session, answer.base_len) == ("s", rows + 1)
    assert answer.tree.tokens.tolist() == expected.tokens.tolist()
    assert answer.tree.parents.tolist() == expected.parents.tolist()
    assert np.abs(answer.tree.log_probs - expected.log_probs).max() < 1e-3
    assert len(answer.tree) == BUDGET.max_nodes
    assert answer.seconds > 0


def test_drafts_the_tree_of_the_oracle_round_after_round(drafter: Eagle3Drafter) -> None:
    """The prompt comes in slices; each verdict brings from one row up to a whole accepted path."""
    features, tokens = checkpoints.random_rows(DESIGN, 18)

    async def scenario(host: DrafterHost) -> None:
        stream = Stream(host)
        stream.send(opened(), observed(features, tokens, 0, 5), observed(features, tokens, 5, 9))
        rows = 9
        for round, accepted in enumerate((0, 4, 1)):
            answer = await stream.ask(draft(rows, round))
            assert_is_oracle_tree(answer, features, tokens, rows)
            assert isinstance(answer, Drafted)
            assert (answer.epoch, answer.round) == (0, round)
            stream.send(observed(features, tokens, rows, rows + accepted + 1))
            rows += accepted + 1
        assert_is_oracle_tree(await stream.ask(draft(rows, 3)), features, tokens, rows)

    run(drafter, scenario)


def test_long_slices_are_read_before_a_draft_asks(drafter: Eagle3Drafter) -> None:
    features, tokens = checkpoints.random_rows(DESIGN, 80)

    async def scenario(host: DrafterHost) -> None:
        stream = Stream(host)
        stream.send(opened(), observed(features, tokens, 0, 70))
        await settle(host)
        assert host.sessions["s"].state.length == 70
        assert_is_oracle_tree(await stream.ask(observed(features, tokens, 70, 80), draft(80)), features, tokens, 80)

    run(drafter, scenario)


def test_asks_for_the_rows_that_it_lacks(drafter: Eagle3Drafter) -> None:
    features, tokens = checkpoints.random_rows(DESIGN, 12)

    async def scenario(host: DrafterHost) -> None:
        stream = Stream(host)
        answer = await stream.ask(opened(), observed(features, tokens, 0, 4), draft(9, round=2))
        assert answer == NeedFeatures("s", 0, 2, ((4, 9),))
        answer = await stream.ask(observed(features, tokens, 4, 9), draft(9, round=2))
        assert_is_oracle_tree(answer, features, tokens, 9)

    run(drafter, scenario)


def test_errors_of_a_session_stay_in_its_stream(drafter: Eagle3Drafter) -> None:
    features, tokens = checkpoints.random_rows(DESIGN, 80)

    async def reason(stream: Stream, *messages: ToDrafter) -> Reason:
        answer = await stream.ask(*messages)
        assert isinstance(answer, PortError)
        assert answer.session == messages[-1].session
        return answer.reason

    async def scenario(host: DrafterHost) -> None:
        good, bad = Stream(host), Stream(host)
        good.send(opened(), observed(features, tokens, 0, 6))
        assert await reason(bad, draft(6, session="nobody")) == Reason.SESSION_UNKNOWN
        assert await reason(bad, observed(features, tokens, 0, 6, "nobody")) == Reason.SESSION_UNKNOWN
        assert await reason(bad, draft(6, epoch=1)) == Reason.SESSION_UNKNOWN
        assert await reason(bad, opened()) == Reason.STALE_ROUND
        # Rows out of place, as a long slice (read at once) and as a short one (read with the draft).
        assert await reason(bad, opened("bad"), observed(features, tokens, 7, 80, "bad")) == Reason.FEATURE_GAP
        assert await reason(bad, observed(features, tokens, 7, 9, "bad"), draft(9, session="bad")) == Reason.FEATURE_GAP
        wrong = Observe("bad", 0, Features(0, {2: features.rows[2][:3]}), tuple(tokens[:3]))
        assert await reason(bad, wrong, draft(3, session="bad")) == Reason.INVALID_ARGUMENT
        # A draft for a round that is over.
        assert await reason(good, draft(5)) == Reason.STALE_ROUND
        assert_is_oracle_tree(await good.ask(draft(6, 1)), features, tokens, 6)
        assert good.answers.empty()
        assert bad.answers.empty()

    run(drafter, scenario)


def test_a_higher_epoch_starts_afresh(drafter: Eagle3Drafter) -> None:
    features, tokens = checkpoints.random_rows(DESIGN, 8)

    async def scenario(host: DrafterHost) -> None:
        old, new = Stream(host), Stream(host)
        old.send(opened(), observed(features, tokens, 0, 8))
        assert isinstance(await old.ask(draft(8)), Drafted)
        new.send(opened(epoch=2))
        answer = await old.ask(draft(8))
        assert isinstance(answer, PortError)
        assert answer.reason == Reason.SESSION_UNKNOWN
        assert await new.ask(draft(8, epoch=2)) == NeedFeatures("s", 2, 0, ((0, 8),))
        host.post(Closed("s", old.reply))  # the old stream ends late, and takes nothing with it
        assert await new.ask(draft(8, epoch=2)) == NeedFeatures("s", 2, 0, ((0, 8),))

    run(drafter, scenario)


def test_sessions_do_not_see_each_other(drafter: Eagle3Drafter) -> None:
    features, tokens = checkpoints.random_rows(DESIGN, 9)
    others, other_tokens = checkpoints.random_rows(DESIGN, 9, seed=5)

    async def scenario(host: DrafterHost) -> None:
        stream, other = Stream(host), Stream(host)
        stream.send(opened())
        other.send(opened("t"))
        for start, stop in ((0, 3), (3, 9)):
            stream.send(observed(features, tokens, start, stop))
            other.send(observed(others, other_tokens, start, stop, "t"))
            await other.ask(draft(stop, session="t"))
        assert_is_oracle_tree(await stream.ask(draft(9)), features, tokens, 9)

    run(drafter, scenario)


def test_closing_frees_the_session(drafter: Eagle3Drafter) -> None:
    features, tokens = checkpoints.random_rows(DESIGN, 70)

    async def scenario(host: DrafterHost) -> None:
        stream = Stream(host)
        assert isinstance(await stream.ask(opened(), observed(features, tokens, 0, 70), draft(70)), Drafted)
        rows = weakref.ref(host.sessions["s"].state.kv)
        host.post(Closed("s", stream.reply))
        host.post(Closed("s", stream.reply))
        host.post(Closed("nobody", stream.reply))
        await settle(host)
        assert host.sessions == {}
        gc.collect()
        assert rows() is None
        answer = await stream.ask(draft(70))
        assert isinstance(answer, PortError)
        assert answer.reason == Reason.SESSION_UNKNOWN

    run(drafter, scenario)


def test_a_failing_draft_is_an_incident_without_its_text(
    drafter: Eagle3Drafter, caplog: pytest.LogCaptureFixture
) -> None:
    """Features that MLX cannot read make the real drafter raise."""
    features, tokens = checkpoints.random_rows(DESIGN, 6)
    broken = Features(0, {tap: np.full((6, DESIGN.target_hidden), "secret") for tap in DESIGN.taps})

    async def scenario(host: DrafterHost) -> None:
        good, bad = Stream(host), Stream(host)
        good.send(opened(), observed(features, tokens, 0, 6))
        answer = await bad.ask(opened("bad"), Observe("bad", 0, broken, tuple(tokens)), draft(6, session="bad"))
        assert isinstance(answer, PortError)
        assert (answer.session, answer.reason) == ("bad", Reason.INTERNAL)
        found = re.fullmatch(r"incident ([0-9a-f]{8})", answer.message)
        assert found, answer.message
        # The log has the whole story under that id.
        record = next(r for r in caplog.records if found[1] in r.getMessage())
        assert record.exc_info
        assert_is_oracle_tree(await good.ask(draft(6)), features, tokens, 6)
        assert host.alive

    with caplog.at_level(logging.ERROR):
        run(drafter, scenario)


def test_an_observe_without_rows_changes_nothing(drafter: Eagle3Drafter) -> None:
    features, tokens = checkpoints.random_rows(DESIGN, 6)

    async def scenario(host: DrafterHost) -> None:
        stream = Stream(host)
        stream.send(opened(), observed(features, tokens, 0, 6), observed(features, tokens, 6, 6))
        assert_is_oracle_tree(await stream.ask(draft(6)), features, tokens, 6)

    run(drafter, scenario)
