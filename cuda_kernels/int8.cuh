// The INT8 quantizer (INT4: fewer levels, the same bytes) and the 16-bit loads that Q and K share.
#pragma once
#include "ptx.cuh"

namespace sage2 {

constexpr float kTiny = 1e-30f;              // a group whose largest magnitude is below this counts as all zero

// Eight neighbouring channels of one token. Rows that are not 16-byte aligned (`vector` 0) are read element by element;
// channels past head_dim are zero.
SAGE2_DEV uint4 load_channels(const uint16_t *row, int channel, int head_dim, int vector) {
  uint4 x = {0, 0, 0, 0};
  if (vector) {
    if (channel < head_dim) x = __ldg((const uint4 *)(row + channel));
  } else {
    #pragma unroll 2
    for (int e = 0; e < 8; e++) {            // shifted in from the top: few registers, a rare path
      const uint32_t u = channel + e < head_dim ? __ldg(row + channel + e) : 0;
      x = {__funnelshift_r(x.x, x.y, 16), __funnelshift_r(x.y, x.z, 16), __funnelshift_r(x.z, x.w, 16), x.w >> 16 | u << 16};
    }
  }
  return x;
}
// The first n of eight channels, the rest zero.
SAGE2_DEV uint4 keep_channels(uint4 x, int n) {
  uint32_t w[4] = {x.x, x.y, x.z, x.w};
  #pragma unroll
  for (int i = 0; i < 4; i++) w[i] = n > 2 * i + 1 ? w[i] : n > 2 * i ? w[i] & 0xFFFFu : 0u;
  return {w[0], w[1], w[2], w[3]};
}
SAGE2_DEV void widen(uint32_t w, bool bf16, float &lo, float &hi) {      // two 16-bit floats -> two fp32
  if (bf16) lo = __uint_as_float(w << 16), hi = __uint_as_float(w & 0xFFFF0000u);
  else asm("{.reg .b16 l,h; mov.b32 {l,h},%2; cvt.f32.f16 %0,l; cvt.f32.f16 %1,h;}" : "=f"(lo), "=f"(hi) : "r"(w));
}
SAGE2_DEV void widen(const uint4 &x, bool bf16, float (&f)[8]) {
  widen(x.x, bf16, f[0], f[1]), widen(x.y, bf16, f[2], f[3]), widen(x.z, bf16, f[4], f[5]), widen(x.w, bf16, f[6], f[7]);
}

// Magnitudes are compared as integers: the order is that of the floats, and NaN > Inf > everything finite.
SAGE2_DEV uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }
constexpr uint32_t kInfBits = 0x7F800000u;

// The same on packed 16-bit floats, two at a time.
SAGE2_DEV uint32_t max_magnitude(uint32_t top, uint32_t w) {
  uint32_t r;
  asm("max.u16x2 %0,%1,%2;" : "=r"(r) : "r"(top), "r"(w & 0x7FFF7FFFu));
  return r;
}
SAGE2_DEV uint32_t max_magnitude(uint32_t top, const uint4 &x) {
  return max_magnitude(max_magnitude(max_magnitude(max_magnitude(top, x.x), x.y), x.z), x.w);
}
SAGE2_DEV uint32_t widen_magnitude(uint32_t top, bool bf16) {             // of a packed pair -> fp32 bits of the larger
  float lo, hi;
  widen(top, bf16, lo, hi);
  return max(__float_as_uint(lo), __float_as_uint(hi));
}

struct Int8Scale { float scale, inverse; };  // x ~ q * scale, q = rint(x * inverse), the exact product rounded once
SAGE2_DEV Int8Scale int8_scale(uint32_t amax_bits, bool int4 = false) {
  const float amax = __uint_as_float(amax_bits);
  if (amax_bits >= kInfBits) return {__uint_as_float(0x7FFFFFFFu), 0.f};   // a non-finite input must stay visible
  if (amax < kTiny) return {0.f, 0.f};
  return {__fmul_rn(amax, int4 ? 1.f / 7.f : 1.f / 127.f), __fdiv_rn(int4 ? 7.f : 127.f, amax)};
}
// Four quantized bytes, a in the lowest. Adding 1.5 * 2^23 leaves the rounded integer in the low byte: one FFMA instead of
// a multiplication and a conversion, which runs at an eighth of the rate.
SAGE2_DEV uint32_t pack_s8(float a, float b, float c, float d, float inverse) {
  constexpr float kMagic = 12582912.f;
  const uint32_t i = __float_as_uint(__fmaf_rn(a, inverse, kMagic)), j = __float_as_uint(__fmaf_rn(b, inverse, kMagic));
  const uint32_t k = __float_as_uint(__fmaf_rn(c, inverse, kMagic)), l = __float_as_uint(__fmaf_rn(d, inverse, kMagic));
  return __byte_perm(__byte_perm(i, j, 0x0040), __byte_perm(k, l, 0x0040), 0x5410);
}

}  // namespace sage2
