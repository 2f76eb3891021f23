"""Ties: positions where rounding alone can decide the token, and the agreement of two runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from services.speculation.warpers import Counts, Logits, Sampler, penalise, warp

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
    if sampler.greedy:
        return _gap(penalise(logits, sampler, counts)) < epsilon
    if noise is None:
        raise ValueError("a sampled position needs its noise")
    scores = warp(logits, sampler, counts) + noise
    if _gap(scores) * sampler.temperature < epsilon:
        return True
    winner = np.argmax(scores)
    for slack in (epsilon, -epsilon):
        moved = warp(logits, sampler, counts, slack) + noise
        if np.argmax(moved) != winner or _gap(moved) * sampler.temperature < epsilon:
            return True
    return False


def _gap(scores: Logits) -> float:
    best = np.partition(scores, -2)[-2:]
    return float(best[1] - best[0])


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
