"""Drafters that only a test of losslessness wants: random trees, and the tree of one node."""

import mlx.core as mx
import numpy as np

from services.drafter.family import Frontier, TreeSession
from services.drafter.session import DraftSession
from services.speculation.messages import DrafterInfo, Features
from services.speculation.trees import IntArray
from services.targets.kv_rows import KVRows


class RandomDrafter:
    """Proposes random tokens in random shapes (implements ``family.DraftModel``).

    Args:
        vocab_size: Of the target.
        seed: Makes its proposals repeatable.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.info = DrafterInfo("random", "random", (0,), None, 0)
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def new_session(self) -> DraftSession:
        return DraftSession(KVRows(0))

    def observe(self, session: DraftSession, tokens: IntArray, features: Features) -> None:
        session.check_base(features.base)
        session.length = features.base + len(tokens)
        session.last = mx.zeros((1, 1))

    def expand(self, session: TreeSession, frontier: Frontier) -> mx.array:
        return mx.zeros((frontier.tokens.shape[0], 1))

    def top_children(self, hidden: mx.array, k: int) -> tuple[mx.array, mx.array]:
        rows = hidden.shape[0]
        ids = np.stack([self._random.choice(self._vocab_size, k, replace=False) for _ in range(rows)])
        scores = -np.sort(self._random.exponential(size=(rows, k)), axis=1)
        return mx.array(scores.astype(np.float32)), mx.array(ids.astype(np.int32))


class RootDrafter(RandomDrafter):
    """Always proposes the tree of one node."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.info = DrafterInfo("root", "root", (0,), None, 0)

    def top_children(self, hidden: mx.array, k: int) -> tuple[mx.array, mx.array]:
        _, ids = super().top_children(hidden, k)
        return mx.full(ids.shape, -mx.inf), ids
