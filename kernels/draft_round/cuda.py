"""A drafter's whole round in one CUDA launch: all blocks stay, and meet between the steps.

Launched step by step the newest rows and each depth are some twenty kernels, which cost more than their work. A
meeting of 132 blocks takes 1 us on an H200.
"""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from kernels._cuda import build_cuda_kernel, write_float
from kernels._tensor_cores import HEADER

_THREADS, _WARPS = 384, 12
_HEAD_TILES = 4
MOST_ROWS = 8
"""New rows that a round can read."""
TOLD = 4 + MOST_ROWS
"""Words before the features in what the host tells: see ``run_round``."""
_MOST_WIDTH, _MOST_DEPTH = 16, 16
_SHARED_BYTES = 46 * 1024
_PATIENCE = 1 << 22
"""Looks at the counter before a block gives up: seconds."""

_HEADER = (
    HEADER
    + """
namespace aerie {
// A warp's share of a product of 16 outputs: chunks of 32 of K, every `parts`-th from `part`, added up in `partial`
// [PRODUCTS, WARPS, TILES * 8, 17]. A lane holds eight consecutive values of K where the instruction wants four pairs:
// any order of K does, if both sides agree. `rows` points to the lane's row of each tile, or nowhere. With gains these
// multiply the weights, and `energy` [WARPS, TILES * 8] gets the squares that the rows' norms divide by.
template <typename T, int PRODUCTS, int TILES, int WARPS>
__device__ inline void share_product(
    const T* const* matrices, int tile, int width, const T* const* rows, const T* gains, int part, int parts,
    float* partial, float* energy) {
  constexpr int AHEAD = 3;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  float sums[PRODUCTS][TILES][4] = {}, squares[TILES] = {};
  for (int chunk = part; chunk < width / 32; chunk += parts * AHEAD) {
    alignas(16) unsigned a[AHEAD][PRODUCTS][2][4], b[AHEAD][TILES][4], g[AHEAD][4];  // all loads are under way at once
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int at = (chunk + i * parts) * 32 + quarter * 8;
      auto load = [&](const T* from, unsigned* pairs) {
        *reinterpret_cast<uint4*>(pairs) =
            at < width && from ? *reinterpret_cast<const uint4*>(from + at) : make_uint4(0, 0, 0, 0);
      };
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p) {
        const T* weights = matrices[p] + static_cast<size_t>(tile * 16 + group) * width;
        load(weights, a[i][p][0]);
        load(weights + static_cast<size_t>(8) * width, a[i][p][1]);
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t) load(rows[t], b[i][t]);
      load(gains, g[i]);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p) {
        unsigned(*w)[4] = a[i][p];
        if (gains) {
          multiply<T>(w[0], g[i]);
          multiply<T>(w[1], g[i]);
        }
        unsigned low[4] = {w[0][0], w[1][0], w[0][1], w[1][1]}, high[4] = {w[0][2], w[1][2], w[0][3], w[1][3]};
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          mma(sums[p][t], low, b[i][t], T());
          mma(sums[p][t], high, b[i][t] + 2, T());
        }
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t) squares[t] += squares_of<T>(b[i][t]);
    }
  }
#pragma unroll
  for (int p = 0; p < PRODUCTS; ++p) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = (p * WARPS + warp) * TILES * 8 + t * 8 + quarter * 2 + i % 2;
        partial[row * 17 + group + 8 * (i / 2)] = sums[p][t][i];
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    float sum = squares[t];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (quarter == 0) energy[warp * TILES * 8 + t * 8 + group] = sum;
  }
}
__device__ inline float sum_lanes(float value) {
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}
__device__ inline float max_lanes(float value) {
  for (int offset = 16; offset; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}
}  // namespace aerie
"""
)

