"""Packing in one CUDA kernel: a concatenation is a launch an array."""

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx

from kernels._cuda import build_cuda_kernel

_THREADS = 128

# The second dimension of the grid is the array.
_SOURCE = """
  const void* from;
  int size, start;
  switch (blockIdx.y) {
    CASES
    default: return;
  }
  const int element = blockIdx.x * blockDim.x + threadIdx.x;
  if (element < size) out[start + element] = reinterpret_cast<const int*>(from)[element];
"""


def pack_words(arrays: Sequence[mx.array]) -> mx.array:
    """See ``kernels.pack.pack_words``."""
    sizes = [array.size for array in arrays]
    starts = [0, *accumulate(sizes)]
    names = tuple(f"array{i}" for i in range(len(arrays)))
    cases = [
        f"case {i}: from = array{i}; size = {size}; start = {start}; break;"
        for i, (size, start) in enumerate(zip(sizes, starts, strict=False))
    ]
    kernel = build_cuda_kernel("pack", names, ("out",), _SOURCE.replace("CASES", "\n    ".join(cases)))
    (out,) = kernel(
        inputs=list(arrays),
        grid=(-(-max(sizes) // _THREADS) * _THREADS, len(arrays), 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(starts[-1],)],
        output_dtypes=[mx.int32],
    )
    return out
