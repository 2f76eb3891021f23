"""Features between MLX and the NumPy arrays that travel: bfloat16 as uint16 bytes, which NumPy has no name for."""

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kernels.pack import pack_words
from services.speculation.messages import Tap


def read_back(best: mx.array | None, taps: dict[Tap, mx.array]) -> tuple[NDArray[np.int32], dict[Tap, NDArray[Any]]]:
    """Evaluate and copy what the host wants of a forward, as one array: on a GPU each costs.

    Args:
        best: [n] uint32, or None: no choices then.
        taps: Each [rows, hidden], hidden even.
    """
    stacked = mx.stack(list(taps.values())) if taps else None
    parts = [part for part in (best, stacked) if part is not None]
    if not parts:
        return np.zeros(0, np.int32), {}
    words = np.array(pack_words(parts))
    count = 0 if best is None else best.size
    if stacked is None:
        return words, {}
    values = words[count:].view(_numpy_dtype(stacked.dtype)).reshape(stacked.shape)
    return words[:count], dict(zip(taps, values, strict=True))


def _numpy_dtype(dtype: mx.Dtype) -> Any:
    return {mx.bfloat16: np.uint16, mx.float16: np.float16, mx.float32: np.float32}[dtype]


def to_mlx(rows: NDArray[Any]) -> mx.array:
    """Features as they travel -> an array of their own type."""
    array = mx.array(np.ascontiguousarray(rows))
    return array.view(mx.bfloat16) if rows.dtype == np.uint16 else array