_SOURCE = """
  constexpr int TILES = ((WIDTH > NEW ? WIDTH : NEW) + 7) / 8, ROWS = TILES * 8;
  constexpr int QUERIES = HEADS * D, JOINT = QUERIES + 2 * KV_HEADS * D;
  constexpr int SPLIT = WARPS / HEAD_TILES;  // warps of one of the head's tiles
  constexpr int PASSES = (VOCAB / 16 + BLOCKS * HEAD_TILES - 1) / (BLOCKS * HEAD_TILES);
  constexpr int COLUMNS = PASSES * HEAD_TILES * 16, LISTS = WIDTH < BLOCKS ? WIDTH : BLOCKS;
  constexpr int CHILDREN = WIDTH + (DEPTH - 1) * WIDTH * WIDTH, GROWN = 2 * CHILDREN + (DEPTH - 1) * WIDTH;
  const float lowest = __int_as_float(0xff800000);  // minus infinity
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4;

  // What the host tells, and is told: its own memory.
  const int* told = reinterpret_cast<const int*>(mailbox[0]);
  int* answer = reinterpret_cast<int*>(mailbox[1]);
  // What blocks tell each other, and what is handed on.
  unsigned* counter = reinterpret_cast<unsigned*>(scratch);
  int* commit = reinterpret_cast<int*>(scratch + 4);       // [1 + NEW]: where new rows go, then their order
  T* newest = reinterpret_cast<T*>(scratch + 32);          // [H]: what the newest row hands on
  T* fresh = newest + H;                                   // [2, KV_HEADS, NEW, D]: keys and values of the new rows
  T* attended = fresh + 2 * KV_HEADS * NEW * D;            // [WIDTH, QUERIES]
  T* middle = attended + WIDTH * QUERIES;                  // [WIDTH, H]
  T* inner = middle + WIDTH * H;                           // [WIDTH, INNER]
  T* handed_on = inner + WIDTH * INNER;                    // [DEPTH - 1, WIDTH, H]
  T* taken = handed_on + (DEPTH - 1) * WIDTH * H;          // [NEW, FEATURES]
  T* fused = taken + NEW * FEATURES;                       // [NEW, H]
  float* new_joint = reinterpret_cast<float*>(fused + NEW * H);  // [NEW, JOINT]: queries, keys, values
  float* joints = new_joint + NEW * JOINT;                 // [DEPTH - 1, WIDTH, JOINT]
  float* inverses = joints + (DEPTH - 1) * WIDTH * JOINT;  // [ROWS]
  float* list_values = inverses + ROWS;                    // [WIDTH, BLOCKS, WIDTH]: each block's best, best first
  int* list_ids = reinterpret_cast<int*>(list_values + WIDTH * BLOCKS * WIDTH);
  float* list_sums = reinterpret_cast<float*>(list_ids + WIDTH * BLOCKS * WIDTH);  // [WIDTH, BLOCKS, 2]
  int* grown = reinterpret_cast<int*>(list_sums + WIDTH * BLOCKS * 2);             // [GROWN]

  __shared__ float partial[WARPS * 2 * ROWS * 17];
  __shared__ float energy[WARPS * 16], logits[WIDTH * COLUMNS];
  __shared__ float totals[WIDTH * WIDTH], scores[WIDTH];
  __shared__ int tokens[ROWS], all_parents[DEPTH * WIDTH], own_rows[NEW], place[4];
  if (threadIdx.x < 4) place[threadIdx.x] = told[threadIdx.x];
  if (threadIdx.x < NEW) {
    tokens[threadIdx.x] = told[4 + threadIdx.x];
    own_rows[threadIdx.x] = threadIdx.x;
  }
  if (threadIdx.x < WIDTH) scores[threadIdx.x] = 0.0f;

  // All blocks wait for each other here; false when some do not come.
  __shared__ bool together;
  unsigned arrivals = 0;
  auto meet = [&]() {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(counter, 1u);
      arrivals += BLOCKS;
      volatile unsigned* arrived = counter;
      int polls = 0;
      for (; *arrived < arrivals && polls < PATIENCE; ++polls) {
        if (polls > 64) __nanosleep(64);
      }
      __threadfence();
      together = polls < PATIENCE;
    }
    __syncthreads();
    return together;
  };
  auto total_of = [&](int product, int from, int to, int row, int output) {
    float total = 0.0f;
    for (int other = from; other < to; ++other) {
      total += partial[((product * WARPS + other) * ROWS + row) * 17 + output];
    }
    return total;
  };
  auto inverse_of = [&](int from, int to, int row) {
    float sum = 0.0f;
    for (int other = from; other < to; ++other) sum += energy[other * ROWS + row];
    return rsqrtf(sum / H + EPS);
  };
  const T* rows[TILES];
  auto point_at = [&](const T* matrix, int width, int count) {
    for (int t = 0; t < TILES; ++t) rows[t] = t * 8 + group < count ? matrix + (t * 8 + group) * width : nullptr;
  };

  __syncthreads();
  const int start = place[0], dropped = place[1], window = place[2], fresh_rows = place[3];
  const int length = start + dropped;  // position of the first new row
  if (fresh_rows) {
    const U* features = reinterpret_cast<const U*>(told + 4 + NEW);
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < fresh_rows * FEATURES; i += BLOCKS * THREADS) {
      taken[i] = static_cast<T>(static_cast<float>(features[i]));
    }
    if (!meet()) return;
    for (int tile = blockIdx.x; tile < H / 16; tile += BLOCKS) {
      point_at(taken, FEATURES, fresh_rows);
      const T* matrix = fuse;
      aerie::share_product<T, 1, TILES, WARPS>(
          &matrix, tile, FEATURES, rows, static_cast<const T*>(nullptr), warp, WARPS, partial, energy);
      __syncthreads();
      for (int element = threadIdx.x; element < fresh_rows * 16; element += THREADS) {
        const int row = element / 16, output = element % 16;
        fused[row * H + tile * 16 + output] = static_cast<T>(total_of(0, 0, WARPS, row, output));
      }
      __syncthreads();
    }
    if (!meet()) return;
  }

  // Level -1 reads the new rows, the others expand the depths of the tree.
  for (int level = fresh_rows ? -1 : 0; level < DEPTH; ++level) {
    const int count = level > 0 ? WIDTH : 1, base = level > 0 ? WIDTH + (level - 1) * WIDTH * WIDTH : 0;
    const T* states = level < 0 ? fused
        : level                 ? handed_on + (level - 1) * WIDTH * H
        : fresh_rows            ? newest
                                : last;
    const int* parents = level < 0 ? own_rows : all_parents + level * WIDTH;
    if (level >= 0) {
      // The head: of each state's logits a block keeps the best of its columns, and their sum of exponentials.
      for (int pass = 0; pass < PASSES; ++pass) {
        const int tile = (pass * HEAD_TILES + warp / SPLIT) * BLOCKS + blockIdx.x;
        point_at(states, H, count);
        const T* matrix = head;
        aerie::share_product<T, 1, TILES, WARPS>(
            &matrix, tile < VOCAB / 16 ? tile : 0, H, rows, final_norm, warp % SPLIT, SPLIT, partial, energy);
        __syncthreads();
        for (int element = threadIdx.x; element < count * HEAD_TILES * 16; element += THREADS) {
          const int row = element / (HEAD_TILES * 16), column = element % (HEAD_TILES * 16), from = column / 16 * SPLIT;
          const float value = SCALE * total_of(0, from, from + SPLIT, row, column % 16) *
              inverse_of(from, from + SPLIT, row);
          const bool exists = (pass * HEAD_TILES + column / 16) * BLOCKS + blockIdx.x < VOCAB / 16;
          logits[row * COLUMNS + pass * HEAD_TILES * 16 + column] = exists && !isnan(value) ? value : lowest;
        }
        __syncthreads();
      }
      for (int row = warp; row < count; row += WARPS) {
        const float* own = logits + row * COLUMNS;
        float peak = lowest, sum = 0.0f;
        for (int column = lane; column < COLUMNS; column += 32) peak = fmaxf(peak, own[column]);
        peak = aerie::max_lanes(peak);
        for (int column = lane; column < COLUMNS; column += 32) {
          sum += own[column] == lowest ? 0.0f : expf(own[column] - peak);
          int rank = 0;
          for (int other = 0; other < COLUMNS; ++other) {
            rank += own[other] > own[column] || (own[other] == own[column] && other < column);
          }
          if (rank >= WIDTH) continue;
          const int entry = (row * BLOCKS + blockIdx.x) * WIDTH + rank;
          list_values[entry] = own[column];
          list_ids[entry] = (column / 16 * BLOCKS + blockIdx.x) * 16 + column % 16;
        }
        sum = aerie::sum_lanes(sum);
        if (lane == 0) {
          list_sums[(row * BLOCKS + blockIdx.x) * 2] = peak;
          list_sums[(row * BLOCKS + blockIdx.x) * 2 + 1] = sum;
        }
      }
      if (!meet()) return;

      // The best children of a state: those of the lists with the best first entries, in the order (value, id).
      for (int row = blockIdx.x; row < count; row += BLOCKS) {
        float *firsts = partial, *values = firsts + BLOCKS;
        int* first_ids = reinterpret_cast<int*>(values + LISTS * WIDTH);
        int *lists = first_ids + BLOCKS, *ids = lists + LISTS;
        const float* own_values = list_values + row * BLOCKS * WIDTH;
        const int* own_ids = list_ids + row * BLOCKS * WIDTH;
        const float* own_sums = list_sums + row * BLOCKS * 2;
        for (int list = threadIdx.x; list < BLOCKS; list += THREADS) {
          firsts[list] = own_values[list * WIDTH];
          first_ids[list] = own_ids[list * WIDTH];
        }
        __syncthreads();
        for (int list = threadIdx.x; list < BLOCKS; list += THREADS) {
          int rank = 0;
          for (int other = 0; other < BLOCKS; ++other) {
            rank += firsts[other] > firsts[list] || (firsts[other] == firsts[list] && first_ids[other] < first_ids[list]);
          }
          if (rank < LISTS) lists[rank] = list;
        }
        if (warp == 0) {
          float peak = lowest, sum = 0.0f;
          for (int list = lane; list < BLOCKS; list += 32) peak = fmaxf(peak, own_sums[list * 2]);
          peak = aerie::max_lanes(peak);
          for (int list = lane; list < BLOCKS; list += 32) {
            if (own_sums[list * 2 + 1] > 0.0f) sum += own_sums[list * 2 + 1] * expf(own_sums[list * 2] - peak);
          }
          sum = aerie::sum_lanes(sum);
          if (lane == 0) energy[0] = peak + logf(sum);
        }
        __syncthreads();
        for (int entry = threadIdx.x; entry < LISTS * WIDTH; entry += THREADS) {
          values[entry] = own_values[lists[entry / WIDTH] * WIDTH + entry % WIDTH];
          ids[entry] = own_ids[lists[entry / WIDTH] * WIDTH + entry % WIDTH];
        }
        __syncthreads();
        for (int entry = threadIdx.x; entry < LISTS * WIDTH; entry += THREADS) {
          int rank = 0;
          for (int other = 0; other < LISTS * WIDTH; ++other) {
            rank += values[other] > values[entry] || (values[other] == values[entry] && ids[other] < ids[entry]);
          }
          if (rank >= WIDTH) continue;
          const float log_prob = values[entry] - energy[0];
          const int child = base + row * WIDTH + rank;
          answer[child] = grown[child] = __float_as_int(log_prob);
          answer[CHILDREN + child] = grown[CHILDREN + child] = labels[ids[entry]];
        }
        __syncthreads();
      }
      if (!meet()) return;
      if (level == DEPTH - 1) break;

      // The frontier, in every block: see kernels.frontier.
      for (int child = threadIdx.x; child < count * WIDTH; child += THREADS) {
        totals[child] = scores[child / WIDTH] + __int_as_float(grown[base + child]);
      }
      __syncthreads();
      for (int child = threadIdx.x; child < count * WIDTH; child += THREADS) {
        const bool lost = isnan(totals[child]);
        const float own = lost ? lowest : totals[child];
        int rank = 0;
        for (int other = 0; other < count * WIDTH; ++other) {
          const bool gone = isnan(totals[other]);
          const float value = gone ? lowest : totals[other];
          rank += value > own || (value == own && (gone < lost || (gone == lost && other < child)));
        }
        if (rank >= WIDTH) continue;
        all_parents[level * WIDTH + rank] = child / WIDTH;
        tokens[rank] = grown[CHILDREN + base + child];
        scores[rank] = totals[child];
        if (blockIdx.x == 0) answer[2 * CHILDREN + level * WIDTH + rank] = child;
      }
      __syncthreads();

    }

    // Queries, keys and values, from the embedding by one half of the warps and from the parent's state by the other.
    const int reads = level < 0 ? fresh_rows : WIDTH;
    float* joint = level < 0 ? new_joint : joints + level * WIDTH * JOINT;
    for (int tile = blockIdx.x; tile < JOINT / 16; tile += BLOCKS) {
      const bool embeds = warp < WARPS / 2;
      for (int t = 0; t < TILES; ++t) {
        const int row = t * 8 + group;
        rows[t] = row >= reads ? nullptr
            : embeds           ? embedding + static_cast<size_t>(tokens[row]) * H
                               : states + parents[row] * H;
      }
      const T* matrix = embeds ? by_embedding : by_state;
      aerie::share_product<T, 1, TILES, WARPS>(
          &matrix, tile, H, rows, embeds ? embedding_norm : state_norm, warp % (WARPS / 2), WARPS / 2, partial, energy);
      __syncthreads();
      for (int element = threadIdx.x; element < reads * 16; element += THREADS) {
        const int row = element / 16, output = element % 16;
        const float inverse = inverse_of(WARPS / 2, WARPS, row);
        joint[row * JOINT + tile * 16 + output] = total_of(0, 0, WARPS / 2, row, output) *
                inverse_of(0, WARPS / 2, row) + total_of(0, WARPS / 2, WARPS, row, output) * inverse;
        if (tile == 0 && output == 0) inverses[row] = inverse;
      }
      __syncthreads();
    }
    if (!meet()) return;

    // Attention over the true rows, the node's ancestors and itself: see kernels.tree_attention. Of the new rows only
    // the newest hands anything on.
    const int expands = level < 0 ? 1 : WIDTH, first_row = level < 0 ? fresh_rows - 1 : 0;
    constexpr int PIECE = 16 / sizeof(T), LANES = D / PIECE, GROUPS = THREADS / LANES, HALF = D / 2;
    const int member = threadIdx.x % LANES, keeper = threadIdx.x / LANES, at = member * PIECE;
    const int capacity = keys_shape[2];
    const int position = length + fresh_rows + level;  // a row sits one before its token
    auto rotate = [&](const float* from, int position, float* piece) {
      const float* angles = rotations + static_cast<size_t>(position) * D + (at < HALF ? at : at - HALF);
      for (int i = 0; i < PIECE; ++i) {
        const float other = from[at < HALF ? at + HALF + i : at - HALF + i];
        piece[i] = from[at + i] * angles[i] + (at < HALF ? -other : other) * angles[HALF + i];
      }
    };
    if (level < 0) {
      for (int item = blockIdx.x * GROUPS + keeper; item < fresh_rows * KV_HEADS; item += BLOCKS * GROUPS) {
        const int row = item / KV_HEADS, kv_head = item % KV_HEADS;
        const float* own = new_joint + row * JOINT;
        float key[PIECE];
        rotate(own + (HEADS + kv_head) * D, length + row, key);
        T* to = fresh + (kv_head * NEW + row) * D + at;
        for (int i = 0; i < PIECE; ++i) {
          to[i] = static_cast<T>(key[i]);
          to[KV_HEADS * NEW * D + i] = static_cast<T>(own[(HEADS + KV_HEADS + kv_head) * D + at + i]);
        }
      }
      if (blockIdx.x == 0 && threadIdx.x <= NEW) {
        commit[threadIdx.x] = threadIdx.x == 0 ? start : threadIdx.x <= fresh_rows ? threadIdx.x - 1 : -1;
      }
    }
    for (int item = blockIdx.x; item < expands * HEADS; item += BLOCKS) {
      const int row = item / HEADS, head_at = item % HEADS, kv_head = head_at / (HEADS / KV_HEADS);
      auto unpack = [](uint4 bytes, float* piece) {
        const T* narrow = reinterpret_cast<const T*>(&bytes);
        for (int i = 0; i < PIECE; ++i) piece[i] = static_cast<float>(narrow[i]);
      };
      float query[PIECE], key[PIECE], value[PIECE], out[PIECE] = {};
      float peak = lowest, total = 0.0f;
      rotate(joint + (first_row + row) * JOINT + head_at * D, position, query);
      for (int i = 0; i < PIECE; ++i) query[i] *= ATTENTION_SCALE;
      auto take = [&](bool seen) {
        float score = 0.0f;
        for (int i = 0; i < PIECE; ++i) score += query[i] * key[i];
        for (int offset = LANES / 2; offset; offset /= 2) score += __shfl_xor_sync(0xffffffffu, score, offset);
        if (!seen) return;
        const float next = fmaxf(peak, score);
        const float keep = expf(peak - next), weight = expf(score - next);
        for (int i = 0; i < PIECE; ++i) out[i] = out[i] * keep + weight * value[i];
        total = total * keep + weight;
        peak = next;
      };
      constexpr int AHEAD = 4;  // keys under way at once
      for (int first = keeper; first - keeper < start; first += GROUPS * AHEAD) {
        uint4 key_bytes[AHEAD], value_bytes[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          const int slot = min(first + i * GROUPS, start - 1);
          key_bytes[i] = *reinterpret_cast<const uint4*>(keys + (kv_head * capacity + slot) * D + at);
          value_bytes[i] = *reinterpret_cast<const uint4*>(values + (kv_head * capacity + slot) * D + at);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          const int slot = first + i * GROUPS, held = slot < SINKS ? slot : slot + dropped;
          unpack(key_bytes[i], key);
          unpack(value_bytes[i], value);
          take(slot < start && (held < SINKS || position - held < window));
        }
      }
      // New rows up to this one, then the node's ancestors, itself last.
      const int others = fresh_rows + level + 1;
      for (int first = keeper; first - keeper < others; first += GROUPS) {
        const int depth = max(first - fresh_rows, -1);
        const float* own = new_joint + min(first, fresh_rows - 1) * JOINT;
        int node = row;
        if (depth >= 0) {
          for (int up = level; up > depth; --up) node = all_parents[up * WIDTH + node];
          own = joints + (min(depth, max(level, 0)) * WIDTH + node) * JOINT;
        }
        const bool near = depth >= 0 || length + first < SINKS || position - length - first < window;
        const int from = min(length + first, position);
        rotate(own + (HEADS + kv_head) * D, from, key);
        for (int i = 0; i < PIECE; ++i) value[i] = own[(HEADS + KV_HEADS + kv_head) * D + at + i];
        take(first < others && near);
      }

      float *outs = partial, *peaks = energy, *weights = energy + GROUPS;
      if (member == 0) peaks[keeper] = peak;
      __syncthreads();
      float highest = lowest;
      for (int other = 0; other < GROUPS; ++other) highest = fmaxf(highest, peaks[other]);
      const float keep = peak == lowest ? 0.0f : expf(peak - highest);
      if (member == 0) weights[keeper] = total * keep;
      for (int i = 0; i < PIECE; ++i) outs[keeper * D + at + i] = out[i] * keep;
      __syncthreads();
      for (int dim = threadIdx.x; dim < D; dim += THREADS) {
        float sum = 0.0f, weight = 0.0f;
        for (int other = 0; other < GROUPS; ++other) {
          sum += outs[other * D + dim];
          weight += weights[other];
        }
        attended[row * QUERIES + head_at * D + dim] = static_cast<T>(sum / weight);
      }
      __syncthreads();
    }
    if (!meet()) return;

    for (int tile = blockIdx.x; tile < H / 16; tile += BLOCKS) {
      point_at(attended, QUERIES, expands);
      const T* matrix = output_weight;
      aerie::share_product<T, 1, TILES, WARPS>(
          &matrix, tile, QUERIES, rows, static_cast<const T*>(nullptr), warp, WARPS, partial, energy);
      __syncthreads();
      for (int element = threadIdx.x; element < expands * 16; element += THREADS) {
        const int row = element / 16, column = tile * 16 + element % 16;
        float residual = static_cast<float>(states[parents[first_row + row] * H + column]);
        if (NORM_RESIDUAL) residual *= inverses[first_row + row] * static_cast<float>(state_norm[column]);
        middle[row * H + column] = static_cast<T>(residual + total_of(0, 0, WARPS, row, element % 16));
      }
      __syncthreads();
    }
    if (!meet()) return;

    for (int tile = blockIdx.x; tile < INNER / 16; tile += BLOCKS) {
      point_at(middle, H, expands);
      const T* matrices[2] = {gate, up};
      aerie::share_product<T, 2, TILES, WARPS>(matrices, tile, H, rows, middle_norm, warp, WARPS, partial, energy);
      __syncthreads();
      for (int element = threadIdx.x; element < expands * 16; element += THREADS) {
        const int row = element / 16, output = element % 16;
        const float inverse = inverse_of(0, WARPS, row), gated = inverse * total_of(0, 0, WARPS, row, output);
        const float value = gated / (1.0f + expf(-gated)) * inverse * total_of(1, 0, WARPS, row, output);
        inner[row * INNER + tile * 16 + output] = static_cast<T>(value);
      }
      __syncthreads();
    }
    if (!meet()) return;

    for (int tile = blockIdx.x; tile < H / 16; tile += BLOCKS) {
      point_at(inner, INNER, expands);
      const T* matrix = down;
      aerie::share_product<T, 1, TILES, WARPS>(
          &matrix, tile, INNER, rows, static_cast<const T*>(nullptr), warp, WARPS, partial, energy);
      __syncthreads();
      for (int element = threadIdx.x; element < expands * 16; element += THREADS) {
        const int row = element / 16, column = tile * 16 + element % 16;
        T* out = level < 0 ? newest : handed_on + (level * WIDTH + row) * H;
        out[column] = static_cast<T>(
            static_cast<float>(middle[row * H + column]) + total_of(0, 0, WARPS, row, element % 16));
      }
      __syncthreads();
    }
    if (!meet()) return;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) answer[GROWN] = 0;
"""


