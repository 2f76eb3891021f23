"""One session on the verifier: its committed tokens, its cache, and how the target chooses."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.speculation import warpers
from services.speculation.errors import AerieError, Reason, check_integers, is_integer
from services.speculation.messages import (
    Attach,
    FinishReason,
    FromVerifier,
    Open,
    SessionSummary,
    Tap,
    TargetInfo,
    TokenLogProbs,
    Truncate,
    Verdict,
    Verify,
)
from services.speculation.noise import gumbel
from services.speculation.session import token_limit
from services.speculation.trees import check_tree, node_depths
from services.speculation.warpers import Counts, Sampler
from services.targets.kv_rows import KVRows

Reply = Callable[[FromVerifier], None]


@dataclass(eq=False)
class VerifierSession:
    """Mutable state of one generation.

    Attributes:
        request: The ``Open`` that started it.
        limit: Most committed tokens.
        kv: Its cache; ``kv.length`` is ``len(tokens) - 1`` between rounds.
        lease: Bytes to give back to the budget.
        reply: Delivers messages to the session's stream.
        tokens: Committed tokens, the pending one last.
        counts: What penalties look at, when there are any.
        taps: What verdicts carry; ``Attach`` changes it.
        attachment: Number of the ``Attach`` that did; 0 is ``Open``.
        round: The round expected next.
        last: The newest verdict, for repeats.
        queued_at: When the round in flight was accepted, ``time.perf_counter``.
        in_flight: The round that is queued or on the device. Until its verdict is delivered, only the device
            thread touches what is above.
        cut: Length to truncate to once the round in flight is over.
        closed: Its stream has ended.
    """

    request: Open
    limit: int
    kv: KVRows
    lease: int
    reply: Reply
    tokens: list[int]
    counts: Counts | None
    taps: tuple[Tap, ...] = ()
    attachment: int = 0
    round: int = 0
    prefilled: bool = False
    last: Verdict | None = None
    queued_at: float = 0.0
    in_flight: Verify | None = None
    cut: int | None = None
    closed: bool = False
    opened: float = field(default_factory=time.monotonic)

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset() if self.request.ignore_eos else frozenset(self.request.eos_ids)

    @property
    def needs_logits(self) -> bool:
        return not self.request.sampler.plain_argmax or self.request.top_logprobs is not None

    @property
    def expected(self) -> tuple[int, int, int]:
        """Epoch, round and base length of the next round, or of the one in flight."""
        if self.in_flight:
            return self.in_flight.epoch, self.in_flight.round, self.in_flight.base_len
        if not self.prefilled:
            return expected_after(self.request)
        return self.request.epoch, self.round, len(self.tokens)

    @property
    def finish(self) -> FinishReason | None:
        """How the sequence has ended, if it has."""
        if self.tokens[-1] in self.eos_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    @property
    def sound(self) -> bool:
        """Tokens and cache belong together. A failure between the two commits would make every later answer wrong."""
        return self.prefilled and self.kv.length == len(self.tokens) - 1

    def settle(self) -> None:
        """The round in flight is over: do what waited for it."""
        self.in_flight = None
        if self.cut is not None:
            self.truncate(self.cut)
            self.cut = None

    def choose(self, logits: warpers.Logits, position: int, path_tokens: Sequence[int]) -> int:
        """The target's token for ``position``, after ``path_tokens`` uncommitted ones."""
        sampler = self.request.sampler
        noise = None if sampler.greedy else gumbel(self.request.seed, position, len(logits))
        counts = self.counts.plus(path_tokens) if self.counts and path_tokens else self.counts
        return warpers.choose(logits, sampler, noise, counts)

    def commit_tokens(self, tokens: Sequence[int]) -> FinishReason | None:
        """Append emitted tokens; says whether the sequence ends with them."""
        counts = self.counts.plus(tokens) if self.counts else None
        self.tokens.extend(tokens)
        self.counts = counts
        return self.finish

    def truncate(self, length: int) -> None:
        """Cut the committed tokens, KV and counts to ``length``; ``check_truncate`` has passed."""
        if self.last and length < self.last.base_len + len(self.last.tokens):
            self.last = None  # it speaks of tokens that are gone
        del self.tokens[length:]
        self.kv.truncate(length - 1)
        if self.counts:
            self.counts = _counts(self.request, self.tokens, len(self.counts.seen))

    def log_probs(self, logits: warpers.Logits, token: int) -> TokenLogProbs:
        """What clients see of one token: unwarped log-probabilities."""
        values = warpers.log_probs(logits)
        top = self.request.top_logprobs or 0
        best = np.argsort(-values, kind="stable")[:top]
        return TokenLogProbs(token, float(values[token]), tuple((int(i), float(values[i])) for i in best))


