"""One generation as a pure state machine: ``apply(state, event) -> (state, effects)``.

Events are messages from the verifier and the drafter, lost services, cancellation and stop strings; effects are
messages to send and things to tell the client. No clock, no model: every schedule of faults can be replayed.
"""

from dataclasses import dataclass, replace
from typing import Literal

from services.speculation.errors import AerieError, Reason
from services.speculation.feed import Feed
from services.speculation.growth import Budget
from services.speculation.messages import (
    Attach,
    Draft,
    Drafted,
    FinishReason,
    History,
    NeedFeatures,
    Open,
    PortError,
    Prefilled,
    Tap,
    ToDrafter,
    TokenLogProbs,
    ToVerifier,
    Truncate,
    Verdict,
    Verify,
)
from services.speculation.trees import DraftTree, check_tree, clip_depth

Phase = Literal["prefilling", "drafting", "verifying", "finished"]

# Events besides the messages of the ports -------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The session's streams are open."""


@dataclass(frozen=True)
class DraftLate:
    """The draft of this round has not come in time."""

    round: int


@dataclass(frozen=True)
class DrafterBehind:
    """The drafter says that it lacks rows: what it was sent and what it has read differ."""

    message: str


@dataclass(frozen=True)
class DrafterLost:
    """The drafter's stream ended, or it is not waited for any longer."""

    message: str


@dataclass(frozen=True)
class DrafterJoined:
    """A drafter serves this session from the next round on, over an open stream of its own."""

    taps: tuple[Tap, ...]


@dataclass(frozen=True)
class VerifierLost:
    message: str


@dataclass(frozen=True)
class Cancel:
    """The client went away."""


@dataclass(frozen=True)
class StopFound:
    """The text holds a stop string: the sequence ends at ``length`` committed tokens."""

    length: int


Event = (
    Start
    | Prefilled
    | History
    | Verdict
    | Drafted
    | NeedFeatures
    | PortError
    | DraftLate
    | DrafterBehind
    | DrafterLost
    | DrafterJoined
    | VerifierLost
    | Cancel
    | StopFound
)

# Effects ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToVerifierEffect:
    message: ToVerifier


@dataclass(frozen=True)
class ToDrafterEffect:
    message: ToDrafter


@dataclass(frozen=True)
class DropDrafter:
    """Close the drafter's stream; ``message`` says why."""

    message: str


@dataclass(frozen=True)
class ReopenDrafter:
    """Give the same drafter a fresh stream: it is primed again from the next round on."""

    message: str


@dataclass(frozen=True)
class Emit:
    """New committed tokens. ``depths[i]`` is the tree depth token i was accepted at, 0 for a bonus token."""

    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    log_probs: tuple[TokenLogProbs, ...]


@dataclass(frozen=True)
class Finish:
    reason: FinishReason


@dataclass(frozen=True)
class Fail:
    reason: Reason
    message: str


Effect = ToVerifierEffect | ToDrafterEffect | DropDrafter | ReopenDrafter | Emit | Finish | Fail

MAX_RESYNCS = 3
"""A drafter that falls behind more often in one session is given up."""


def token_limit(request: Open, context_length: int) -> int:
    """Most committed tokens of a session: ``max_tokens`` after the prompt, and never beyond the context."""
    return min(request.prompt_len + request.max_tokens, context_length)


@dataclass(frozen=True)
class State:
    """Everything a round depends on.

    Attributes:
        open: The request; its ``epoch`` and ``prompt_len`` hold for the session's life.
        context_length: Most positions that the target has.
        budget: The tree budget while a drafter is attached.
        feed: The attached drafter, if there is one.
        joining: Taps to attach before the next round: of a drafter that joins, or none when one has left.
        attachments: How many there have been, counted from ``Open``.
        resyncs: How often the drafter has been primed again.
        phase: What the session waits for.
        round: Number of the current or next round.
        committed: Committed tokens, the pending one included.
        pending: The newest committed token.
        drafted: The tree that is being verified came from the drafter.
    """

    open: Open
    context_length: int
    budget: Budget
    feed: Feed | None = None
    joining: tuple[Tap, ...] | None = None
    attachments: int = 0
    resyncs: int = 0
    phase: Phase = "prefilling"
    round: int = 0
    committed: int = 0
    pending: int = -1
    drafted: bool = False

    @property
    def wants_drafter(self) -> bool:
        """A drafter may join."""
        return self.phase != "finished" and self.feed is None and not self.joining

    @property
    def max_depth(self) -> int:
        """Deepest node that can be emitted: both the tokens and the positions left bound it."""
        return max(0, token_limit(self.open, self.context_length) - self.committed - 1)


