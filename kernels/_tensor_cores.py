"""What CUDA sources that multiply on tensor cores share: one instruction, and pairs of half-precision values."""

HEADER = """
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
__device__ inline float2 floats(unsigned pair, __half) { return __half22float2(*reinterpret_cast<__half2*>(&pair)); }
__device__ inline float2 floats(unsigned pair, __nv_bfloat16) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
}
// Four pairs times four others.
template <typename T>
__device__ inline void multiply(unsigned* pairs, const unsigned* gains) {
  for (int i = 0; i < 4; ++i) {
    float2 value = floats(pairs[i], T()), gain = floats(gains[i], T());
    pairs[i] = pair(value.x * gain.x, value.y * gain.y, T());
  }
}
template <typename T>
__device__ inline float squares_of(const unsigned* pairs) {
  float total = 0.0f;
  for (int i = 0; i < 4; ++i) {
    float2 value = floats(pairs[i], T());
    total += value.x * value.x + value.y * value.y;
  }
  return total;
}
}  // namespace aerie
"""
