"""Observing and growth at fixed shapes, each compiled whole: on GPUs, launching a drafter costs more than running it.

Rows of a round are padded to one count and keys to the cache's capacity, so a budget is traced once a capacity.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kernels.commit import commit_rows
from kernels.draft_round import MOST_ROWS
from kernels.pack import pack_words
from kernels.tree_attention import prefix_tree_attention, rotary_tree_attention
from services.drafter import growth
from services.drafter.family import TraceableDraftModel
from services.drafter.session import DraftSession
from services.drafter.whole import WholeRounds
from services.speculation.growth import Budget, Candidates, rerank
from services.speculation.messages import Features
from services.speculation.trees import DraftTree, IntArray
from services.speculation.window import SINK_ROWS
from services.targets.compiled import count_up
from services.targets.features import to_mlx
from services.targets.seams import rotation_table

ROUND_ROWS = MOST_ROWS
"""Observed rows of a round are padded to this; more are a prompt's, and not compiled."""


class CompiledDrafting:
    """Runs one drafter. Use on the device thread only.

    What the host tells and is told travels in as few arrays as can be: on a GPU each costs 0.2 ms.

    Args:
        model: The drafter.
    """

    def __init__(self, model: TraceableDraftModel) -> None:
        self._model = model
        self._reads: dict[np.dtype[Any], Callable[..., Any]] = {}  # by type of the features
        self._growths: dict[int, _Growth] = {}  # by top_k
        self._whole = WholeRounds(model)

    def observe(self, session: DraftSession, tokens: IntArray, features: Features) -> None:
        """As ``family.DraftModel.observe``. A round's rows may be left for the growth that follows."""
        self._catch_up(session)
        count = len(tokens)
        if not session.length or not 0 < count <= ROUND_ROWS:
            return self._model.observe(session, tokens, features)
        self._model.check_features(session, tokens, features)
        if not self._whole.defers(features):
            return self._read_round(session, tokens, features)
        session.deferred = tokens, features
        session.length = features.base + count
        return None

    def _catch_up(self, session: DraftSession) -> None:
        """Read what was left."""
        if session.deferred:
            rows, session.deferred = session.deferred, None
            self._read_round(session, *rows)

    def _read_round(self, session: DraftSession, tokens: IntArray, features: Features) -> None:
        count = len(tokens)
        session.length = features.base
        session.kv.reserve(ROUND_ROWS)
        taps = np.stack([features.rows[tap] for tap in self._model.info.taps])
        padded = np.zeros((len(taps), ROUND_ROWS, taps.shape[2]), taps.dtype)
        padded[:, :count] = taps
        told = np.zeros(4 + ROUND_ROWS, np.int32)
        told[:4] = (*_place(session), count - 1)
        told[4 : 4 + count] = tokens
        if taps.dtype not in self._reads:
            self._reads[taps.dtype] = mx.compile(partial(self._read_rows, to_mlx(padded[:0, :0, :0]).dtype))
        packed = mx.array(np.concatenate([told, padded.reshape(-1).view(np.int32)]))
        last, place, arrays = self._reads[taps.dtype](packed, session.kv.arrays())
        session.kv.fill(arrays)
        start, dropped, window = _place(session)
        # Not what ``keep`` leaves: it may drop rows, of which the device has not been told.
        session.told = (start + count, dropped, window), place
        session.keep(count, last)

    def _read_rows(
        self, dtype: mx.Dtype, packed: mx.array, arrays: list[mx.array]
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        """``packed``: the session's place, the newest row, ROUND_ROWS tokens, then the bits of their features."""
        told, bits = packed[: 4 + ROUND_ROWS], packed[4 + ROUND_ROWS :]
        slots = Slots(told[:1], told[1:2], told[2:3], arrays[0].shape[2])
        positions = slots.length + count_up(ROUND_ROWS)
        own = sees(positions, positions, slots.window)
        rotations = partial(rotation_table, positions=positions)
        rows = FixedRows(list(arrays), positions, rotations, slots.kept_seen_by(positions), own, slots.start)
        taps = bits.view(dtype).reshape(len(self._model.info.taps), ROUND_ROWS, -1)
        states = self._model.read(told[4:], list(taps), rows)
        return states[told[3:4]], told[:4], rows.arrays

    def grow(self, session: DraftSession, root_token: int, budget: Budget) -> DraftTree:
        """As ``growth.grow``, which runs the budgets with a stop rule: they read scores back at every depth."""
        if session.last is None or budget.max_depth < 1 or budget.max_nodes < 2 or budget.min_log_prob > -np.inf:
            self._catch_up(session)
            return growth.grow(self._model, session, root_token, budget)
        if self._whole.takes(budget) and (candidates := self._whole.run(session, budget)):
            return rerank(root_token, candidates, budget)
        self._catch_up(session)
        traced = self._growths.get(budget.top_k)
        if traced is None or traced.depth < budget.max_depth:
            traced = self._growths[budget.top_k] = _Growth(self._model, budget)
        # A deeper growth serves too: the rerank drops what the budget does not allow.
        return rerank(root_token, traced.run(session, session.last), budget)


class _Growth:
    """One traced growth: every depth of one width, in one call.

    Args:
        model: The drafter.
        budget: Its depth and width.
    """

    def __init__(self, model: TraceableDraftModel, budget: Budget) -> None:
        self.depth = budget.max_depth
        self._model, self._budget = model, budget
        self._shapes: tuple[tuple[int, int], ...] = ()  # of each depth's children; known once traced
        self._propose = mx.compile(self._trace)

    def run(self, session: DraftSession, last: mx.array) -> Candidates:
        """Grow below the last observed row, whose state is ``last`` [1, hidden]."""
        session.kv.reserve(self.depth * self._budget.top_k)
        here = _place(session)
        # What the rows of this round were told is on the device already.
        place = session.told[1] if session.told and session.told[0] == here else mx.array([*here, -1])
        flat = np.array(self._propose(last, place, session.kv.arrays()))
        return growth.unpack(flat, self._shapes)

    def _trace(self, last: mx.array, place: mx.array, arrays: list[mx.array]) -> mx.array:
        """Log-probabilities (their bits), tokens and picks of all depths, one after the other, as int32.

        ``place`` [4]: the session's place before its newest rows, and the index of the newest.
        """
        slots = Slots(place[:1] + place[3:4] + 1, place[1:2], place[2:3], arrays[0].shape[2])
        tree = _FixedTree(list(arrays), slots, self._budget.max_depth)
        levels, picks = growth.propose(self._model, tree, last, self._budget, lambda *_: self._budget.top_k)
        self._shapes = tuple((ids.shape[0], ids.shape[1]) for _, ids in levels)
        return pack_words([*(values for values, _ in levels), *(ids for _, ids in levels), *picks])


def _place(session: DraftSession) -> tuple[int, int, int]:
    """Rows in the cache, rows dropped from it, and the window."""
    return session.kv.length, session.length - session.kv.length, session.window


def sees(queries: mx.array, keys: mx.array, window: mx.array) -> mx.array:
    """``session.sees`` on the device: [q], [k] positions -> [q, k] bool."""
    back = queries[:, None] - keys
    return (back >= 0) & ((keys < SINK_ROWS) | (back < window))


class Slots:
    """Which position each slot of a cache holds: the first SINK_ROWS their own, later ones ``dropped`` more.

    Args:
        start: [1] rows in the cache.
        dropped: [1] rows dropped from it.
        window: [1].
        capacity: Slots.
    """

    def __init__(self, start: mx.array, dropped: mx.array, window: mx.array, capacity: int) -> None:
        self.start, self.window = start, window
        self.length = self.start + dropped
        self._slots = count_up(capacity)
        self._positions = mx.where(self._slots < SINK_ROWS, self._slots, self._slots + dropped)

    def kept_seen_by(self, positions: mx.array) -> mx.array:
        """[n] -> [n, capacity] bool: the kept rows that rows at these positions see."""
        return sees(positions, self._positions, self.window) & (self._slots < self.start)


class FixedRows:
    """Rows in arrays whose shapes do not follow the session's length (implements ``session.Rows``).

    Args:
        arrays: Keys of every layer, then values, [1, kv_heads, capacity, d]; replaced as layers write.
        positions: [n].
        rotations: (rope, width) -> their ``rotation_table``.
        visible: [n, capacity] bool, the true rows that each new row sees.
        ancestors: [n, scratch + n] bool, the rows of the tree that it sees.
        start: [1] slot of the first row of the tree.
    """

    def __init__(
        self,
        arrays: list[mx.array],
        positions: mx.array,
        rotations: Callable[..., mx.array],
        visible: mx.array,
        ancestors: mx.array,
        start: mx.array,
    ) -> None:
        self.arrays, self.positions = arrays, positions
        self._rotations = rotations
        self._masks = visible, ancestors, start

    def attend(self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        prefix, new = self._cached(layer), (keys, values)
        out = prefix_tree_attention(queries, prefix, new, *self._masks, scale)
        self._store(layer, keys, values)
        return out

    def attend_joint(self, layer: int, joint: mx.array, rope: nn.Module, scale: float) -> mx.array:
        """Rows as ``rotary_tree_attention`` takes them -> attended [n, heads d]."""
        prefix = self._cached(layer)
        rotations = self._rotations(rope, width=prefix[0].shape[3])
        attended, keys, values = rotary_tree_attention(joint, prefix, rotations, *self._masks, scale)
        self._store(layer, keys, values)
        return attended

    def _cached(self, layer: int) -> tuple[mx.array, mx.array]:
        return self.arrays[layer], self.arrays[len(self.arrays) // 2 + layer]

    def _store(self, layer: int, keys: mx.array, values: mx.array) -> None:
        _, ancestors, start = self._masks
        count = keys.shape[2]
        # A constant, and not a launch: the rows go behind the tree's earlier ones.
        order = mx.array([-1] * (ancestors.shape[1] - count) + list(range(count)), mx.int32)
        fresh = commit_rows(self._cached(layer), (keys, values), order, start)
        self.arrays[layer], self.arrays[len(self.arrays) // 2 + layer] = fresh


class _FixedTree:
    """Stands in for a session while its growth is traced (implements ``family.TreeSession``).

    Args:
        arrays: The session's cache.
        slots: Of the session.
        depths: Of the tree. What depends on a depth's position is made once, for all of them.
    """

    def __init__(self, arrays: list[mx.array], slots: Slots, depths: int) -> None:
        self._arrays, self._start = arrays, slots.start
        # A row sits one before its token, as in ``DraftSession.tree_position``.
        self._positions = slots.length + count_up(depths)
        self._visible = slots.kept_seen_by(self._positions)
        self._tables: dict[tuple[int, int], mx.array] = {}

    def tree_rows(self, depth: int, ancestors: mx.array, scratch: int) -> FixedRows:
        count, row = ancestors.shape[0], slice(depth - 1, depth)

        def rotations(rope: nn.Module, width: int) -> mx.array:
            key = id(rope), width
            if key not in self._tables:
                self._tables[key] = rotation_table(rope, self._positions, width)
            return mx.broadcast_to(self._tables[key][row], (count, width))

        visible = mx.broadcast_to(self._visible[row], (count, self._visible.shape[1]))
        positions = mx.broadcast_to(self._positions[row], (count,))
        return FixedRows(self._arrays, positions, rotations, visible, ancestors, self._start)
