"""Products of 2 to 64 rows on tensor cores.

MLX's own take tiles of 64 and more rows: at 16 rows and these sizes its 4-bit product costs three times its one-row
product (20 to 26 us against 7 on an H200), cuBLAS's dense one twice.
"""

import mlx.core as mx

from kernels._cuda import build_cuda_kernel

MOST_ROWS = 64
_WARPS = 4

_HEADER = """
namespace aerie {
// D += A B with A [16, 16] weights, B [16, 8] activations (PTX ISA, mma.m16n8k16).
__device__ inline void mma(float* d, const unsigned* a, const unsigned* b, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void mma(float* d, const unsigned* a, const unsigned* b, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline unsigned pair(float low, float high, __half) {
  __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<unsigned*>(&both);
}
__device__ inline unsigned pair(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<unsigned*>(&both);
}
// Eight values of 4 bits, low first -> four pairs.
template <typename T>
__device__ inline void unpack(unsigned packed, float scale, float bias, unsigned* pairs) {
  for (int i = 0; i < 4; ++i) {
    float low = scale * ((packed >> (8 * i)) & 15u) + bias, high = scale * ((packed >> (8 * i + 4)) & 15u) + bias;
    pairs[i] = pair(low, high, T());
  }
}
}  // namespace aerie
"""

# A block makes 16 outputs of all rows; its warps split K in chunks of 32 and add up in shared memory. A thread holds
# eight consecutive values of K where the instruction wants four pairs: any order of K does, if A and B agree.
_SOURCE = """
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = lane / 4, quarter = lane % 4;
  const int rows = x_shape[0], width = x_shape[1], outputs = gridDim.x * 16;
  const int first = blockIdx.x * 16 + group, second = first + 8;
  const int chunks = width / 32;
  float sums[TILES][4] = {};

  for (int chunk = warp; chunk < chunks; chunk += WARPS) {
    unsigned a[2][4];  // the two weight rows, four pairs each
    LOAD_WEIGHTS
    for (int tile = 0; tile < TILES; ++tile) {
      int row = tile * 8 + group;
      uint4 b = make_uint4(0, 0, 0, 0);
      if (row < rows) b = *reinterpret_cast<const uint4*>(x + row * width + chunk * 32 + quarter * 8);
      unsigned a_low[4] = {a[0][0], a[1][0], a[0][1], a[1][1]}, b_low[2] = {b.x, b.y};
      unsigned a_high[4] = {a[0][2], a[1][2], a[0][3], a[1][3]}, b_high[2] = {b.z, b.w};
      aerie::mma(sums[tile], a_low, b_low, T());
      aerie::mma(sums[tile], a_high, b_high, T());
    }
  }

  __shared__ float partial[WARPS][TILES * 8][17];  // [row][output]; 17 spreads the banks
  for (int tile = 0; tile < TILES; ++tile) {
    for (int i = 0; i < 4; ++i) {
      partial[warp][tile * 8 + quarter * 2 + i % 2][group + 8 * (i / 2)] = sums[tile][i];
    }
  }
  __syncthreads();
  for (int element = threadIdx.x; element < rows * 16; element += blockDim.x) {
    int row = element / 16, output = element % 16;
    float total = 0.0f;
    for (int other = 0; other < WARPS; ++other) total += partial[other][row][output];
    out[row * outputs + blockIdx.x * 16 + output] = static_cast<T>(total);
  }
"""
_DENSE = """
    *reinterpret_cast<uint4*>(a[0]) =
        *reinterpret_cast<const uint4*>(weight + static_cast<size_t>(first) * width + chunk * 32 + quarter * 8);
    *reinterpret_cast<uint4*>(a[1]) =
        *reinterpret_cast<const uint4*>(weight + static_cast<size_t>(second) * width + chunk * 32 + quarter * 8);
"""
_QUANTIZED = """
    const int groups = width / GROUP, at = chunk * 32 / GROUP;
    aerie::unpack<T>(
        weight[first * (width / 8) + chunk * 4 + quarter],
        static_cast<float>(scales[first * groups + at]),
        static_cast<float>(biases[first * groups + at]),
        a[0]);
    aerie::unpack<T>(
        weight[second * (width / 8) + chunk * 4 + quarter],
        static_cast<float>(scales[second * groups + at]),
        static_cast<float>(biases[second * groups + at]),
        a[1]);
"""


def supports(x: mx.array, outputs: int, dtype: mx.Dtype) -> bool:
    """2 to 64 rows of half precision, K in whole chunks of 32 and N of 16."""
    rows = x.size // x.shape[-1]
    half = x.dtype == dtype and dtype in (mx.float16, mx.bfloat16)
    return half and 1 < rows <= MOST_ROWS and x.shape[-1] % 32 == 0 and outputs % 16 == 0


def dense(x: mx.array, weight: mx.array) -> mx.array:
    """See ``kernels.small_matmul.small_matmul``."""
    return _run("dense_matmul", _DENSE, x, weight.shape[0], {"weight": weight}, {})


def quantized(x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, group_size: int) -> mx.array:
    """See ``kernels.small_matmul.small_quantized_matmul``."""
    arrays = {"weight": weight, "scales": scales, "biases": biases}
    return _run("quantized_matmul", _QUANTIZED, x, weight.shape[0], arrays, {"GROUP": group_size})


def _run(
    name: str, load: str, x: mx.array, outputs: int, weights: dict[str, mx.array], constants: dict[str, int]
) -> mx.array:
    flat = mx.contiguous(x.reshape(-1, x.shape[-1]))
    rows = flat.shape[0]
    source = _SOURCE.replace("    LOAD_WEIGHTS", load)
    kernel = build_cuda_kernel(name, ("x", *weights), ("out",), source, _HEADER)
    (out,) = kernel(
        inputs=[flat, *weights.values()],
        template=[("T", x.dtype), ("TILES", -(-rows // 8)), ("WARPS", _WARPS), *constants.items()],
        grid=(outputs // 16 * _WARPS * 32, 1, 1),
        threadgroup=(_WARPS * 32, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[x.dtype],
    )
    return out.reshape(*x.shape[:-1], outputs)
