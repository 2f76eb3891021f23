"""Tree attention over a prefix and separate new rows, in one CUDA kernel.

It replaces, in each layer, two writes at a dynamic offset, a mask conversion and a cuDNN plan for each key length.
"""

import mlx.core as mx

from kernels._cuda import build_cuda_kernel

_THREADS = 256

# One block a (row, head). Keys come in tiles of one a thread: each thread scores its own key, the block shares the
# peak, and then threads stand for output dimensions and walk over the tile's values. The softmax is online over tiles.
_SOURCE = """
  const float lowest = __int_as_float(0xff800000);  // minus infinity
  const int row = blockIdx.x, head = blockIdx.y, rows = gridDim.x, heads = gridDim.y;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, prefix = length[0];
  const int kv_heads = prefix_keys_shape[1], kv_head = head / (heads / kv_heads);
  constexpr int WARPS = THREADS / 32, SLICES = THREADS / D, PIECE = 16 / sizeof(T);  // D divides THREADS

  __shared__ float query[D], weights[THREADS], warp_value[WARPS], slices[SLICES][D];
  SETUP
  __syncthreads();

  const int dim = threadIdx.x % D, slice = threadIdx.x / D;
  float peak = lowest, total = 0.0f, out = 0.0f;
  const int count = prefix + rows;
  for (int start = 0; start < count; start += THREADS) {
    const int key = start + threadIdx.x;
    const int own = key - prefix;  // index among the new rows
    float score = lowest;
    bool seen = key < prefix ? visible[row * visible_strides[0] + key * visible_strides[1]]
        : own < rows && ancestors[row * ancestors_strides[0] + own * ancestors_strides[1]];
    if (seen) {
      const T* at = prefix_keys + kv_head * prefix_keys_strides[1] + key * prefix_keys_strides[2];
      score = 0.0f;
      OWN_SCORE
      for (int base = 0; base < D; base += PIECE) {
        uint4 bytes = *reinterpret_cast<const uint4*>(at + base);
        const T* piece = reinterpret_cast<const T*>(&bytes);
        for (int i = 0; i < PIECE; ++i) score += query[base + i] * static_cast<float>(piece[i]);
      }
    }

    float highest = score;
    for (int offset = 16; offset; offset /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, offset));
    if (lane == 0) warp_value[warp] = highest;
    __syncthreads();
    for (int other = 0; other < WARPS; ++other) highest = fmaxf(highest, warp_value[other]);
    const float next = fmaxf(peak, highest);
    // Nothing seen so far: weights stay 0 and -inf - -inf is never taken.
    const float keep = next == lowest ? 1.0f : expf(peak - next);
    weights[threadIdx.x] = seen ? expf(score - next) : 0.0f;
    peak = next;
    __syncthreads();

    out *= keep;
    total *= keep;
    const int stop = min(THREADS, count - start);
    for (int i = slice; i < stop; i += SLICES) {
      const int other = start + i, fresh = other - prefix;
      const T* at = fresh < 0 ? prefix_values + kv_head * prefix_values_strides[1] + other * prefix_values_strides[2]
                              : OWN_VALUE;
      // A weight of 0 may stand beside a slot that was never written: its value is not looked at.
      if (weights[i] > 0.0f) out += weights[i] * static_cast<float>(at[dim]);
      total += weights[i];
    }
    __syncthreads();
  }

  slices[slice][dim] = out;
  if (dim == 0) warp_value[slice] = total;
  __syncthreads();
  if (slice == 0) {
    float value = 0.0f, sum = 0.0f;
    for (int other = 0; other < SLICES; ++other) {
      value += slices[other][dim];
      sum += warp_value[other];
    }
    attended[(row * heads + head) * D + dim] = static_cast<T>(value / sum);
  }
"""


def _write_source(setup: str, own_score: str, own_value: str) -> str:
    """The body for new rows that are stored in one way or another."""
    return _SOURCE.replace("  SETUP", setup).replace("      OWN_SCORE", own_score).replace("OWN_VALUE", own_value)


