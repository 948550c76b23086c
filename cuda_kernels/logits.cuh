// Int32 scores -> float logits where softcap or an additive mask changes them before the softmax. The slow path: three
// special-function results an element for softcap, one load an element for a mask.
#pragma once
#include <type_traits>
#include "softmax.cuh"

namespace sage2 {

constexpr float kLog2e = 1.4426950408889634f;
// An added mask counts no less than this: a row whose keys all carry the lowest number of their type attends evenly, as it
// does elsewhere, and is not one without keys (kNoKeys).
constexpr float kLowest = -6e28f;

// cap * tanh(x / cap) in log2 units, as cap - 2 cap / (1 + 2^(k x)): absolute error near 1e-6 cap at every x.
struct Softcap {
  float cap, k;                    // cap 0: none
  SAGE2_DEV float operator()(float x) const {
    float r;
    asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(1.f + exp2_fast(k * x)));
    return fmaf(-2.f * cap, r, cap);
  }
};

SAGE2_DEV float bias_at(const void *data, int kind, int64_t i) {
  if (kind == kFloat32) return __ldg((const float *)data + i);
  const uint32_t w = __ldg((const uint16_t *)data + i);
  if (kind == kBfloat16) return __uint_as_float(w << 16);
  float x;
  asm("cvt.f32.f16 %0,%1;" : "=f"(x) : "h"((uint16_t)w));
  return x;
}

SAGE2_DEV float2 bias_pair(const uint8_t *row, int kind, int i) {          // columns i and i + 1 of neighbouring elements
  if (kind == kFloat32) return __ldg((const float2 *)((const float *)row + i));
  const uint32_t w = __ldg((const uint32_t *)((const uint16_t *)row + i));
  if (kind == kBfloat16) return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u));
  float2 x;
  asm("{.reg .b16 l,h; mov.b32 {l,h},%2; cvt.f32.f16 %0,l; cvt.f32.f16 %1,h;}" : "=f"(x.x), "=f"(x.y) : "r"(w));
  return x;
}

// Where a thread's rows r and r + 8 of the mask begin, for this key tile; a column past the last one reads the last one
// (its bit hides it).
struct BiasRows {
  const uint8_t *row0, *row1;
  int64_t column;                  // stride, elements
  int kind, last;                  // last: column that exists, counted from the tile's first key
  bool pairs;                      // two neighbouring elements can be read at once
};

// g: log2 units per integer step; d: q . k_mean in log2 units, which softcap must see (the softmax itself does not).
SAGE2_DEV void logits(int (&S)[64], float g0, float g1, float d0, float d1, const Softcap &softcap, const BiasRows &bias, int c) {
  auto change = [&](auto f) {
    #pragma unroll
    for (int i = 0; i < 64; i++) {
      const float x = f(__int2float_rn(S[i]), i & 2 ? g1 : g0, i & 2 ? d1 : d0);
      S[i] = S[i] == kHidden ? __float_as_int(-INFINITY) : __float_as_int(x);
    }
  };
  if (softcap.cap != 0.f) change([&](float s, float g, float d) { return softcap(fmaf(s, g, d)); });
  else change([](float s, float g, float) { return s * g; });
  auto add = [&](int &s, float value) {        // a hidden key stays hidden, whatever the mask says there
    const float x = __int_as_float(s);
    s = x == -INFINITY ? s : __float_as_int(fmaf(max_keep_nan(value, kLowest), kLog2e, x));
  };
  if (bias.kind <= kBool) return;
  if (bias.pairs && bias.last >= kTileTokens - 1) {
    auto all = [&](auto kind) {
      #pragma unroll
      for (int i = 0; i < 16; i++) {
        const float2 a = bias_pair(bias.row0, kind.value, 8 * i + 2 * c), b = bias_pair(bias.row1, kind.value, 8 * i + 2 * c);
        add(S[4 * i], a.x), add(S[4 * i + 1], a.y), add(S[4 * i + 2], b.x), add(S[4 * i + 3], b.y);
      }
    };
    if (bias.kind == kFloat32) all(std::integral_constant<int, kFloat32>());
    else if (bias.kind == kBfloat16) all(std::integral_constant<int, kBfloat16>());
    else all(std::integral_constant<int, kFloat16>());
    return;
  }
  #pragma unroll
  for (int i = 0; i < 16; i++)
    #pragma unroll
    for (int e = 0; e < 2; e++) {
      const int64_t at = min(8 * i + 2 * c + e, bias.last) * bias.column;
      add(S[4 * i + e], bias_at(bias.row0, bias.kind, at)), add(S[4 * i + 2 + e], bias_at(bias.row1, bias.kind, at));
    }
}

}  // namespace sage2
