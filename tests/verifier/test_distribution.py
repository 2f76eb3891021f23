"""Sampled tokens follow the target's distribution, whatever the tree: real logits, many seeds, chi-square."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import chisquare

from services.runtime.device import device_thread
from services.speculation.noise import gumbel
from services.speculation.trees import DraftTree
from services.speculation.walk import walk
from services.speculation.warpers import Sampler, choose
from services.targets.ragged import SessionRows
from services.targets.target import Target
from tests.plain import node_logits
from tests.speculation.slow_warpers import slow_warp, softmax
from tests.verifier.conftest import Tiny

SEEDS = 20_000
PROMPT, ROOT = list(range(5, 25)), 77
SAMPLERS = {
    "plain": Sampler(temperature=1.0),
    "top-p": Sampler(temperature=1.3, top_p=0.8),
    "top-k": Sampler(temperature=0.8, top_k=6),
}


@dataclass
class Judged:
    """A tree with the logits of its nodes: the target's own in one forward, and mlx-lm's one token at a time."""

    tree: DraftTree
    logits: np.ndarray
    plain: np.ndarray


def tree_logits(target: Target, tree: DraftTree) -> np.ndarray:
    kv = target.new_kv()
    target.forward([SessionRows.chunk(kv, PROMPT, "none")])
    kv.commit(range(len(PROMPT)))
    return np.array(target.forward([SessionRows(kv, tree.tokens, tree.parents)]).logits)


@pytest.fixture(scope="module")
def judged(tiny: Tiny) -> Judged:
    """Below the root its three likeliest tokens, one that is unlikely, and below the first three more."""
    best = np.argsort(-node_logits(tiny.plain, PROMPT, [ROOT], [-1])[0])
    tokens = [ROOT, *best[[0, 1, 2, 150, 0, 5, 9]].tolist()]
    tree = DraftTree.build(tokens, [-1, 0, 0, 0, 0, 1, 1, 1])
    logits = device_thread().submit(lambda: tree_logits(tiny.target, tree)).result()
    return Judged(tree, logits, node_logits(tiny.plain, PROMPT, tokens, tree.parents.tolist()))


@pytest.fixture(scope="module")
def noise() -> list[np.ndarray]:
    """For the first two tokens after the root, [seeds, V]."""
    first = len(PROMPT) + 1
    return [np.stack([gumbel(seed, first + i, 300) for seed in range(SEEDS)]) for i in (0, 1)]


def assert_drawn_from(drawn: Counter, expected: dict) -> None:
    """Chi-square over cells of at least five expected draws, the rest put together; impossible ones never come."""
    assert not [cell for cell in drawn if not expected.get(cell)]
    large = [cell for cell, count in expected.items() if count >= 5]
    counts = [drawn[cell] for cell in large]
    means = [expected[cell] for cell in large]
    rest = sum(expected.values()) - sum(means)
    if rest > 1e-6 * SEEDS:
        counts.append(drawn.total() - sum(counts))
        means.append(rest)
    assert len(means) > 3
    assert chisquare(counts, np.array(means) * drawn.total() / sum(means)).pvalue > 1e-3


@pytest.mark.parametrize("tiny", ["ragged"], indirect=True)  # both paths give these logits: once is enough
@pytest.mark.parametrize("name", SAMPLERS)
def test_first_and_second_tokens_follow_the_target(judged: Judged, noise: list[np.ndarray], name: str) -> None:
    """What a round emits: the first token, and where the tree has it the second, beside the exact probabilities."""
    sampler, children = SAMPLERS[name], judged.tree.tokens[1:5].tolist()
    firsts: Counter = Counter()
    pairs: Counter = Counter()
    for seed in range(SEEDS):

        def target_token(path: tuple[int, ...], seed: int = seed) -> int:
            depth = len(path) - 1
            # A third token is not counted: any will do.
            return choose(judged.logits[path[-1]], sampler, noise[depth][seed]) if depth < 2 else 0

        accepted = walk(judged.tree, target_token)
        emitted = [*judged.tree.tokens[list(accepted.path[1:])].tolist(), accepted.bonus]
        firsts[emitted[0]] += 1
        assert (len(emitted) > 1) == (emitted[0] in children)
        if len(emitted) > 1:
            pairs[emitted[0], emitted[1]] += 1
    after = [softmax(slow_warp(row, sampler)) for row in judged.plain[:5].tolist()]
    assert_drawn_from(firsts, {token: SEEDS * p for token, p in enumerate(after[0]) if p})
    for child, probabilities in zip(children, after[1:], strict=True):
        count = sum(n for (first, _), n in pairs.items() if first == child)
        if count > 300:
            seconds = Counter({second: n for (first, second), n in pairs.items() if first == child})
            assert_drawn_from(seconds, {token: count * p for token, p in enumerate(probabilities) if p})
    assert pairs.total() > SEEDS / 10