@dataclass(frozen=True, eq=False)
class DraftLayer:
    """A drafter of one layer over (embedding, state), as the kernel takes it. All of one half-precision type.

    Attributes:
        embedding: [V, H].
        fuse: [H, taps Ht], from features to a state.
        by_embedding, by_state: [(heads + 2 kv_heads) d, H], queries, then keys, then values.
        output: [H, heads d].
        gate, up: [I, H].
        down: [H, I].
        head: [draft V, H].
        embedding_norm, state_norm, middle_norm, final_norm: [H].
        labels: [draft V] int32, the target's token ids.
        heads, kv_heads: Of the attention.
        eps: Of the norms.
        attention_scale, logit_scale: Factors.
        norm_residual: The residual is the normed state.
    """

    embedding: mx.array
    fuse: mx.array
    by_embedding: mx.array
    by_state: mx.array
    output: mx.array
    gate: mx.array
    up: mx.array
    down: mx.array
    head: mx.array
    embedding_norm: mx.array
    state_norm: mx.array
    middle_norm: mx.array
    final_norm: mx.array
    labels: mx.array
    heads: int
    kv_heads: int
    eps: float
    attention_scale: float
    logit_scale: float
    norm_residual: bool

    @property
    def head_dim(self) -> int:
        return self.by_embedding.shape[0] // (self.heads + 2 * self.kv_heads)