_APART = _write_source(
    """
  for (int dim = threadIdx.x; dim < D; dim += THREADS) {
    query[dim] = scale[0] * static_cast<float>(
        queries[head * queries_strides[1] + row * queries_strides[2] + dim * queries_strides[3]]);
  }
""",
    """
      if (own >= 0) at = keys + kv_head * keys_strides[1] + own * keys_strides[2];
""",
    "values + kv_head * values_strides[1] + fresh * values_strides[2]",
)
_APART_INPUTS = ("queries", "prefix_keys", "prefix_values", "keys", "values", "visible", "ancestors", "length", "scale")

# Row r of ``joint`` holds its queries, keys and values before the rotation, head by head. Keys of new rows are
# rotated where they are scored, and once more by one head of each group to be stored.
_JOINT = _write_source(
    """
  const int stride = (heads + 2 * kv_heads) * D;
  auto rotate = [&](const T* at, int from, int i) {
    const int half = i < D / 2 ? i : i - D / 2;
    const float c = cosines[from * cosines_strides[0] + half * cosines_strides[1]];
    const float s = sines[from * sines_strides[0] + half * sines_strides[1]];
    const float low = static_cast<float>(at[half]), high = static_cast<float>(at[half + D / 2]);
    return static_cast<T>(i < D / 2 ? low * c - high * s : high * c + low * s);
  };
  for (int dim = threadIdx.x; dim < D; dim += THREADS) {
    query[dim] = scale[0] * static_cast<float>(rotate(joint + row * stride + head * D, row, dim));
    if (head % (heads / kv_heads) == 0) {
      const int place = (kv_head * rows + row) * D + dim;
      keys[place] = rotate(joint + row * stride + (heads + kv_head) * D, row, dim);
      values[place] = joint[row * stride + (heads + kv_heads + kv_head) * D + dim];
    }
  }
""",
    """
      if (own >= 0) {
        const T* fresh = joint + own * stride + (heads + kv_head) * D;
        for (int i = 0; i < D; ++i) score += query[i] * static_cast<float>(rotate(fresh, own, i));
      } else
""",
    "joint + fresh * stride + (heads + kv_heads + kv_head) * D",
)
_JOINT_INPUTS = (
    "joint",
    "prefix_keys",
    "prefix_values",
    "cosines",
    "sines",
    "visible",
    "ancestors",
    "length",
    "scale",
)


def supports(width: int, value_width: int, capacity: int) -> bool:
    """Head dimensions that divide the block, and prefixes that a block is quick over."""
    return width in (32, 64, 128, 256) and value_width == width and capacity <= 4096


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
    kernel = build_cuda_kernel("tree_attention", _APART_INPUTS, ("attended",), _APART)
    (attended,) = kernel(
        inputs=[queries, *prefix, *new, visible, ancestors, length, mx.array([scale], mx.float32)],
        template=[("T", queries.dtype), ("D", width), ("THREADS", _THREADS)],
        grid=(rows * _THREADS, heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1, rows, heads, width)],
        output_dtypes=[queries.dtype],
    )
    return attended.transpose(0, 2, 1, 3)  # models turn it back: rows stay contiguous


def rotary_tree_attention(
    joint: mx.array,
    prefix: tuple[mx.array, mx.array],
    tables: tuple[mx.array, mx.array],
    visible: mx.array,
    ancestors: mx.array,
    length: mx.array,
    scale: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """See ``kernels.tree_attention.rotary_tree_attention``."""
    rows, total = joint.shape
    _, kv_heads, _, width = prefix[0].shape
    heads = total // width - 2 * kv_heads
    kernel = build_cuda_kernel("rotary_tree_attention", _JOINT_INPUTS, ("attended", "keys", "values"), _JOINT)
    attended, keys, values = kernel(
        inputs=[joint, *prefix, *tables, visible, ancestors, length, mx.array([scale], mx.float32)],
        template=[("T", joint.dtype), ("D", width), ("THREADS", _THREADS)],
        grid=(rows * _THREADS, heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, heads * width), (1, kv_heads, rows, width), (1, kv_heads, rows, width)],
        output_dtypes=[joint.dtype] * 3,
    )
    return attended, keys, values
