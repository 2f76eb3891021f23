"""Top-k log-probabilities in one CUDA kernel: MLX takes a sort of the whole row and a dozen launches."""

import mlx.core as mx

from kernels._cuda import build_cuda_kernel

MOST = 32
"""Each of k passes looks at the whole row: beyond this a sort is quicker."""
_THREADS = 1024
_HELD = 32

# One block a row. Each of K passes finds the best entry after the last winner in the order (value descending, id
# ascending), so nothing has to be marked as taken. A thread holds PER entries; longer rows are read again each pass.
_SOURCE = """
  const float lowest = __int_as_float(0xff800000);  // minus infinity
  const int row = blockIdx.x, width = logits_shape[1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __shared__ float warp_value[32];
  __shared__ int warp_id[32];

  auto read = [&](int id) {
    float value = id < width ? static_cast<float>(logits[static_cast<size_t>(row) * width + id]) : lowest;
    return isnan(value) ? lowest : value;
  };
  float held[PER > 0 ? PER : 1];
  for (int i = 0; i < PER; ++i) held[i] = read(threadIdx.x + i * blockDim.x);
  const int entries = (width + blockDim.x - 1) / blockDim.x;

  float last_value = 0.0f, top = 0.0f, log_total = 0.0f;
  int last_id = -1;
  for (int pass = 0; pass < K; ++pass) {
    float best = lowest;
    int best_id = width;  // none yet
    auto look = [&](float value, int id) {
      bool open = pass == 0 || value < last_value || (value == last_value && id > last_id);
      if (id < width && open && (best_id == width || value > best)) {
        best = value;
        best_id = id;
      }
    };
    if constexpr (PER > 0) {
      for (int i = 0; i < PER; ++i) look(held[i], threadIdx.x + i * blockDim.x);
    } else {
      for (int i = 0; i < entries; ++i) look(read(threadIdx.x + i * blockDim.x), threadIdx.x + i * blockDim.x);
    }
    auto reduce = [&]() {
      for (int offset = 16; offset; offset /= 2) {
        float value = __shfl_xor_sync(0xffffffffu, best, offset);
        int id = __shfl_xor_sync(0xffffffffu, best_id, offset);
        if (id != width && (best_id == width || value > best || (value == best && id < best_id))) {
          best = value;
          best_id = id;
        }
      }
    };
    reduce();
    if (lane == 0) {
      warp_value[warp] = best;
      warp_id[warp] = best_id;
    }
    __syncthreads();
    best = warp_value[lane];  // 32 warps, 32 lanes: every warp finds the same winner
    best_id = warp_id[lane];
    reduce();
    last_value = best;
    last_id = best_id;
    __syncthreads();
    if (pass == 0) {
      top = last_value;
      float total = 0.0f;
      if constexpr (PER > 0) {
        for (int i = 0; i < PER; ++i) total += expf(held[i] - top);
      } else {
        for (int i = 0; i < entries; ++i) total += expf(read(threadIdx.x + i * blockDim.x) - top);
      }
      for (int offset = 16; offset; offset /= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
      if (lane == 0) warp_value[warp] = total;
      __syncthreads();
      total = warp_value[lane];
      for (int offset = 16; offset; offset /= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
      log_total = logf(total);
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      log_probs[row * K + pass] = last_value - top - log_total;
      named[row * K + pass] = labels[last_id];
    }
  }
"""


def top_log_probs(logits: mx.array, k: int, labels: mx.array) -> tuple[mx.array, mx.array]:
    """See ``kernels.top_k.top_log_probs``."""
    rows, width = logits.shape
    entries = -(-width // _THREADS)
    kernel = build_cuda_kernel("top_k", ("logits", "labels"), ("log_probs", "named"), _SOURCE)
    log_probs, named = kernel(
        inputs=[logits, labels.astype(mx.int32)],
        template=[("T", logits.dtype), ("K", k), ("PER", entries if entries <= _HELD else 0)],
        grid=(rows * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, k), (rows, k)],
        output_dtypes=[mx.float32, mx.int32],
    )
    return log_probs, named