def summarise(session: VerifierSession, feature_bytes: int) -> SessionSummary:
    """What ``ListSessions`` shows of it."""
    return SessionSummary(
        session=session.request.session,
        epoch=session.request.epoch,
        round=session.round,
        committed=len(session.tokens),
        kv_bytes=session.kv.nbytes,
        feature_bytes=feature_bytes,
        age_seconds=time.monotonic() - session.opened,
        state="verifying" if session.in_flight else "idle" if session.prefilled else "prefill",
    )


def expected_after(request: Open) -> tuple[int, int, int]:
    """Epoch, round and base length of the first round after an ``Open``."""
    return request.epoch, 0, len(request.tokens) + 1


def open_session(request: Open, info: TargetInfo, kv: KVRows, lease: int, reply: Reply) -> VerifierSession:
    """A fresh session; ``check_open`` has passed."""
    return VerifierSession(
        request=request,
        limit=token_limit(request, info.context_length),
        kv=kv,
        lease=lease,
        reply=reply,
        tokens=list(request.tokens),
        counts=_counts(request, request.tokens, info.vocab_size),
        taps=request.taps,
    )


def _counts(request: Open, tokens: Sequence[int], vocab_size: int) -> Counts | None:
    s = request.sampler
    if s.repetition_penalty == 1 and not s.presence_penalty and not s.frequency_penalty:
        return None
    return Counts.of(vocab_size, tokens[: request.prompt_len], tokens[request.prompt_len :])


def check_open(request: Open, info: TargetInfo) -> None:
    """Refuse what cannot run, before work starts.

    Raises:
        AerieError: PROMPT_EMPTY, PROMPT_TOO_LONG or INVALID_ARGUMENT.
    """
    _check_types(request)
    if not request.tokens or request.prompt_len < 1:
        raise AerieError(Reason.PROMPT_EMPTY, "the prompt has no tokens")
    if len(request.tokens) >= info.context_length:
        raise AerieError(
            Reason.PROMPT_TOO_LONG,
            f"the prompt has {len(request.tokens)} tokens; the context of {info.context_length} leaves no room",
        )
    if not request.prompt_len <= len(request.tokens) < request.prompt_len + request.max_tokens:
        raise AerieError(Reason.INVALID_ARGUMENT, f"max_tokens is {request.max_tokens}: nothing is left to generate")
    if bad := next((t for t in request.tokens if not 0 <= t < info.vocab_size), None):
        raise AerieError(Reason.INVALID_ARGUMENT, f"prompt token {bad} is outside the vocabulary of {info.vocab_size}")
    if not 0 <= request.seed < 2**64:
        raise AerieError(Reason.INVALID_ARGUMENT, "seed must be an unsigned 64-bit integer")
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= info.vocab_size:
        raise AerieError(Reason.INVALID_ARGUMENT, f"top_logprobs is {request.top_logprobs}")
    _check_taps(request.taps, info)
    request.sampler.check_vocabulary(info.vocab_size)


def _check_taps(taps: tuple[Tap, ...], info: TargetInfo) -> None:
    if len(set(taps)) < len(taps):
        raise AerieError(Reason.INVALID_ARGUMENT, f"taps {list(taps)} name one twice")
    for tap in taps:
        if tap != "final" and not (is_integer(tap) and 0 <= tap <= info.layers):
            raise AerieError(Reason.INVALID_ARGUMENT, f"tap {tap} outside 0..{info.layers}")


