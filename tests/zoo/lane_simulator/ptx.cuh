// The names of cuda_kernels/ptx.cuh that the mma.sync kernels use, for a host compiler; those of Hopper alone end the
// program.
#pragma once
#include <cuda_runtime.h>

#define SAGE2_DEV inline

namespace sage2 {

inline uint32_t smem_address(const void *) { return 0; }
inline float load_shared(uint32_t a) { return simulator::load<float>(a); }
inline int load_shared_int(uint32_t a) { return simulator::load<int>(a); }
inline float2 load_shared2(uint32_t a) { return simulator::load<float2>(a); }
inline float4 load_again(const float4 *from) { return *from; }
inline uint4 load_shared4(uint32_t a) { return simulator::load<uint4>(a); }
inline void store_shared(uint32_t a, uint32_t x) { simulator::store(a, x); }
inline void store_shared16(uint32_t a, uint16_t x) { simulator::store(a, x); }
inline void store_shared2(uint32_t a, uint32_t x, uint32_t y) { simulator::store(a, uint2{x, y}); }
inline int thread_index() { return threadIdx.x; }
inline int block_index() { return blockIdx.x; }
inline void barrier_expect(uint32_t, int) { simulator::fail("mbarrier"); }
inline void barrier_wait(uint32_t, int) { simulator::fail("mbarrier"); }
inline void async_proxy_fence() { simulator::fail("proxy fence"); }
inline void bulk_load(uint32_t, const void *, int, uint32_t) { simulator::fail("bulk copy"); }

// ------------------------------------------------------------------ arithmetic
inline float flush(float x) { return fabsf(x) < 1.17549435e-38f ? 0.f : x; }
inline float exp2_fast(float x) { return flush((float)exp2((double)x)); }
inline float reciprocal_fast(float x) { return flush(1.f / x); }
inline float min_keep_nan(float x, float y) { return isnan(x) || isnan(y) ? NAN : fminf(x, y); }
inline float max_keep_nan(float x, float y) { return isnan(x) || isnan(y) ? NAN : fmaxf(x, y); }
inline uint32_t max_u16x2(uint32_t a, uint32_t b) { return max(a >> 16, b >> 16) << 16 | max(a & 0xFFFF, b & 0xFFFF); }
inline float f16_value(uint16_t u) {
  const int e = u >> 10 & 31, f = u & 1023;
  const float x = e == 31 ? (f ? NAN : INFINITY) : e ? ldexpf(1024 + f, e - 25) : ldexpf(f, -24);
  return u & 0x8000 ? -x : x;
}
inline void f16_values(uint32_t w, float &lo, float &hi) {
  lo = f16_value(w);
  hi = f16_value(w >> 16);
}
inline void extend(uint16_t &low, uint16_t &high, uint16_t x, bool bf16, bool keep_nan) {
  auto value = [&](uint16_t u) { return bf16 ? __uint_as_float((uint32_t)u << 16) : f16_value(u); };
  if (isnan(value(x)) && keep_nan) low = high = x;
  if (isnan(value(x)) || isnan(value(low))) return;
  if (value(x) < value(low)) low = x;
  if (value(x) > value(high)) high = x;
}
inline void extend_pair(uint32_t &low, uint32_t &high, uint32_t x, bool bf16, bool keep_nan) {
  uint16_t l[2], h[2], y[2];
  memcpy(l, &low, 4);
  memcpy(h, &high, 4);
  memcpy(y, &x, 4);
  for (int i = 0; i < 2; i++) extend(l[i], h[i], y[i], bf16, keep_nan);
  memcpy(&low, l, 4);
  memcpy(&high, h, 4);
}
inline void extend_bf16x2(uint32_t &low, uint32_t &high, uint32_t x) { extend_pair(low, high, x, true, false); }
inline void extend_f16x2(uint32_t &low, uint32_t &high, uint32_t x) { extend_pair(low, high, x, false, false); }
inline void extend_bf16x2_nan(uint32_t &low, uint32_t &high, uint32_t x) { extend_pair(low, high, x, true, true); }
inline void extend_f16x2_nan(uint32_t &low, uint32_t &high, uint32_t x) { extend_pair(low, high, x, false, true); }
inline void forget(int &) {}
inline void forget(uint32_t &, uint32_t &, uint32_t &, uint32_t &) {}
inline void load_if(uint4 &x, const void *from, bool wanted) {
  if (!wanted) return;
  if ((uintptr_t)from % 16) simulator::fail("misaligned load");
  memcpy(&x, from, 16);
}
inline void grid_dependency_wait() {}
inline void grid_dependency_trigger() {}
// To a float of `bits` fraction bits whose smallest normal exponent is `least`: nearest even; NaN and top apart.
inline uint32_t rounded(float x, int bits, int least) {
  int e;
  frexpf(x, &e);
  e = max(e - 1, least);
  const int n = (int)rintf(ldexpf(x, bits - e));
  return n < 1 << bits ? n : ((e - least + 1) << bits) + (n - (1 << bits));
}
inline uint32_t f16_bits(float x) {
  const uint32_t sign = signbit(x) ? 0x8000 : 0;
  if (isnan(x)) return 0x7FFF;
  return sign | min(rounded(min(fabsf(x), 65504.f), 10, -14), 0x7BFFu);
}
inline uint32_t e4m3_bits(float x) {
  const uint32_t sign = signbit(x) ? 0x80 : 0;
  if (isnan(x)) return 0x7F;
  return sign | rounded(min(fabsf(x), 448.f), 3, -6);
}
inline float e4m3_value(uint8_t u) {
  const int e = u >> 3 & 15, f = u & 7;
  const float x = (u & 127) == 127 ? NAN : e ? ldexpf(8 + f, e - 10) : ldexpf(f, -9);
  return u & 0x80 ? -x : x;
}
inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  return e4m3_bits(a) | e4m3_bits(b) << 8 | e4m3_bits(c) << 16 | e4m3_bits(d) << 24;
}
inline uint32_t pack_f16(float a, float b) { return f16_bits(a) | f16_bits(b) << 16; }
inline uint32_t bf16_bits(float x) {
  const uint32_t u = __float_as_uint(x);
  return isnan(x) ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float a, float b) { return bf16_bits(a) | bf16_bits(b) << 16; }

}  // namespace sage2
