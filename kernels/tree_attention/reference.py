"""Tree attention in plain MLX: queries attend to a prefix and to their own ancestors."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TreeMask:
    """Which keys each of n new rows sees: all of a prefix, then ancestors and self.

    Attributes:
        prefix: Rows in the cache before the new ones; the key at index j sits at position j.
        ancestors: [n, n] bool, ``ancestors[i, j]`` when row j is row i or an ancestor; None for a chain.
        positions: [n] absolute position of each row.
    """

    prefix: int
    ancestors: NDArray[np.bool_] | None
    positions: NDArray[np.int32]

    def array(self, window: int | None) -> mx.array | str | None:
        """What ``mx.fast.scaled_dot_product_attention`` takes; true entries are kept.

        Args:
            window: Sliding window: a key is seen while ``position_q - position_k < window``.
        """
        rows = len(self.positions)
        slides = window is not None and int(self.positions.max()) >= window
        if self.ancestors is None and not slides:
            return None if rows == 1 else "causal"
        own = np.tri(rows, dtype=np.bool_) if self.ancestors is None else self.ancestors
        mask = np.concatenate([np.ones((rows, self.prefix), np.bool_), own], axis=1)
        if slides:
            keys = np.concatenate([np.arange(self.prefix), self.positions])
            mask &= self.positions[:, None] - keys[None] < window
        return mx.array(mask)


def tree_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | str | None,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """Masked attention of new rows over a cache that already holds their keys and values.

    Args:
        queries: [1, heads, n, d].
        keys, values: [1, kv_heads, prefix + n, d].
        mask: From ``TreeMask.array``, or a bool array [n, prefix + n].
        scale: Multiplies the scores.
        sinks: [heads] extra logits that take attention and give nothing, or None.

    Returns:
        [1, heads, n, d].
    """
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


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
    """See ``kernels.tree_attention.prefix_tree_attention``."""
    keys, values = (mx.concatenate([old, own], axis=2) for old, own in zip(prefix, new, strict=True))
    held = ancestors.shape[1] - queries.shape[2]
    if held:  # they lie in the cache
        visible = mx.slice_update(visible, ancestors[:, :held], length, (1,))
    mask = mx.concatenate([visible, ancestors[:, held:]], axis=1)
    return tree_attention(queries, keys, values, mask, scale, sinks)


def rotary_tree_attention(
    joint: mx.array,
    prefix: tuple[mx.array, mx.array],
    rotations: mx.array,
    visible: mx.array,
    ancestors: mx.array,
    length: mx.array,
    scale: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """See ``kernels.tree_attention.rotary_tree_attention``."""
    rows, (_, kv_heads, _, width) = joint.shape[-2], prefix[0].shape
    by_head = joint.reshape(1, rows, -1, width).transpose(0, 2, 1, 3)
    heads = by_head.shape[1] - 2 * kv_heads
    low, high = by_head[:, :-kv_heads, :, : width // 2], by_head[:, :-kv_heads, :, width // 2 :]
    cosines, sines = mx.split(rotations, 2, axis=1)
    turned = mx.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=3).astype(joint.dtype)
    keys, values = turned[:, heads:], by_head[:, -kv_heads:]
    out = prefix_tree_attention(turned[:, :heads], prefix, (keys, values), visible, ancestors, length, scale)
    return out.transpose(0, 2, 1, 3).reshape(*joint.shape[:-1], -1), keys, values
