// Online softmax of the mma.sync kernels on fragments of 16 rows and 64 keys. A thread holds rows r (elements 0, 1) and
// r + 8 (2, 3) of columns 8 i + 2 c + {0, 1}, as in a wgmma warp.
//
// Scores start at the bits of 1.5 * 2^23: read as fp32, a score is kMagic + score, exactly, and one multiply-add makes
// an exponent of it: fma(kMagic + score, g, -(kMagic g + m)). No conversion, which sm_80 does in the unit of the
// exponentials; mma.sync has a third operand, so the start costs nothing. Exponents are then exact to 3/4 of one
// integer step, hundreds of times less than INT8 lost, and a step must be small: kMaxStepMagic.
#pragma once
#include "logits.cuh"
#include "mma_tile.cuh"

namespace sage2 {
namespace {

constexpr int kMagicBits = 0x4B400000;
constexpr float kMagic = 12582912.f;
// Log2 units of an integer step, at most. Logits beyond 2^16 alone are touched, as kMaxStep touches them beyond 2^25.
constexpr float kMaxStepMagic = 0.0625f;

template<class C> using Probabilities = uint32_t[C::steps][4];  // operand A of the second product

// Over the keys so far, of rows r and r + 8 of each fragment.
template<class C> struct RowSums { float O[C::fragments][C::dv / 8][4], m[C::fragments][2], l[C::fragments][2]; };

// Which scores a row does not see: columns outside [begin, end), counted from the first of the 64 keys.
SAGE2_DEV void hide_outside(int (&S)[8][4], int h, int begin, int end, int c) {
  begin -= 2 * c;
  end -= 2 * c;
  #pragma unroll
  for (int i = 0; i < 8; i++)
    #pragma unroll
    for (int e = 0; e < 2; e++)
      if (8 * i + e < begin || 8 * i + e >= end) S[i][2 * h + e] = kHidden;
}
// With a mask tensor: those whose bit is 0.
SAGE2_DEV void hide_unset(int (&S)[8][4], int h, uint32_t seen) {
  #pragma unroll
  for (int b = 0; b < 16; b++)
    if (!(seen & 1u << b)) S[b / 2][2 * h + b % 2] = kHidden;
}

// The largest exponent of row r + 8 h in this fragment, before any offset. kLogits: S holds floats.
template<Scores KIND> SAGE2_DEV float fragment_maximum(const int (&S)[8][4], int h, float g, float offset) {
  if (KIND == kLogits) {
    float f = __int_as_float(S[0][2 * h]);
    #pragma unroll
    for (int i = 0; i < 8; i++) f = fmaxf(f, fmaxf(__int_as_float(S[i][2 * h]), __int_as_float(S[i][2 * h + 1])));
    return quad_max(f - offset);
  }
  int x = S[0][2 * h];
  #pragma unroll
  for (int i = 0; i < 8; i++) x = __vimax3_s32(x, S[i][2 * h], S[i][2 * h + 1]);
  const float f = fmaf(__int_as_float(x), g, -fmaf(kMagic, g, offset));
  return quad_max(KIND == kSomeHidden && x == kHidden ? kNoKeys : f);
}

// Scores -> probabilities as operand A; factors: what the sums so far must be multiplied by. Returns whether a
// reference exponent of this thread moved. Row sums are kept in fp32. q_scales: where this thread's rows have theirs.
template<class C, Scores KIND>
SAGE2_DEV bool softmax(int (&S)[8][4], Probabilities<C> &P, RowSums<C> &sums, int fragment, float (&factors)[2],
                       float k_scale, uint32_t q_scales) {
  bool moved = false;
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    float g = 0.f;
    if (KIND != kLogits) g = step_of(k_scale, load_shared(q_scales + 4 * (16 * fragment + 8 * h)), kMaxStepMagic);
    const float top = fragment_maximum<KIND>(S, h, g, C::offset), old = sums.m[fragment][h];
    const float m = top > old + C::slack ? top : old;
    moved |= m != old;
    sums.m[fragment][h] = m;
    factors[h] = exp2_fast(old - m);
    const float reference = KIND == kLogits ? m : fmaf(kMagic, g, m);
    float sum[2] = {0.f, 0.f};
    #pragma unroll
    for (int i = 0; i < 8; i++)
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        int &s = S[i][2 * h + e];
        const float x = __int_as_float(s);
        float p = exp2_fast(KIND == kLogits ? x - m : fmaf(x, g, -reference));
        if (KIND == kSomeHidden && s == kHidden) p = 0.f;
        sum[e] += p;
        s = __float_as_int(p);
      }
    sums.l[fragment][h] = fmaf(sums.l[fragment][h], factors[h], sum[0] + sum[1]);
  }
  auto p = [&](int i, int e) { return __int_as_float(S[i][e]); };
  #pragma unroll
  for (int u = 0; u < 4; u++)
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      if constexpr (C::fp8)  // V's token order makes two neighbouring 8-key blocks one register
        P[u / 2][u % 2 * 2 + h] =
            pack_e4m3(p(2 * u, 2 * h), p(2 * u, 2 * h + 1), p(2 * u + 1, 2 * h), p(2 * u + 1, 2 * h + 1));
      else {
        P[u][h] = pack_f16(p(2 * u, 2 * h), p(2 * u, 2 * h + 1));
        P[u][2 + h] = pack_f16(p(2 * u + 1, 2 * h), p(2 * u + 1, 2 * h + 1));
      }
    }
  return moved;
}

}  // namespace
}  // namespace sage2
