"""One forward over fixed shapes, compiled whole: on GPUs, launching a small forward costs more than running it.

Row counts are padded to a few sizes and keys to the cache's capacity, so shapes repeat and neither ``mx.compile``
nor cuDNN (a plan for each key length) builds anything new in most rounds.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kernels.tree_attention import prefix_tree_attention, rotary_tree_attention
from services.speculation.messages import Tap
from services.speculation.trees import IntArray, ancestor_bits, node_depths
from services.targets import cuda
from services.targets.kv_rows import KVRows
from services.targets.ragged import SessionRows, WindowMask
from services.targets.seams import Recorder, RowRope, rotation_table

ROW_COUNTS = (1, 16, 32, 48, 64)
"""Trees are padded to the next of these."""
_WORD = 32


class CompiledForward:
    """Runs the tree of one session. Use on the device thread only.

    Args:
        model: With its seams installed.
        recorder: From ``seams.install``.
    """

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        cuda.swap_linears(model)
        self._model = model
        self._recorder = recorder
        self._functions: dict[tuple[int, frozenset[Tap]], Callable[..., Any]] = {}

    def takes(self, rows: SessionRows) -> bool:
        """A tree of not too many nodes, over a cache that has been written."""
        return rows.logits == "all" and len(rows.tokens) <= ROW_COUNTS[-1] and bool(rows.kv.arrays())

    def __call__(self, rows: SessionRows, taps: frozenset[Tap]) -> tuple[mx.array, dict[Tap, mx.array]]:
        """Logits [n, V] and the wanted taps [n, hidden]; keys and values become scratch rows."""
        count = len(rows.tokens)
        width = next(size for size in ROW_COUNTS if size >= count)
        if (width, taps) not in self._functions:
            self._functions[width, taps] = mx.compile(self._function(width, taps, rows.kv))
        logits, recorded, scratch = self._functions[width, taps](mx.array(_pack(rows, width)), rows.kv.arrays())
        rows.kv.hold(scratch)
        return logits[:count], {tap: value[:count] for tap, value in recorded.items()}

    def _function(self, width: int, taps: frozenset[Tap], like: KVRows) -> Callable[..., Any]:
        layers = len(like.keys)
        owners = [layer for layer in range(layers) if like.keys[layer] is not None]

        def forward(packed: mx.array, arrays: list[mx.array]) -> tuple[mx.array, dict[Tap, mx.array], list[mx.array]]:
            tokens, positions, ancestors, length = _unpack(packed, width)
            prefixes = dict(zip(owners, zip(arrays[: len(owners)], arrays[len(owners) :], strict=True), strict=True))
            rows = FixedRows(positions, ancestors, length, prefixes)
            self._recorder.begin(taps, None)
            try:
                logits = self._model(tokens[None], cache=[FixedLayerCache(rows, i) for i in range(layers)])[0]
                recorded = self._recorder.taps
            finally:
                self._recorder.begin(frozenset(), None)
            return logits, recorded, [rows.new[layer][part] for part in (0, 1) for layer in owners]

        return forward


def _pack(rows: SessionRows, width: int) -> IntArray:
    """Everything that a forward is told, in one array: on a GPU each array that comes from the host costs 0.2 ms.

    Tokens [width], positions [width], committed rows [1], then ancestors as words of 32 bits, least first.
    """
    count = len(rows.tokens)
    # A padded row sees the prefix and itself, so its attention is finite; nobody reads it.
    tokens = np.full(width, rows.tokens[0], np.int32)
    tokens[:count] = rows.tokens
    positions = np.full(width, rows.kv.length, np.int32)
    positions[:count] += node_depths(rows.parents)
    bits = ancestor_bits(rows.parents) + [1 << row for row in range(count, width)]
    size = -(-width // _WORD) * _WORD // 8
    words = np.frombuffer(b"".join(row.to_bytes(size, "little") for row in bits), np.int32)
    return np.concatenate([tokens, positions, np.array([rows.kv.length], np.int32), words])


def _unpack(packed: mx.array, width: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Tokens [width], positions [width], ancestors [width, width] bool and committed rows [1]."""
    words = packed[2 * width + 1 :].reshape(width, -1, 1)
    bits = (words >> count_up(_WORD)) & 1
    ancestors = bits.reshape(width, -1)[:, :width].astype(mx.bool_)
    return packed[:width], packed[width : 2 * width], ancestors, packed[2 * width : 2 * width + 1]


