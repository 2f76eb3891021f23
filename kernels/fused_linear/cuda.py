"""Linear layers of 2 to 64 rows on tensor cores, with their norm, residual or SwiGLU in the same launch.

MLX's own products take tiles of 64 and more rows: at 16 rows of 576 to 1536 the 4-bit one takes 20 to 26 us on an
H200, against 7 for one row. And a forward of a small model is bound by the number of its launches.
"""

from collections.abc import Sequence

import mlx.core as mx

from kernels._cuda import build_cuda_kernel
from kernels.fused_linear.weight import Weight

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
// Eight consecutive values of a dense row -> four pairs.
template <typename T>
__device__ inline void load_dense(const T* weight, int row, int width, int at, unsigned* pairs) {
  *reinterpret_cast<uint4*>(pairs) = *reinterpret_cast<const uint4*>(weight + static_cast<size_t>(row) * width + at);
}
// Eight consecutive values of a row of 4 bits, low first -> four pairs.
template <typename T, typename U, int GROUP>
__device__ inline void load_packed(
    const U* weight, const T* scales, const T* biases, int row, int width, int at, unsigned* pairs) {
  unsigned packed = weight[(static_cast<size_t>(row) * width + at) / 8];
  size_t group = static_cast<size_t>(row) * (width / GROUP) + at / GROUP;
  float scale = static_cast<float>(scales[group]), bias = static_cast<float>(biases[group]);
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
  float sums[PRODUCTS][TILES][4] = {};
  PROLOGUE

  for (int chunk = warp; chunk < chunks; chunk += WARPS) {
    const int at = chunk * 32 + quarter * 8;
    unsigned a[PRODUCTS][2][4];  // per weight, two of its rows, four pairs each
    LOAD_WEIGHTS
    for (int tile = 0; tile < TILES; ++tile) {
      int row = tile * 8 + group;
      uint4 b = make_uint4(0, 0, 0, 0);
      if (row < rows) {
        b = *reinterpret_cast<const uint4*>(x + row * width + at);
        LOAD_NORM
      }
      unsigned b_low[2] = {b.x, b.y}, b_high[2] = {b.z, b.w};
      for (int product = 0; product < PRODUCTS; ++product) {
        unsigned(*w)[4] = a[product];
        unsigned a_low[4] = {w[0][0], w[1][0], w[0][1], w[1][1]}, a_high[4] = {w[0][2], w[1][2], w[0][3], w[1][3]};
        aerie::mma(sums[product][tile], a_low, b_low, T());
        aerie::mma(sums[product][tile], a_high, b_high, T());
      }
    }
  }

  __shared__ float partial[PRODUCTS][WARPS][TILES * 8][17];  // [row][output]; 17 spreads the banks
  for (int product = 0; product < PRODUCTS; ++product) {
    for (int tile = 0; tile < TILES; ++tile) {
      for (int i = 0; i < 4; ++i) {
        partial[product][warp][tile * 8 + quarter * 2 + i % 2][group + 8 * (i / 2)] = sums[product][tile][i];
      }
    }
  }
  __syncthreads();
  for (int element = threadIdx.x; element < rows * 16; element += blockDim.x) {
    int row = element / 16, output = element % 16;
    float totals[PRODUCTS] = {};
    for (int product = 0; product < PRODUCTS; ++product) {
      for (int other = 0; other < WARPS; ++other) totals[product] += partial[product][other][row][output];
    }
    const int place = row * outputs + blockIdx.x * 16 + output;
    out[place] = static_cast<T>(RESULT);
  }
"""
_ADDED = "totals[0] + static_cast<float>(residual[place])"
_NORM_PROLOGUE = """
  __shared__ float inverse[TILES * 8];
  for (int row = warp; row < rows; row += WARPS) {
    float squares = 0.0f;
    for (int k = lane; k < width; k += 32) {
      float value = static_cast<float>(x[row * width + k]);
      squares += value * value;
    }
    for (int offset = 16; offset; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    if (lane == 0) inverse[row] = rsqrtf(squares / width + eps[0]);
  }
  __syncthreads();
"""
_NORM_LOAD = """
        T* values = reinterpret_cast<T*>(&b);
        for (int i = 0; i < 8; ++i) {
          values[i] = static_cast<T>(
              static_cast<float>(values[i]) * inverse[row] * static_cast<float>(norm[at + i]));
        }
"""


def supports(x: mx.array, weight: Weight) -> bool:
    """2 to 64 rows of half precision, K in whole chunks of 32 and N of 16; weights dense or of 4 bits."""
    rows, width = x.size // x.shape[-1], x.shape[-1]
    if x.dtype not in (mx.float16, mx.bfloat16) or not 1 < rows <= MOST_ROWS or width % 32 or weight.outputs % 16:
        return False
    if weight.scales is None:
        return weight.array.dtype == x.dtype
    packed = weight.bits == 4 and weight.group_size in (32, 64, 128) and weight.biases is not None
    return packed and weight.scales.dtype == x.dtype


def linear(x: mx.array, weight: Weight) -> mx.array:
    """See ``kernels.fused_linear.linear``."""
    return _run("linear", x, [weight], {}, "totals[0]")


def norm_linear(x: mx.array, norm: mx.array, eps: float, weight: Weight) -> mx.array:
    """See ``kernels.fused_linear.norm_linear``."""
    return _run("norm_linear", x, [weight], {"norm": norm, "eps": mx.array([eps], mx.float32)}, "totals[0]")


def linear_add(x: mx.array, weight: Weight, residual: mx.array) -> mx.array:
    """See ``kernels.fused_linear.linear_add``."""
    return _run("linear_add", x, [weight], {"residual": mx.contiguous(residual)}, _ADDED)


def norm_linear_add(x: mx.array, norm: mx.array, eps: float, weight: Weight, residual: mx.array) -> mx.array:
    """See ``kernels.fused_linear.norm_linear_add``."""
    extras = {"norm": norm, "eps": mx.array([eps], mx.float32), "residual": mx.contiguous(residual)}
    return _run("norm_linear_add", x, [weight], extras, _ADDED)


def norm_swiglu(x: mx.array, norm: mx.array, eps: float, gate: Weight, up: Weight) -> mx.array:
    """See ``kernels.fused_linear.norm_swiglu``."""
    extras = {"norm": norm, "eps": mx.array([eps], mx.float32)}
    return _run("norm_swiglu", x, [gate, up], extras, "totals[0] / (1.0f + expf(-totals[0])) * totals[1]")


def write_source(weights: Sequence[Weight], norm: bool, result: str) -> str:
    """The body for these weights: what is loaded, how, and what becomes of the totals."""
    loads = []
    for index, weight in enumerate(weights):
        for half, row in enumerate(("first", "second")):
            if weight.scales is None:
                call = f"load_dense<T>(weight{index}, {row}, width, at, a[{index}][{half}]);"
            else:
                kind = f"load_packed<T, uint32_t, {weight.group_size}>"
                call = f"{kind}(weight{index}, scales{index}, biases{index}, {row}, width, at, a[{index}][{half}]);"
            loads.append(f"    aerie::{call}")
    source = _SOURCE.replace("    LOAD_WEIGHTS", "\n".join(loads)).replace("RESULT", result)
    source = source.replace("  PROLOGUE", _NORM_PROLOGUE if norm else "")
    return source.replace("        LOAD_NORM", _NORM_LOAD if norm else "")


def _run(name: str, x: mx.array, weights: Sequence[Weight], extras: dict[str, mx.array], result: str) -> mx.array:
    outputs = weights[0].outputs
    flat = mx.contiguous(x.reshape(-1, x.shape[-1]))
    rows = flat.shape[0]
    inputs = {"x": flat, **extras}
    for index, weight in enumerate(weights):
        named = zip(("weight", "scales", "biases"), weight.arrays(), strict=False)
        inputs |= {f"{part}{index}": array for part, array in named}
    source = write_source(weights, "norm" in extras, result)
    kernel = build_cuda_kernel(name, tuple(inputs), ("out",), source, _HEADER)
    (out,) = kernel(
        inputs=list(inputs.values()),
        template=[("T", x.dtype), ("TILES", -(-rows // 8)), ("WARPS", _WARPS), ("PRODUCTS", len(weights))],
        grid=(outputs // 16 * _WARPS * 32, 1, 1),
        threadgroup=(_WARPS * 32, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[x.dtype],
    )
    return out.reshape(*x.shape[:-1], outputs)
