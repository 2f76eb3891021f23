"""Packing in one CUDA kernel: a concatenation is a launch an array."""

from collections.abc import Sequence

import mlx.core as mx

from kernels._cuda import build_cuda_kernel

_THREADS = 128

# The second dimension of the grid is the array. Sizes are read at run time: each in the source would be a build.
_SOURCE = """
  const void* from = nullptr;
  int size = 0, start = 0;
  CASES
  const int element = blockIdx.x * blockDim.x + threadIdx.x;
  if (element < size) out[start + element] = reinterpret_cast<const int*>(from)[element];
"""
# Each array but this block's moves the start on, up to its own.
_CASE = """
  if (blockIdx.y == INDEX) {
    from = arrayINDEX;
    size = arrayINDEX_shape[0];
  } else if (blockIdx.y > INDEX) {
    start += arrayINDEX_shape[0];
  }
"""


def pack_words(arrays: Sequence[mx.array]) -> mx.array:
    """See ``kernels.pack.pack_words``."""
    words = [array.reshape(-1).view(mx.int32) for array in arrays]
    sizes = [array.size for array in words]
    names = tuple(f"array{i}" for i in range(len(arrays)))
    cases = "".join(_CASE.replace("INDEX", str(i)) for i in range(len(arrays)))
    kernel = build_cuda_kernel("pack", names, ("out",), _SOURCE.replace("  CASES\n", cases))
    (out,) = kernel(
        # One type: MLX keeps a compiled kernel whatever the types of its inputs.
        inputs=words,
        grid=(-(-max(sizes) // _THREADS) * _THREADS, len(arrays), 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(sum(sizes),)],
        output_dtypes=[mx.int32],
    )
    return out
