"""Observing and growth at fixed shapes, each compiled whole: on GPUs, launching a drafter costs more than running it.

Rows of a round are padded to one count and keys to the cache's capacity, so a budget is traced once a capacity.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from kernels.tree_attention import tree_attention
from services.drafter import growth
from services.drafter.family import TraceableDraftModel
from services.drafter.session import DraftSession, sees
from services.speculation.growth import Budget, rerank
from services.speculation.messages import Features
from services.speculation.trees import BoolArray, DraftTree, IntArray
from services.targets.features import to_mlx

ROUND_ROWS = 8
"""Observed rows of a round are padded to this; more are a prompt's, and not compiled."""


class CompiledDrafting:
    """Runs one drafter. Use on the device thread only.

    Args:
        model: The drafter.
    """

    def __init__(self, model: TraceableDraftModel) -> None:
        self._model = model
        self._read = mx.compile(self._read_rows)
        self._grow: dict[tuple[int, int], Callable[..., Any]] = {}

    def observe(self, session: DraftSession, tokens: IntArray, features: Features) -> None:
        """As ``family.DraftModel.observe``."""
        count = len(tokens)
        if not session.length or not 0 < count <= ROUND_ROWS:
            return self._model.observe(session, tokens, features)
        self._model.check_features(session, tokens, features)
        session.kv.reserve(ROUND_ROWS)
        start = session.kv.length
        positions = session.next_positions(ROUND_ROWS)
        visible = _visible(session, positions)
        visible[:, start : start + ROUND_ROWS] = sees(positions, positions, session.window)
        padded = np.zeros(ROUND_ROWS, np.int32)
        padded[:count] = tokens
        rows = [
            np.zeros((ROUND_ROWS, features.rows[tap].shape[1]), features.rows[tap].dtype)
            for tap in self._model.info.taps
        ]
        for tap, array in zip(self._model.info.taps, rows, strict=True):
            array[:count] = features.rows[tap]
        last, arrays = self._read(
            mx.array(padded),
            [to_mlx(array) for array in rows],
            mx.array(positions),
            mx.array(visible),
            mx.array([start]),
            mx.array([count - 1]),
            session.kv.arrays(),
        )
        session.kv.fill(arrays)
        session.keep(count, last)
        return None

    def _read_rows(
        self,
        tokens: mx.array,
        taps: list[mx.array],
        positions: mx.array,
        visible: mx.array,
        start: mx.array,
        newest: mx.array,
        arrays: list[mx.array],
    ) -> tuple[mx.array, list[mx.array]]:
        rows = FixedRows(arrays, positions, visible, start)
        states = self._model.read(tokens, taps, rows)
        return states[newest], rows.arrays

    def grow(self, session: DraftSession, root_token: int, budget: Budget) -> DraftTree:
        """As ``growth.grow``, which runs the budgets with a stop rule: they read scores back at every depth."""
        if session.last is None or budget.max_depth < 1 or budget.max_nodes < 2 or budget.min_log_prob > -np.inf:
            return growth.grow(self._model, session, root_token, budget)
        key = (budget.max_depth, budget.top_k)
        if key not in self._grow:
            self._grow[key] = mx.compile(lambda *inputs: self._propose(budget, *inputs))
        session.kv.reserve(budget.max_depth * budget.top_k)
        positions = np.array([session.tree_position(depth) for depth in range(1, budget.max_depth + 1)], np.int32)
        levels, picks = self._grow[key](
            session.last,
            mx.array(positions),
            mx.array(_visible(session, positions)),
            mx.array([session.kv.length]),
            session.kv.arrays(),
        )
        mx.eval(levels, picks)
        return rerank(root_token, growth.collect(levels, picks), budget)

    def _propose(
        self,
        budget: Budget,
        last: mx.array,
        positions: mx.array,
        visible: mx.array,
        start: mx.array,
        arrays: list[mx.array],
    ) -> tuple[list[tuple[mx.array, mx.array]], list[mx.array]]:
        tree = _FixedTree(arrays, positions, visible, start)
        return growth.propose(self._model, tree, last, budget, lambda levels, picks, totals: budget.top_k)


def _visible(session: DraftSession, positions: IntArray) -> BoolArray:
    """[q, capacity]: which kept rows each query sees; slots of rows to come are not seen."""
    visible = np.zeros((len(positions), session.kv.arrays()[0].shape[2]), np.bool_)
    visible[:, : len(session.kept)] = sees(positions, session.kept, session.window)
    return visible


class FixedRows:
    """Rows in arrays whose shapes do not follow the session's length (implements ``session.Rows``).

    Args:
        arrays: Keys of every layer, then values, [1, kv_heads, capacity, d]; replaced as layers write.
        positions: [n].
        visible: [n, capacity] bool, the new rows' own slots included.
        start: [1] slot of the first new row.
    """

    def __init__(self, arrays: list[mx.array], positions: mx.array, visible: mx.array, start: mx.array) -> None:
        self.arrays, self.positions = arrays, positions
        self._visible, self._start = visible, start

    def attend(self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        slots = (layer, len(self.arrays) // 2 + layer)
        for slot, rows in zip(slots, (keys, values), strict=True):
            self.arrays[slot] = mx.slice_update(self.arrays[slot], rows, self._start, (2,))
        all_keys, all_values = (self.arrays[slot] for slot in slots)
        return tree_attention(queries, all_keys, all_values, self._visible, scale)


class _FixedTree:
    """Stands in for a session while its growth is traced (implements ``family.TreeSession``)."""

    def __init__(self, arrays: list[mx.array], positions: mx.array, visible: mx.array, start: mx.array) -> None:
        self._arrays, self._positions, self._visible, self._start = list(arrays), positions, visible, start

    def tree_rows(self, depth: int, ancestors: mx.array, scratch: int) -> FixedRows:
        count = ancestors.shape[0]
        positions = mx.broadcast_to(self._positions[depth - 1], (count,))
        prefix = mx.broadcast_to(self._visible[depth - 1], (count, self._visible.shape[1]))
        visible = mx.slice_update(prefix, ancestors, self._start, (1,))
        return FixedRows(self._arrays, positions, visible, self._start + scratch)