Step = tuple[State, tuple[Effect, ...]]


def apply(state: State, event: Event) -> Step:
    """Advance a session by one event. Events of a finished session, or of another round, change nothing."""
    if state.phase == "finished":
        return state, ()
    match event:
        case Start() if state.phase == "prefilling":
            opened = tuple(ToDrafterEffect(feed.open(state.open)) for feed in _fed(state))
            return state, (ToVerifierEffect(state.open), *opened)
        case Prefilled() if state.phase == "prefilling":
            state = replace(state, committed=len(state.open.tokens) + 1, pending=event.token)
            emit = Emit((event.token,), (0,), event.log_probs)
            return _finish(state, event.finish, emit) if event.finish else _next_round(state, emit)
        case History() if state.feed and state.feed.number == event.number:
            return _send_on(state, state.feed.take_history(event))
        case Drafted() if _answers(state, event):
            return _take_draft(state, event)
        case NeedFeatures() if _answers(state, event):
            return _resync(state, f"the drafter lacks features of positions {event.ranges}")
        case DrafterBehind() if state.feed:
            return _resync(state, event.message)
        case DraftLate() if state.phase == "drafting" and event.round == state.round:
            return _verify(state, DraftTree.root(state.pending))
        case DrafterLost():
            return _lose_drafter(state, event.message)
        case DrafterJoined() if state.wants_drafter:
            return replace(state, joining=event.taps), ()
        case Verdict() if state.phase == "verifying" and _is_current(state, event):
            return _commit(state, event)
        case PortError(reason=Reason.INVALID_TREE) if state.phase == "verifying" and state.drafted:
            return _replace_tree(state, event.message)
        case PortError():
            return _fail(state, event.reason, event.message)
        case VerifierLost():
            return _fail(state, Reason.SERVICE_UNAVAILABLE, event.message)
        case StopFound():
            cut = ToVerifierEffect(Truncate(state.open.session, state.open.epoch, event.length))
            return replace(state, phase="finished", committed=event.length), (cut, Finish("stop"))
        case Cancel():
            return replace(state, phase="finished"), (Finish("cancelled"),)
        case _:
            return state, ()


def _fed(state: State) -> tuple[Feed, ...]:
    return (state.feed,) if state.feed else ()


def _is_current(state: State, event: Drafted | Verdict) -> bool:
    return (event.epoch, event.round) == (state.open.epoch, state.round)


def _answers(state: State, event: Drafted | NeedFeatures) -> bool:
    """It is the answer that the drafter owes."""
    feed = state.feed
    return feed is not None and feed.asked is not None and (event.epoch, event.round) == (feed.epoch, feed.asked)


def _send_on(state: State, step: tuple[Feed, tuple[ToDrafter, ...]]) -> Step:
    feed, observes = step
    return replace(state, feed=feed), tuple(ToDrafterEffect(observe) for observe in observes)


def _next_round(state: State, emit: Emit, verdict: Verdict | None = None) -> Step:
    """Ask for a tree, or verify one node at once. Sending comes before emitting: the device works meanwhile."""
    state, effects = _observe(state, verdict) if verdict else (state, ())
    state, attached = _attach(state)
    effects = (*effects, *attached)
    depth = min(state.max_depth, state.budget.max_depth)
    if state.feed is None or not state.feed.ready or depth == 0:
        state, verify = _verify(state, DraftTree.root(state.pending))
        return state, (*effects, *verify, emit)
    feed, budget = replace(state.feed, asked=state.round), replace(state.budget, max_depth=depth)
    draft = Draft(feed.session, feed.epoch, state.round, state.committed, budget)
    return replace(state, phase="drafting", feed=feed), (*effects, ToDrafterEffect(draft), emit)


