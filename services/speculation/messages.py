"""What travels through the ports: frozen values, the same for local and remote implementations.

Every message of a round carries ``(session, epoch, round, base_len)``; ``base_len`` is the number of committed
tokens it builds on, so the root of its tree sits at position ``base_len - 1``.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

from services.speculation.errors import Reason
from services.speculation.growth import Budget
from services.speculation.trees import DraftTree
from services.speculation.warpers import Sampler

Tap = int | Literal["final"]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class TargetInfo:
    """What services learn about the target.

    Attributes:
        name: What the user asked for.
        weights_fingerprint: Digest of the weights that are served.
        tokenizer_fingerprint: Digest of the tokenizer.
        layers, hidden_size, vocab_size: Shape of the model.
        context_length: Most positions of one session.
        eos_ids: Tokens that end a sequence.
        feature_dtype: "float32" or "bfloat16", the type of features on local ports.
        device: "cpu" or "gpu"; picks the tree preset until the cost model does.
        max_tree_nodes: Largest tree that is verified.
    """

    name: str
    weights_fingerprint: str
    tokenizer_fingerprint: str
    layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]
    feature_dtype: str
    device: str
    max_tree_nodes: int


@dataclass(frozen=True)
class DrafterInfo:
    """What a drafter says of itself: its family, the taps it reads and the target it was made for."""

    name: str
    family: str
    taps: tuple[Tap, ...]
    target_fingerprint: str | None
    parameters: int


@dataclass(frozen=True)
class DrafterStatus:
    """A drafter now: the sessions it holds, and the running mean of ``T_draft`` in seconds."""

    info: DrafterInfo
    sessions: int = 0
    draft_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Features:
    """Hidden states at a drafter's taps for positions ``base .. base + rows``.

    Attributes:
        base: Position of the first row.
        rows: Per tap, [rows, hidden]: float32, or uint16 bytes of bfloat16.
    """

    base: int
    rows: dict[Tap, NDArray[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.rows.values()))) if self.rows else 0

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())

    def at(self, taps: tuple[Tap, ...]) -> "Features":
        """These taps alone. Raises KeyError: one is not there."""
        if self.rows.keys() == set(taps):
            return self
        return Features(self.base, {tap: self.rows[tap] for tap in taps})


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probability of an emitted token under the unwarped target, and the best alternatives."""

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


# To the verifier ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """Start (or resume, with a higher epoch) a session: ``tokens`` is the prompt and what was committed."""

    session: str
    tokens: tuple[int, ...]
    prompt_len: int
    max_tokens: int
    sampler: Sampler
    seed: int
    epoch: int = 0
    eos_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    taps: tuple[Tap, ...] = ()


@dataclass(frozen=True, eq=False)
class Verify:
    session: str
    epoch: int
    round: int
    base_len: int
    tree: DraftTree


@dataclass(frozen=True)
class Truncate:
    """Cut the committed tokens to ``length`` (a stop string was found): KV and counts follow."""

    session: str
    epoch: int
    length: int


@dataclass(frozen=True)
class Attach:
    """Between two rounds: later verdicts carry these taps, and their history follows as ``History`` (none: neither).

    ``number`` counts a session's attachments from 1 and comes back with each slice; 0 is what ``Open`` asked for.
    """

    session: str
    epoch: int
    number: int
    taps: tuple[Tap, ...]


# From the verifier ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prefilled:
    """The prompt is in the cache; ``token`` is the first pending token. Features follow in slices."""

    session: str
    epoch: int
    token: int
    finish: FinishReason | None
    seconds: float
    log_probs: tuple[TokenLogProbs, ...] = ()


@dataclass(frozen=True, eq=False)
class History:
    """A slice of features before the verdicts' own, ready for ``Observe``: ``tokens`` are those at base+1 .. .

    ``number`` is that of the ``Attach`` it answers, 0 for ``Open``.
    """

    session: str
    epoch: int
    features: Features
    tokens: tuple[int, ...]
    number: int = 0


@dataclass(frozen=True, eq=False)
class Verdict:
    """Outcome of a round: ``tokens`` are the accepted drafts and the bonus; features cover the accepted path.

    ``seconds`` is ``T_verify``, ``queue_seconds`` the wait for a batch before it.
    """

    session: str
    epoch: int
    round: int
    base_len: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: FinishReason | None
    features: Features
    seconds: float
    log_probs: tuple[TokenLogProbs, ...] = ()
    queue_seconds: float = 0.0


@dataclass(frozen=True)
class PortError:
    """A failure of one session, in-band, so that it never looks like a dead service."""

    session: str
    reason: Reason
    message: str
    expected: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class SessionSummary:
    """One session as ``ListSessions`` shows it.

    Attributes:
        session, epoch, round: Which, and its next round.
        committed: Tokens, the prompt and the pending one included.
        kv_bytes: Of its cache.
        feature_bytes: Of history that its orchestrator has not passed on yet.
        age_seconds: Since it was opened.
        state: What it waits for: its prompt, its client, or the device.
    """

    session: str
    epoch: int
    round: int
    committed: int
    kv_bytes: int
    feature_bytes: int
    age_seconds: float
    state: Literal["prefill", "idle", "verifying"]


# To the drafter -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenDraft:
    """Start a drafter session at position 0 of a target session.

    ``sampler`` and ``seed`` are for coupled drafters; a drafter that is not coupled ignores them.
    """

    session: str
    epoch: int
    sampler: Sampler
    seed: int


@dataclass(frozen=True, eq=False)
class Observe:
    """True features and the tokens that follow them: row i is (features[i], token at position i + 1)."""

    session: str
    epoch: int
    features: Features
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Draft:
    """Ask for a tree. ``observe`` is read first: rows that would else be a message of their own just before."""

    session: str
    epoch: int
    round: int
    base_len: int
    budget: Budget
    observe: Observe | None = None


# From the drafter -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Drafted:
    """A tree whose root is the pending token, the seconds it took (``T_draft``) and those that it waited before."""

    session: str
    epoch: int
    round: int
    base_len: int
    tree: DraftTree
    seconds: float
    queue_seconds: float = 0.0


@dataclass(frozen=True)
class NeedFeatures:
    """The drafter lacks the rows of these position ranges [(start, stop), ...]."""

    session: str
    epoch: int
    round: int
    ranges: tuple[tuple[int, int], ...] = field(default=())


ToVerifier = Open | Verify | Truncate | Attach
FromVerifier = Prefilled | History | Verdict | PortError
ToDrafter = OpenDraft | Observe | Draft
FromDrafter = Drafted | NeedFeatures | PortError