class Round(NamedTuple):
    """What stays on the device.

    Attributes:
        newest: [1, H], the state that the newest row hands on.
        rows: Keys and values [1, kv_heads, MOST_ROWS, d] of the new rows.
        commit: [1 + MOST_ROWS] int32, the slot of the first new row and their order, -1 beyond the last.
    """

    newest: mx.array
    rows: tuple[mx.array, mx.array]
    commit: mx.array


_ARRAYS = (
    "embedding",
    "fuse",
    "by_embedding",
    "by_state",
    "output_weight",
    "gate",
    "up",
    "down",
    "head",
    "embedding_norm",
    "state_norm",
    "middle_norm",
    "final_norm",
    "labels",
)
_INPUTS = ("mailbox", "last", "keys", "values", "rotations", *_ARRAYS)


def supports(layer: DraftLayer, depth: int, width: int, blocks: int) -> bool:
    """Half precision, sizes in whole tiles, trees whose rows are a product's, and what a block can share."""
    (hidden, features), queries, vocab = layer.fuse.shape, layer.output.shape[1], layer.head.shape[0]
    columns = -(-vocab // (16 * blocks * _HEAD_TILES)) * _HEAD_TILES * 16
    rows = -(-max(width, MOST_ROWS) // 8) * 8
    shared = _WARPS * (2 * rows * 17 + 16) + width * (columns + width + 1 + depth) + rows + 16
    return (
        layer.embedding.dtype in (mx.float16, mx.bfloat16)
        and layer.head_dim in (32, 64, 128)
        and not any(size % 32 for size in (hidden, features, queries, layer.gate.shape[0]))
        and not any(size % 16 for size in (layer.by_embedding.shape[0], vocab))
        and 0 < width <= min(_MOST_WIDTH, vocab)
        and 0 < depth <= _MOST_DEPTH
        and 4 * shared <= _SHARED_BYTES
    )


def count_answer(depth: int, width: int) -> int:
    """Words of a round's answer."""
    return 2 * (width + (depth - 1) * width * width) + (depth - 1) * width + 1


def run_round(
    layer: DraftLayer,
    mailbox: mx.array,
    feature_dtype: mx.Dtype,
    last: mx.array,
    cache: tuple[mx.array, mx.array],
    rotations: mx.array,
    depth: int,
    width: int,
    sinks: int,
    blocks: int,
) -> Round:
    """Read the newest rows, then expand the ``width`` best nodes of every depth but the last.

    As ``read`` and ``services.drafter.growth.propose`` do with the same drafter. The host tells, in memory that the
    device reads: rows in the cache (at least one), rows dropped from it, the window, the number of new rows,
    MOST_ROWS tokens (TOLD words so far), then the new rows' features [new, taps Ht]. The device answers
    ``count_answer`` words: bits of all children's log-probabilities, depth by depth, their tokens, the picks of each
    depth but the last, and 0; that last word stays as it was when blocks waited in vain for each other.

    Args:
        layer: The drafter.
        mailbox: [2] int64, the addresses of what is told and of the answer.
        feature_dtype: Of the features.
        last: [1, H], the state that predicts the root's children; not read when there are new rows.
        cache: Keys and values [1, kv_heads, capacity, d] of the true rows.
        rotations: [positions, d] float32, ``rotation_table`` of 0, 1, ..., beyond the deepest row's position.
        depth, width: Of the tree.
        sinks: First positions, which every row sees.
        blocks: At most what the GPU runs at the same time.
    """
    (hidden, features), inner, head_dim = layer.fuse.shape, layer.gate.shape[0], layer.head_dim
    queries, joint, kv_heads = layer.output.shape[1], layer.by_embedding.shape[0], layer.kv_heads
    held = 2 * kv_heads * MOST_ROWS * head_dim
    halves = hidden + held + width * (queries + hidden + inner + (depth - 1) * hidden) + MOST_ROWS * (features + hidden)
    words = 32 + halves // 2 + (MOST_ROWS + (depth - 1) * width) * joint + max(width, MOST_ROWS) + 8
    words += 2 * width * blocks * (width + 1) + count_answer(depth, width)
    literals = {
        "ATTENTION_SCALE": write_float(layer.attention_scale),
        "SCALE": write_float(layer.logit_scale),
        "EPS": write_float(layer.eps),
    }
    source = _SOURCE
    for name, value in literals.items():
        source = source.replace(name, value)
    kernel = build_cuda_kernel("draft_round", _INPUTS, ("scratch",), source, _HEADER)
    arrays = [getattr(layer, name.removesuffix("_weight")) for name in _ARRAYS]
    (scratch,) = kernel(
        inputs=[mailbox, last, *cache, rotations, *arrays],
        template=[
            ("T", layer.embedding.dtype),
            ("U", feature_dtype),
            ("H", hidden),
            ("FEATURES", features),
            ("HEADS", layer.heads),
            ("KV_HEADS", kv_heads),
            ("D", head_dim),
            ("INNER", inner),
            ("VOCAB", layer.head.shape[0]),
            ("NEW", MOST_ROWS),
            ("DEPTH", depth),
            ("WIDTH", width),
            ("SINKS", sinks),
            ("BLOCKS", blocks),
            ("THREADS", _THREADS),
            ("WARPS", _WARPS),
            ("HEAD_TILES", _HEAD_TILES),
            ("NORM_RESIDUAL", int(layer.norm_residual)),
            ("PATIENCE", _PATIENCE),
        ],
        grid=(blocks * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(words,)],
        output_dtypes=[mx.float32],
        init_value=0,
    )
    kept = scratch[32 : 32 + (hidden + held) // 2].view(layer.embedding.dtype)
    rows = kept[hidden:].reshape(2, 1, kv_heads, MOST_ROWS, head_dim)
    return Round(kept[:hidden][None], (rows[0], rows[1]), scratch[4 : 5 + MOST_ROWS].view(mx.int32))
