"""Random schedules of faults, replayed without a model or a clock: the tokens are the target's, whatever happens."""

from collections import Counter, deque
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from services.speculation.errors import Reason
from services.speculation.feed import Feed
from services.speculation.growth import Budget
from services.speculation.messages import Drafted, History, NeedFeatures, Open, OpenDraft, Prefilled, Verdict
from services.speculation.session import (
    Cancel,
    DrafterBehind,
    DrafterJoined,
    DrafterLost,
    DraftLate,
    DropDrafter,
    Emit,
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
from services.speculation.warpers import Sampler
from tests.speculation.simulated import EOS, SimulatedDrafter, SimulatedTarget, SimulatedVerifier

MAX_NODES = 100


class Schedule:
    """One session from start to end; each stream keeps its order, everything else is up to chance."""

    def __init__(self, seed, drafting=True, faults=True):
        self.rng = np.random.default_rng(seed)
        prompt = tuple(int(t) for t in self.rng.integers(0, EOS, int(self.rng.integers(1, 9))))
        max_tokens, context_length = (int(n) for n in self.rng.integers([1, len(prompt) + 1], 60))
        eos = () if seed % 3 else (EOS,)
        taps = (0,) if drafting else ()
        self.request = Open("s", prompt, len(prompt), max_tokens, Sampler(), seed, epoch=1, eos_ids=eos, taps=taps)
        self.target = SimulatedTarget(seed, eos=bool(eos))
        self.verifier = SimulatedVerifier(self.target, context_length, MAX_NODES)
        self.drafter = self.new_drafter() if drafting else None
        self.expected, self.finish = self.target.plain(self.request, context_length)
        self.state = State(
            self.request, context_length, Budget(24, 6, 4), Feed.from_start(self.request) if drafting else None
        )
        self.faults = faults
        # History comes on a stream of its own: in any order with verdicts.
        self.from_verifier, self.history, self.from_drafter, self.past = deque(), deque(), deque(), []
        self.emitted, self.depths, self.outcome, self.seen = [], [], None, Counter()

    def new_drafter(self):
        return SimulatedDrafter(self.target, self.rng, self.request.tokens)

    def run(self):
        self.feed(Start())
        while self.outcome is None:
            self.feed(self.next_event())
        return self

    def next_event(self):
        if self.faults:
            chance = self.rng.random()
            if chance < 0.1 and self.past:
                self.seen["stale"] += 1
                return self.past[int(self.rng.integers(len(self.past)))]
            if chance < 0.115:
                return DrafterLost("by chance")
            if chance < 0.12:
                return self.rng.choice([Cancel(), VerifierLost("by chance"), "stop"])
            if chance < 0.17 and self.state.phase == "drafting":
                self.seen["late"] += 1
                return DraftLate(self.state.round)
            if chance < 0.175 and self.drafter:
                return DrafterBehind("by chance")
            if chance < 0.3 and self.drafter is None and self.state.wants_drafter:
                self.seen["joined"] += 1
                self.drafter = self.new_drafter()
                return DrafterJoined((0,))
        ready = [queue for queue in (self.from_verifier, self.history, self.from_drafter) if queue]
        assert ready, f"nothing is under way while {self.state.phase}"
        event = ready[int(self.rng.integers(len(ready)))].popleft()
        # Only messages that belong to a round can come twice, and the one that begins the first.
        self.past += [event] if isinstance(event, Prefilled | Verdict | Drafted | NeedFeatures) else []
        return event

    def feed(self, event):
        if isinstance(event, str):
            if not self.emitted:
                return
            event = StopFound(len(self.request.tokens) + int(self.rng.integers(1, len(self.emitted) + 1)))
            self.stop_at = event.length
        before = self.state
        self.state, effects = apply(before, event)
        if isinstance(event, Drafted) and effects and event.tree.tokens[0] != before.pending:
            self.seen["wrong root"] += 1
        for effect in effects:
            self.perform(effect)

    def perform(self, effect):
        match effect:
            case ToVerifierEffect():
                for answer in self.verifier.receive(effect.message):
                    (self.history if isinstance(answer, History) else self.from_verifier).append(answer)
            case ToDrafterEffect():
                assert self.drafter, "a drafter that is gone is sent nothing"
                assert isinstance(effect.message, OpenDraft) or effect.message.session == self.state.feed.session
                self.from_drafter += self.drafter.receive(effect.message)
            case DropDrafter():
                assert self.drafter
                self.drafter = None
                self.from_drafter.clear()
                self.seen[next(why for why in ("by chance", "refused", "once more") if why in effect.message)] += 1
            case ReopenDrafter():
                assert self.drafter
                self.drafter = self.new_drafter()
                self.from_drafter.clear()
                self.seen["resynced"] += 1
            case Emit():
                self.emitted += effect.tokens
                self.depths += effect.depths
            case Finish() | Fail():
                assert self.outcome is None, "a session ends once"
                self.outcome = effect


def assert_end(run):
    """What was emitted is the target's, and complete unless someone ended it."""
    assert run.emitted == run.expected[: len(run.emitted)]
    assert run.state.phase == "finished"
    match run.outcome:
        case Fail(reason=Reason.SERVICE_UNAVAILABLE, message="by chance") | Finish("cancelled"):
            pass
        case Finish("stop") if hasattr(run, "stop_at"):
            assert run.verifier.tokens == [*run.request.tokens, *run.expected][: run.stop_at]
        case Finish(reason):
            assert (reason, run.emitted) == (run.finish, run.expected)
        case _:
            raise AssertionError(run.outcome)


@cache
def run_with_faults(seed):
    return Schedule(seed).run()


@pytest.mark.parametrize("block", range(10))
def test_faults_never_change_a_token(block):
    for seed in range(30 * block, 30 * block + 30):
        assert_end(run_with_faults(seed))


def test_the_schedules_meet_every_fault_and_every_end():
    runs = [run_with_faults(seed) for seed in range(300)]
    seen = sum((run.seen for run in runs), Counter())
    assert set(seen) - {"once more"} == {"stale", "wrong root", "by chance", "refused", "late", "joined", "resynced"}
    assert min(count for fault, count in seen.items() if fault != "once more") >= 5
    ends = Counter(type(run.outcome).__name__ if isinstance(run.outcome, Fail) else run.outcome.reason for run in runs)
    assert set(ends) == {"Fail", "cancelled", "stop", "length"}
    assert min(ends.values()) >= 5


def test_without_faults_trees_save_rounds_and_plain_decoding_gives_the_same():
    saved = 0
    for seed in range(60):
        drafted, plain = Schedule(seed, faults=False).run(), Schedule(seed, drafting=False, faults=False).run()
        assert_end(drafted)
        assert_end(plain)
        assert (drafted.emitted, drafted.outcome) == (plain.emitted, plain.outcome)
        assert plain.depths == [0] * len(plain.emitted)
        # Each round ends with a token of the target's own.
        assert drafted.depths.count(0) == drafted.verifier.round + 1
        saved += plain.verifier.round - drafted.verifier.round
    assert saved > 300


def test_a_session_resumed_with_a_higher_epoch_goes_on_with_the_same_tokens():
    for seed in range(20):
        first = Schedule(seed, faults=False)
        whole = [*first.request.tokens, *first.expected]
        middle = len(first.request.tokens) + len(first.expected) // 2
        resumed = Schedule(seed, faults=False)
        resumed.request = replace(first.request, tokens=tuple(whole[:middle]), epoch=2)
        resumed.state = replace(resumed.state, open=resumed.request, feed=Feed.from_start(resumed.request))
        resumed.drafter = SimulatedDrafter(resumed.target, resumed.rng, resumed.request.tokens)
        resumed.run()
        assert resumed.emitted == whole[middle:]
        assert resumed.outcome == Finish(first.finish)
