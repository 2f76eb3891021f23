"""One generation as a pure state machine: ``apply(state, event) -> (state, effects)``.

Events are messages from the verifier and the drafter, lost services, cancellation and stop strings; effects are
messages to send and things to tell the client. No clock, no model: every schedule of faults can be replayed.
"""

from dataclasses import dataclass, replace
from typing import Literal

from services.speculation.errors import AerieError, Reason
from services.speculation.growth import Budget
from services.speculation.messages import (
    Draft,
    Drafted,
    FinishReason,
    History,
    NeedFeatures,
    Observe,
    Open,
    OpenDraft,
    PortError,
    Prefilled,
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
class DrafterLost:
    """The drafter's stream ended, or its deadline passed."""

    message: str


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
    | DrafterLost
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


Effect = ToVerifierEffect | ToDrafterEffect | DropDrafter | Emit | Finish | Fail


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
        drafting: A drafter is attached.
        phase: What the session waits for.
        round: Number of the current or next round.
        committed: Committed tokens, the pending one included.
        pending: The newest committed token.
        drafted: The tree that is being verified came from the drafter.
    """

    open: Open
    context_length: int
    budget: Budget
    drafting: bool
    phase: Phase = "prefilling"
    round: int = 0
    committed: int = 0
    pending: int = -1
    drafted: bool = False

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
            return _start(state)
        case Prefilled() if state.phase == "prefilling":
            state = replace(state, committed=len(state.open.tokens) + 1, pending=event.token)
            emit = Emit((event.token,), (0,), event.log_probs)
            return _finish(state, event.finish, emit) if event.finish else _next_round(state, emit)
        case History():
            observe = Observe(state.open.session, state.open.epoch, event.features, event.tokens)
            return state, ((ToDrafterEffect(observe),) if state.drafting else ())
        case Drafted() if state.phase == "drafting" and _is_current(state, event):
            try:
                check_tree(event.tree)
            except AerieError as error:
                return _lose_drafter(state, f"the drafter sent no tree: {error.message}")
            return _verify(state, event.tree)
        case NeedFeatures() if state.phase == "drafting" and _is_current(state, event):
            return _lose_drafter(state, f"the drafter lacks features of positions {event.ranges}")
        case DrafterLost():
            return _lose_drafter(state, event.message)
        case Verdict() if state.phase == "verifying" and _is_current(state, event):
            return _commit(state, event)
        case PortError(reason=Reason.INVALID_TREE) if state.phase == "verifying" and state.drafted:
            return _replace_tree(state, event.message)
        case PortError():
            return _fail(state, event.reason, event.message)
        case VerifierLost():
            return _fail(state, Reason.INTERNAL, event.message)
        case StopFound():
            cut = ToVerifierEffect(Truncate(state.open.session, state.open.epoch, event.length))
            return replace(state, phase="finished", committed=event.length), (cut, Finish("stop"))
        case Cancel():
            return replace(state, phase="finished"), (Finish("cancelled"),)
        case _:
            return state, ()


def _is_current(state: State, event: Drafted | NeedFeatures | Verdict) -> bool:
    return (event.epoch, event.round) == (state.open.epoch, state.round)


def _start(state: State) -> Step:
    effects: list[Effect] = [ToVerifierEffect(state.open)]
    if state.drafting:
        opened = OpenDraft(state.open.session, state.open.epoch, state.open.sampler, state.open.seed)
        effects.append(ToDrafterEffect(opened))
    return state, tuple(effects)


def _next_round(state: State, emit: Emit, *observe: Effect) -> Step:
    """Ask for a tree, or verify one node at once. Sending comes before emitting: the device works meanwhile."""
    depth = min(state.max_depth, state.budget.max_depth)
    if not state.drafting or depth == 0:
        state, verify = _verify(state, DraftTree.root(state.pending))
        return state, (*observe, *verify, emit)
    budget = replace(state.budget, max_depth=depth)
    draft = Draft(state.open.session, state.open.epoch, state.round, state.committed, budget)
    return replace(state, phase="drafting"), (*observe, ToDrafterEffect(draft), emit)


def _verify(state: State, tree: DraftTree) -> Step:
    # A drafter is never trusted with the root or the limits.
    if tree.tokens[0] != state.pending:
        tree = DraftTree.root(state.pending)
    tree = clip_depth(tree, state.max_depth)
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
    if verdict.finish:
        return _finish(state, verdict.finish, emit)
    if not state.drafting:
        return _next_round(state, emit)
    observe = Observe(state.open.session, state.open.epoch, verdict.features, verdict.tokens)
    return _next_round(state, emit, ToDrafterEffect(observe))


def _lose_drafter(state: State, message: str) -> Step:
    if not state.drafting:
        return state, ()
    waiting = state.phase == "drafting"
    state, effects = replace(state, drafting=False), (DropDrafter(message),)
    if not waiting:
        return state, effects
    state, verify = _verify(state, DraftTree.root(state.pending))
    return state, (*effects, *verify)


def _replace_tree(state: State, message: str) -> Step:
    """The verifier refused a drafter's tree (its size, or its tokens): the session goes on without that drafter."""
    state, dropped = _lose_drafter(state, f"the drafter's tree was refused: {message}")
    state, verify = _verify(state, DraftTree.root(state.pending))
    return state, (*dropped, *verify)


def _finish(state: State, reason: FinishReason, emit: Emit) -> Step:
    return replace(state, phase="finished"), (emit, Finish(reason))


def _fail(state: State, reason: Reason, message: str) -> Step:
    return replace(state, phase="finished"), (Fail(reason, message),)
