"""Tree attention over a prefix and separate new rows, in one CUDA kernel.

It replaces, in each layer, two writes at a dynamic offset, a mask conversion and a cuDNN plan for each key length.
"""

import mlx.core as mx

from kernels._cuda import build_cuda_kernel, write_float

_THREADS = 256

# One block a (row, head). LANES lanes hold one key's dimensions, 16 bytes each, and the block's groups of lanes take
# the keys in turn, each with a softmax of its own (online); the groups' states are merged at the end.
_SOURCE = """
  const float lowest = __int_as_float(0xff800000);  // minus infinity
  constexpr int PIECE = 16 / sizeof(T), LANES = D / PIECE, GROUPS = THREADS / LANES, AHEAD = 4;
  const int row = blockIdx.x, head = blockIdx.y, rows = gridDim.x, heads = gridDim.y;
  const int kv_heads = prefix_keys_shape[1], kv_head = head / (heads / kv_heads), prefix = length[0];
  const int member = threadIdx.x % LANES, group = threadIdx.x / LANES, at = member * PIECE;

  auto unpack = [](uint4 bytes, float* piece) {
    const T* narrow = reinterpret_cast<const T*>(&bytes);
    for (int i = 0; i < PIECE; ++i) piece[i] = static_cast<float>(narrow[i]);
  };
  auto load = [&](const T* from, float* piece) { unpack(*reinterpret_cast<const uint4*>(from), piece); };
  float query[PIECE], key[PIECE], value[PIECE], out[PIECE] = {};
  float peak = lowest, total = 0.0f;
  SETUP

  // All lanes of a warp call this together: they add up their parts of the score.
  auto take = [&](bool seen) {
    float score = 0.0f;
    for (int i = 0; i < PIECE; ++i) score += query[i] * key[i];
    for (int offset = LANES / 2; offset; offset /= 2) score += __shfl_xor_sync(0xffffffffu, score, offset);
    if (!seen) return;  // a key that is not seen may be a slot that was never written
    const float next = fmaxf(peak, score);
    const float keep = expf(peak - next), weight = expf(score - next);
    for (int i = 0; i < PIECE; ++i) out[i] = out[i] * keep + weight * value[i];
    total = total * keep + weight;
    peak = next;
  };
  const T* keys_at = prefix_keys + kv_head * prefix_keys_strides[1] + at;
  const T* values_at = prefix_values + kv_head * prefix_values_strides[1] + at;
  const bool* visible_at = visible + row * visible_strides[0];
  for (int start = group; start - group < prefix; start += GROUPS * AHEAD) {
    uint4 key_bytes[AHEAD], value_bytes[AHEAD];  // several keys are under way at once
    bool seen[AHEAD];
    for (int i = 0; i < AHEAD; ++i) {
      const int slot = min(start + i * GROUPS, prefix - 1);
      key_bytes[i] = *reinterpret_cast<const uint4*>(keys_at + slot * prefix_keys_strides[2]);
      value_bytes[i] = *reinterpret_cast<const uint4*>(values_at + slot * prefix_values_strides[2]);
      seen[i] = start + i * GROUPS < prefix && visible_at[slot * visible_strides[1]];
    }
    for (int i = 0; i < AHEAD; ++i) {
      unpack(key_bytes[i], key);
      unpack(value_bytes[i], value);
      take(seen[i]);
    }
  }
  const int held = ancestors_shape[1] - rows;  // new rows that lie in the cache already, behind the prefix
  for (int start = 0; start < held + rows; start += GROUPS) {
    const int column = min(start + group, held + rows - 1), own = column - held;
    const bool seen =
        start + group < held + rows && ancestors[row * ancestors_strides[0] + column * ancestors_strides[1]];
    if (!__any_sync(0xffffffffu, seen)) continue;  // few rows are ancestors
    if (own < 0) {
      load(keys_at + (prefix + column) * prefix_keys_strides[2], key);
      load(values_at + (prefix + column) * prefix_values_strides[2], value);
    } else {
      LOAD_OWN
    }
    take(seen);
  }

  __shared__ float peaks[GROUPS], totals[GROUPS], outs[GROUPS][D];
  if (member == 0) peaks[group] = peak;
  __syncthreads();
  float highest = lowest;
  for (int other = 0; other < GROUPS; ++other) highest = fmaxf(highest, peaks[other]);
  const float keep = peak == lowest ? 0.0f : expf(peak - highest);
  if (member == 0) totals[group] = total * keep;
  for (int i = 0; i < PIECE; ++i) outs[group][at + i] = out[i] * keep;
  __syncthreads();
  for (int dim = threadIdx.x; dim < D; dim += THREADS) {
    float sum = 0.0f, weights = 0.0f;
    for (int other = 0; other < GROUPS; ++other) {
      sum += outs[other][dim];
      weights += totals[other];
    }
    attended[(row * heads + head) * D + dim] = static_cast<T>(sum / weights);
  }
"""


