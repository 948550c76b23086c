// Online softmax on int32 scores, in place: S becomes the unnormalised probabilities of one key tile.
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
constexpr float kMaxStepInt4 = 4096.f;       // INT4 scores are smaller by (127 / 7)^2: the same logits

// What the first product's accumulators hold when the softmax begins.
enum Scores {
  kAllSeen,              // int32 scores
  kSomeHidden,           // int32 scores, kHidden where a row does not see a key; such tiles are rare
  kManyHidden,           // the same; such tiles are the rule, so the cheaper way to drop hidden keys is worth its registers
  kLogits                // float logits in log2 units: softcap, an additive mask or Q's mean has been applied; -inf where hidden
};

struct RowState {
  float m0, m1;          // reference exponents: P = 2^(x - m), m = (row maximum so far) - offset
  float a0, a1;          // what the sums so far must be multiplied by after this tile
};

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
    if (x0 == kHidden) f0 = kNoKeys;
    if (x1 == kHidden) f1 = kNoKeys;
  }
  f0 = quad_max(f0), f1 = quad_max(f1);
}

template<Scores KIND> SAGE2_DEV float probability(int s, float g, float m) {
  const float p = exp2_fast(KIND == kLogits ? __int_as_float(s) - m : fmaf(__int2float_rn(s), g, -m));
  return KIND == kSomeHidden && s == kHidden ? 0.f : p;
}
// S -> probabilities. none0, none1: the rows see nothing of this tile.
template<Scores KIND> SAGE2_DEV void probabilities(int (&S)[64], float g0, float g1, float m0, float m1, bool none0, bool none1) {
  if (KIND == kManyHidden) {
    // A hidden score vanishes by itself, as 2^(-2^31 g - m). Not so where g is tiny, or m that of far larger scores
    // (other keys have other scales), or either is NaN: there hidden scores are looked for.
    constexpr float kVanished = -150.f, kHiddenScore = -2147483648.f;
    if (none0) m0 = 0.f;
    if (none1) m1 = 0.f;
    const bool vanish = fmaf(kHiddenScore, g0, -m0) < kVanished && fmaf(kHiddenScore, g1, -m1) < kVanished;
    if (!__all_sync(~0u, vanish)) return probabilities<kSomeHidden>(S, g0, g1, m0, m1, none0, none1);
  }
  #pragma unroll
  for (int i = 0; i < 64; i++)               // the place of a direct E4M3 exponent, once it earns its place
    S[i] = __float_as_int(probability<KIND>(S[i], i & 2 ? g1 : g0, i & 2 ? m1 : m0));
}

SAGE2_DEV float step_of(float k_scale, float q_scale, float most = kMaxStep) { return min_keep_nan(k_scale * q_scale, most); }

// FP8 recipe: the reference follows the maximum in every tile, the sum is left to the matrix product (a column of ones).
template<Scores KIND> SAGE2_DEV void softmax_fp8(int (&S)[64], float k_scale, float q0, float q1, RowState &row) {
  const float g0 = step_of(k_scale, q0), g1 = step_of(k_scale, q1);
  float f0, f1;
  tile_maximum<KIND>(S, g0, g1, kFp8Offset, f0, f1);
  const bool none0 = f0 == kNoKeys, none1 = f1 == kNoKeys;
  f0 = fmaxf(f0, row.m0), f1 = fmaxf(f1, row.m1);
  row.a0 = exp2_fast(row.m0 - f0), row.a1 = exp2_fast(row.m1 - f1);
  row.m0 = f0, row.m1 = f1;
  probabilities<KIND>(S, g0, g1, f0, f1, none0, none1);
}

// FP16 recipe: O accumulates inside the tensor core, so the reference moves only when a maximum outgrows the slack.
// Returns whether any row of the warp moved; a row that did not has a = 1 exactly. Row sums are kept in fp32.
template<Scores KIND>
SAGE2_DEV bool softmax_fp16(int (&S)[64], float k_scale, float q0, float q1, RowState &row, float &l0, float &l1) {
  const float g0 = step_of(k_scale, q0), g1 = step_of(k_scale, q1);
  float f0, f1;
  tile_maximum<KIND>(S, g0, g1, kFp16Offset, f0, f1);
  const bool none0 = f0 == kNoKeys, none1 = f1 == kNoKeys;
  f0 = f0 > row.m0 + kFp16Slack ? f0 : row.m0, f1 = f1 > row.m1 + kFp16Slack ? f1 : row.m1;
  const bool moved = __any_sync(~0u, f0 != row.m0 || f1 != row.m1);
  row.a0 = exp2_fast(row.m0 - f0), row.a1 = exp2_fast(row.m1 - f1);
  row.m0 = f0, row.m1 = f1;
  if (KIND == kManyHidden) probabilities<KIND>(S, g0, g1, f0, f1, none0, none1);
  float s[4] = {0.f, 0.f, 0.f, 0.f};
  #pragma unroll
  for (int i = 0; i < 64; i++) {
    const float p = KIND == kManyHidden ? __int_as_float(S[i]) : probability<KIND>(S[i], i & 2 ? g1 : g0, i & 2 ? f1 : f0);
    s[i & 3] += p;
    S[i] = __float_as_int(p);
  }
  l0 = fmaf(l0, row.a0, s[0] + s[1]), l1 = fmaf(l1, row.a1, s[2] + s[3]);
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

}  // namespace sage2
