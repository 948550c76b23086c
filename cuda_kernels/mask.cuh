// Which keys a query row sees, and how hidden scores are marked. Without a mask tensor that is a few numbers: the item's
// key count, the diagonal's offset, and how many keys are seen left and right of the diagonal. Row i sees keys
// [max(0, i + offset - left), min(keys, i + offset + right + 1)). The dense kernel knows no windows: causal is right = 0,
// and no causal mask an offset past every length.
#pragma once
#include "params.h"
#include "ptx.cuh"
#include "tile_image.h"

namespace sage2 {

constexpr int kHidden = INT32_MIN;           // no INT8 dot product reaches it
constexpr int kNoCausalOffset = 1 << 30;
constexpr int kNoLimit = 1 << 30;
constexpr int kMaxLength = 1 << 30;          // tokens; row + offset + 1 stays inside int32

SAGE2_DEV int visible_keys(int row, int keys, int offset) { return min(keys, row + offset + 1); }

// The key tiles of a group of rows [first, last]: tiles [0, full) are seen whole by every row, [full, seen) in part
// or by some rows, [seen, ...) by none.
struct TileSpan { int full, seen; };
SAGE2_DEV TileSpan tile_span(int first, int last, int q_len, int keys, int offset) {
  if (first >= q_len) return {0, 0};
  const int seen = max(visible_keys(last, keys, offset), 0), full = max(visible_keys(first, keys, offset), 0);
  return {full / kTileTokens, (seen + kTileTokens - 1) / kTileTokens};
}

// The same with windows: tiles [begin, end) are seen by some row.
struct Limits { int keys, offset, left, right; };
SAGE2_DEV int first_key(int row, const Limits &l) { return max(0, row + l.offset - l.left); }
SAGE2_DEV int end_key(int row, const Limits &l) { return max(0, min(l.keys, row + l.offset + l.right + 1)); }
struct TileRange { int begin, end; };
SAGE2_DEV TileRange tile_range(int first, int last, const Limits &l) {
  const int begin = first_key(first, l) / kTileTokens, end = (end_key(last, l) + kTileTokens - 1) / kTileTokens;
  return {begin, max(begin, end)};
}

// Marks the scores of one 64 x 128 accumulator tile that rows r (limit0) and r + 8 (limit1) may not see.
// Limits count from the tile's first key; c = lane % 4 owns columns 8i + 2c + {0, 1}.
template<int MARK = kHidden> SAGE2_DEV void hide(int (&S)[64], int limit0, int limit1, int c) {
  limit0 -= 2 * c, limit1 -= 2 * c;
  #pragma unroll
  for (int i = 0; i < 16; i++)
    #pragma unroll
    for (int e = 0; e < 2; e++) {
      if (8 * i + e >= limit0) S[4 * i + e] = MARK;
      if (8 * i + e >= limit1) S[4 * i + 2 + e] = MARK;
    }
}
// And those before the first key of a window.
template<int MARK = kHidden> SAGE2_DEV void hide_before(int (&S)[64], int limit0, int limit1, int c) {
  limit0 -= 2 * c, limit1 -= 2 * c;
  #pragma unroll
  for (int i = 0; i < 16; i++)
    #pragma unroll
    for (int e = 0; e < 2; e++) {
      if (8 * i + e < limit0) S[4 * i + e] = MARK;
      if (8 * i + e < limit1) S[4 * i + 2 + e] = MARK;
    }
}

// With a mask tensor they are those whose bit is 0. row0, row1: a thread's word of each of its rows (tile_image.h).
SAGE2_DEV void hide(int (&S)[64], uint32_t row0, uint32_t row1) {
  #pragma unroll
  for (int b = 0; b < 32; b++) {
    const int i = b / 2 * 4 + b % 2;
    S[i] = row0 & 1u << b ? S[i] : kHidden;
    S[i + 2] = row1 & 1u << b ? S[i + 2] : kHidden;
  }
}

// Where such tiles are many, the marks are set before the product: hidden scores are sums that start at kBarred, all others
// start at 0. An INT8 product of 256 channels, at most 2^22 in magnitude, neither wraps them nor lifts them to kHiddenBelow.
constexpr int kBarred = INT32_MIN + (1 << 23), kHiddenBelow = INT32_MIN + (1 << 24);
SAGE2_DEV void start_scores(int (&S)[64], uint32_t row0, uint32_t row1) {
  #pragma unroll
  for (int b = 0; b < 8; b++) {              // one bit of each byte moves to its top; two such bytes make kBarred
    const uint32_t x = ~(row0 << (7 - b)) & 0x80808080u, y = ~(row1 << (7 - b)) & 0x80808080u;
    #pragma unroll
    for (int k = 0; k < 4; k++) {
      const int i = (8 * k + b) / 2 * 4 + b % 2;
      S[i] = __byte_perm(x, 0, 0x0044 | k << 8 | k << 12);
      S[i + 2] = __byte_perm(y, 0, 0x0044 | k << 8 | k << 12);
    }
  }
}
SAGE2_DEV void mark_hidden(int (&S)[64]) {   // of such sums -> kHidden
  #pragma unroll
  for (int i = 0; i < 64; i++) S[i] = S[i] < kHiddenBelow ? kHidden : S[i];
}

}  // namespace sage2
