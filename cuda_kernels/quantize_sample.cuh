// What the pre-processing knows of K and V before it reads them: the smoothing vectors, and V's scales.
//
// Both come from 64 tokens spread over the visible ones. Any constant vector is valid (softmax does not see a shift of
// K; V's comes back in the epilogue), so a sample does what the mean does. Every CTA forms them by itself, in a fixed
// order: partial sum g of samples g, g + 16, g + 32, g + 48, then the partial sums in order; fp32. A V channel whose
// sampled mean is below an eighth of its largest sample is not shifted: the mean is then mostly noise, and E4M3 is
// least biased around zero.
//
// V's scale leaves room above the largest sample (VRange::reach), unless the sample is everything: E4M3 is floating
// point, so that costs subnormals only. A channel that a value overflows nevertheless takes its scale from its true
// maximum (quantize_repair.cuh).
#pragma once
#include "quantize_head.cuh"

namespace sage2 {
namespace {

struct VRange {
  float reach;  // a channel's scale holds so many times its largest sample
  float limit;  // the largest number of an image
  SAGE2_DEV bool is_beyond(float x) const { return x > limit * 1.03125f; }  // below, it is rounded to limit at most
};
template<int WIDTH> struct Vectors {              // in shared memory
  alignas(16) float mean[WIDTH], inverse[WIDTH];  // inverse, of V: what |v - mean| is multiplied by
};
template<int WIDTH> struct Partial {
  float sum[kMeanGroups][WIDTH];
  uint4 low[kMeanGroups][WIDTH / 8], high[kMeanGroups][WIDTH / 8];  // V alone
};

// Smallest and largest value of eight channels, on packed 16-bit floats. fp32 subtraction is monotone, so the largest
// |x - mean| is that of one of the two.
struct Extremes { uint32_t low[4], high[4]; };
SAGE2_DEV Extremes no_values(bool bf16) {  // +Inf, -Inf
  Extremes r;
  #pragma unroll
  for (int e = 0; e < 4; e++) {
    r.low[e] = bf16 ? 0x7F807F80u : 0x7C007C00u;
    r.high[e] = r.low[e] | 0x80008000u;
  }
  return r;
}
template<bool KEEP_NAN = false> SAGE2_DEV void extend(Extremes &r, const uint4 &x, bool bf16) {
  const uint32_t w[4] = {x.x, x.y, x.z, x.w};
  #pragma unroll
  for (int i = 0; i < 4; i++)
    if (KEEP_NAN) bf16 ? extend_bf16x2_nan(r.low[i], r.high[i], w[i]) : extend_f16x2_nan(r.low[i], r.high[i], w[i]);
    else bf16 ? extend_bf16x2(r.low[i], r.high[i], w[i]) : extend_f16x2(r.low[i], r.high[i], w[i]);
}
SAGE2_DEV uint4 as_uint4(const uint32_t (&w)[4]) { return {w[0], w[1], w[2], w[3]}; }

// Eight vector elements from shared memory.
SAGE2_DEV void load8(const float *from, float (&to)[8]) {
  const float4 a = *(const float4 *)from, b = *(const float4 *)(from + 4);
  to[0] = a.x;
  to[1] = a.y;
  to[2] = a.z;
  to[3] = a.w;
  to[4] = b.x;
  to[5] = b.y;
  to[6] = b.z;
  to[7] = b.w;
}

// A V channel's scale and what its values are multiplied by, from the bits of the largest magnitude that it holds.
template<bool FP16> SAGE2_DEV void v_scale_of(uint32_t bits, float limit, float &scale, float &inverse) {
  const float amax = __uint_as_float(bits);
  if (amax < kTiny) scale = inverse = 0.f;  // a constant channel: the mean is the answer
  else if (bits >= kInfBits) {              // an Inf: the channel is NaN
    scale = __uint_as_float(0x7FFFFFFFu);
    inverse = 0.f;
  } else if (FP16) {
    scale = __uint_as_float(bits & kInfBits);
    inverse = __fdiv_rn(1.f, scale);
  } else {
    scale = __fmul_rn(amax, __fdiv_rn(1.f, limit));
    inverse = __fdiv_rn(limit, amax);
  }
}

// One sample group of eight channels. Values that are not finite count as zero for the sum, and not at all for the
// extremes.
template<int WIDTH, Mode MODE, bool IS_V>
SAGE2_DEV void sample_group(const Params &p, const Head &h, const Rows &rows, int group, int chunk,
                            Partial<WIDTH> &to) {
  constexpr int kEach = kMeanSamples / kMeanGroups;
  const int samples = mean_samples(h.keys);
  const bool bf16 = is_bf16<MODE>(p);
  const auto key = [&](int i) {
    const int s = group + i * kMeanGroups;
    return s < samples ? mean_token(s, h.keys) : h.keys;  // there is none
  };
  uint4 x[kEach];
  load_some<MODE>(p, h, rows, x, key, [&](int) { return chunk * 8; });
  float sum[8] = {};
  Extremes range = no_values(bf16);
  #pragma unroll
  for (int i = 0; i < kEach; i++) {
    float f[8];
    widen(x[i], bf16, f);
    uint32_t w[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
    #pragma unroll
    for (int e = 0; e < 8; e++) {
      if (magnitude(f[e]) >= kInfBits) {
        f[e] = 0.f;
        w[e / 2] |= e % 2 ? 0x7FFF0000u : 0x7FFFu;  // NaN
      }
      sum[e] = __fadd_rn(sum[e], f[e]);
    }
    if (IS_V && exists<MODE>(p, h, key(i))) extend(range, as_uint4(w), bf16);
  }
  float *const out = &to.sum[group][chunk * 8];
  *(float4 *)out = make_float4(sum[0], sum[1], sum[2], sum[3]);
  *(float4 *)(out + 4) = make_float4(sum[4], sum[5], sum[6], sum[7]);
  if (IS_V) {
    to.low[group][chunk] = as_uint4(range.low);
    to.high[group][chunk] = as_uint4(range.high);
  }
}
template<Mode MODE> SAGE2_DEV int count_samples(const Params &p, const Head &h) {  // by whole warps
  const int samples = mean_samples(h.keys);
  if (is_plain(MODE) || !p.mask.data) return samples;
  int there = 0;
  for (int i = 0; i < samples; i += 32) {  // each lane looks at its share
    const int mine = i + (int)threadIdx.x % 32;
    there += __popc(__ballot_sync(~0u, mine < samples && exists<MODE>(p, h, mean_token(mine, h.keys))));
  }
  return there;
}
template<int WIDTH>
SAGE2_DEV void sampled_range(const Partial<WIDTH> &partial, int channel, bool bf16, float &low, float &high) {
  low = __uint_as_float(kInfBits);
  high = -low;
  #pragma unroll 4
  for (int g = 0; g < kMeanGroups; g++) {
    low = fminf(low, widen(((const uint16_t *)partial.low[g])[channel], bf16));
    high = fmaxf(high, widen(((const uint16_t *)partial.high[g])[channel], bf16));
  }
  if (!(low <= high)) low = high = 0.f;
}

// The vectors of K, or of V with the scales that the sample gives, by a whole CTA. leads: it writes them where they
// belong, `head` and `channel0` of arrays of STRIDE channels. A channel without a usable sample gets scale zero and an
// inverse that everything but the mean itself overflows.
template<int WIDTH, int STRIDE, int THREADS, Mode MODE, bool IS_V, bool FP16>
SAGE2_DEV void sample(const Params &p, const Head &h, const Rows &rows, VRange range, Partial<WIDTH> &partial,
                      Vectors<WIDTH> &to, bool leads, int head, int channel0) {
  constexpr int kChunks = WIDTH / 8;
  const bool smooth = IS_V ? p.smooth_v : p.smooth_k;
  #pragma unroll 1
  for (int u = threadIdx.x; u < kMeanGroups * kChunks; u += THREADS)
    sample_group<WIDTH, MODE, IS_V>(p, h, rows, u / kChunks, u % kChunks, partial);
  __syncthreads();
  #pragma unroll 1
  for (int channel = threadIdx.x; channel < WIDTH; channel += THREADS) {
    float sum = 0.f;
    #pragma unroll 4
    for (int g = 0; g < kMeanGroups; g++) sum = __fadd_rn(sum, partial.sum[g][channel]);
    const int samples = count_samples<MODE>(p, h);
    float mean = samples && smooth ? __fdiv_rn(sum, (float)samples) : 0.f;
    if (IS_V) {
      float low, high;
      sampled_range<WIDTH>(partial, channel, is_bf16<MODE>(p), low, high);
      if (fabsf(mean) * kSignificance < fmaxf(fabsf(low), fabsf(high))) mean = 0.f;
      const float amax = fmaxf(fabsf(__fsub_rn(low, mean)), fabsf(__fsub_rn(high, mean)));
      const float most = h.keys > kMeanSamples ? __fmul_rn(amax, range.reach) : amax;
      float scale = 0.f, inverse = 0x1p127f;
      if (amax >= kTiny && magnitude(most) < kInfBits) v_scale_of<FP16>(magnitude(most), range.limit, scale, inverse);
      to.inverse[channel] = inverse;
      if (leads) p.images.v_scale[(int64_t)head * STRIDE + channel0 + channel] = scale;
    }
    to.mean[channel] = mean;
    if (leads) (IS_V ? p.images.v_mean : p.images.k_mean)[(int64_t)head * STRIDE + channel0 + channel] = mean;
  }
  __syncthreads();
}

}  // namespace
}  // namespace sage2
