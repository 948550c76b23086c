// Probabilities without an exponential: the int32 score times an integer is the bit pattern of a float.
//
// S M + B, with 2^23 an octave, read as a float32 is linear between powers of two: the chord of 2^(x - m). One integer
// multiply-add an element; the conversion to E4M3 clamps what is negative, and rounds. kChord takes that as it is:
// error 0..6.1 %, period one octave. kDuo packs it to half precision and adds the same pattern half an octave on, whose
// error has the opposite phase: 0.5 % rms. Both have the mean of 2^x, so that sums mix with those of exact tiles.
//
// Right while x - m stays above -126 octaves: below are NaN patterns, and from -383 on the product wraps. So every row
// of Q comes with a bound of what its scores can reach, and a warp whose rows, at this tile's step, could be too far
// below their references looks at the scores themselves: then it is their minimum that decides, and what is too far
// even so is computed exactly, as are steps that are not finite. sage_patch/reference/emulator/exponent.py has the same
// bits.
#pragma once
#include "query.cuh"
#include "softmax.cuh"

namespace sage2 {

constexpr float kOctave = 8388608.f, kMagic = 12582912.f;  // 2^23; adding 1.5 2^23 leaves an integer in the low bits
constexpr float kReachLimit = 125.f;                       // octaves
// Of the largest score that a row can reach in octaves, times 1 + 1/6: a reference that is below zero is so by no more
// than this score and kFp8Offset, so one comparison, reach + m < kReachLimit, keeps m inside of (-820, 125).
constexpr float kReach = 127.f * 7.f / 6.f;
constexpr float kFurthest = 820.f, kLargestStep = 0.25f;  // what BitsRow can hold

// Of rows [first, first + count) of Q as they lie quantized: kReach x the sum of magnitudes x the scale; a negative
// scale gives NaN, as no score bounds are known. One lane a row, by the warp that wrote them.
template<int DIM> SAGE2_DEV void measure_rows(const QBuffer &to, uint32_t reach, int first, int count) {
  #pragma unroll 1
  for (int row = first + (thread_index() & 31); row < first + count; row += 32) {
    const uint32_t panel = to.q + row / 64 * (64 * DIM);
    int sum = 0;
    #pragma unroll 1
    for (int channel = 0; channel < DIM; channel += 16) {
      const uint4 x = load_shared4(panel + row_offset(row % 64, channel, DIM, 64));
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
      #pragma unroll
      for (int i = 0; i < 4; i++)  // times the signs, bytes of +-1
        sum = __dp4a((int)words[i], (int)((words[i] >> 7 & 0x01010101u) * 0xFEu + 0x01010101u), sum);
    }
    const float scale = load_shared(to.scale + 4 * row_slot(row));
    const float bound = __fmul_rn(__fmul_rn(__int2float_rn(sum), kReach), scale);
    store_shared(reach + 4 * row_slot(row), scale < 0.f ? 0x7FFFFFFFu : __float_as_uint(bound));
  }
  __syncwarp();
}

struct BitsRow { int m, b; };
// m = rint(2^23 g), b = rint(2^12 (bias - reference)) 2^11, both without a conversion.
template<Exponent EXP> SAGE2_DEV BitsRow bits_row(float g, float reference) {
  constexpr float kBias = (EXP == kDuo ? 125.94257f : 126.94257f) * 4096.f + kMagic;
  return {__float_as_int(fmaf(g, kOctave, kMagic)) - __float_as_int(kMagic),
          (int)(__float_as_uint(fmaf(reference, -4096.f, kBias)) << 11)};
}
template<Exponent EXP>
SAGE2_DEV void probabilities_bits(const int (&S)[64], uint32_t (&P)[16], const BitsRow &r0, const BitsRow &r1) {
  #pragma unroll
  for (int u = 0; u < 8; u++)
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const BitsRow &r = h ? r1 : r0;
      const int at = 8 * u + 2 * h;
      uint32_t t[4] = {(uint32_t)S[at], (uint32_t)S[at + 1], (uint32_t)S[at + 4], (uint32_t)S[at + 5]};
      #pragma unroll
      for (int j = 0; j < 4; j++) t[j] = t[j] * (uint32_t)r.m + (uint32_t)r.b;
      if (EXP == kChord) {
        P[2 * u + h] = pack_e4m3_relu(t[0], t[1], t[2], t[3]);
      } else {
        const uint32_t low = pack_f16_relu(t[0], t[1]), high = pack_f16_relu(t[2], t[3]);
        constexpr uint32_t kHalfOctave = 0x02000200u, kRoot = 0x39A839A8u;  // in fp16: 512 units; 181 / 256 ~ 2^-0.5
        P[2 * u + h] =
            e4m3_of_half2(fma_f16x2(low + kHalfOctave, kRoot, low), fma_f16x2(high + kHalfOctave, kRoot, high));
      }
    }
}

// Whether a thread's scores of one row are near enough by their minimum.
SAGE2_DEV bool is_near(int least, float g, float m) {
  return fmaf(__int2float_rn(-least), g, m) < kReachLimit && fabsf(m) < kFurthest && g >= 0.f && g < kLargestStep;
}
// softmax_fp8 of a tile that its rows see whole; reach: measure_rows().
template<Exponent EXP>
SAGE2_DEV void softmax_bits(int (&S)[64], uint32_t (&P)[16], float k_scale, float2 q_scale, float2 reach,
                            RowState &row) {
  const float g0 = step_of(k_scale, q_scale.x), g1 = step_of(k_scale, q_scale.y);
  follow_maximum<kAllSeen>(S, g0, g1, row);
  const float m0 = row.m0, m1 = row.m1;
  bool far = __any_sync(~0u, !(fmaf(reach.x, k_scale, m0) < kReachLimit && fmaf(reach.y, k_scale, m1) < kReachLimit));
  if (far) {
    int x0 = S[0], x1 = S[2];
    #pragma unroll
    for (int i = 0; i < 16; i++) {
      x0 = __vimin3_s32(x0, S[4 * i], S[4 * i + 1]);
      x1 = __vimin3_s32(x1, S[4 * i + 2], S[4 * i + 3]);
    }
    far = __any_sync(~0u, !(is_near(x0, g0, m0) && is_near(x1, g1, m1)));
  }
  if (far) {
    probabilities<kAllSeen>(S, g0, g1, m0, m1);
    pack_probabilities(S, P);
  } else {
    probabilities_bits<EXP>(S, P, bits_row<EXP>(g0, m0), bits_row<EXP>(g1, m1));
  }
}

}  // namespace sage2
