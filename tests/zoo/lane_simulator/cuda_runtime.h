// What the kernels' headers need of CUDA, for a host compiler: types, qualifiers, intrinsics. One CTA runs on one CPU,
// every thread of it a fiber; whatever needs the other lanes of a warp waits for them.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <algorithm>
#include <functional>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __align__(n)
#define __launch_bounds__(...)
#define __grid_constant__

typedef int cudaError_t;
typedef void *cudaStream_t;
struct int2 { int x, y; };
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::max;
using std::min;

// ------------------------------------------------------------------ one CTA
namespace simulator {
struct Dim { unsigned x = 0, y = 0, z = 0; };
struct Warp {
  int waiting = 0, turn = 0;
  uint32_t box[32][8];  // what each lane shows the others
};
struct Copy {
  uint32_t to;
  const void *from;  // null: the end of a group
};
inline Dim thread, block, size, grid;
inline int threads, cta_waiting, cta_turn;
inline std::vector<uint8_t> shared;
inline std::vector<Warp> warps;
inline std::vector<std::vector<Copy>> copies;  // of each thread, on their way
inline std::vector<ucontext_t> fibers;
inline std::vector<char> done;
inline ucontext_t scheduler;
inline std::function<void()> body;

[[noreturn]] inline void fail(const char *what) {
  fprintf(stderr, "block %u, thread %u: %s\n", block.x, thread.x, what);
  abort();
}
inline void yield() {
  const unsigned me = thread.x;
  swapcontext(&fibers[me], &scheduler);
  thread.x = me;
}
inline Warp &warp() { return warps[thread.x / 32]; }
inline uint32_t *box() { return warp().box[thread.x % 32]; }
inline void sync(int &waiting, int &turn, int all) {
  const int mine = turn;
  if (++waiting == all) {
    waiting = 0;
    turn++;
  }
  while (turn == mine) yield();
}
inline void sync_warp() { sync(warp().waiting, warp().turn, 32); }
inline uint8_t *at(uint32_t address, uint32_t size) {
  if (address + size > shared.size()) fail("outside shared memory");
  if (address % size) fail("misaligned access to shared memory");
  return shared.data() + address;
}
template<class T> T load(uint32_t address) {
  T x;
  memcpy(&x, at(address, sizeof x), sizeof x);
  return x;
}
template<class T> void store(uint32_t address, T x) { memcpy(at(address, sizeof x), &x, sizeof x); }
inline void enter() {
  body();
  done[thread.x] = 1;
  swapcontext(&fibers[thread.x], &scheduler);
}
inline void launch(int blocks, int n, int bytes, const std::function<void()> &kernel, Dim of = {0, 0, 0}) {
  constexpr size_t kStack = 256 << 10;
  static std::vector<char> stacks;
  stacks.resize(n * kStack);
  body = kernel;
  threads = size.x = n;
  grid = of.x ? of : Dim{(unsigned)blocks, 1, 1};
  for (unsigned b = 0; b < grid.x * grid.y * grid.z; b++) {
    block = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    shared.assign(bytes, 0xFF);  // NaN everywhere: nothing may be read before it is written
    warps.assign(n / 32, Warp());
    copies.assign(n, {});
    done.assign(n, 0);
    fibers.resize(n);
    cta_waiting = cta_turn = 0;
    for (int t = 0; t < n; t++) {
      getcontext(&fibers[t]);
      fibers[t].uc_stack.ss_sp = stacks.data() + t * kStack;
      fibers[t].uc_stack.ss_size = kStack;
      fibers[t].uc_link = nullptr;
      makecontext(&fibers[t], enter, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (int t = 0; t < n; t++)
        if (!done[t]) {
          left = true;
          thread.x = t;
          swapcontext(&scheduler, &fibers[t]);
        }
    }
    for (auto &mine : copies)
      for (auto &copy : mine)
        if (copy.from) fail("a copy that nobody waited for");
  }
}
}  // namespace simulator
#define threadIdx (simulator::thread)
#define blockIdx (simulator::block)
#define blockDim (simulator::size)
#define gridDim (simulator::grid)

// ------------------------------------------------------------------ intrinsics
inline void __syncwarp() { simulator::sync_warp(); }
inline void __syncthreads() { simulator::sync(simulator::cta_waiting, simulator::cta_turn, simulator::threads); }
template<class T> T __shfl_xor_sync(unsigned, T x, int s) {
  memcpy(simulator::box(), &x, 4);
  simulator::sync_warp();
  T y;
  memcpy(&y, simulator::warp().box[simulator::thread.x % 32 ^ s], 4);
  simulator::sync_warp();
  return y;
}
template<class T> T __shfl_sync(unsigned, T x, int lane) {
  memcpy(simulator::box(), &x, 4);
  simulator::sync_warp();
  T y;
  memcpy(&y, simulator::warp().box[lane], 4);
  simulator::sync_warp();
  return y;
}
inline unsigned __reduce_or_sync(unsigned, unsigned x) {
  simulator::box()[0] = x;
  simulator::sync_warp();
  unsigned y = 0;
  for (auto &b : simulator::warp().box) y |= b[0];
  simulator::sync_warp();
  return y;
}
inline unsigned __ballot_sync(unsigned m, bool x) {
  return __reduce_or_sync(m, (unsigned)x << simulator::thread.x % 32);
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  simulator::box()[0] = x;
  simulator::sync_warp();
  unsigned y = 0;
  for (auto &b : simulator::warp().box) y = std::max<unsigned>(y, b[0]);
  simulator::sync_warp();
  return y;
}
template<class F> int reduce_int(int x, F f) {
  simulator::box()[0] = x;
  simulator::sync_warp();
  for (auto &b : simulator::warp().box) x = f(x, (int)b[0]);
  simulator::sync_warp();
  return x;
}
inline int __reduce_max_sync(unsigned, int x) {
  return reduce_int(x, [](int a, int b) { return max(a, b); });
}
inline int __reduce_min_sync(unsigned, int x) {
  return reduce_int(x, [](int a, int b) { return min(a, b); });
}
inline int __syncthreads_or(int x) {
  static int any;
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= x;
  __syncthreads();
  return any;
}
inline int __syncthreads_and(int x) { return !__syncthreads_or(!x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline void atomicMax(uint32_t *p, uint32_t x) { *p = max(*p, x); }
inline void atomicOr(uint32_t *p, uint32_t x) { *p |= x; }
inline int __any_sync(unsigned m, int x) { return __reduce_or_sync(m, x != 0) != 0; }
inline int __all_sync(unsigned m, int x) { return !__any_sync(m, !x); }
template<class T> T __ldg(const T *p) { return *p; }
inline float __uint_as_float(uint32_t x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  memcpy(&y, &x, 4);
  return y;
}
inline float __int_as_float(int x) { return __uint_as_float(x); }
inline int __float_as_int(float x) { return __float_as_uint(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __log2f(float x) { return (float)log2((double)x); }
inline int __vimax3_s32(int x, int y, int z) { return max(x, max(y, z)); }
inline uint32_t __funnelshift_r(uint32_t lo, uint32_t hi, int s) { return ((uint64_t)hi << 32 | lo) >> s; }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t s) {
  const uint64_t all = (uint64_t)y << 32 | x;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) r |= (uint32_t)(all >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
