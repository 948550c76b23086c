// Online softmax on int32 scores: S becomes the unnormalised probabilities of one key tile, P the same as an operand.
// A thread holds rows r (elements 4i, 4i+1) and r+8 (4i+2, 4i+3); the four lanes of a quad share its rows.
#pragma once
#include "mask.cuh"
#include "ptx.cuh"

namespace sage2 {

constexpr float kFp8Offset = 8.807f;         // log2(448): the largest probability of a row becomes the largest E4M3 number
constexpr float kFp16Offset = 9.f;           // the row maximum may be stale by kFp16Slack, still inside fp16's range
constexpr float kFp16Slack = 4.f;
constexpr float kNoKeys = -1e30f;            // reference exponent of a row that has seen no key
// One unit of an integer score never counts more than this in log2. Only logits beyond 2^25 are touched, where fp32
// cannot tell neighbours apart; in return every probability stays finite and a row's maximum never rounds to zero.
constexpr float kMaxStep = 16.f;

// What the first product's accumulators hold when the softmax begins.
enum Scores {
  kAllSeen,              // int32 scores
  kSomeHidden,           // int32 scores, kHidden where a row does not see a key; such tiles are rare
  kManyHidden,           // int32 scores, below kHiddenBelow where a row does not see a key, and hidden_vanish() holds
  kLogits                // float logits in log2 units: softcap or an additive mask has been applied; -inf where hidden
};

struct RowState {
  float m0, m1;          // reference exponents: P = 2^(x - m), m = (row maximum so far) - offset
  float a0, a1;          // what the sums so far must be multiplied by after this tile
};

SAGE2_DEV float step_of(float k_scale, float q_scale) { return min_keep_nan(k_scale * q_scale, kMaxStep); }
SAGE2_DEV float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
SAGE2_DEV float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// g0, g1: log2 units per integer step (Q scale x softmax scale x log2 e x K scale). Returns the tile's maxima minus OFFSET.
template<Scores KIND> SAGE2_DEV void tile_maximum(const int (&S)[64], float g0, float g1, float offset, float &f0, float &f1) {
  if (KIND == kLogits) {
    f0 = __int_as_float(S[0]), f1 = __int_as_float(S[2]);
    #pragma unroll
    for (int i = 0; i < 64; i++) {
      float &f = i & 2 ? f1 : f0;
      f = fmaxf(f, __int_as_float(S[i]));
    }
    f0 = quad_max(f0 - offset), f1 = quad_max(f1 - offset);
    return;
  }
  int x0 = S[0], x1 = S[2];                  // the maximum is taken on integers: three-input VIMNMX, half an instruction an element
  #pragma unroll
  for (int i = 0; i < 16; i++) {
    x0 = __vimax3_s32(x0, S[4 * i], S[4 * i + 1]);
    x1 = __vimax3_s32(x1, S[4 * i + 2], S[4 * i + 3]);
  }
  f0 = fmaf(__int2float_rn(x0), g0, -offset);
  f1 = fmaf(__int2float_rn(x1), g1, -offset);
  if (KIND == kSomeHidden || KIND == kManyHidden) {
    if (KIND == kManyHidden ? x0 < kHiddenBelow : x0 == kHidden) f0 = kNoKeys;
    if (KIND == kManyHidden ? x1 < kHiddenBelow : x1 == kHidden) f1 = kNoKeys;
  }
  f0 = quad_max(f0), f1 = quad_max(f1);
}

template<Scores KIND> SAGE2_DEV float probability(int s, float g, float m) {
  const float p = exp2_fast(KIND == kLogits ? __int_as_float(s) - m : fmaf(__int2float_rn(s), g, -m));
  return KIND == kSomeHidden && s == kHidden ? 0.f : p;
}
// kManyHidden: a hidden score x < -2^30 vanishes by itself, as 2^(x g - m), where g is neither tiny nor NaN (else hidden scores
// are looked for) and m is not far below zero. So m is taken no lower than the lowest score can make it: that changes no
// m but where none of this thread's keys is seen.
constexpr float kLeastStep = 1.f / (1 << 23), kLowestScore = -1.f * (1 << 22), kLargestOffset = 16.f;      // > kFp16Offset + kFp16Slack
SAGE2_DEV bool hidden_vanish(float k_scale, float q0, float q1) {          // in all rows of the warp
  return __all_sync(~0u, step_of(k_scale, q0) >= kLeastStep && step_of(k_scale, q1) >= kLeastStep);
}
template<Scores KIND> SAGE2_DEV float reference(float m, float g) {
  return KIND == kManyHidden ? fmaxf(m, fmaf(kLowestScore, g, -kLargestOffset)) : m;
}
// S -> probabilities.
template<Scores KIND> SAGE2_DEV void probabilities(int (&S)[64], float g0, float g1, float m0, float m1) {
  #pragma unroll
  for (int i = 0; i < 64; i++)               // the place of a direct E4M3 exponent, once it earns its place
    S[i] = __float_as_int(probability<KIND>(S[i], i & 2 ? g1 : g0, i & 2 ? m1 : m0));
}

// Probabilities -> operand A of the second product. E4M3: V's token order (tile_image.h) makes the four scores of two
// neighbouring 8-key blocks one register. FP16: the accumulator layout already is the operand layout.
SAGE2_DEV void pack_probabilities(const int (&S)[64], uint32_t (&P)[16]) {
  #pragma unroll
  for (int u = 0; u < 8; u++)
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int b = 8 * u + 2 * h;
      P[2 * u + h] = pack_e4m3(__int_as_float(S[b]), __int_as_float(S[b + 1]), __int_as_float(S[b + 4]), __int_as_float(S[b + 5]));
    }
}
SAGE2_DEV void pack_probabilities(const int (&S)[64], uint32_t (&P)[32]) {
  #pragma unroll
  for (int i = 0; i < 32; i++) P[i] = pack_f16(__int_as_float(S[2 * i]), __int_as_float(S[2 * i + 1]));
}

