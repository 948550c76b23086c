// A warp's share of a block of 128 tokens whose image has rows as the tensor has: INT8 K, and FP16 V.
//
// Warp g of four holds tokens 8 j + 2 g + {0, 1}, j = 0..15: K's scale group g, so it alone knows the group's largest
// magnitude. 32 rows lie in registers, 16 bits a value: a row is DIM / 8 neighbouring lanes, lane l of them its
// channels 8 l .. 8 l + 7, and every load takes 256 / DIM rows. So a whole row is in one warp, a butterfly over its
// channels three steps inside a lane and log2(DIM / 8) shuffles.
#pragma once
#include "fwd_mma.h"
#include "mma_image.h"
#include "quantize_sample.cuh"

namespace sage2 {
namespace {

template<int DIM, Mode MODE> struct RowShare {
  static constexpr int kLanes = DIM / 8, kAtOnce = 32 / kLanes, kLoads = 32 / kAtOnce;
  uint4 x[kLoads];
  int token, channel;  // of x[0]
  float worst = 0.f;   // the largest scaled value of V

  SAGE2_DEV explicit RowShare(int tid) {
    const int lane = tid % 32, row = lane / kLanes;
    token = row / 2 * 8 + tid / 32 % kScaleGroups * 2 + row % 2;
    channel = lane % kLanes * 8;
    #pragma unroll
    for (int i = 0; i < kLoads; i++) x[i] = make_uint4(0, 0, 0, 0);
  }
  // Tokens from x[0]'s to x[i]'s: whole groups of eight, after which swizzles repeat, but for dim 256.
  SAGE2_HD static constexpr int step(int i) { return kAtOnce > 1 ? i * 4 * kAtOnce : i / 2 * 8 + i % 2; }

  SAGE2_DEV void load(const Head &h, const Rows &rows, int i, int block, const Lie &lie) {
    load_plain(x[i], h, rows, block * kTileTokens + token + step(i), channel, lie);
  }
  SAGE2_DEV void load(const Head &h, const Rows &rows, int block, const Lie &lie) {
    #pragma unroll
    for (int i = 0; i < kLoads; i++) load(h, rows, i, block, lie);
  }
  SAGE2_DEV void load_block(const Params &p, const Head &h, const Rows &rows, int block) {
    const int first = block * kTileTokens + token;
    load_rows<MODE>(p, h, rows, x, [&](int i) { return first + step(i); }, [&](int) { return channel; });
  }
  SAGE2_DEV uint32_t present(const Params &p, const Head &h, int block) const {  // bit i: the key of x[i] exists
    uint32_t there = 0;
    #pragma unroll 4
    for (int i = 0; i < kLoads; i++) there |= (uint32_t)exists<MODE>(p, h, block * kTileTokens + token + step(i)) << i;
    return there;
  }

  // Keys less their mean, in fp32: a lane's eight channels of x[i]; zeros where there is no key. The whole warp comes
  // here for every i, whole rows side by side. What is done to keys before their scale is taken belongs here.
  SAGE2_DEV void centred_keys(const Params &p, int i, const float (&mean)[8], bool there, float (&f)[8]) const {
    widen(x[i], is_bf16<MODE>(p), f);
    #pragma unroll
    for (int e = 0; e < 8; e++) f[e] = there ? __fsub_rn(f[e], mean[e]) : 0.f;
  }
  // The lane's largest magnitude of centred keys, where each of them exists: from the extremes of each channel.
  SAGE2_DEV float largest_of_all(const float (&mean)[8]) const {
    constexpr bool kBf16 = MODE % 2;
    Extremes range = no_values(kBf16);
    #pragma unroll
    for (int i = 0; i < kLoads; i++) extend<true>(range, x[i], kBf16);
    float low[8], high[8], top = 0.f;
    widen(as_uint4(range.low), kBf16, low);
    widen(as_uint4(range.high), kBf16, high);
    #pragma unroll
    for (int e = 0; e < 8; e++)
      top = max_keep_nan(top, max_keep_nan(fabsf(__fsub_rn(low[e], mean[e])), fabsf(__fsub_rn(high[e], mean[e]))));
    return top;
  }
  SAGE2_DEV float largest(const Params &p, const float (&mean)[8], uint32_t there) {
    float top = 0.f;
    #pragma unroll
    for (int i = 0; i < kLoads; i++) {
      float f[8];
      forget(x[i].x, x[i].y, x[i].z, x[i].w);  // one row after the other: registers that are not there
      centred_keys(p, i, mean, there >> i & 1, f);
      #pragma unroll
      for (int e = 0; e < 8; e++) top = max_keep_nan(top, fabsf(f[e]));
    }
    return top;
  }

  // The block's INT8 keys of this warp and their scale. ALL: each key exists, and those of the next block, if they lie
  // so, are read as soon as their registers are free.
  template<bool ALL>
  SAGE2_DEV void write_keys(const Params &p, const Head &h, const Rows &rows, const float (&mean)[8], int block,
                            const Lie &next) {
    const uint32_t there = ALL ? ~0u : present(p, h, block);
    constexpr bool kAsked = MODE == kAny;
    const bool int4 = kAsked && p.int4, packed = kAsked && DIM <= 128 && p.int4 == kPackedInt4;
    const float top = ALL ? largest_of_all(mean) : largest(p, mean, there);
    const Int8Scale s8 = int8_scale(__reduce_max_sync(~0u, magnitude(top)), int4);
    const int64_t image = h.image + block;
    const int group = threadIdx.x / 32 % kScaleGroups;
    if (threadIdx.x % 32 == 0) p.images.k_scale[image * kScaleGroups + group] = s8.scale;
    constexpr int kPitch = DIM > 128 ? 128 : DIM;  // bytes of a row
    const int at = k_offset(token, channel, DIM);
    uint8_t *const out = p.images.k + image * (int64_t)(k_image_bytes(DIM) / (packed ? 2 : 1));
    #pragma unroll
    for (int i = 0; i < kLoads; i++) {
      float f[8];
      if (!ALL) forget(x[i].x, x[i].y, x[i].z, x[i].w);  // centred again
      centred_keys(p, i, mean, there >> i & 1, f);
      if (packed) *(uint32_t *)(out + k4_offset(token, channel, DIM) + step(i) * (DIM / 2)) = pack_s4(f, s8.inverse);
      else
        *(uint2 *)(out + (kAtOnce == 1 && i % 2 ? at ^ 16 : at) + step(i) * kPitch) = {
            pack_s8(f[0], f[1], f[2], f[3], s8.inverse), pack_s8(f[4], f[5], f[6], f[7], s8.inverse)};
      if (ALL) load(h, rows, i, block + 1, next);
    }
  }

  // The same of 16-bit V, which is scaled so that any bf16 fits fp16.
  template<bool ALL>
  SAGE2_DEV void write_values(const Params &p, const Head &h, const Rows &rows, const Vectors<DIM> &of, uint8_t *image,
                              int block, const Lie &next) {
    const uint32_t there = ALL ? ~0u : present(p, h, block);
    float mean[8], inverse[8];
    load8(of.mean + channel, mean);
    load8(of.inverse + channel, inverse);
    uint8_t *const out = image + v16_offset(token, channel);
    #pragma unroll
    for (int i = 0; i < kLoads; i++) {
      float f[8];
      forget(x[i].x, x[i].y, x[i].z, x[i].w);  // one row after the other
      widen(x[i], is_bf16<MODE>(p), f);
      #pragma unroll
      for (int e = 0; e < 8; e++) {
        f[e] = there >> i & 1 ? __fmul_rn(__fsub_rn(f[e], mean[e]), inverse[e]) : 0.f;
        worst = fmaxf(worst, fabsf(f[e]));
      }
      *(uint4 *)(out + step(i) * 128) = {pack_f16(f[0], f[1]), pack_f16(f[2], f[3]), pack_f16(f[4], f[5]),
                                         pack_f16(f[6], f[7])};
      if (ALL) load(h, rows, i, block + 1, next);
    }
  }
};

}  // namespace
}  // namespace sage2
