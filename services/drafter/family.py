"""What a drafter family implements; growth and the host know nothing else of it."""

from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np

from services.speculation.messages import DrafterInfo, Features
from services.speculation.trees import IntArray
from services.targets.kv_rows import KVRows


@dataclass(eq=False)
class DraftSession:
    """A drafter's view of one session.

    Attributes:
        kv: Keys and values of the true rows that are kept; tree rows are scratch.
        kept: [rows] absolute position of each kept row.
        length: Rows observed; row i is (features at i, token at i + 1). The next row has this position.
        last: Hidden state [1, hidden] that the last observed row hands on, or None.
    """

    kv: KVRows
    kept: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    length: int = 0
    last: mx.array | None = None


@dataclass(frozen=True, eq=False)
class Frontier:
    """Tree nodes of one depth, about to be expanded.

    Attributes:
        tokens: [f] target token ids.
        hidden: [f, hidden] state handed on by each node's parent.
        ancestors: [f, scratch + f] bool over the tree rows so far and these: ancestors and self.
        depth: Their depth; the children of the root have depth 1.
        scratch: Tree rows already in the cache.
    """

    tokens: mx.array
    hidden: mx.array
    ancestors: mx.array
    depth: int
    scratch: int


class DraftModel(Protocol):
    """One loaded drafter."""

    info: DrafterInfo

    def new_session(self) -> DraftSession: ...

    def observe(self, session: DraftSession, tokens: IntArray, features: Features) -> None:
        """Append true rows; ``session.last`` becomes the state that predicts the next token."""
        ...

    def expand(self, session: DraftSession, frontier: Frontier) -> mx.array:
        """Write the frontier's rows as scratch; returns the states [f, hidden] that they hand on."""
        ...

    def top_children(self, hidden: mx.array, k: int) -> tuple[mx.array, mx.array]:
        """States [f, hidden] -> log-probabilities and target ids of the k likeliest children, [f, k] each."""
        ...
