// A warp's share of a block of 128 keys that are rotated before they are quantized. The tokens are those of RowShare,
// one scale group a warp, but four lanes hold a key, as pieces of eight channels: the operands of rotate_piece(). Keys
// wait in registers as they came and are rotated twice, for the scale of their group and for its integers, half of
// their channels at a time: rotated ones would need twice the registers.
#pragma once
#include "fwd_mma.h"
#include "mma_image.h"
#include "quantize_sample.cuh"
#include "rotation.cuh"

namespace sage2 {
namespace {

template<int DIM, Mode MODE> struct RotatedShare {
  static constexpr int kLanes = 4, kPieces = DIM / 8 / kLanes;
  static constexpr int kSets = 4,
                       kSetTokens = kTileTokens / kSets;  // a set: a key in every four lanes; to the next one
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

  // What the sums of rotate_piece() start from, for all lanes, from the mean that smoothing takes off: by one warp.
  SAGE2_DEV static void start_from(const float *mean, float4 *start) {
    const int lane = thread_index() % 32, chunk = lane % (DIM / 8);
    float f[8];
    load8(mean + chunk * 8, f);
    #pragma unroll
    for (int e = 0; e < 8; e++) f[e] = __fmul_rn(f[e], -1.f / DIM);
    butterflies(f, 1);
    butterflies(f, 4);
    exchange<4>(f);
    #pragma unroll
    for (int half = 0; half < 2; half++)
      start[(chunk / 4 * 2 + half) * 4 + chunk % 4] =
          make_float4(f[4 * half], f[4 * half + 1], f[4 * half + 2], f[4 * half + 3]);
  }
  // Half of a set of keys less their mean, rotated but for the last step; zeros where there is no key.
  SAGE2_DEV void turn(const Params &p, int set, int half, const float4 *start, bool there, uint32_t signs,
                      float (&f)[kPieces][4]) const {
    #pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const float4 from = load_again(start + i * 8 + half * 4 + thread_index() % 4);
      f[i][0] = from.x;
      f[i][1] = from.y;
      f[i][2] = from.z;
      f[i][3] = from.w;
      rotate_piece(f[i], x[set * kPieces + i], half, signs, is_bf16<MODE>(p));
      #pragma unroll
      for (int e = 0; e < 4; e++) f[i][e] = there ? f[i][e] : 0.f;
    }
    rotate_pieces<kPieces / 2>(f);
  }
  SAGE2_DEV static void store_set(uint8_t *out, int set, bool packed, const uint32_t (&words)[2][kPieces]) {
    constexpr int kPitch = DIM > 128 ? 128 : DIM;  // bytes of a row
    #pragma unroll
    for (int i = 0; i < kPieces; i++)
      if (packed)
        *(uint32_t *)(out + k4_offset(token(), channel(i), DIM) + set * kSetTokens * (DIM / 2)) =
            nibbles(words[0][i]) | nibbles(words[1][i]) << 16;
      else
        *(uint2 *)(out + k_offset(token(), channel(i), DIM) + set * kSetTokens * kPitch) = {words[0][i], words[1][i]};
  }

  SAGE2_DEV static void fence(int i, int never) {  // schedule_fence() wants constants
    if (i == 0) schedule_fence<0>(never);
    if (i == 1) schedule_fence<1>(never);
    if (i == 2) schedule_fence<2>(never);
    if (i == 3) schedule_fence<3>(never);
    if (i == 4) schedule_fence<4>(never);
    if (i == 5) schedule_fence<5>(never);
    if (i == 6) schedule_fence<6>(never);
    if (i == 7) schedule_fence<7>(never);
  }

  // As RowShare's. start: start_from()'s, in shared memory.
  template<bool ALL>
  SAGE2_DEV void write_keys(const Params &p, const Head &h, const Rows &rows, const float4 *start, uint32_t signs,
                            int block, const Lie &next) {
    constexpr bool kAsked = MODE == kAny;
    const bool int4 = kAsked && p.int4, packed = kAsked && DIM <= 128 && p.int4 == kPackedInt4;
    uint32_t there = ~0u;  // bit i: the key of set i exists
    if (!ALL) {
      there = 0;
      const int first = block * kTileTokens + token();
      #pragma unroll
      for (int i = 0; i < kSets; i++) there |= (uint32_t)exists<MODE>(p, h, first + i * kSetTokens) << i;
    }
    float top = 0.f;
    #pragma unroll
    for (int i = 0; i < 2 * kSets; i++) {
      float f[kPieces][4];
      turn(p, i / 2, i % 2, start, there >> i / 2 & 1, signs, f);
      top = largest_turned(f, top);
    }
    const Int8Scale s8 = int8_scale_in_line(__reduce_max_sync(~0u, magnitude(top)), int4);
    const int64_t image = h.image + block;
    if (thread_index() % 32 == 0)
      p.images.k_scale[image * kScaleGroups + thread_index() / 32 % kScaleGroups] = s8.scale;
    uint8_t *const out = p.images.k + image * (int64_t)(k_image_bytes(DIM) / (packed ? 2 : 1));
    #pragma unroll
    for (int set = 0; set < kSets; set++) {
      uint32_t words[2][kPieces];
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        fence(2 * set + half, block);  // one after the other: registers are short
        float f[kPieces][4];
        turn(p, set, half, start, there >> set & 1, signs, f);
        #pragma unroll
        for (int i = 0; i < kPieces / 2; i++) butterflies(f[i], f[i + kPieces / 2]);
        #pragma unroll
        for (int i = 0; i < kPieces; i++) words[half][i] = pack_s8(f[i][0], f[i][1], f[i][2], f[i][3], s8.inverse);
      }
      store_set(out, set, packed, words);
      if (ALL) load_set(h, rows, set, block + 1, next);
    }
  }
};

}  // namespace
}  // namespace sage2
