"""Keys and values of one session: committed rows, then the rows of the round in flight."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from kernels.commit import commit_rows

STEP = 256
"""Rows are allocated in steps, as in mlx-lm."""
_MOVE = 8
"""Commits move rows by multiples of this, so that the compiled move is traced a few times only."""


def round_to_steps(rows: int) -> int:
    """Capacity for ``rows`` positions: little memory, a new shape every STEP rows."""
    return -(-rows // STEP) * STEP


def round_to_doubles(rows: int) -> int:
    """Capacity for ``rows`` positions where every new shape costs a compilation: powers of two."""
    return max(STEP, 1 << (rows - 1).bit_length())


class KVRows:
    """Per layer, keys and values [1, kv_heads, capacity, d]; index j holds position j.

    Rows at and after ``length`` are scratch: written by a forward, kept by ``commit``, else overwritten. A compiled
    forward leaves them outside the cache (``hold``).

    Args:
        layers: Number of caches that the model asks for.
        round_up: Rows needed -> rows allocated.
    """

    def __init__(self, layers: int, round_up: Callable[[int], int] = round_to_steps) -> None:
        self.length = 0
        self._round_up = round_up
        self._held: Sequence[mx.array] | None = None
        self.keys: list[mx.array | None] = [None] * layers
        self.values: list[mx.array | None] = [None] * layers

    def write(self, layer: int, keys: mx.array, values: mx.array, scratch: int = 0) -> None:
        """Store rows [1, kv_heads, n, d] after the committed ones and ``scratch`` others."""
        self._held = None
        start = self.length + scratch
        stop = start + keys.shape[2]
        for arrays, rows in ((self.keys, keys), (self.values, values)):
            array = self._grown(arrays[layer], stop, rows)
            array[..., start:stop, :] = rows
            arrays[layer] = array

    def read(self, layer: int, stop: int) -> tuple[mx.array, mx.array]:
        """Keys and values of rows [0, stop)."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None
        assert values is not None
        return keys[..., :stop, :], values[..., :stop, :]

    def hold(self, scratch: Sequence[mx.array]) -> None:
        """Take [1, kv_heads, n, d] for each of ``arrays()`` as the scratch rows, until they are committed."""
        self._held = scratch

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows after the committed ones in every layer that has been written."""
        for arrays in (self.keys, self.values):
            for layer, array in enumerate(arrays):
                if array is not None:
                    arrays[layer] = self._grown(array, self.length + rows, array)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the scratch rows of an accepted path (node indices, root first)."""
        if self._held is None:
            self._commit_in_place(path)
        else:
            self._commit_held(self._held, path)
            self._held = None
        self.length += len(path)

    def _commit_held(self, held: Sequence[mx.array], path: Sequence[int]) -> None:
        self.reserve(len(path))
        told = np.full(1 + _round_to_moves(len(path)), -1, np.int32)  # one array: each that comes from the host costs
        told[0], told[1 : 1 + len(path)] = self.length, path
        self.fill(_commit_rows(self.arrays(), held, mx.array(told)))
        mx.async_eval(self.arrays())

    def _commit_in_place(self, path: Sequence[int]) -> None:
        """Rows that are in place already stay: a path that is a prefix of the node order moves nothing."""
        in_place = next((i for i, node in enumerate(path) if node != i), len(path))
        moved = path[in_place:]
        if not moved:
            return
        capacity = min(array.shape[2] for array in self.arrays())
        count = min(_round_to_moves(len(moved)), capacity)
        start = min(self.length + in_place, capacity - count)
        source = np.arange(start, start + count)
        first = self.length + in_place - start
        source[first : first + len(moved)] = self.length + np.array(moved)
        self.fill(_move_rows(self.arrays(), mx.array(source), mx.array([start])))
        mx.async_eval(self.arrays())

    def prefix(self, length: int) -> "KVRows":
        """Another cache that begins with a copy of the first ``length`` committed rows."""
        other = KVRows(len(self.keys), self._round_up)
        other.length = length
        for own, copies in ((self.keys, other.keys), (self.values, other.values)):
            for layer, array in enumerate(own):
                if array is not None and length:
                    copy = other._grown(None, length, array)
                    copy[..., :length, :] = array[..., :length, :]
                    copies[layer] = copy
        return other

    def truncate(self, length: int) -> None:
        """Forget the rows at and after ``length``."""
        self.length = min(self.length, length)

    def drop(self, start: int, stop: int) -> None:
        """Remove committed rows [start, stop): later rows move up. The capacity stays."""
        parts = (slice(start), slice(stop, None), slice(start, stop))
        self.fill([mx.concatenate([array[..., part, :] for part in parts], axis=2) for array in self.arrays()])
        self.length -= stop - start
        mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        """Keys, then values, of the layers that have their own."""
        return [array for array in (*self.keys, *self.values) if array is not None]

    def fill(self, arrays: Sequence[mx.array]) -> None:
        """Put other arrays in the places of ``arrays()``."""
        fresh = iter(arrays)
        self.keys = [None if array is None else next(fresh) for array in self.keys]
        self.values = [None if array is None else next(fresh) for array in self.values]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def _grown(self, array: mx.array | None, rows: int, like: mx.array) -> mx.array:
        if array is not None and rows <= array.shape[2]:
            return array
        grown = mx.zeros((1, like.shape[1], self._round_up(rows), like.shape[3]), like.dtype)
        if array is not None:
            grown[..., : array.shape[2], :] = array
        return grown


def _round_to_moves(rows: int) -> int:
    return -(-rows // _MOVE) * _MOVE


@mx.compile
def _commit_rows(arrays: list[mx.array], held: Sequence[mx.array], told: mx.array) -> list[mx.array]:
    """``told`` is the slot of the first row, then the path."""
    return commit_rows(arrays, held, told[1:], told[:1])


@mx.compile
def _move_rows(arrays: list[mx.array], source: mx.array, start: mx.array) -> list[mx.array]:
    """Copy rows ``source`` [n] to ``start`` .. in every array: one call instead of two a layer."""
    return [mx.slice_update(array, array[..., source, :], start, (2,)) for array in arrays]