def count_up(count: int) -> mx.array:
    """[count] int32. ``mx.arange`` would be a launch at every call of a traced function; this is a constant."""
    return mx.array(np.arange(count, dtype=np.int32))


class FixedRows:
    """Positions, masks and storage of one session's rows, in arrays whose shapes do not follow its length.

    Args:
        positions: [n] absolute position of each new row.
        ancestors: [n, n] bool, ``ancestors[i, j]`` when row j is row i or an ancestor.
        length: [1] committed rows.
        prefixes: By layer, keys and values [1, kv_heads, capacity, d].

    Attributes:
        new: By layer, keys and values [1, kv_heads, n, d] of the new rows.
    """

    def __init__(
        self,
        positions: mx.array,
        ancestors: mx.array,
        length: mx.array,
        prefixes: dict[int, tuple[mx.array, mx.array]],
    ) -> None:
        self.positions, self.length, self.prefixes = positions, length, prefixes
        self.new: dict[int, tuple[mx.array, mx.array]] = {}
        self._ancestors = ancestors
        self._masks: dict[int | None, tuple[mx.array, mx.array]] = {}
        self._rotations: dict[tuple[Any, ...], mx.array] = {}

    def masks(self, window: int | None) -> tuple[mx.array, mx.array]:
        """Which cached rows [n, capacity] and which new rows [n, n] each new row sees, built once a window."""
        if window not in self._masks:
            capacity = next(iter(self.prefixes.values()))[0].shape[2]
            slots = count_up(capacity)
            visible = mx.broadcast_to(slots < self.length, (len(self.positions), capacity))
            ancestors = self._ancestors
            if window is not None:
                visible = visible & (self.positions[:, None] - slots < window)
                ancestors = ancestors & (self.positions[:, None] - self.positions < window)
            self._masks[window] = visible, ancestors
        return self._masks[window]

    def rotations(self, rope: nn.Module, width: int) -> mx.array:
        """Cosines, then sines [n, width] of the rows' positions, built once for layers that rotate alike."""
        key = rope.key if isinstance(rope, RowRope) else (id(rope),)
        if key not in self._rotations:
            self._rotations[key] = rotation_table(rope, self.positions, width)
        return self._rotations[key]


class FixedLayerCache:
    """One layer's cache, with the methods that mlx-lm's models call."""

    def __init__(self, rows: FixedRows, layer: int) -> None:
        self._rows = rows
        self._layer = layer

    @property
    def offset(self) -> mx.array:
        return self._rows.positions

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> WindowMask:
        return WindowMask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Note the new rows. What is returned goes to ``attend`` unread."""
        self._rows.new[self._layer] = keys, values
        return keys, values

    def attend_joint(self, joint: mx.array, rope: nn.Module, scale: float, mask: WindowMask) -> mx.array:
        """Rows as ``rotary_tree_attention`` takes them -> attended [n, heads d]."""
        rows, prefix = self._rows, self._rows.prefixes[self._layer]
        visible, ancestors = rows.masks(mask.window)
        rotations = rows.rotations(rope, prefix[0].shape[3])
        attended, keys, values = rotary_tree_attention(joint, prefix, rotations, visible, ancestors, rows.length, scale)
        rows.new[self._layer] = keys, values
        return attended

    def attend(self, queries: mx.array, scale: float, mask: WindowMask, sinks: mx.array | None = None) -> mx.array:
        """[1, heads, n, d] -> [1, heads, n, d]."""
        rows = self._rows
        visible, ancestors = rows.masks(mask.window)
        prefix, new = rows.prefixes[self._layer], rows.new[self._layer]
        return prefix_tree_attention(queries, prefix, new, visible, ancestors, rows.length, scale, sinks)
