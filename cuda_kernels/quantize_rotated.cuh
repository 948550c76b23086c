// A warp's share of a block of 128 keys that are rotated before they are quantized. The tokens are those of RowShare,
// one scale group a warp, but only four lanes (256 channels: eight) hold a key, as pieces of eight channels: most of a
// butterfly then stays inside a lane. Up to 128 channels each number is formed once and waits in registers for the
// scale of its group; 256 channels are formed twice.
#pragma once
#include "fwd_mma.h"
#include "mma_image.h"
#include "quantize_sample.cuh"
#include "rotation.cuh"

namespace sage2 {
namespace {

template<int DIM, Mode MODE> struct RotatedShare {
  static constexpr int kLanes = DIM > 128 ? 8 : 4, kPieces = DIM / 8 / kLanes;
  static constexpr int kSets = kLanes, kSetTokens = kTileTokens / kSets;  // a set: a key in every lane; to the next one
  uint4 x[kSets * kPieces];

  SAGE2_DEV RotatedShare() {
    #pragma unroll
    for (int i = 0; i < kSets * kPieces; i++) x[i] = make_uint4(0, 0, 0, 0);
  }
  // Of x[0]; read again where they are needed, not kept.
  SAGE2_DEV static int token() {
    const int tid = thread_index(), row = tid % 32 / kLanes;
    return row / 2 * 8 + tid / 32 % kScaleGroups * 2 + row % 2;
  }
  SAGE2_DEV static int channel(int piece) { return (piece * kLanes + thread_index() % kLanes) * 8; }

  SAGE2_DEV void load_set(const Head &h, const Rows &rows, int set, int block, const Lie &lie) {
    #pragma unroll
    for (int i = 0; i < kPieces; i++)
      load_plain(x[set * kPieces + i], h, rows, block * kTileTokens + token() + set * kSetTokens, channel(i), lie);
  }
  SAGE2_DEV void load(const Head &h, const Rows &rows, int block, const Lie &lie) {
    #pragma unroll
    for (int set = 0; set < kSets; set++) load_set(h, rows, set, block, lie);
  }
  SAGE2_DEV void load_block(const Params &p, const Head &h, const Rows &rows, int block) {
    const int first = block * kTileTokens + token();
    load_rows<MODE>(
        p, h, rows, x, [&](int i) { return first + i / kPieces * kSetTokens; },
        [&](int i) { return channel(i % kPieces); });
  }

  // A set less its mean, rotated, in fp32; zeros where there is no key.
  SAGE2_DEV void rotated_keys(const Params &p, int set, const float *mean, bool there, float (&f)[8 * kPieces]) const {
    #pragma unroll
    for (int i = 0; i < kPieces; i++) {
      float wide[8], m[8];
      widen(x[set * kPieces + i], is_bf16<MODE>(p), wide);
      load8(mean + channel(i), m);
      #pragma unroll
      for (int e = 0; e < 8; e++) f[8 * i + e] = there ? __fsub_rn(wide[e], m[e]) : 0.f;
    }
    rotate<kLanes>(f);
  }
  SAGE2_DEV static float largest_of(const float (&f)[8 * kPieces], float top) {
    #pragma unroll
    for (int e = 0; e < 8 * kPieces; e++) top = max_keep_nan(top, fabsf(f[e]));
    return top;
  }
  SAGE2_DEV static void store_set(uint8_t *out, int set, bool packed, const float (&f)[8 * kPieces], float inverse) {
    constexpr int kPitch = DIM > 128 ? 128 : DIM;  // bytes of a row
    #pragma unroll
    for (int i = 0; i < kPieces; i++) {
      float y[8];
      #pragma unroll
      for (int e = 0; e < 8; e++) y[e] = f[8 * i + e];
      if (packed)
        *(uint32_t *)(out + k4_offset(token(), channel(i), DIM) + set * kSetTokens * (DIM / 2)) = pack_s4(y, inverse);
      else
        *(uint2 *)(out + k_offset(token(), channel(i), DIM) + set * kSetTokens * kPitch) = {
            pack_s8(y[0], y[1], y[2], y[3], inverse), pack_s8(y[4], y[5], y[6], y[7], inverse)};
    }
  }

  // As RowShare's. mean: in shared memory.
  template<bool ALL>
  SAGE2_DEV void write_keys(const Params &p, const Head &h, const Rows &rows, const float *mean, int block,
                            const Lie &next) {
    constexpr bool kAsked = MODE == kAny, kOnce = DIM <= 128;
    const bool int4 = kAsked && p.int4, packed = kAsked && DIM <= 128 && p.int4 == kPackedInt4;
    uint32_t there = ~0u;  // bit i: the key of set i exists
    if (!ALL) {
      there = 0;
      const int first = block * kTileTokens + token();
      #pragma unroll
      for (int i = 0; i < kSets; i++) there |= (uint32_t)exists<MODE>(p, h, first + i * kSetTokens) << i;
    }
    float f[kOnce ? kSets : 1][8 * kPieces], top = 0.f;
    #pragma unroll
    for (int set = 0; set < kSets; set++) {
      rotated_keys(p, set, mean, there >> set & 1, f[kOnce ? set : 0]);
      top = largest_of(f[kOnce ? set : 0], top);
      if (kOnce && ALL) load_set(h, rows, set, block + 1, next);
    }
    const Int8Scale s8 = int8_scale_in_line(__reduce_max_sync(~0u, magnitude(top)), int4);
    const int64_t image = h.image + block;
    if (thread_index() % 32 == 0)
      p.images.k_scale[image * kScaleGroups + thread_index() / 32 % kScaleGroups] = s8.scale;
    uint8_t *const out = p.images.k + image * (int64_t)(k_image_bytes(DIM) / (packed ? 2 : 1));
    #pragma unroll
    for (int set = 0; set < kSets; set++) {
      if (!kOnce) {
        #pragma unroll
        for (int i = set * kPieces; i < (set + 1) * kPieces; i++) forget(x[i].x, x[i].y, x[i].z, x[i].w);
        rotated_keys(p, set, mean, there >> set & 1, f[0]);
      }
      store_set(out, set, packed, f[kOnce ? set : 0], s8.inverse);
      if (!kOnce && ALL) load_set(h, rows, set, block + 1, next);
    }
  }
};

}  // namespace
}  // namespace sage2
