"""Attention over a draft tree and its prefix."""

import mlx.core as mx

from kernels._cuda import on_cuda
from kernels.tree_attention import cuda, reference
from kernels.tree_attention.reference import TreeMask, tree_attention

__all__ = ["TreeMask", "prefix_tree_attention", "tree_attention"]


def prefix_tree_attention(
    queries: mx.array,
    prefix: tuple[mx.array, mx.array],
    new: tuple[mx.array, mx.array],
    visible: mx.array,
    ancestors: mx.array,
    length: mx.array,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of new rows over a cache that does not hold them yet: shapes do not follow the session's length.

    Args:
        queries: [1, heads, n, d].
        prefix: Keys and values [1, kv_heads, capacity, d] of the cache.
        new: Keys and values [1, kv_heads, n, d] of the new rows.
        visible: [n, capacity] bool, which cached rows each new row sees; none at or after ``length``.
        ancestors: [n, n] bool, which new rows it sees: its ancestors and itself.
        length: [1] int32, rows of the cache.
        scale: Multiplies the scores.
        sinks: As ``tree_attention``.

    Returns:
        [1, heads, n, d].
    """
    if on_cuda() and cuda.supports(queries, new[1], prefix[0].shape[2], sinks):
        return cuda.prefix_tree_attention(queries, prefix, new, visible, ancestors, length, scale)
    return reference.prefix_tree_attention(queries, prefix, new, visible, ancestors, scale, sinks)
