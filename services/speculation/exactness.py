"""Ties: positions where rounding alone can decide the token, and the agreement of two runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.speculation.warpers import Counts, Logits, Sampler, choose, penalise

Wide = NDArray[np.float64]
Mask = NDArray[np.bool_]

EPSILON_FLOAT32 = 1e-3
EPSILON_HALF = 0.25
"""Widest move of a raw logit difference that rounding explains: float32, and bf16 or 4-bit weights."""


def is_tie(
    logits: Logits, sampler: Sampler, noise: Logits | None, counts: Counts | None, epsilon: float = EPSILON_FLOAT32
) -> bool:
    """True when another token would win if each raw logit moved by at most ``epsilon / 2``.

    Args:
        logits: Raw logits [V] of plain decoding at the position.
        sampler: Its settings.
        noise: The position's Gumbel noise [V]; None when greedy.
        counts: Tokens seen, when penalties are on.
        epsilon: EPSILON_FLOAT32 or EPSILON_HALF.
    """
    # A repetition penalty stretches a logit's error with the logit.
    epsilon *= max(sampler.repetition_penalty, 1 / sampler.repetition_penalty)
    winner = choose(logits, sampler, noise, counts)
    scores = penalise(logits, sampler, counts).astype(np.float64)
    maybe = sure = np.isfinite(scores)
    if noise is not None and not sampler.greedy:
        # Differences of tempered logits move by at most this.
        epsilon /= sampler.temperature
        scores /= sampler.temperature
        maybe, sure = _kept(scores, sampler, epsilon)
        scores = scores + noise
    rivals = maybe & (np.arange(len(scores)) != winner)
    return not sure[winner] or bool((scores[rivals] > scores[winner] - epsilon).any())


def _kept(scores: Wide, sampler: Sampler, epsilon: float) -> tuple[Mask, Mask]:
    """Tokens that the cuts may keep, and those that they surely keep, when differences move by ``epsilon``.

    The sorted scores move no further than the scores do, so a token's place is bounded by the tokens within
    ``epsilon`` of it, and the mass before a place changes its odds by ``e^epsilon`` at most.
    """
    finite = np.isfinite(scores)
    ordered = np.sort(scores[finite])[::-1]
    k = min(sampler.top_k or len(ordered), len(ordered))
    first = np.searchsorted(-ordered, -scores - epsilon, side="left")
    last = np.searchsorted(-ordered, -scores + epsilon, side="right") - 1
    maybe, sure = finite & (first < k), finite & (last < k)
    if sampler.top_p < 1:
        mass = np.cumsum(np.exp(ordered[:k] - ordered[0]))
        before = np.concatenate([[0.0], mass / mass[-1]])
        factor = np.exp(min(epsilon, 500.0))
        maybe &= (before / (before + (1 - before) * factor))[np.minimum(first, k)] < sampler.top_p
        sure &= (before * factor / (before * factor + 1 - before))[np.minimum(last, k)] < sampler.top_p
    if sampler.min_p > 0:
        span = np.log(sampler.min_p)
        maybe &= scores >= ordered[0] + span - epsilon
        # The best token is measured against the second: a token never falls below its own share.
        best_other = np.where(scores == ordered[0], ordered[1] if len(ordered) > 1 else -np.inf, ordered[0])
        sure &= scores >= best_other + span + epsilon
    return maybe, sure


@dataclass(frozen=True)
class Agreement:
    """How two token sequences relate.

    Attributes:
        identical: Every token is the same.
        tie_at: Index of the first difference when it is a tie, else None.
        differs_at: Index of the first difference when it is not a tie, else None.
    """

    identical: bool
    tie_at: int | None = None
    differs_at: int | None = None

    @property
    def agrees(self) -> bool:
        return self.differs_at is None

    def __str__(self) -> str:
        if self.identical:
            return "identical"
        if self.tie_at is not None:
            return f"identical up to a tie at token {self.tie_at}"
        return f"DIFFERENT at token {self.differs_at}"


def compare(plain: Sequence[int], other: Sequence[int], tie_test: Callable[[int], bool]) -> Agreement:
    """Compare a run with plain decoding; ``tie_test(i)`` says whether output position i is a tie."""
    for index, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return Agreement(False, tie_at=index) if tie_test(index) else Agreement(False, differs_at=index)
    if len(plain) == len(other):
        return Agreement(True)
    return Agreement(False, differs_at=min(len(plain), len(other)))
