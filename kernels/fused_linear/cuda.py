"""Linear layers of 2 to 64 rows on tensor cores, with their norm, residual or SwiGLU in the same launch.

MLX's own products take tiles of 64 and more rows: at 16 rows of 576 to 1536 the 4-bit one takes 20 to 26 us on an
H200, against 7 for one row. And a forward of a small model is bound by the number of its launches.
"""

from collections.abc import Sequence

import mlx.core as mx

from kernels._cuda import build_cuda_kernel, write_float
from kernels._tensor_cores import HEADER
from kernels.fused_linear.weight import Weight

MOST_ROWS = 64
_MOST_WARPS = 20
_ROWS = 16
"""Rows of a block: more blocks, each with little to wait for, beat reading weights once."""

_HEADER = (
    HEADER
    + """
namespace aerie {
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
)

# A block makes 16 outputs of up to 16 rows; its warps split K in chunks of 32 and add up in shared memory: with one
# chunk a warp all loads are under way at once. A thread holds eight consecutive values of K where the instruction
# wants four pairs: any order of K does, if A and B agree.
_SOURCE = """
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = lane / 4, quarter = lane % 4;
  const int outputs = gridDim.x * 16, base = blockIdx.y * TILES * 8;
  int all = 1;
  for (int i = 0; i + 1 < x_ndim; ++i) all *= x_shape[i];
  const int rows = min(all - base, TILES * 8);
  const int first = blockIdx.x * 16 + group, second = first + 8;
  float sums[PRODUCTS][TILES][4] = {};
  DECLARE_SQUARES

  for (int chunk = warp; chunk < K / 32; chunk += WARPS) {
    const int at = chunk * 32 + quarter * 8;
    alignas(16) unsigned a[PRODUCTS][2][4], b[TILES][4];  // a: per weight, two of its rows, four pairs each
    for (int tile = 0; tile < TILES; ++tile) {
      const int row = tile * 8 + group;
      *reinterpret_cast<uint4*>(b[tile]) = row < rows
          ? *reinterpret_cast<const uint4*>(x + static_cast<size_t>(base + row) * K + at) : make_uint4(0, 0, 0, 0);
    }
    LOAD_WEIGHTS
    ADD_SQUARES
    for (int product = 0; product < PRODUCTS; ++product) {
      unsigned(*w)[4] = a[product];
      unsigned a_low[4] = {w[0][0], w[1][0], w[0][1], w[1][1]}, a_high[4] = {w[0][2], w[1][2], w[0][3], w[1][3]};
      for (int tile = 0; tile < TILES; ++tile) {
        aerie::mma(sums[product][tile], a_low, b[tile], T());
        aerie::mma(sums[product][tile], a_high, b[tile] + 2, T());
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
  SHARE_SQUARES
  __syncthreads();
  for (int element = threadIdx.x; element < rows * 16; element += blockDim.x) {
    const int row = element / 16, output = element % 16;
    float totals[PRODUCTS] = {};
    for (int product = 0; product < PRODUCTS; ++product) {
      for (int other = 0; other < WARPS; ++other) totals[product] += partial[product][other][row][output];
    }
    NORMALISE
    const size_t place = static_cast<size_t>(base + row) * outputs + blockIdx.x * 16 + output;
    out[place] = static_cast<T>(RESULT);
  }
"""
_ADDED = "totals[0] + static_cast<float>(residual[place])"
_SWIGLU = "totals[0] / (1.0f + expf(-totals[0])) * totals[1]"
# The norm costs no pass of its own: its weight multiplies the matrix, and a row's scale comes last.
_NORM = {
    "DECLARE_SQUARES": "float squares[TILES] = {};",
    "ADD_SQUARES": """
    alignas(16) unsigned gains[4];
    *reinterpret_cast<uint4*>(gains) = *reinterpret_cast<const uint4*>(norm + at);
    for (int product = 0; product < PRODUCTS; ++product) {
      for (int half = 0; half < 2; ++half) aerie::multiply<T>(a[product][half], gains);
    }
    for (int tile = 0; tile < TILES; ++tile) squares[tile] += aerie::squares_of<T>(b[tile]);
""",
    "SHARE_SQUARES": """
  __shared__ float energy[WARPS][TILES * 8];
  for (int tile = 0; tile < TILES; ++tile) {
    float sum = squares[tile];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (quarter == 0) energy[warp][tile * 8 + group] = sum;
  }
""",
    "NORMALISE": """
    float sum = 0.0f;
    for (int other = 0; other < WARPS; ++other) sum += energy[other][row];
    const float inverse = rsqrtf(sum / K + EPS);
    for (int product = 0; product < PRODUCTS; ++product) totals[product] *= inverse;
""",
}


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
    return _run("linear", x, [weight], "totals[0]")


def norm_linear(x: mx.array, norm: mx.array, eps: float, weight: Weight) -> mx.array:
    """See ``kernels.fused_linear.norm_linear``."""
    return _run("norm_linear", x, [weight], "totals[0]", norm=norm, eps=eps)


def linear_add(x: mx.array, weight: Weight, residual: mx.array) -> mx.array:
    """See ``kernels.fused_linear.linear_add``."""
    return _run("linear_add", x, [weight], _ADDED, residual=residual)


def norm_linear_add(x: mx.array, norm: mx.array, eps: float, weight: Weight, residual: mx.array) -> mx.array:
    """See ``kernels.fused_linear.norm_linear_add``."""
    return _run("norm_linear_add", x, [weight], _ADDED, norm=norm, eps=eps, residual=residual)


def norm_swiglu(x: mx.array, norm: mx.array, eps: float, gate: Weight, up: Weight) -> mx.array:
    """See ``kernels.fused_linear.norm_swiglu``."""
    return _run("norm_swiglu", x, [gate, up], _SWIGLU, norm=norm, eps=eps)


def write_source(weights: Sequence[Weight], eps: float | None, result: str) -> str:
    """The body for these weights: what is loaded, how, and what becomes of the totals; without eps no norm."""
    loads = []
    for index, weight in enumerate(weights):
        for half, row in enumerate(("first", "second")):
            if weight.scales is None:
                call = f"load_dense<T>(weight{index}, {row}, K, at, a[{index}][{half}]);"
            else:
                kind = f"load_packed<T, uint32_t, {weight.group_size}>"
                call = f"{kind}(weight{index}, scales{index}, biases{index}, {row}, K, at, a[{index}][{half}]);"
            loads.append(f"    aerie::{call}")
    source = _SOURCE.replace("    LOAD_WEIGHTS", "\n".join(loads)).replace("RESULT", result)
    for mark, part in _NORM.items():
        source = source.replace(mark, "" if eps is None else part.replace("EPS", write_float(eps)))
    return source


def _run(
    name: str,
    x: mx.array,
    weights: Sequence[Weight],
    result: str,
    norm: mx.array | None = None,
    eps: float | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    rows, width, outputs = x.size // x.shape[-1], x.shape[-1], weights[0].outputs
    chunks = width // 32
    warps = -(-chunks // -(-chunks // _MOST_WARPS))
    inputs = {"x": x}
    if norm is not None:
        inputs["norm"] = norm.astype(x.dtype)
    if residual is not None:
        inputs["residual"] = residual.astype(x.dtype)
    for index, weight in enumerate(weights):
        named = zip(("weight", "scales", "biases"), weight.arrays(), strict=False)
        inputs |= {f"{part}{index}": array for part, array in named}
    kernel = build_cuda_kernel(name, tuple(inputs), ("out",), write_source(weights, eps, result), _HEADER)
    (out,) = kernel(
        inputs=list(inputs.values()),
        template=[
            ("T", x.dtype),
            ("K", width),
            ("TILES", min(-(-rows // 8), _ROWS // 8)),
            ("WARPS", warps),
            ("PRODUCTS", len(weights)),
        ],
        grid=(outputs // 16 * warps * 32, -(-rows // _ROWS), 1),
        threadgroup=(warps * 32, 1, 1),
        output_shapes=[(*x.shape[:-1], outputs)],
        output_dtypes=[x.dtype],
    )
    return out
