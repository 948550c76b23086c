// The index maps of the K and V tile images: where element (token, channel) of a 128-token block lives; and of mask bits.
// One truth for the pre-processing that writes the images, the attention kernels that read them, host tests,
// and sage_patch/reference/tile_image.py, which must agree line by line.
//
// Why images: one 1-D bulk copy then feeds a whole pipeline stage (no tensor map, no address arithmetic in the
// inner loop), the bytes arrive already swizzled for wgmma, and V's token order is chosen so that the registers
// that hold the scores are the registers that hold P (no shuffle between the two matrix products).
#pragma once

#ifdef __CUDACC__
#define SAGE2_HD __host__ __device__
#else
#define SAGE2_HD
#endif

namespace sage2 {

constexpr int kTileTokens = 128;       // tokens of one image
constexpr int kScaleGroups = 4;        // INT8 scales of one K image
constexpr int kVPitch = 128;           // bytes of one V^T row: 128 tokens in E4M3
constexpr int kHalfPanel = 64;         // channels of one panel of a 16-bit V image (128 bytes)
constexpr int kMeanSamples = 64;       // tokens that form a smoothing vector
constexpr int kMeanGroups = 16;        // partial sums of a smoothing vector

// wgmma's shared-memory swizzles: the index of a 16-byte chunk is XORed with bits of the row, so that the eight
// rows of a core matrix fall into different banks. pitch = bytes of a row: 128 or 64.
SAGE2_HD constexpr int swizzle(int row, int byte, int pitch) {
  const int x = pitch == 128 ? row & 7 : (row >> 1) & 3;
  return row * pitch + ((((byte >> 4) ^ x) << 4) | (byte & 15));
}

// Rows of `dim` INT8 channels: one panel of 64 or 128 channels, or, dim 256, two panels of 128 channels after each other.
SAGE2_HD constexpr int row_offset(int row, int channel, int dim, int rows) {
  return dim <= 128 ? swizzle(row, channel, dim) : channel / 128 * (rows * 128) + swizzle(row, channel % 128, 128);
}
// K image: 128 such rows.
SAGE2_HD constexpr int k_offset(int token, int channel, int dim) { return row_offset(token, channel, dim, kTileTokens); }

// Tokens that share one INT8 scale: the paper's per-thread groups for wgmma. A thread of the score accumulator
// holds columns 8i + 2c + {0, 1} with c = lane % 4, so it needs one scale.
SAGE2_HD constexpr int k_group(int token) { return (token % 8) / 2; }

// V image, E4M3: `dim` rows (V transposed) of 128 tokens. Inside each 16 tokens position 4c + t holds token
// {2c, 2c+1, 2c+8, 2c+9}[t]: the four scores that one thread owns become the four bytes of its P register.
SAGE2_HD constexpr int v_position(int token) {
  return (token & ~15) | ((token & 7) / 2 * 4) | ((token & 8) / 4) | (token & 1);
}
SAGE2_HD constexpr int v_token(int position) {
  return (position & ~15) | ((position & 15) / 4 * 2) | ((position & 2) * 4) | (position & 1);
}
SAGE2_HD constexpr int v_offset(int token, int channel) { return swizzle(channel, v_position(token), kVPitch); }

// V image, 16 bit: panels of 64 channels; in a panel 128 rows (tokens in order) of 128 bytes.
SAGE2_HD constexpr int v16_offset(int token, int channel) {
  return channel / kHalfPanel * (kTileTokens * 128) + swizzle(token, channel % kHalfPanel * 2, 128);
}

// Mask bits of 64 query rows and a key tile, kMaskWords words. Word c of a row holds column 8i + 2c + e at bit 2i + e: the
// scores that one thread of the accumulator owns. A thread finds the words of its rows r and r + 8 side by side.
constexpr int kMaskWords = 256;
SAGE2_HD constexpr int mask_word(int row, int c) { return row / 16 * 64 + row % 8 * 8 + c * 2 + row / 8 % 2; }
SAGE2_HD constexpr int mask_bit(int column) { return column / 8 * 2 + column % 2; }

// The sampled tokens of a smoothing vector: n = min(length, 64) tokens spread over the visible ones.
SAGE2_HD constexpr int mean_samples(int length) { return length < kMeanSamples ? length : kMeanSamples; }
SAGE2_HD constexpr int mean_token(int sample, int length) {
  return (int)((long long)sample * length / mean_samples(length));
}

}  // namespace sage2
