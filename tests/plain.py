"""Plain decoding by mlx-lm's own forward and caches: what trees and services are measured against."""

import copy
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from services.speculation import warpers
from services.speculation.noise import gumbel
from services.speculation.warpers import Counts, Sampler

GREEDY = Sampler()


def prefill(model: nn.Module, tokens: Sequence[int], cache: list | None = None) -> list:
    """mlx-lm's caches after a prompt."""
    cache = make_prompt_cache(model) if cache is None else cache
    if tokens:
        mx.eval(model(mx.array(tokens)[None], cache=cache))
    return cache


def node_logits(model: nn.Module, prompt: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
    """Logits [nodes, V] after each node of a tree: one token at a time, on a copy of its parent's caches."""
    caches = {-1: prefill(model, prompt)}
    rows = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        caches[node] = copy.deepcopy(caches[parent])
        rows.append(np.array(model(mx.array([[token]]), cache=caches[node])[0, -1]))
    return np.stack(rows)


def keys_values(model: nn.Module, tokens: Sequence[int]) -> list[np.ndarray]:
    """Keys of every layer, then values, [1, kv_heads, len(tokens), d]; unbounded caches, so nothing is evicted."""
    cache = prefill(model, tokens, [KVCache() for _ in model.layers])
    return [np.array(layer.state[part][..., : len(tokens), :]) for part in (0, 1) for layer in cache]


@dataclass
class PlainRun:
    """Tokens of a plain run, and the raw logits [V] that each was chosen from."""

    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)


def decode(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    sampler: Sampler = GREEDY,
    seed: int = 0,
    eos_ids: Container[int] = (),
) -> PlainRun:
    """Generate ``count`` tokens, or up to EOS, one at a time."""
    cache, run, new = make_prompt_cache(model), PlainRun(), list(prompt)
    while len(run.tokens) < count:
        logits = np.array(model(mx.array(new)[None], cache=cache)[0, -1])
        counts = Counts.of(len(logits), prompt, run.tokens)
        noise = gumbel(seed, len(prompt) + len(run.tokens), len(logits)) if sampler.temperature else None
        new = [warpers.choose(logits, sampler, noise, counts)]
        run.tokens += new
        run.logits.append(logits)
        if new[0] in eos_ids:
            break
    return run


def relative_error(values: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference, relative to the largest magnitude in its row."""
    assert values.shape == reference.shape
    return float((np.abs(values - reference).max(-1) / np.abs(reference).max(-1)).max())