def _observe(state: State, verdict: Verdict) -> Step:
    """Pass a verdict's rows on to the drafter."""
    if state.feed is None:
        return state, ()
    try:
        state, effects = _send_on(state, state.feed.take_rows(verdict.features, verdict.tokens))
    except KeyError:
        return _lose_drafter(state, "a verdict lacks the drafter's features")
    if state.feed and state.feed.overrun:
        return _lose_drafter(state, "the drafter does not keep up")
    return state, effects


def _attach(state: State) -> Step:
    """Tell the verifier who reads features from this round on, and begin with a drafter that joins."""
    taps = state.joining
    if taps is None:
        return state, ()
    number = state.attachments + 1
    attach = ToVerifierEffect(Attach(state.open.session, state.open.epoch, number, taps))
    state = replace(state, joining=None, attachments=number)
    if not taps:
        return state, (attach,)
    feed = Feed.attached(state.open, number, taps, state.committed - 1)  # the pending token has no row yet
    return replace(state, feed=feed), (attach, ToDrafterEffect(feed.open(state.open)))


def _take_draft(state: State, event: Drafted) -> Step:
    assert state.feed
    state, effects = _send_on(state, state.feed.answered())
    if state.phase != "drafting" or not _is_current(state, event):
        return state, effects  # it came too late
    try:
        check_tree(event.tree)
    except AerieError as error:
        return _lose_drafter(state, f"the drafter sent no tree: {error.message}")
    if event.tree.tokens[0] != state.pending:
        return _resync(state, "the drafter's tree begins with another token than the pending one")
    return _verify(state, event.tree)


def _verify(state: State, tree: DraftTree) -> Step:
    tree = clip_depth(tree, state.max_depth)  # a drafter is not trusted with the limits
    verify = Verify(state.open.session, state.open.epoch, state.round, state.committed, tree)
    return replace(state, phase="verifying", drafted=len(tree) > 1), (ToVerifierEffect(verify),)


def _commit(state: State, verdict: Verdict) -> Step:
    state = replace(
        state,
        round=state.round + 1,
        committed=state.committed + len(verdict.tokens),
        pending=verdict.tokens[-1],
    )
    depths = (*range(1, len(verdict.tokens)), 0)
    emit = Emit(verdict.tokens, depths, verdict.log_probs)
    return _finish(state, verdict.finish, emit) if verdict.finish else _next_round(state, emit, verdict)


def _lose_drafter(state: State, message: str) -> Step:
    """Go on without the drafter, or without the one that was about to join."""
    if state.feed is None and not state.joining:
        return state, ()
    return _leave_drafter(state, (), DropDrafter(message))


def _resync(state: State, message: str) -> Step:
    """Prime the drafter again from the next round on, unless that is the rule with this one."""
    assert state.feed
    if state.resyncs == MAX_RESYNCS:
        return _lose_drafter(state, f"{message}, once more")
    taps = state.feed.taps
    return _leave_drafter(replace(state, resyncs=state.resyncs + 1), taps, ReopenDrafter(message))


def _leave_drafter(state: State, joining: tuple[Tap, ...], effect: Effect) -> Step:
    waiting = state.phase == "drafting"
    state = replace(state, feed=None, joining=joining)
    if not waiting:
        return state, (effect,)
    state, verify = _verify(state, DraftTree.root(state.pending))
    return state, (effect, *verify)


def _replace_tree(state: State, message: str) -> Step:
    """The verifier refused a drafter's tree (its size, or its tokens): the session goes on without that drafter."""
    state, dropped = _lose_drafter(state, f"the drafter's tree was refused: {message}")
    state, verify = _verify(state, DraftTree.root(state.pending))
    return state, (*dropped, *verify)


def _finish(state: State, reason: FinishReason, emit: Emit) -> Step:
    return replace(state, phase="finished"), (emit, Finish(reason))


def _fail(state: State, reason: Reason, message: str) -> Step:
    return replace(state, phase="finished"), (Fail(reason, message),)
