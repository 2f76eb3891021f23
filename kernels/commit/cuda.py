"""Commit in one CUDA kernel for all caches of a shape, instead of four launches for each."""

from collections import defaultdict
from collections.abc import Sequence

import mlx.core as mx

from kernels._cuda import build_cuda_kernel

_THREADS = 256
_MOST = 64
"""Caches in one launch: their addresses are the kernel's parameters, 4 KiB at most."""

# The second dimension of the grid is the cache. A switch, since an array of parameters would live in local memory.
_SOURCE = """
  const T *cache, *fresh;
  T* out;
  switch (blockIdx.y) {
    CASES
    default: return;
  }
  const int element = (blockIdx.x * blockDim.x + threadIdx.x) * PIECE;
  const int heads = cache0_shape[1], capacity = cache0_shape[2], width = cache0_shape[3], rows = rows0_shape[2];
  if (element >= heads * capacity * width) return;
  const int dim = element % width, slot = element / width % capacity, head = element / (width * capacity);
  const int step = slot - length[0];
  const int row = step >= 0 && step < path_shape[0] ? path[step] : -1;
  const T* from = row < 0 ? cache + element : fresh + (head * rows + row) * width + dim;
  if constexpr (PIECE * sizeof(T) == 16) {
    *reinterpret_cast<uint4*>(out + element) = *reinterpret_cast<const uint4*>(from);
  } else {
    out[element] = *from;
  }
"""


def commit_rows(
    caches: Sequence[mx.array], rows: Sequence[mx.array], path: mx.array, length: mx.array
) -> list[mx.array]:
    """See ``kernels.commit.commit_rows``."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, cache in enumerate(caches):
        alike[cache.shape].append(index)
    out: dict[int, mx.array] = {}
    for indices in alike.values():
        for start in range(0, len(indices), _MOST):
            some = indices[start : start + _MOST]
            fresh = _commit_alike([caches[i] for i in some], [rows[i] for i in some], path, length)
            out |= dict(zip(some, fresh, strict=True))
    return [out[index] for index in range(len(caches))]


def _commit_alike(
    caches: Sequence[mx.array], rows: Sequence[mx.array], path: mx.array, length: mx.array
) -> Sequence[mx.array]:
    count, first = len(caches), caches[0]
    piece = 16 // first.dtype.size if first.shape[3] * first.dtype.size % 16 == 0 else 1
    names = {kind: tuple(f"{kind}{i}" for i in range(count)) for kind in ("cache", "rows", "out")}
    cases = [f"case {i}: cache = cache{i}; fresh = rows{i}; out = out{i}; break;" for i in range(count)]
    source = _SOURCE.replace("CASES", "\n    ".join(cases))
    inputs = (*names["cache"], *names["rows"], "path", "length")
    kernel = build_cuda_kernel("commit", inputs, names["out"], source)
    return kernel(
        inputs=[*caches, *rows, path, length],
        template=[("T", first.dtype), ("PIECE", piece)],
        grid=(-(-first.size // piece // _THREADS) * _THREADS, count, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[first.shape] * count,
        output_dtypes=[first.dtype] * count,
    )
