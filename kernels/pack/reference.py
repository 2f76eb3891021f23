"""Packing in plain MLX."""

from collections.abc import Sequence

import mlx.core as mx


def pack_words(arrays: Sequence[mx.array]) -> mx.array:
    """See ``kernels.pack.pack_words``."""
    return mx.concatenate([array.reshape(-1).view(mx.int32) for array in arrays])
