"""Warpers: logits -> the distribution that is sampled, in one fixed order.

Bias, repetition penalty (prompt + output), presence and frequency penalties (output only), temperature,
top-k, top-p, min-p. Ties at a cut keep the smaller id; top-p keeps the token that crosses it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from services.speculation.errors import AerieError, Reason, check_integers, is_integer

Logits = NDArray[np.float32]


MIN_TEMPERATURE = 1e-5
"""Below it logits divided by the temperature leave float32; 0 is greedy."""
MAX_TEMPERATURE = 1e9
MAX_BIAS = 1e9
"""Of a bias, and of a presence or frequency penalty, either sign."""
MAX_REPETITION = 1e9
"""Of a repetition penalty; its inverse is the least. Within all these limits no score leaves float32."""


@dataclass(frozen=True)
class Sampler:
    """How the target's distribution is warped and sampled.

    Attributes:
        temperature: 0 is greedy; bias and penalties still apply.
        top_k: Keep the k best tokens; 0 keeps all.
        top_p: Keep the smallest set of best tokens with at least this mass; 1 keeps all.
        min_p: Keep tokens with at least this share of the best token's probability; 0 keeps all.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen; 1 is off.
        presence_penalty: Subtracted once from tokens in the output.
        frequency_penalty: Subtracted once for each occurrence in the output.
        logit_bias: (token id, bias) pairs, added first.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = field(default=())

    def __post_init__(self) -> None:
        self._check_types()
        checks = (
            (
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE,
                f"temperature must be 0 or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}",
            ),
            (self.top_k >= 0, "top_k must be 0 or more"),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]"),
            (0 <= self.min_p < 1, "min_p must be in [0, 1)"),
            (
                1 / MAX_REPETITION <= self.repetition_penalty <= MAX_REPETITION,
                f"repetition_penalty must be from {1 / MAX_REPETITION:g} to {MAX_REPETITION:g}",
            ),
            (abs(self.presence_penalty) <= MAX_BIAS, f"presence_penalty must be within ±{MAX_BIAS:g}"),
            (abs(self.frequency_penalty) <= MAX_BIAS, f"frequency_penalty must be within ±{MAX_BIAS:g}"),
            (all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias), f"logit_bias must be within ±{MAX_BIAS:g}"),
        )
        for holds, message in checks:
            if not holds:
                raise AerieError(Reason.INVALID_ARGUMENT, message)

    def _check_types(self) -> None:
        check_integers(top_k=self.top_k)
        for number in fields(self)[:-1]:
            value = getattr(self, number.name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise AerieError(Reason.INVALID_ARGUMENT, f"{number.name} must be a number, not {value!r}")
        bias = self.logit_bias
        pairs = isinstance(bias, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in bias)
        if not pairs or not all(is_integer(token) and isinstance(value, Real) for token, value in bias):
            raise AerieError(Reason.INVALID_ARGUMENT, "logit_bias must be a tuple of (token id, bias) pairs")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def plain_argmax(self) -> bool:
        """True when the target's token is the argmax of the raw logits."""
        penalised = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return self.greedy and not penalised and not self.logit_bias

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse bias on tokens that the target does not have (INVALID_ARGUMENT)."""
        for token, _ in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise AerieError(Reason.INVALID_ARGUMENT, f"logit_bias names token {token} of {vocab_size}")


@dataclass(frozen=True)
class Counts:
    """What penalties look at: tokens seen anywhere, and occurrences in the output, both [V]."""

    seen: NDArray[np.bool_]
    output: NDArray[np.int32]

    @staticmethod
    def of(vocab_size: int, prompt: Iterable[int], output: Iterable[int] = ()) -> "Counts":
        seen, counts = np.zeros(vocab_size, np.bool_), np.zeros(vocab_size, np.int32)
        seen[list(prompt)] = True
        return Counts(seen, counts).plus(output)

    def plus(self, output: Iterable[int]) -> "Counts":
        """A copy with more output tokens counted."""
        tokens = list(output)
        seen, counts = self.seen.copy(), self.output.copy()
        seen[tokens] = True
        np.add.at(counts, tokens, 1)
        return Counts(seen, counts)


def penalise(logits: Logits, sampler: Sampler, counts: Counts | None) -> Logits:
    """Bias and penalties: what greedy decoding takes the argmax of. [V] -> [V], a copy."""
    scores = np.array(logits, np.float32)
    for token, bias in sampler.logit_bias:
        scores[token] += np.float32(bias)
    if counts is None:
        return scores
    if sampler.repetition_penalty != 1:
        penalty = np.float32(sampler.repetition_penalty)
        repeated = np.where(scores > 0, scores / penalty, scores * penalty)
        scores = np.where(counts.seen, repeated, scores)
    if sampler.presence_penalty or sampler.frequency_penalty:
        scores -= np.float32(sampler.presence_penalty) * (counts.output > 0)
        scores -= np.float32(sampler.frequency_penalty) * counts.output
    return scores


def warp(logits: Logits, sampler: Sampler, counts: Counts | None = None) -> Logits:
    """Raw logits [V] -> warped logits [V]: tempered, cut tokens at -inf.

    Args:
        logits: Raw float32 logits of one position.
        sampler: Its settings; ``temperature`` must be above 0.
        counts: Tokens seen so far, for penalties.
    """
    scores = penalise(logits, sampler, counts) / np.float32(sampler.temperature)
    keep = np.isfinite(scores)
    if 0 < sampler.top_k < len(scores):
        keep &= _top_k(scores, sampler.top_k)
    if sampler.top_p < 1:
        keep &= _top_p(np.where(keep, scores, -np.inf), sampler.top_p)
    if sampler.min_p > 0:
        floor = scores[keep].max() + math.log(sampler.min_p)
        keep &= scores >= np.float32(floor)
    return np.where(keep, scores, np.float32(-np.inf)).astype(np.float32)


def _top_k(scores: Logits, k: int) -> NDArray[np.bool_]:
    kth = np.partition(scores, -k)[-k]
    kept: NDArray[np.bool_] = scores > kth
    at_cut = np.flatnonzero(scores == kth)[: k - int(kept.sum())]
    kept[at_cut] = True
    return kept


def _top_p(scores: Logits, top_p: float) -> NDArray[np.bool_]:
    """Keep the shortest prefix of the descending order whose mass reaches top_p, the crossing token included."""
    mass = np.exp((scores - scores.max()).astype(np.float64))
    mass /= mass.sum()
    # Only candidates that can matter are sorted: what is left out weighs less than a millionth of (1 - top_p).
    candidates = np.flatnonzero(mass > (1 - top_p) * 1e-6 / len(mass))
    order = candidates[np.lexsort((candidates, -mass[candidates]))]
    before = np.cumsum(mass[order]) - mass[order]
    keep = np.zeros(len(mass), np.bool_)
    keep[order[before < top_p]] = True
    keep[order[0]] = True
    return keep


def choose(logits: Logits, sampler: Sampler, noise: Logits | None, counts: Counts | None = None) -> int:
    """The target's token at one node: argmax when greedy, else Gumbel-max over the warped logits."""
    if sampler.greedy:
        return int(np.argmax(penalise(logits, sampler, counts)))
    if noise is None:
        raise ValueError("sampling needs the position's noise")
    return int(np.argmax(warp(logits, sampler, counts) + noise))


def log_probs(logits: Logits) -> Logits:
    """Log-softmax of raw logits over the last axis: what is reported to clients."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    result: Logits = (wide - np.log(np.exp(wide).sum(-1, keepdims=True))).astype(np.float32)
    return result