def _write_source(setup: str, load_own: str) -> str:
    """The body for new rows that are stored in one way or another."""
    return _SOURCE.replace("  SETUP", setup).replace("      LOAD_OWN", load_own)


_APART = _write_source(
    """
  for (int i = 0; i < PIECE; ++i) {
    query[i] = SCALE * static_cast<float>(
        queries[head * queries_strides[1] + row * queries_strides[2] + (at + i) * queries_strides[3]]);
  }
""",
    """
    load(keys + kv_head * keys_strides[1] + own * keys_strides[2] + at, key);
    load(values + kv_head * values_strides[1] + own * values_strides[2] + at, value);
""",
)
_APART_INPUTS = ("queries", "prefix_keys", "prefix_values", "keys", "values", "visible", "ancestors", "length")

# Row r of ``joint`` holds its queries, keys and values before the rotation, head by head. Keys of new rows are
# rotated where they are scored, and once more by one head of each group to be stored.
_JOINT = _write_source(
    """
  const int stride = (heads + 2 * kv_heads) * D;
  // A lane's piece of a rotated head: its own dimensions and those that they turn with, half a head away.
  auto rotate = [&](const T* from, int of, float* piece) {
    constexpr int HALF = D / 2;
    const int base = at < HALF ? at : at - HALF;
    const float* angles = rotations + of * rotations_strides[0] + base;
    alignas(16) float other[PIECE], cosines[PIECE], sines[PIECE];
    load(from + at, piece);
    load(from + (at < HALF ? at + HALF : base), other);
    for (int i = 0; i < PIECE; i += 4) {
      *reinterpret_cast<float4*>(cosines + i) = *reinterpret_cast<const float4*>(angles + i);
      *reinterpret_cast<float4*>(sines + i) = *reinterpret_cast<const float4*>(angles + HALF + i);
    }
    for (int i = 0; i < PIECE; ++i) {
      const float sine = at < HALF ? -sines[i] : sines[i];
      piece[i] = static_cast<float>(static_cast<T>(piece[i] * cosines[i] + other[i] * sine));
    }
  };
  rotate(joint + row * stride + head * D, row, query);
  for (int i = 0; i < PIECE; ++i) query[i] *= SCALE;
  if (group == 0 && head % (heads / kv_heads) == 0) {
    const int place = (kv_head * rows + row) * D + at;
    rotate(joint + row * stride + (heads + kv_head) * D, row, key);
    load(joint + row * stride + (heads + kv_heads + kv_head) * D + at, value);
    for (int i = 0; i < PIECE; ++i) {
      keys[place + i] = static_cast<T>(key[i]);
      values[place + i] = static_cast<T>(value[i]);
    }
  }
""",
    """
    rotate(joint + own * stride + (heads + kv_head) * D, own, key);
    load(joint + own * stride + (heads + kv_heads + kv_head) * D + at, value);
""",
)
_JOINT_INPUTS = ("joint", "prefix_keys", "prefix_values", "rotations", "visible", "ancestors", "length")


def supports(width: int, value_width: int, capacity: int, dtype: mx.Dtype) -> bool:
    """Head dimensions that up to a warp's lanes hold, 16 bytes each, and prefixes that a block is quick over."""
    return width in (32, 64, 128, 256) and value_width == width and width * dtype.size <= 512 and capacity <= 4096


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
    source = _APART.replace("SCALE", write_float(scale))
    kernel = build_cuda_kernel("tree_attention", _APART_INPUTS, ("attended",), source, strided=True)
    (attended,) = kernel(
        inputs=[queries, *prefix, *new, visible, ancestors, length],
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
    rotations: mx.array,
    visible: mx.array,
    ancestors: mx.array,
    length: mx.array,
    scale: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """See ``kernels.tree_attention.rotary_tree_attention``."""
    rows, total = joint.shape[-2:]
    _, kv_heads, _, width = prefix[0].shape
    heads = total // width - 2 * kv_heads
    source, outputs = _JOINT.replace("SCALE", write_float(scale)), ("attended", "keys", "values")
    kernel = build_cuda_kernel("rotary_tree_attention", _JOINT_INPUTS, outputs, source, strided=True)
    attended, keys, values = kernel(
        inputs=[joint, *prefix, rotations, visible, ancestors, length],
        template=[("T", joint.dtype), ("D", width), ("THREADS", _THREADS)],
        grid=(rows * _THREADS, heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(*joint.shape[:-1], heads * width), (1, kv_heads, rows, width), (1, kv_heads, rows, width)],
        output_dtypes=[joint.dtype] * 3,
    )
    return attended, keys, values
