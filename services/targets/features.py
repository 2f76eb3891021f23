"""Features between MLX and the NumPy arrays that travel: bfloat16 as uint16 bytes, which NumPy has no name for."""

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def to_numpy(rows: mx.array) -> NDArray[Any]:
    """A copy of an array's values."""
    if rows.dtype == mx.bfloat16:
        return np.array(rows.view(mx.uint16))
    return np.array(rows)


def to_mlx(rows: NDArray[Any]) -> mx.array:
    """The inverse of ``to_numpy``."""
    array = mx.array(np.ascontiguousarray(rows))
    return array.view(mx.bfloat16) if rows.dtype == np.uint16 else array
