"""What a drafter family implements; growth and the host know nothing else of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from kernels.draft_round import DraftLayer
from services.drafter.session import DraftSession, Rows
from services.speculation.messages import DrafterInfo, Features
from services.speculation.trees import IntArray


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


class TreeSession(Protocol):
    """Where tree rows go: a ``DraftSession``, or its stand-in while a growth is traced."""

    def tree_rows(self, depth: int, ancestors: mx.array, scratch: int) -> Rows: ...


class DraftModel(Protocol):
    """One loaded drafter."""

    info: DrafterInfo

    def new_session(self) -> DraftSession: ...

    def observe(self, session: DraftSession, tokens: IntArray, features: Features) -> None:
        """Append true rows; ``session.last`` becomes the state that predicts the next token."""
        ...

    def expand(self, session: TreeSession, frontier: Frontier) -> mx.array:
        """Write the frontier's rows as scratch; returns the states [f, hidden] that they hand on."""
        ...

    def top_children(self, hidden: mx.array, k: int) -> tuple[mx.array, mx.array]:
        """States [f, hidden] -> log-probabilities (float32) and target ids of the k likeliest children, [f, k] each."""
        ...


class TraceableDraftModel(DraftModel, Protocol):
    """A drafter whose steps are pure functions of arrays, so that ``compiled`` can run them at fixed shapes.

    Attributes:
        draft_layer: The whole drafter as one kernel takes it, or None: ``whole`` then does without.
    """

    draft_layer: DraftLayer | None

    def check_features(self, session: DraftSession, tokens: IntArray, features: Features) -> None:
        """Raises AerieError: FEATURE_GAP or INVALID_ARGUMENT."""
        ...

    def read(self, tokens: mx.array, taps: Sequence[mx.array], rows: Rows) -> mx.array:
        """True rows: tokens [n] and features [n, hidden] by tap -> the states [n, hidden] that they hand on."""
        ...

    def rotations(self, count: int) -> mx.array:
        """``rotation_table`` of the first ``count`` positions [count, d], when there is a ``draft_layer``."""
        ...
