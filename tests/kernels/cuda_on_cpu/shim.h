// CUDA's names for kernel bodies that run on the CPU: a block's threads are fibers that take turns, and blocks that
// wait for each other are threads.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __grid_constant__
#define __shared__ static thread_local  // a thread runs one block at a time
using std::isnan, std::max, std::min;

struct dim3 { int x = 1, y = 1, z = 1; };
struct uint4 { unsigned x, y, z, w; };  // not aligned as on a GPU: MLX's arrays on the CPU are not
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using Shape = std::array<int, 8>;
using Strides = std::array<long long, 8>;

using __half = _Float16;
struct __half2 { __half x, y; };
inline __half2 __floats2half2_rn(float x, float y) { return {static_cast<__half>(x), static_cast<__half>(y)}; }
inline float2 __half22float2(__half2 v) { return {static_cast<float>(v.x), static_cast<float>(v.y)}; }
struct __nv_bfloat16 {
  uint16_t bits = 0;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    bits = static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
  explicit operator float() const {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {static_cast<float>(v.x), static_cast<float>(v.y)}; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __int_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace fibers {
enum class Wait { none, block, warp, done };
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Wait wait = Wait::none;
  int thread = 0;
  unsigned exchanges = 0;
};
inline thread_local std::vector<Fiber> all;
inline thread_local Fiber* current;
inline thread_local ucontext_t scheduler;
inline thread_local std::function<void()> body;
struct alignas(16) Slot { char bytes[64]; };
inline thread_local std::vector<Slot> slots[2];  // two sets: a lane may be one exchange ahead of another

inline void pause(Wait why) {
  current->wait = why;
  swapcontext(&current->context, &scheduler);
}
inline void enter() {
  body();
  current->wait = Wait::done;
  swapcontext(&current->context, &scheduler);
}
inline void resume(Fiber& fiber) {
  current = &fiber;
  fiber.wait = Wait::none;
  threadIdx = {fiber.thread, 0, 0};
  swapcontext(&scheduler, &fiber.context);
}
// All live threads of [from, to) wait for `what`.
inline bool ready(size_t from, size_t to, Wait what) {
  bool any = false;
  for (size_t i = from; i < to; ++i) {
    if (all[i].wait == Wait::done) continue;
    if (all[i].wait != what) return false;
    any = true;
  }
  return any;
}
// Runs one block; false when its threads wait for different things, which on a GPU hangs or is undefined.
inline bool run_block() {
  for (auto& fiber : all) resume(fiber);
  for (;;) {
    bool moved = false, live = false;
    for (size_t from = 0; from < all.size(); from += 32) {
      size_t to = std::min(from + 32, all.size());
      if (ready(from, to, Wait::warp)) {
        for (size_t i = from; i < to; ++i) if (all[i].wait == Wait::warp) resume(all[i]);
        moved = true;
      }
    }
    if (!moved && ready(0, all.size(), Wait::block)) {
      for (auto& fiber : all) if (fiber.wait == Wait::block) resume(fiber);
      moved = true;
    }
    for (auto& fiber : all) live |= fiber.wait != Wait::done;
    if (!live) return true;
    if (!moved) return false;
  }
}
inline bool run_one(dim3 at, const int* grid, const int* block, const std::function<void()>& kernel) {
  constexpr size_t stack = 65536;
  body = kernel;
  blockIdx = at;
  blockDim = {block[0], block[1], block[2]};
  gridDim = {grid[0], grid[1], grid[2]};
  for (auto& set : slots) set.assign(block[0], Slot{});
  all = std::vector<Fiber>(block[0]);
  for (int i = 0; i < block[0]; ++i) {
    all[i].thread = i;
    all[i].stack = std::make_unique<char[]>(stack);
    getcontext(&all[i].context);
    all[i].context.uc_stack.ss_sp = all[i].stack.get();
    all[i].context.uc_stack.ss_size = stack;
    all[i].context.uc_link = nullptr;
    makecontext(&all[i].context, enter, 0);
  }
  return run_block();
}
inline bool run_grid(const int* grid, const int* block, bool together, std::function<void()> kernel) {
  std::atomic<bool> fine = true;
  std::vector<std::thread> threads;
  for (int z = 0; z < grid[2]; ++z)
    for (int y = 0; y < grid[1]; ++y)
      for (int x = 0; x < grid[0]; ++x) {
        auto run = [&, at = dim3{x, y, z}] { if (!run_one(at, grid, block, kernel)) fine = false; };
        if (together) threads.emplace_back(run);
        else run();
      }
  for (auto& thread : threads) thread.join();
  return fine;
}
// What every lane of the warp gives, by lane.
template <typename T>
std::array<T, 32> exchange(const T& own) {
  static_assert(sizeof(T) <= sizeof(Slot));
  const int thread = current->thread, first = thread / 32 * 32;
  auto& set = slots[current->exchanges++ % 2];
  std::memcpy(set[thread].bytes, &own, sizeof(T));
  pause(Wait::warp);
  std::array<T, 32> given{};
  for (int lane = 0; lane < 32 && first + lane < blockDim.x; ++lane) {
    std::memcpy(&given[lane], set[first + lane].bytes, sizeof(T));
  }
  return given;
}
}  // namespace fibers

inline unsigned atomicAdd(unsigned* at, unsigned value) { return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned) { std::this_thread::yield(); }
inline void __syncthreads() { fibers::pause(fibers::Wait::block); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int offset) {
  return fibers::exchange(value)[threadIdx.x % 32 ^ offset];
}
inline int __any_sync(unsigned, int predicate) {
  const auto given = fibers::exchange(predicate);
  return std::any_of(given.begin(), given.end(), [](int value) { return value != 0; });
}

// mma.sync.m16n8k16 by the fragment layouts of the PTX ISA: which lane and register holds which element.
template <typename T>
void emulate_mma(float* d, const unsigned* a, const unsigned* b) {
  struct Given { unsigned a[4], b[2]; } own;
  std::memcpy(own.a, a, 16);
  std::memcpy(own.b, b, 8);
  const auto given = fibers::exchange(own);
  const int lane = threadIdx.x % 32;
  auto element = [](unsigned pair, int index) {
    uint16_t bits = static_cast<uint16_t>(pair >> (16 * index));
    T value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int quarter = k % 8 / 2;
      d[i] += element(given[row % 8 * 4 + quarter].a[row / 8 + 2 * (k / 8)], k % 2) *
          element(given[column * 4 + quarter].b[k / 8], k % 2);
    }
  }
}
