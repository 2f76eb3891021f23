"""Draft trees by brute force: list every path, sort by the one order, take the best."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np

from services.speculation.trees import DraftTree

Path = tuple[int, ...]
Table = Callable[[Path], np.ndarray]
"""Maps a path of tokens below the root to log-probabilities [V] of the next token."""


def random_table(seed: int, vocab_size: int, spread: float = 2.0) -> Table:
    """Log-softmax of random logits, one row a path, the same in any order of asking."""

    @cache
    def row(path: Path) -> np.ndarray:
        logits = np.random.default_rng([seed, *path, 7]).normal(0, spread, vocab_size)
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)

    return row


def tied_table(seed: int, vocab_size: int) -> Table:
    """Scores in steps of 1/2 that add up exactly: full of ties, with certain, impossible and broken tokens."""

    @cache
    def row(path: Path) -> np.ndarray:
        rng = np.random.default_rng([seed, *path, 7])
        return rng.choice(np.array([0, -0.5, -1, -1.5, -np.inf, np.nan], np.float32), vocab_size)

    return row


def all_paths(vocab_size: int, max_depth: int) -> Iterable[Path]:
    return itertools.chain.from_iterable(
        itertools.product(range(vocab_size), repeat=depth) for depth in range(1, max_depth + 1)
    )


def score(table: Table, path: Path) -> float:
    return sum(float(table(path[:i])[token]) for i, token in enumerate(path))


def best_paths(table: Table, paths: Iterable[Path], count: int, min_log_prob: float = -math.inf) -> list[Path]:
    """The best paths: score descending, depth ascending, then the parent first in this order, then the token."""

    def key(path: Path) -> tuple:
        return (-score(table, path), len(path), key(path[:-1]), path[-1]) if path else ()

    usable = [path for path in paths if math.isfinite(score(table, path)) and score(table, path) >= min_log_prob]
    return sorted(usable, key=key)[:count]


def assert_is_tree_of(tree: DraftTree, root: int, table: Table, chosen: Sequence[Path]) -> None:
    """The tree holds exactly ``chosen``, given in the one order, in preorder with children in that order."""
    expected: list[Path] = []

    def visit(path: Path) -> None:
        expected.append(path)
        for child in chosen:
            if child[:-1] == path:
                visit(child)

    visit(())
    assert tree.tokens.tolist() == [root, *(path[-1] for path in expected[1:])]
    assert tree.parents.tolist() == [-1, *(expected.index(path[:-1]) for path in expected[1:])]
    scores = np.array([score(table, path) for path in expected], np.float64)
    np.testing.assert_array_equal(tree.log_probs, np.maximum(scores, np.finfo(np.float32).min).astype(np.float32))
