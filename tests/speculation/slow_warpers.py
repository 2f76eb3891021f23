"""The warpers again, in Python floats, by sorting: what the fast ones must agree with."""

import math
from collections.abc import Sequence

from services.speculation.warpers import Sampler

INF = math.inf


def slow_penalise(
    logits: Sequence[float], sampler: Sampler, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> list[float]:
    """Bias, repetition, presence and frequency penalties, in this order."""
    scores = [float(x) for x in logits]
    for token, bias in sampler.logit_bias:
        scores[token] += bias
    for token in {*prompt, *output}:
        p = sampler.repetition_penalty
        scores[token] = scores[token] / p if scores[token] > 0 else scores[token] * p
    for token in set(output):
        scores[token] -= sampler.presence_penalty + sampler.frequency_penalty * list(output).count(token)
    return scores


def slow_warp(
    logits: Sequence[float], sampler: Sampler, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> list[float]:
    """Tempered logits, -inf where a token is cut."""
    scores = [x / sampler.temperature for x in slow_penalise(logits, sampler, prompt, output)]
    kept = sorted((t for t in range(len(scores)) if scores[t] > -INF), key=lambda t: (-scores[t], t))
    if sampler.top_k:
        kept = kept[: sampler.top_k]
    if sampler.top_p < 1:
        probabilities = softmax([scores[t] for t in kept])
        size = next((n for n in range(1, len(kept)) if math.fsum(probabilities[:n]) >= sampler.top_p), len(kept))
        kept = kept[:size]
    if sampler.min_p:
        kept = [t for t in kept if math.exp(scores[t] - scores[kept[0]]) >= sampler.min_p]
    return [scores[t] if t in kept else -INF for t in range(len(scores))]


def softmax(scores: Sequence[float]) -> list[float]:
    weights = [math.exp(x - max(scores)) for x in scores]
    return [w / math.fsum(weights) for w in weights]
