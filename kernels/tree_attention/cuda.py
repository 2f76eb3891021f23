"""Tree attention over a prefix and separate new rows, in one CUDA kernel.

It replaces, in each layer, two writes at a dynamic offset, a mask conversion and a cuDNN plan for each key length.
"""

import mlx.core as mx

from kernels._cuda import build_cuda_kernel

_WARPS = 8

# One block a (row, head): each warp takes every eighth key with an online softmax, and the warps merge at the end.
# A lane holds D / 32 values of the query, of the key at hand and of the output.
_SOURCE = """
  const int row = blockIdx.x, head = blockIdx.y;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int heads = queries_shape[1], rows = queries_shape[2];
  const int kv_head = head / (heads / keys_shape[1]);
  constexpr int PER_LANE = D / 32;

  float query[PER_LANE], out[PER_LANE];
  for (int i = 0; i < PER_LANE; ++i) {
    int dim = lane + 32 * i;
    query[i] = scale[0] * static_cast<float>(
        queries[head * queries_strides[1] + row * queries_strides[2] + dim * queries_strides[3]]);
    out[i] = 0.0f;
  }
  float best = -inf, total = 0.0f;

  auto attend = [&](const auto* key, auto key_stride, const auto* value, auto value_stride) {
    float score = 0.0f;
    for (int i = 0; i < PER_LANE; ++i) {
      score += query[i] * static_cast<float>(key[(lane + 32 * i) * key_stride]);
    }
    for (int offset = 16; offset; offset /= 2) score += __shfl_xor_sync(0xffffffffu, score, offset);
    float peak = fmaxf(best, score);
    float keep = expf(best - peak), weight = expf(score - peak);
    best = peak;
    total = total * keep + weight;
    for (int i = 0; i < PER_LANE; ++i) {
      out[i] = out[i] * keep + weight * static_cast<float>(value[(lane + 32 * i) * value_stride]);
    }
  };

  const int prefix = length[0];
  for (int key = warp; key < prefix; key += WARPS) {
    if (visible[row * visible_strides[0] + key * visible_strides[1]]) {
      attend(
          prefix_keys + kv_head * prefix_keys_strides[1] + key * prefix_keys_strides[2],
          prefix_keys_strides[3],
          prefix_values + kv_head * prefix_values_strides[1] + key * prefix_values_strides[2],
          prefix_values_strides[3]);
    }
  }
  for (int key = warp; key < rows; key += WARPS) {
    if (ancestors[row * ancestors_strides[0] + key * ancestors_strides[1]]) {
      attend(
          keys + kv_head * keys_strides[1] + key * keys_strides[2],
          keys_strides[3],
          values + kv_head * values_strides[1] + key * values_strides[2],
          values_strides[3]);
    }
  }

  __shared__ float warp_best[WARPS], warp_total[WARPS], warp_out[WARPS][D];
  if (lane == 0) {
    warp_best[warp] = best;
    warp_total[warp] = total;
  }
  for (int i = 0; i < PER_LANE; ++i) warp_out[warp][lane + 32 * i] = out[i];
  __syncthreads();
  for (int dim = threadIdx.x; dim < D; dim += blockDim.x) {
    float peak = -inf;
    for (int other = 0; other < WARPS; ++other) peak = fmaxf(peak, warp_best[other]);
    float sum = 0.0f, value = 0.0f;
    for (int other = 0; other < WARPS; ++other) {
      // A warp that saw no key has total 0; its weight must not be exp(-inf + inf).
      float weight = warp_total[other] > 0.0f ? expf(warp_best[other] - peak) : 0.0f;
      sum += weight * warp_total[other];
      value += weight * warp_out[other][dim];
    }
    attended[(row * heads + head) * D + dim] = static_cast<T>(value / sum);
  }
"""
_INPUTS = ("queries", "prefix_keys", "prefix_values", "keys", "values", "visible", "ancestors", "length", "scale")


def supports(queries: mx.array, values: mx.array, capacity: int, sinks: mx.array | None) -> bool:
    """Whole warps of head dimensions, no sinks, and prefixes that one pass of eight warps is quick over."""
    width = queries.shape[3]
    return width % 32 == 0 and width <= 256 and values.shape[3] == width and sinks is None and capacity <= 4096


def prefix_tree_attention(
    queries: mx.array,
    prefix: tuple[mx.array, mx.array],
    new: tuple[mx.array, mx.array],
    visible: mx.array,
    ancestors: mx.array,
    length: mx.array,
    scale: float,
) -> mx.array:
    """See ``kernels.tree_attention.prefix_tree_attention``."""
    _, heads, rows, width = queries.shape
    kernel = build_cuda_kernel("tree_attention", _INPUTS, ("attended",), _SOURCE)
    (attended,) = kernel(
        inputs=[queries, *prefix, *new, visible, ancestors, length, mx.array([scale], mx.float32)],
        template=[("T", queries.dtype), ("D", width), ("WARPS", _WARPS)],
        grid=(rows * _WARPS * 32, heads, 1),
        threadgroup=(_WARPS * 32, 1, 1),
        output_shapes=[(1, rows, heads, width)],
        output_dtypes=[queries.dtype],
    )
    return attended.transpose(0, 2, 1, 3)  # models turn it back: rows stay contiguous
