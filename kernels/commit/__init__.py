"""Commit: the rows of an accepted path join the cache, for all layers in one call."""

from collections.abc import Sequence

import mlx.core as mx

from kernels._cuda import on_cuda
from kernels.commit import cuda, reference


def commit_rows(
    caches: Sequence[mx.array], rows: Sequence[mx.array], path: mx.array, length: mx.array
) -> list[mx.array]:
    """Copies of the caches with new rows in place; lazy.

    Args:
        caches: [1, kv_heads, capacity, d] each.
        rows: [1, kv_heads, n, d] each, the new rows for each of them.
        path: [p] int32, which row goes to each slot from ``length`` on; -1 leaves a slot as it was.
        length: [1] int32, the slot of ``path[0]``. Slots beyond the capacity are left out.
    """
    return (cuda if on_cuda() else reference).commit_rows(caches, rows, path, length)
