"""Random trees and a slow, recursive reading of them, which shares nothing with the product's."""

import numpy as np


def random_parents(rng: np.random.Generator, nodes: int, reach: int | None = None) -> np.ndarray:
    """Parents of a random tree; a small ``reach`` hangs each node below a recent one, which makes deep trees."""
    low = [0 if reach is None else max(0, node - reach) for node in range(nodes)]
    return np.array([-1, *(rng.integers(low[node], node) for node in range(1, nodes))], np.int32)


def random_tree(rng: np.random.Generator, nodes: int, vocab_size: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree whose siblings differ; it may have fewer nodes than asked for."""
    tokens, parents, taken = [int(rng.integers(vocab_size))], [-1], set()
    for _ in range(1, nodes):
        parent = int(rng.integers(len(tokens)))
        token = int(rng.integers(vocab_size))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def ancestry(parents: list[int] | np.ndarray, node: int) -> list[int]:
    """Nodes from the root to ``node``."""
    return [] if node < 0 else [*ancestry(parents, int(parents[node])), node]
