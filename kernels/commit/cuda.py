"""Commit in one CUDA kernel a layer instead of a gather, an offset and two copies for its keys and again its values."""

from collections.abc import Sequence

import mlx.core as mx

from kernels._cuda import build_cuda_kernel

_THREADS = 256

_SOURCE = """
  const int element = blockIdx.x * blockDim.x + threadIdx.x;
  const int capacity = old_keys_shape[2], width = old_keys_shape[3];
  if (element >= old_keys_shape[1] * capacity * width) return;
  const int dim = element % width, slot = element / width % capacity, head = element / (width * capacity);
  const int step = slot - length[0];
  const int row = step >= 0 && step < path_shape[0] ? path[step] : -1;
  all_keys[element] = row < 0
      ? old_keys[head * old_keys_strides[1] + slot * old_keys_strides[2] + dim * old_keys_strides[3]]
      : keys[head * keys_strides[1] + row * keys_strides[2] + dim * keys_strides[3]];
  all_values[element] = row < 0
      ? old_values[head * old_values_strides[1] + slot * old_values_strides[2] + dim * old_values_strides[3]]
      : values[head * values_strides[1] + row * values_strides[2] + dim * values_strides[3]];
"""


def commit_rows(
    caches: Sequence[mx.array], rows: Sequence[mx.array], path: mx.array, length: mx.array
) -> list[mx.array]:
    """See ``kernels.commit.commit_rows``. Keys come first, then values of the same shapes."""
    inputs = ("old_keys", "old_values", "keys", "values", "path", "length")
    kernel = build_cuda_kernel("commit", inputs, ("all_keys", "all_values"), _SOURCE)
    half = len(caches) // 2
    all_keys, all_values = [], []
    for layer in range(half):
        old = caches[layer], caches[half + layer]
        fresh = kernel(
            inputs=[*old, rows[layer], rows[half + layer], path, length],
            template=[("T", old[0].dtype)],
            grid=(-(-old[0].size // _THREADS) * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[old[0].shape, old[1].shape],
            output_dtypes=[old[0].dtype, old[1].dtype],
        )
        all_keys.append(fresh[0])
        all_values.append(fresh[1])
    return [*all_keys, *all_values]
