from dataclasses import replace

import numpy as np
import pytest

from services.speculation.errors import Reason
from services.speculation.feed import HELD_ROWS, SOON_ROWS, Feed
from services.speculation.growth import Budget
from services.speculation.messages import (
    Attach,
    Draft,
    Drafted,
    Features,
    History,
    NeedFeatures,
    Observe,
    Open,
    OpenDraft,
    PortError,
    Prefilled,
    TokenLogProbs,
    Truncate,
    Verdict,
    Verify,
)
from services.speculation.session import (
    MAX_RESYNCS,
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
    token_limit,
)
from services.speculation.trees import DraftTree
from services.speculation.warpers import Sampler

PROMPT = (7, 8, 9)
OPEN = Open("s", PROMPT, 3, max_tokens=20, sampler=Sampler(), seed=5, epoch=2, taps=(0,))
START = State(OPEN, context_length=100, budget=Budget(16, 6, 4), feed=Feed.from_start(OPEN))
ROWS = Features(3, {0: np.zeros((2, 4), np.float32)})
PROMPT_ROWS = Features(0, {0: np.zeros((3, 4), np.float32)})
LOG_PROBS = (TokenLogProbs(50, -0.5, ()),)
TREE = DraftTree.build([50, 51, 52, 53], [-1, 0, 1, 0], [0, -0.5, -1, -2])


def verdict(round=0, tokens=(51, 60), finish=None, epoch=2):
    return Verdict("s", epoch, round, 4, (0, 1), tokens, finish, ROWS, 0.1, LOG_PROBS)


def drafted(round=0, tree=TREE, epoch=2):
    return Drafted("s", epoch, round, 4, tree, 0.1)


EVENTS = {
    "start": Start(),
    "prefilled": Prefilled("s", 2, 50, None, 0.1, LOG_PROBS),
    "history": History("s", 2, PROMPT_ROWS, (8, 9, 50)),
    "history of another attachment": History("s", 2, PROMPT_ROWS, (8, 9, 50), number=3),
    "drafted": drafted(),
    "stale drafted": drafted(round=1),
    "drafted in another epoch": drafted(epoch=1),
    "draft late": DraftLate(0),
    "draft of another round late": DraftLate(4),
    "drafter behind": DrafterBehind("a gap"),
    "drafter joins": DrafterJoined((1, 2)),
    "needs features": NeedFeatures("s", 2, 0, ((0, 3),)),
    "stale needs features": NeedFeatures("s", 2, 5, ((0, 3),)),
    "verdict": verdict(),
    "stale verdict": verdict(round=3),
    "verdict of another epoch": verdict(epoch=1),
    "verifier's error": PortError("s", Reason.RESOURCE_EXHAUSTED, "full"),
    "refused tree": PortError("s", Reason.INVALID_TREE, "too large"),
    "drafter lost": DrafterLost("gone"),
    "verifier lost": VerifierLost("gone"),
    "cancel": Cancel(),
    "stop found": StopFound(4),
}


def run(state, *names):
    for name in names:
        state, _ = apply(state, EVENTS[name])
    return state


PLAIN = replace(START, feed=None)
LONG = replace(START, feed=replace(START.feed, history_end=SOON_ROWS + 1))
STATES = {
    "prefilling": START,
    "prefilling, plain": PLAIN,
    "drafting": run(START, "history", "prefilled"),
    "verifying a tree": run(START, "history", "prefilled", "drafted"),
    "verifying one node while a draft is late": run(START, "history", "prefilled", "draft late"),
    "verifying a tree of a lost drafter": run(START, "history", "prefilled", "drafted", "drafter lost"),
    "verifying one node": run(PLAIN, "prefilled"),
    "verifying one node before a long history is there": run(LONG, "prefilled"),
    "verifying one node while a drafter joins": run(PLAIN, "prefilled", "drafter joins"),
}

