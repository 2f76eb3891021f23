"""Commit in one CUDA kernel for all caches of a shape, instead of four launches for each."""

from collections import defaultdict
from collections.abc import Sequence

import mlx.core as mx

from kernels._cuda import build_cuda_kernel

_THREADS = 256
_MOST = 64
"""Caches in one launch: their addresses are the kernel's parameters, 4 KiB at most."""

# The second dimension of the grid is the cache.
_SOURCE = """
  const T* const caches[] = {CACHES};
  const T* const fresh[] = {FRESH};
  T* const outs[] = {OUTS};
  const int element = blockIdx.x * blockDim.x + threadIdx.x, which = blockIdx.y;
  const int heads = cache0_shape[1], capacity = cache0_shape[2], width = cache0_shape[3], rows = rows0_shape[2];
  if (element >= heads * capacity * width) return;
  const int dim = element % width, slot = element / width % capacity, head = element / (width * capacity);
  const int step = slot - length[0];
  const int row = step >= 0 && step < path_shape[0] ? path[step] : -1;
  outs[which][element] = row < 0 ? caches[which][element] : fresh[which][(head * rows + row) * width + dim];
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
    names = {kind: tuple(f"{kind}{i}" for i in range(count)) for kind in ("cache", "rows", "out")}
    source = _SOURCE
    for mark, kind in (("CACHES", "cache"), ("FRESH", "rows"), ("OUTS", "out")):
        source = source.replace(mark, ", ".join(names[kind]))
    inputs = (*names["cache"], *names["rows"], "path", "length")
    kernel = build_cuda_kernel("commit", inputs, names["out"], source)
    return kernel(
        inputs=[*map(mx.contiguous, caches), *map(mx.contiguous, rows), path, length],
        template=[("T", first.dtype)],
        grid=(-(-first.size // _THREADS) * _THREADS, count, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[first.shape] * count,
        output_dtypes=[first.dtype] * count,
    )
