"""Attention over a draft tree and its prefix."""

import mlx.core as mx

from kernels._cuda import on_cuda
from kernels.tree_attention import cuda, reference
from kernels.tree_attention.reference import TreeMask, tree_attention

__all__ = ["TreeMask", "prefix_tree_attention", "rotary_tree_attention", "tree_attention"]


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
        ancestors: [n, s + n] bool, which new rows it sees, its ancestors and itself: first s rows of earlier calls that
            lie in the cache behind ``length``, then these.
        length: [1] int32, rows of the cache.
        scale: Multiplies the scores.
        sinks: As ``tree_attention``.

    Returns:
        [1, heads, n, d].
    """
    fits = cuda.supports(queries.shape[3], new[1].shape[3], prefix[0].shape[2], queries.dtype)
    if on_cuda() and fits and sinks is None:
        return cuda.prefix_tree_attention(queries, prefix, new, visible, ancestors, length, scale)
    return reference.prefix_tree_attention(queries, prefix, new, visible, ancestors, length, scale, sinks)


def rotary_tree_attention(
    joint: mx.array,
    prefix: tuple[mx.array, mx.array],
    rotations: mx.array,
    visible: mx.array,
    ancestors: mx.array,
    length: mx.array,
    scale: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """``prefix_tree_attention`` that rotates queries and keys itself (halves, all dimensions of a head).

    Args:
        joint: [..., n, (heads + 2 kv_heads) d], each row's queries, keys and values, not yet rotated; contiguous.
        prefix: Keys and values [1, kv_heads, capacity, d] of the cache; its keys are rotated.
        rotations: [n, d] float32, cosines, then sines of the rows' positions.
        visible, ancestors, length, scale: As ``prefix_tree_attention``.

    Returns:
        Attended [..., n, heads d], and the new rows' rotated keys and values [1, kv_heads, n, d].
    """
    width = prefix[0].shape[3]
    if on_cuda() and cuda.supports(width, prefix[1].shape[3], prefix[0].shape[2], joint.dtype):
        return cuda.rotary_tree_attention(joint, prefix, rotations, visible, ancestors, length, scale)
    return reference.rotary_tree_attention(joint, prefix, rotations, visible, ancestors, length, scale)