// FP8 recipe: the reference follows the maximum in every tile, the sum is left to the matrix product (a column of ones).
template<Scores KIND> SAGE2_DEV void softmax_fp8(int (&S)[64], uint32_t (&P)[16], float k_scale, float q0, float q1, RowState &row) {
  const float g0 = step_of(k_scale, q0), g1 = step_of(k_scale, q1);
  float f0, f1;
  tile_maximum<KIND>(S, g0, g1, kFp8Offset, f0, f1);
  f0 = fmaxf(f0, row.m0), f1 = fmaxf(f1, row.m1);
  row.a0 = exp2_fast(row.m0 - f0), row.a1 = exp2_fast(row.m1 - f1);
  row.m0 = f0, row.m1 = f1;
  probabilities<KIND>(S, g0, g1, reference<KIND>(f0, g0), reference<KIND>(f1, g1));
  pack_probabilities(S, P);
}

// FP16 recipe: O accumulates inside the tensor core, so the reference moves only when a maximum outgrows the slack.
// Returns whether any row of the warp moved; a row that did not has a = 1 exactly. Row sums are kept in fp32.
template<Scores KIND>
SAGE2_DEV bool softmax_fp16(int (&S)[64], uint32_t (&P)[32], float k_scale, float q0, float q1, RowState &row, float &l0, float &l1) {
  const float g0 = step_of(k_scale, q0), g1 = step_of(k_scale, q1);
  float f0, f1;
  tile_maximum<KIND>(S, g0, g1, kFp16Offset, f0, f1);
  f0 = f0 > row.m0 + kFp16Slack ? f0 : row.m0, f1 = f1 > row.m1 + kFp16Slack ? f1 : row.m1;
  const bool moved = __any_sync(~0u, f0 != row.m0 || f1 != row.m1);
  row.a0 = exp2_fast(row.m0 - f0), row.a1 = exp2_fast(row.m1 - f1);
  row.m0 = f0, row.m1 = f1;
  f0 = reference<KIND>(f0, g0), f1 = reference<KIND>(f1, g1);
  float s[4] = {0.f, 0.f, 0.f, 0.f};
  #pragma unroll
  for (int i = 0; i < 64; i++) {
    const float p = probability<KIND>(S[i], i & 2 ? g1 : g0, i & 2 ? f1 : f0);
    s[i & 3] += p;
    S[i] = __float_as_int(p);
  }
  l0 = fmaf(l0, row.a0, s[0] + s[1]), l1 = fmaf(l1, row.a1, s[2] + s[3]);
  pack_probabilities(S, P);
  return moved;
}

// A sink: one more key of weight 2^sink (in the logits' own units) and no value. The sum l and its reference m take it in;
// `shrink` is what the outputs must be multiplied by as well, `kept` the keys' share. A row without keys stays without.
SAGE2_DEV void add_sink(float sink, float &m, float &l, float &shrink, float &kept) {
  if (l == 0.f) return;
  const float shift = fmaxf(sink - m - 60.f, 0.f);
  shrink = exp2_fast(-shift);
  const float keys = l * shrink;
  m += shift;
  l = keys + exp2_fast(sink - m);
  kept = __fdividef(keys, l);
}

}  // namespace sage2
