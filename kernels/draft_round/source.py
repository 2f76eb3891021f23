"""The body of a round's kernel: memory, the meeting of all blocks, and the order of the steps."""

from kernels.draft_round.choose import CHOOSE
from kernels.draft_round.expand import EXPAND

_SETUP = """
  constexpr int TILES = ((WIDTH > NEW ? WIDTH : NEW) + 7) / 8, ROWS = TILES * 8;
  constexpr int QUERIES = HEADS * D, JOINT = QUERIES + 2 * KV_HEADS * D;
  constexpr int SPLIT = WARPS / HEAD_TILES;  // warps of one of the head's tiles
  constexpr int PASSES = (VOCAB / 16 + BLOCKS * HEAD_TILES - 1) / (BLOCKS * HEAD_TILES);
  constexpr int COLUMNS = PASSES * HEAD_TILES * 16, LISTS = WIDTH < BLOCKS ? WIDTH : BLOCKS;
  const float lowest = __int_as_float(0xff800000);  // minus infinity
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4;

  // What the host tells, and is told: its own memory.
  const int* told = reinterpret_cast<const int*>(mailbox[0]);
  int* answer = reinterpret_cast<int*>(mailbox[1]);
  // What blocks tell each other, and what is handed on.
  unsigned* counter = reinterpret_cast<unsigned*>(scratch);
  int* commit = reinterpret_cast<int*>(scratch + 4);       // [1 + NEW]: where new rows go, then their order
  T* fresh = reinterpret_cast<T*>(scratch + 32);           // [2, KV_HEADS, NEW, D]: keys and values of the new rows
  T* attended = fresh + 2 * KV_HEADS * NEW * D;            // [WIDTH, QUERIES]
  T* middle = attended + WIDTH * QUERIES;                  // [WIDTH, H]
  T* inner = middle + WIDTH * H;                           // [WIDTH, INNER]
  T* handed_on = inner + WIDTH * INNER;                    // [MOST_DEPTH, WIDTH, H]
  T* taken = handed_on + MOST_DEPTH * WIDTH * H;          // [NEW, FEATURES]
  T* fused = taken + NEW * FEATURES;                       // [NEW, H]
  float* new_joint = reinterpret_cast<float*>(fused + NEW * H);  // [NEW, JOINT]: queries, keys, values
  float* joints = new_joint + NEW * JOINT;                 // [MOST_DEPTH, WIDTH, JOINT]
  float* inverses = joints + MOST_DEPTH * WIDTH * JOINT;  // [ROWS]
  float* list_values = inverses + ROWS;                    // [WIDTH, BLOCKS, WIDTH]: each block's best, best first
  int* list_ids = reinterpret_cast<int*>(list_values + WIDTH * BLOCKS * WIDTH);
  float* list_sums = reinterpret_cast<float*>(list_ids + WIDTH * BLOCKS * WIDTH);  // [WIDTH, BLOCKS, 2]
  int* grown = reinterpret_cast<int*>(list_sums + WIDTH * BLOCKS * 2);             // as the answer

  __shared__ float partial[WARPS * 2 * ROWS * 17];
  __shared__ float energy[WARPS * 16], logits[WIDTH * COLUMNS];
  __shared__ float totals[WIDTH * WIDTH], scores[WIDTH];
  __shared__ int tokens[ROWS], all_parents[MOST_DEPTH * WIDTH], own_rows[NEW], place[5];
  if (threadIdx.x < 5) place[threadIdx.x] = told[threadIdx.x];
  if (threadIdx.x < NEW) {
    tokens[threadIdx.x] = told[TOLD - NEW + threadIdx.x];
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
  const int start = place[0], dropped = place[1], window = place[2], fresh_rows = place[3], depths = place[4];
  const int children = WIDTH + (depths - 1) * WIDTH * WIDTH;
  const int length = start + dropped;  // position of the first new row
  if (fresh_rows) {
    const U* features = reinterpret_cast<const U*>(told + TOLD);
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
  for (int level = fresh_rows ? -1 : 0; level < depths; ++level) {
    const int count = level > 0 ? WIDTH : 1, base = level > 0 ? WIDTH + (level - 1) * WIDTH * WIDTH : 0;
    const T* states = level < 0 ? fused
        : level                 ? handed_on + (level - 1) * WIDTH * H
        : fresh_rows            ? newest
                                : last;
    const int* parents = level < 0 ? own_rows : all_parents + level * WIDTH;
"""

SOURCE = _SETUP + CHOOSE + EXPAND
