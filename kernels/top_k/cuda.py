"""Top-k log-probabilities in one CUDA kernel: MLX takes a sort of the whole row and a dozen launches."""

import mlx.core as mx

from kernels._cuda import build_cuda_kernel

MOST = 32
"""Each of k passes reads the row again: beyond this a sort is quicker."""
_THREADS = 256

# One block a row. Each of K passes finds the best entry after the last winner in the order (value descending, id
# ascending), so nothing has to be marked as taken. The first pass finds the maximum for the log-sum-exp.
_SOURCE = """
  const int row = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const auto* values = logits + row * logits_strides[0];
  const auto stride = logits_strides[1];
  const int width = logits_shape[1];
  __shared__ float warp_value[32];
  __shared__ int warp_id[32];
  __shared__ float last_value;
  __shared__ int last_id;

  float top = 0.0f, log_total = 0.0f;
  for (int pass = 0; pass < K; ++pass) {
    float best = 0.0f;
    int best_id = width;  // none yet
    for (int id = threadIdx.x; id < width; id += blockDim.x) {
      float value = static_cast<float>(values[id * stride]);
      value = isnan(value) ? -inf : value;
      bool open = pass == 0 || value < last_value || (value == last_value && id > last_id);
      if (open && (best_id == width || value > best)) {
        best = value;
        best_id = id;
      }
    }
    for (int offset = 16; offset; offset /= 2) {
      float value = __shfl_xor_sync(0xffffffffu, best, offset);
      int id = __shfl_xor_sync(0xffffffffu, best_id, offset);
      if (id != width && (best_id == width || value > best || (value == best && id < best_id))) {
        best = value;
        best_id = id;
      }
    }
    if (lane == 0) {
      warp_value[warp] = best;
      warp_id[warp] = best_id;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int other = 1; other < warps; ++other) {
        float value = warp_value[other];
        int id = warp_id[other];
        if (id != width && (best_id == width || value > best || (value == best && id < best_id))) {
          best = value;
          best_id = id;
        }
      }
      last_value = best;
      last_id = best_id;
    }
    __syncthreads();
    if (pass == 0) {
      top = last_value;
      float total = 0.0f;
      for (int id = threadIdx.x; id < width; id += blockDim.x) {
        float value = static_cast<float>(values[id * stride]);
        total += isnan(value) ? 0.0f : expf(value - top);
      }
      for (int offset = 16; offset; offset /= 2) {
        total += __shfl_xor_sync(0xffffffffu, total, offset);
      }
      if (lane == 0) warp_value[warp] = total;
      __syncthreads();
      total = 0.0f;
      for (int other = 0; other < warps; ++other) total += warp_value[other];
      log_total = logf(total);
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      log_probs[row * K + pass] = last_value - top - log_total;
      ids[row * K + pass] = last_id;
    }
  }
"""


def top_log_probs(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """See ``kernels.top_k.top_log_probs``."""
    rows = logits.shape[0]
    kernel = build_cuda_kernel("top_k", ("logits",), ("log_probs", "ids"), _SOURCE)
    log_probs, ids = kernel(
        inputs=[logits],
        template=[("T", logits.dtype), ("K", k)],
        grid=(rows * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, k), (rows, k)],
        output_dtypes=[mx.float32, mx.int32],
    )
    return log_probs, ids
