"""Commit in plain MLX."""

from collections.abc import Sequence

import mlx.core as mx


def commit_rows(
    caches: Sequence[mx.array], rows: Sequence[mx.array], path: mx.array, length: mx.array
) -> list[mx.array]:
    """See ``kernels.commit.commit_rows``."""
    index = mx.arange(caches[0].shape[2]) - length
    inside = (index >= 0) & (index < path.size)
    source = mx.where(inside, path[mx.where(inside, index, 0)], -1)
    kept, source = (source >= 0)[:, None], mx.maximum(source, 0)
    return [mx.where(kept, own[:, :, source], cache) for cache, own in zip(caches, rows, strict=True)]
