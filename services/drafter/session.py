"""A drafter's view of one session: the true rows that it keeps, and what new rows see of them.

The row at position i attends to rows j <= i with j < SINK_ROWS or j > i - window, each at its absolute position.
"""

from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np

from kernels.tree_attention import tree_attention
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import Features
from services.speculation.trees import BoolArray, IntArray
from services.speculation.window import SINK_ROWS, WINDOW
from services.targets.kv_rows import KVRows

_DROP_STEP = 256


class Rows(Protocol):
    """New rows of one session, as the layers of a drafter see them."""

    @property
    def positions(self) -> int | mx.array:
        """Of the first of consecutive rows, or [n]."""
        ...

    def attend(self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """Store keys and values [1, kv_heads, n, d] and attend: [1, heads, n, d] -> [1, heads, n, d]."""
        ...


class CachedRows:
    """Rows that follow a cache of the session's own length (implements ``Rows``).

    Args:
        kv: The session's cache.
        positions: int (consecutive rows) or [n].
        mask: For ``tree_attention``: None, "causal", or bool [n, cached + scratch + n].
        scratch: Tree rows already in the cache.
    """

    def __init__(self, kv: KVRows, positions: int | mx.array, mask: mx.array | str | None, scratch: int) -> None:
        self.positions = positions
        self._kv, self._mask, self._scratch = kv, mask, scratch

    def attend(self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        stop = self._kv.length + self._scratch + keys.shape[2]
        self._kv.write(layer, keys, values, self._scratch)
        return tree_attention(queries, *self._kv.read(layer, stop), self._mask, scale)


@dataclass(eq=False)
class DraftSession:
    """Mutable state of one session.

    Attributes:
        kv: Keys and values of the true rows that are kept; tree rows are scratch.
        window: Rows that attention looks back at most, besides the first SINK_ROWS.
        kept: [rows] absolute position of each kept row.
        length: Rows observed; row i is (features at i, token at i + 1). The next row has this position.
        last: Hidden state [1, hidden] that the last row read hands on, or None.
        deferred: Tokens and features of the newest observed rows while they wait for the next growth to read them:
            ``length`` counts them, the rest does not know them yet.
        told: What a compiled drafter told the device last, and the place in the session that it stands for.
    """

    kv: KVRows
    window: int = WINDOW
    kept: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    length: int = 0
    last: mx.array | None = None
    deferred: tuple[IntArray, Features] | None = None
    told: tuple[tuple[int, int, int], mx.array] | None = None

    def check_base(self, base: int) -> None:
        """Refuse rows that do not follow the observed ones.

        After the sinks a long prompt's rows are left out, up to those that its end still sees.

        Raises:
            AerieError: FEATURE_GAP.
        """
        left_out = base > self.length == SINK_ROWS
        if base != self.length and not left_out:
            raise AerieError(Reason.FEATURE_GAP, f"features start at {base}, expected {self.length}")

    def true_rows(self, count: int) -> CachedRows:
        """The next ``count`` true rows."""
        assert self.deferred is None
        positions = self.next_positions(count)
        mask: mx.array | str | None = None if count == 1 else "causal"
        if self.slides(positions):
            own = sees(positions, positions, self.window)
            mask = mx.array(np.concatenate([sees(positions, self.kept, self.window), own], axis=1))
        return CachedRows(self.kv, self.length, mask, 0)

    def tree_rows(self, depth: int, ancestors: mx.array, scratch: int) -> CachedRows:
        """Tree rows of one depth, after ``scratch`` others; ``ancestors`` [n, scratch + n] as in ``Frontier``."""
        assert self.deferred is None
        positions = np.full(ancestors.shape[0], self.tree_position(depth), np.int32)
        prefix = mx.ones((len(positions), len(self.kept)), mx.bool_)
        if self.slides(positions):
            prefix = mx.array(sees(positions, self.kept, self.window))
        mask = mx.concatenate([prefix, ancestors], axis=1)
        return CachedRows(self.kv, mx.array(positions), mask, scratch)

    def next_positions(self, count: int) -> IntArray:
        return np.arange(self.length, self.length + count, dtype=np.int32)

    def tree_position(self, depth: int) -> int:
        """A row sits one position before its token; a node at depth d holds the token at position length + d."""
        return self.length + depth - 1

    def slides(self, positions: IntArray) -> bool:
        return bool(positions[-1] >= self.window)

    def keep(self, count: int, last: mx.array) -> None:
        """The ``count`` true rows after the kept ones are in the cache; ``last`` is what they hand on."""
        self.kv.commit(range(count))
        self.kept = np.concatenate([self.kept, self.next_positions(count)])
        self.length += count
        self.last = last
        mx.async_eval(last, self.kv.arrays())
        # Free rows that no later row can see, some at a time.
        gone = int(np.searchsorted(self.kept, self.length - self.window)) - SINK_ROWS
        if gone >= _DROP_STEP:
            self.kv.drop(SINK_ROWS, SINK_ROWS + gone)
            self.kept = np.delete(self.kept, np.s_[SINK_ROWS : SINK_ROWS + gone])


def sees(queries: IntArray, keys: IntArray, window: int) -> BoolArray:
    """[q, k]: which keys each query attends to, by absolute positions."""
    back = queries[:, None] - keys[None]
    visible: BoolArray = (back >= 0) & ((keys[None] < SINK_ROWS) | (back < window))
    return visible