# What each event does in each phase: the phase after it and the kinds of effects. All else changes nothing.
FAILS = ("finished", [Fail])
ENDS = {
    "verifier's error": FAILS,
    "refused tree": FAILS,
    "verifier lost": FAILS,
    "cancel": ("finished", [Finish]),
    "stop found": ("finished", [ToVerifierEffect, Finish]),
}
LOSES = ("verifying", [DropDrafter])
RESYNCS = ("verifying", [ReopenDrafter])
EXPECTED = {
    "prefilling": {
        "start": ("prefilling", [ToVerifierEffect, ToDrafterEffect]),
        "prefilled": ("drafting", [ToDrafterEffect, Emit]),
        "history": ("prefilling", [ToDrafterEffect]),
        "drafter lost": ("prefilling", [DropDrafter]),
        "drafter behind": ("prefilling", [ReopenDrafter]),
        **ENDS,
    },
    "prefilling, plain": {
        "start": ("prefilling", [ToVerifierEffect]),
        "prefilled": ("verifying", [ToVerifierEffect, Emit]),
        "drafter joins": ("prefilling", []),
        **ENDS,
    },
    "drafting": {
        "history": ("drafting", [ToDrafterEffect]),
        "drafted": ("verifying", [ToVerifierEffect]),
        "draft late": ("verifying", [ToVerifierEffect]),
        "needs features": ("verifying", [ReopenDrafter, ToVerifierEffect]),
        "drafter behind": ("verifying", [ReopenDrafter, ToVerifierEffect]),
        "drafter lost": ("verifying", [DropDrafter, ToVerifierEffect]),
        **ENDS,
    },
    "verifying a tree": {
        **ENDS,
        "history": ("verifying", [ToDrafterEffect]),
        "verdict": ("drafting", [ToDrafterEffect, ToDrafterEffect, Emit]),
        "refused tree": ("verifying", [DropDrafter, ToVerifierEffect]),
        "drafter behind": RESYNCS,
        "drafter lost": LOSES,
    },
    "verifying one node while a draft is late": {
        **ENDS,
        "history": ("verifying", [ToDrafterEffect]),
        "drafted": ("verifying", []),
        "needs features": RESYNCS,
        "drafter behind": RESYNCS,
        "verdict": ("verifying", [ToVerifierEffect, Emit]),
        "drafter lost": LOSES,
    },
    "verifying a tree of a lost drafter": {
        **ENDS,
        "verdict": ("verifying", [ToVerifierEffect, ToVerifierEffect, Emit]),
        "refused tree": ("verifying", [ToVerifierEffect]),
        "drafter joins": ("verifying", []),
    },
    "verifying one node": {
        "verdict": ("verifying", [ToVerifierEffect, Emit]),
        "drafter joins": ("verifying", []),
        **ENDS,
    },
    "verifying one node before a long history is there": {
        **ENDS,
        "history": ("verifying", [ToDrafterEffect]),
        "verdict": ("verifying", [ToVerifierEffect, Emit]),
        "drafter behind": RESYNCS,
        "drafter lost": LOSES,
    },
    "verifying one node while a drafter joins": {
        **ENDS,
        "verdict": ("verifying", [ToVerifierEffect, ToDrafterEffect, ToVerifierEffect, Emit]),
        "drafter lost": LOSES,
    },
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", STATES)
def test_every_event_in_every_phase(phase, event):
    state = STATES[phase]
    after, effects = apply(state, EVENTS[event])
    if event in EXPECTED[phase]:
        assert (after.phase, [type(effect) for effect in effects]) == EXPECTED[phase][event]
    else:
        assert after == state
        assert effects == ()


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("end", ["cancel", "stop found", "verifier lost"])
def test_events_after_the_end_change_nothing(event, end):
    state = run(STATES["verifying a tree"], end)
    assert apply(state, EVENTS[event]) == (state, ())


def test_start_opens_both_sides():
    _, effects = apply(START, Start())
    assert effects == (ToVerifierEffect(OPEN), ToDrafterEffect(OpenDraft("s", 2, OPEN.sampler, 5)))


def test_prefilled_commits_the_first_token_and_asks_for_a_tree():
    state, effects = apply(run(START, "history"), EVENTS["prefilled"])
    assert (state.round, state.committed, state.pending) == (0, 4, 50)
    assert effects == (ToDrafterEffect(Draft("s", 2, 0, 4, Budget(16, 6, 4))), Emit((50,), (0,), LOG_PROBS))


def test_prefilled_counts_from_the_tokens_of_a_resumed_session():
    """Three of the 20 tokens are there already: 16 follow the pending one."""
    resumed = replace(START, open=replace(OPEN, tokens=(*PROMPT, 1, 2, 3)))
    state, _ = apply(resumed, EVENTS["prefilled"])
    assert (state.committed, state.max_depth) == (7, 15)


def test_a_first_token_that_ends_the_sequence_ends_the_session():
    state, effects = apply(START, replace(EVENTS["prefilled"], finish="length"))
    assert state.phase == "finished"
    assert effects == (Emit((50,), (0,), LOG_PROBS), Finish("length"))


def test_a_tree_is_verified_as_it_came():
    _, (effect,) = apply(STATES["drafting"], drafted())
    assert isinstance(effect.message, Verify)
    assert (effect.message.epoch, effect.message.round, effect.message.base_len) == (2, 0, 4)
    assert effect.message.tree is TREE


def test_a_drafter_whose_tree_has_a_wrong_root_is_out_of_step_and_primed_again():
    state, (reopen, verify) = apply(STATES["drafting"], drafted(tree=DraftTree.build([49, 51], [-1, 0])))
    assert isinstance(reopen, ReopenDrafter)
    assert (state.phase, state.feed, bool(state.joining)) == ("verifying", None, True)
    assert verify.message.tree.tokens.tolist() == [50]


@pytest.mark.parametrize(
    "tree", [None, replace(TREE, parents=TREE.parents + 1), replace(TREE, tokens=TREE.tokens[:2]), [50, 51]]
)
def test_what_is_no_tree_costs_the_drafter_and_not_the_session(tree):
    state, (dropped, verify) = apply(STATES["drafting"], drafted(tree=tree))
    assert (state.phase, state.feed) == ("verifying", None)
    assert isinstance(dropped, DropDrafter)
    assert verify.message.tree.tokens.tolist() == [50]


def test_a_refused_tree_costs_the_drafter_and_not_the_session():
    state, (dropped, verify) = apply(STATES["verifying a tree"], EVENTS["refused tree"])
    assert "too large" in dropped.message
    assert (verify.message.round, verify.message.base_len) == (0, 4)
    assert verify.message.tree.tokens.tolist() == [50]
    # The same refusal again is about the verifier's own token: that is no drafter's fault.
    assert apply(state, EVENTS["refused tree"])[1] == (Fail(Reason.INVALID_TREE, "too large"),)


def test_a_verdict_commits_its_tokens_and_feeds_the_drafter():
    state, effects = apply(STATES["verifying a tree"], verdict(tokens=(51, 52, 60)))
    assert (state.round, state.committed, state.pending) == (1, 7, 60)
    observe, draft, emit = effects
    assert isinstance(observe.message, Observe)
    assert observe.message.features is ROWS
    assert observe.message.tokens == (51, 52, 60)
    assert draft == ToDrafterEffect(Draft("s", 2, 1, 7, Budget(16, 6, 4)))
    assert emit == Emit((51, 52, 60), (1, 2, 0), LOG_PROBS)


def test_a_verdict_that_ends_the_sequence_sends_nothing_more():
    state, effects = apply(STATES["verifying a tree"], verdict(finish="stop"))
    assert state.phase == "finished"
    assert effects == (Emit((51, 60), (1, 0), LOG_PROBS), Finish("stop"))


def test_a_stop_string_cuts_the_verifier_to_its_length():
    state, effects = apply(STATES["verifying a tree"], StopFound(5))
    assert (state.phase, state.committed) == ("finished", 5)
    assert effects == (ToVerifierEffect(Truncate("s", 2, 5)), Finish("stop"))


@pytest.mark.parametrize(
    ("max_tokens", "context_length", "limit"), [(20, 100, 23), (97, 100, 100), (500, 100, 100), (1, 100, 4)]
)
def test_the_limit_is_the_nearer_of_tokens_and_context(max_tokens, context_length, limit):
    assert token_limit(replace(OPEN, max_tokens=max_tokens), context_length) == limit


@pytest.mark.parametrize(("left", "asked"), [(9, 6), (7, 6), (6, 5), (3, 2), (2, 1)])
def test_drafts_are_no_deeper_than_what_is_left(left, asked):
    """A tree of depth d emits up to d + 1 tokens."""
    for open_, context in ((replace(OPEN, max_tokens=1 + left), 100), (OPEN, 4 + left)):
        state = run(replace(START, open=open_, context_length=context), "history")
        _, effects = apply(state, EVENTS["prefilled"])
        assert effects[0].message.budget == Budget(16, asked, 4)


def test_the_last_token_is_not_drafted_for():
    state, effects = apply(replace(run(START, "history"), open=replace(OPEN, max_tokens=2)), EVENTS["prefilled"])
    assert state.phase == "verifying"
    assert effects[0].message.tree.tokens.tolist() == [50]


def test_trees_deeper_than_what_is_left_are_clipped():
    state = run(replace(START, open=replace(OPEN, max_tokens=3)), "history", "prefilled")
    _, (effect,) = apply(state, drafted())
    assert effect.message.tree.tokens.tolist() == [50, 51, 53]
    assert effect.message.tree.parents.tolist() == [-1, 0, 0]


def sent(effects, kind):
    messages = [e.message for e in effects if isinstance(e, ToVerifierEffect | ToDrafterEffect)]
    return [m for m in messages if isinstance(m, kind)]


def rows(base, count=1):
    return Features(base, {0: np.full((count, 4), base, np.float32), 7: np.zeros((count, 4), np.float32)})


def next_verdict(state, *tokens):
    features = rows(state.committed - 1, len(tokens))
    return Verdict("s", 2, state.round, state.committed, tuple(range(len(tokens))), tokens, None, features, 0.1)


def test_rows_of_verdicts_wait_for_the_history():
    """The drafter reads its rows in order, whatever order the two streams deliver."""
    state = run(replace(START, feed=replace(START.feed, number=3)), "prefilled")
    state, effects = apply(state, next_verdict(state, 60))
    assert not sent(effects, Observe)
    state, effects = apply(state, EVENTS["history of another attachment"])
    assert [(o.features.base, o.tokens) for o in sent(effects, Observe)] == [(0, (8, 9, 50)), (3, (60,))]
    _, effects = apply(state, next_verdict(state, 61))
    assert [o.features.base for o in sent(effects, Observe)] == [4]
    assert [d.base_len for d in sent(effects, Draft)] == [6]


def test_the_first_draft_does_not_wait_for_a_short_history_that_is_on_its_way():
    """The drafter does: so no round is lost, whichever stream is quicker."""
    state, effects = apply(START, EVENTS["prefilled"])
    assert [d.base_len for d in sent(effects, Draft)] == [4]
    state, effects = apply(state, EVENTS["history"])
    assert [o.features.base for o in sent(effects, Observe)] == [0]
    state, effects = apply(state, drafted())
    assert len(sent(effects, Verify)[0].tree) == 4
    # When it comes too late after all, rows are held as ever.
    late = run(START, "prefilled", "draft late")
    late, effects = apply(late, next_verdict(late, 60))
    assert not sent(effects, Observe | Draft)


def test_a_drafter_is_sent_its_own_taps():
    state = run(START, "history", "prefilled", "drafted")
    _, effects = apply(state, next_verdict(state, 60))
    assert [set(o.features.rows) for o in sent(effects, Observe)] == [{0}]


def test_rounds_go_on_while_a_draft_is_late_and_its_answer_counts_for_the_next():
    state = STATES["verifying one node while a draft is late"]
    state, effects = apply(state, next_verdict(state, 60))
    assert (state.phase, state.round) == ("verifying", 1)
    assert not sent(effects, Observe | Draft)  # it is asked for one thing at a time
    state, effects = apply(state, drafted(round=0))
    assert [o.features.base for o in sent(effects, Observe)] == [3]
    assert not sent(effects, Verify)
    state, effects = apply(state, next_verdict(state, 61))
    assert [d.round for d in sent(effects, Draft)] == [2]


def test_a_drafter_that_never_answers_is_given_up_when_too_many_rows_wait():
    state = STATES["verifying one node while a draft is late"]
    state = replace(state, open=replace(OPEN, max_tokens=1000), context_length=2000)
    for count in range(HELD_ROWS):
        state, effects = apply(state, next_verdict(state, 60 + count % 9))
        assert not [e for e in effects if isinstance(e, DropDrafter)]
    state, effects = apply(state, next_verdict(state, 60))
    assert [e.message for e in effects if isinstance(e, DropDrafter)] == ["the drafter does not keep up"]
    assert state.feed is None


def test_a_drafter_that_joins_is_primed_from_the_next_round_on():
    state = run(PLAIN, "prefilled", "drafter joins")
    state, effects = apply(state, next_verdict(state, 60))
    attach, opened, verify, _ = effects
    assert attach.message == Attach("s", 2, 1, (1, 2))
    assert opened.message == OpenDraft("s#1", 2, OPEN.sampler, 5)
    # Five tokens are committed, so the cache holds four rows: those are history, the fifth comes with this round.
    assert (verify.message.base_len, state.feed.history_end) == (5, 4)
    late = History("s", 2, Features(0, {1: np.zeros((4, 2)), 2: np.zeros((4, 2))}), (8, 9, 50, 60), number=1)
    state, effects = apply(state, late)
    assert [o.session for o in sent(effects, Observe)] == ["s#1"]
    verdict = replace(next_verdict(state, 61), features=Features(4, {1: np.zeros((1, 2)), 2: np.zeros((1, 2))}))
    _, effects = apply(state, verdict)
    assert [d.base_len for d in sent(effects, Draft)] == [6]


def test_the_verifier_is_told_when_nobody_reads_features_any_more():
    state = STATES["verifying a tree of a lost drafter"]
    state, effects = apply(state, next_verdict(state, 60))
    assert sent(effects, Attach) == [Attach("s", 2, 1, ())]
    _, effects = apply(state, next_verdict(state, 61))
    assert not sent(effects, Attach)


def test_a_drafter_that_lacks_rows_is_primed_again_but_not_for_ever():
    state = STATES["drafting"]
    for attempt in range(MAX_RESYNCS):
        state, effects = apply(state, DrafterBehind("a gap"))
        assert isinstance(effects[0], ReopenDrafter)
        state, effects = apply(state, next_verdict(state, 60))
        assert sent(effects, Attach) == [Attach("s", 2, attempt + 1, (0,))]
    _, effects = apply(state, DrafterBehind("a gap"))
    assert isinstance(effects[0], DropDrafter)


def test_a_verdict_without_the_drafters_taps_costs_the_drafter():
    state = STATES["verifying a tree"]
    verdict = replace(next_verdict(state, 60), features=Features(3, {7: np.zeros((1, 4))}))
    state, effects = apply(state, verdict)
    assert state.feed is None
    assert isinstance(effects[0], DropDrafter)
    assert sent(effects, Verify)
