"""What a round's kernel does again and again: a product of a few rows on tensor cores, shared by a block's warps."""

from kernels._tensor_cores import HEADER as _TENSOR_CORES

HEADER = (
    _TENSOR_CORES
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
