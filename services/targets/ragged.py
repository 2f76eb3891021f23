"""One forward over the rows of many sessions: what mlx-lm's models see as their cache.

Seam 1 of three. mlx-lm's attention asks its cache for an offset (positions), a mask, and storage, then calls
the module's ``scaled_dot_product_attention``; a ``LayerCache`` answers for all sessions of the batch at once.
All other layers see one ragged ``[1, rows, hidden]`` input.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kernels.tree_attention import TreeMask, tree_attention
from services.speculation.trees import IntArray, ancestor_mask, is_chain, node_depths
from services.targets.kv_rows import KVRows


@dataclass(frozen=True, eq=False)
class SessionRows:
    """The new rows of one session: a draft tree, or a chunk of its prompt (a chain).

    Attributes:
        kv: Its cache; row 0 sits at position ``kv.length``.
        tokens: [n] token ids.
        parents: [n] as in ``DraftTree``.
        logits: Which rows the head runs on.
    """

    kv: KVRows
    tokens: IntArray
    parents: IntArray
    logits: Literal["all", "last", "none"] = "all"

    @staticmethod
    def chunk(kv: KVRows, tokens: Sequence[int], logits: Literal["all", "last", "none"]) -> "SessionRows":
        ids = np.asarray(tokens, np.int32)
        return SessionRows(kv, ids, np.arange(-1, len(ids) - 1, dtype=np.int32), logits)


@dataclass(frozen=True)
class WindowMask:
    """What ``make_mask`` hands to a layer, which hands it on unread: the layer's sliding window."""

    window: int | None


@dataclass(eq=False)
class _Segment:
    rows: SessionRows
    start: int
    stop: int
    mask: TreeMask
    masks: dict[int | None, mx.array | str | None] = field(default_factory=dict)

    def mask_for(self, window: int | None) -> mx.array | str | None:
        if window not in self.masks:
            self.masks[window] = self.mask.array(window)
        return self.masks[window]


class RaggedBatch:
    """Positions, masks and storage of the rows of several sessions side by side.

    Args:
        sessions: At least one; no cache may appear twice.
    """

    def __init__(self, sessions: Sequence[SessionRows]) -> None:
        self.segments: list[_Segment] = []
        start = 0
        for rows in sessions:
            chain = is_chain(rows.parents)
            depths = np.arange(len(rows.tokens), dtype=np.int32) if chain else node_depths(rows.parents)
            mask = TreeMask(rows.kv.length, None if chain else ancestor_mask(rows.parents), rows.kv.length + depths)
            self.segments.append(_Segment(rows, start, start + len(rows.tokens), mask))
            start += len(rows.tokens)
        self.rows = start
        self.tokens = mx.array(np.concatenate([rows.tokens for rows in sessions]))[None]
        first = self.segments[0]
        # A single chain takes the model's own path: an integer offset. Otherwise each row has its position.
        self.offset: int | mx.array = first.rows.kv.length
        if len(sessions) > 1 or first.mask.ancestors is not None:
            self.offset = mx.array(np.concatenate([segment.mask.positions for segment in self.segments]))

    def caches(self, layers: int) -> list["LayerCache"]:
        return [LayerCache(self, layer) for layer in range(layers)]

    def logit_rows(self) -> NDArray[np.int32] | None:
        """Indices of the rows that need logits, or None for all."""
        wanted = [
            np.arange(s.start if s.rows.logits == "all" else s.stop - 1, s.stop, dtype=np.int32)
            for s in self.segments
            if s.rows.logits != "none"
        ]
        chosen = np.concatenate(wanted) if wanted else np.zeros(0, np.int32)
        return None if len(chosen) == self.rows else chosen


class LayerCache:
    """One layer's cache in a ragged batch, with the methods that mlx-lm's models call."""

    def __init__(self, batch: RaggedBatch, layer: int) -> None:
        self._batch = batch
        self._layer = layer

    @property
    def offset(self) -> int | mx.array:
        return self._batch.offset

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> WindowMask:
        return WindowMask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store every session's new rows. What is returned goes to ``attend`` unread."""
        segments = self._batch.segments
        if len(segments) == 1:
            segments[0].rows.kv.write(self._layer, keys, values)
            return keys, values
        for s in segments:
            s.rows.kv.write(self._layer, keys[:, :, s.start : s.stop], values[:, :, s.start : s.stop])
        return keys, values

    def attend(self, queries: mx.array, scale: float, mask: WindowMask, sinks: mx.array | None = None) -> mx.array:
        """Attention session by session: [1, heads, rows, d] -> [1, heads, rows, d]."""
        segments = self._batch.segments
        outputs = []
        for s in segments:
            keys, values = s.rows.kv.read(self._layer, s.rows.kv.length + s.stop - s.start)
            own = queries if len(segments) == 1 else queries[:, :, s.start : s.stop]
            outputs.append(tree_attention(own, keys, values, s.mask_for(mask.window), scale, sinks))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
