"""Several small arrays as one, for the way to the host: there each array costs more than its bytes."""

from collections.abc import Sequence

import mlx.core as mx

from kernels._cuda import on_cuda
from kernels.pack import cuda, reference


def pack_words(arrays: Sequence[mx.array]) -> mx.array:
    """The bits of arrays that fill whole words of 4 bytes, one array after the other: [words in all] int32."""
    return (cuda if on_cuda() else reference).pack_words(arrays)
