// A warp's share of a block of 128 tokens of E4M3 V, whose image is transposed and token-permuted.
//
// Warp j of four holds tokens 32 j .. 32 j + 31 in registers, 16 bits a value. A lane has the four tokens {2c, 2c + 1,
// 2c + 8, 2c + 9} of one 16-token group, a word of the image, and eight channels of every 32: each of its words is one
// channel's. The image is put together in shared memory, or, for a repair, written where it belongs.
#pragma once
#include "quantize_sample.cuh"

namespace sage2 {
namespace {

// Where byte `at` of an image waits in shared memory: the four rows that a warp writes at a time, eight apart, fall
// into different banks.
SAGE2_DEV int staged(int at) { return at ^ (at >> 10 & 3) << 5; }

template<int DIM, Mode MODE> struct ColumnShare {
  static constexpr int kGroups = DIM / 32;
  uint4 x[kGroups * 4];  // [32 channels][token]
  int token, channel;    // the first of each
  float worst = 0.f;     // the largest scaled value

  SAGE2_DEV explicit ColumnShare(int tid) {
    const int lane = tid % 32, word = tid / 32 % 4 * 8 + lane / 4;
    token = word / 4 * 16 + word % 4 * 2;
    channel = lane % 4 * 8;
    #pragma unroll
    for (int i = 0; i < 4 * kGroups; i++) x[i] = make_uint4(0, 0, 0, 0);
  }
  SAGE2_HD static constexpr int step(int i) {
    return (i & 1) + (i & 2) * 4;
  }  // tokens from the first to the lane's i-th

  SAGE2_DEV void load(const Head &h, const Rows &rows, int c, int block, const Lie &lie) {
    #pragma unroll
    for (int i = 0; i < 4; i++)
      load_plain(x[4 * c + i], h, rows, block * kTileTokens + token + step(i), channel + c * 32, lie);
  }
  SAGE2_DEV void load(const Head &h, const Rows &rows, int block, const Lie &lie) {
    #pragma unroll
    for (int c = 0; c < kGroups; c++) load(h, rows, c, block, lie);
  }
  SAGE2_DEV void load_block(const Params &p, const Head &h, const Rows &rows, int block) {
    const int first = block * kTileTokens + token;
    load_rows<MODE>(
        p, h, rows, x, [&](int i) { return first + step(i % 4); }, [&](int i) { return channel + i / 4 * 32; });
  }

  // Into the image at `base + at`, STAGED or as it will lie (at: its size, or 0). ALL: each key exists, and those of
  // the next block, if they lie so, are read as soon as their registers are free.
  template<bool ALL, bool STAGED>
  SAGE2_DEV void write_values(const Params &p, const Head &h, const Rows &rows, const Vectors<DIM> &of, uint8_t *base,
                              int at, int block, const Lie &next) {
    const bool bf16 = is_bf16<MODE>(p);
    bool there[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) there[i] = ALL || exists<MODE>(p, h, block * kTileTokens + token + step(i));
    const int first = v_offset(token, channel);  // in row channel + e its 16-byte chunk is XORed with e
    const int word = at + (STAGED ? staged(first) : first);
    #pragma unroll
    for (int c = 0; c < kGroups; c++) {
      #pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const float2 mean = *(const float2 *)&of.mean[channel + c * 32 + e];
        const float2 inverse = *(const float2 *)&of.inverse[channel + c * 32 + e];
        float lo[4], hi[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint4 &row = x[4 * c + i];
          widen(e == 0 ? row.x : e == 2 ? row.y : e == 4 ? row.z : row.w, bf16, lo[i], hi[i]);
          lo[i] = there[i] ? __fmul_rn(__fsub_rn(lo[i], mean.x), inverse.x) : 0.f;
          hi[i] = there[i] ? __fmul_rn(__fsub_rn(hi[i], mean.y), inverse.y) : 0.f;
          worst = fmaxf(worst, fmaxf(fabsf(lo[i]), fabsf(hi[i])));
        }
        *(uint32_t *)(base + (word ^ e << 4) + (c * 32 + e) * kVPitch) = pack_e4m3(lo[0], lo[1], lo[2], lo[3]);
        *(uint32_t *)(base + (word ^ (e + 1) << 4) + (c * 32 + e + 1) * kVPitch) =
            pack_e4m3(hi[0], hi[1], hi[2], hi[3]);
      }
      if (ALL) load(h, rows, c, block + 1, next);
    }
  }
};

}  // namespace
}  // namespace sage2