def _check_types(request: Open) -> None:
    check_integers(epoch=request.epoch, prompt_len=request.prompt_len, max_tokens=request.max_tokens, seed=request.seed)
    if request.top_logprobs is not None:
        check_integers(top_logprobs=request.top_logprobs)
    for name, values in (("prompt", request.tokens), ("eos_ids", request.eos_ids), ("taps", request.taps)):
        if not isinstance(values, tuple):
            raise AerieError(Reason.INVALID_ARGUMENT, f"{name} must be a tuple")
        for value in values:
            if not is_integer(value) and (name, value) != ("taps", "final"):
                raise AerieError(Reason.INVALID_ARGUMENT, f"{name} has {value!r}, which is not an integer")
    if not isinstance(request.sampler, Sampler):
        raise AerieError(Reason.INVALID_ARGUMENT, f"sampler must be a Sampler, not {request.sampler!r}")


def check_verify(session: VerifierSession, verify: Verify, info: TargetInfo) -> None:
    """Refuse a tree that is over a limit or not of this session's next round.

    Raises:
        AerieError: STALE_ROUND or INVALID_TREE.
    """
    epoch, round_, committed = session.expected
    if not session.prefilled or session.in_flight or (verify.epoch, verify.round, verify.base_len) != session.expected:
        raise AerieError(Reason.STALE_ROUND, f"expected round {round_} of epoch {epoch} on {committed} tokens")
    if session.finish:
        raise AerieError(Reason.INVALID_TREE, f"the sequence has ended with {session.finish!r}: no tree continues it")
    tree = verify.tree
    check_tree(tree)
    if tree.tokens[0] != session.tokens[-1]:
        raise AerieError(Reason.INVALID_TREE, f"the root is {tree.tokens[0]}, the pending token {session.tokens[-1]}")
    if len(tree) > info.max_tree_nodes:
        raise AerieError(Reason.INVALID_TREE, f"{len(tree)} nodes; the limit is {info.max_tree_nodes}")
    if (tree.tokens < 0).any() or (tree.tokens >= info.vocab_size).any():
        raise AerieError(Reason.INVALID_TREE, "a token is outside the vocabulary")
    if committed + int(node_depths(tree.parents).max()) + 1 > session.limit:
        raise AerieError(Reason.INVALID_TREE, f"the tree is deeper than the {session.limit - committed} tokens left")


def check_attach(session: VerifierSession, attach: Attach, info: TargetInfo) -> None:
    """Refuse an attachment of another epoch, one that does not come between two rounds, or taps that are none.

    Raises:
        AerieError: STALE_ROUND or INVALID_ARGUMENT.
    """
    epoch, round_, _ = session.expected
    check_integers(number=attach.number)
    if attach.epoch != epoch or attach.number <= session.attachment:
        raise AerieError(Reason.STALE_ROUND, f"attachment {attach.number} of epoch {attach.epoch} is over")
    if not session.prefilled or session.in_flight:
        raise AerieError(Reason.STALE_ROUND, f"round {round_} is not over: attach between two rounds")
    if not isinstance(attach.taps, tuple):
        raise AerieError(Reason.INVALID_ARGUMENT, "taps must be a tuple")
    _check_taps(attach.taps, info)


def check_truncate(session: VerifierSession, cut: Truncate) -> None:
    """Refuse a cut of another epoch, into the prompt, or beyond what the client has been told.

    Raises:
        AerieError: STALE_ROUND or INVALID_ARGUMENT.
    """
    epoch, _, committed = session.expected
    check_integers(length=cut.length)
    if cut.epoch != epoch:
        raise AerieError(Reason.STALE_ROUND, f"session {cut.session} lives with epoch {epoch}")
    if not session.prefilled or not session.request.prompt_len < cut.length <= committed:
        raise AerieError(Reason.INVALID_ARGUMENT, f"cannot truncate {committed} tokens to {cut.length}")
