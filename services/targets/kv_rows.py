"""Keys and values of one session: committed rows, then the rows of the round in flight."""

from collections.abc import Sequence

import mlx.core as mx

STEP = 256
"""Rows are allocated in steps, as in mlx-lm."""


class KVRows:
    """Per layer, keys and values [1, kv_heads, capacity, d]; index j holds position j.

    Rows at and after ``length`` are scratch: written by a forward, kept by ``commit``, else overwritten.

    Args:
        layers: Number of caches that the model asks for.
    """

    def __init__(self, layers: int) -> None:
        self.length = 0
        self.keys: list[mx.array | None] = [None] * layers
        self.values: list[mx.array | None] = [None] * layers

    def write(self, layer: int, keys: mx.array, values: mx.array, scratch: int = 0) -> None:
        """Store rows [1, kv_heads, n, d] after the committed ones and ``scratch`` others."""
        start = self.length + scratch
        stop = start + keys.shape[2]
        self.keys[layer] = _put(self.keys[layer], keys, start, stop)
        self.values[layer] = _put(self.values[layer], values, start, stop)

    def read(self, layer: int, stop: int) -> tuple[mx.array, mx.array]:
        """Keys and values of rows [0, stop)."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None
        assert values is not None
        return keys[..., :stop, :], values[..., :stop, :]

    def commit(self, path: Sequence[int]) -> None:
        """Keep the scratch rows of an accepted path (node indices, root first).

        Rows that are in place already stay: a path that is a prefix of the node order moves nothing.
        """
        in_place = next((i for i, node in enumerate(path) if node != i), len(path))
        if moved := list(path[in_place:]):
            start = self.length + in_place
            source = mx.array(moved) + self.length
            for arrays in (self.keys, self.values):
                for array in arrays:
                    if array is not None:  # some layers read another layer's cache
                        array[..., start : start + len(moved), :] = array[..., source, :]
            mx.async_eval(self.arrays())
        self.length += len(path)

    def truncate(self, length: int) -> None:
        """Forget the rows at and after ``length``."""
        self.length = min(self.length, length)

    def drop(self, start: int, stop: int) -> None:
        """Remove committed rows [start, stop): later rows move up, contiguous in memory."""
        for arrays in (self.keys, self.values):
            for layer, array in enumerate(arrays):
                if array is not None:
                    arrays[layer] = mx.concatenate([array[..., :start, :], array[..., stop:, :]], axis=2)
        self.length -= stop - start
        mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        return [array for array in (*self.keys, *self.values) if array is not None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


def _put(array: mx.array | None, rows: mx.array, start: int, stop: int) -> mx.array:
    if array is None or stop > array.shape[2]:
        capacity = -(-stop // STEP) * STEP
        grown = mx.zeros((1, rows.shape[1], capacity, rows.shape[3]), rows.dtype)
        if array is not None:
            grown[..., :start, :] = array[..., :start, :]
        array = grown
    array[..., start:stop, :] = rows
    return array
