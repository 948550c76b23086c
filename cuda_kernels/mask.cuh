// Which keys a query row sees, and how hidden scores are marked. A mask is two numbers: the item's key count and the
// causal offset; row i sees keys [0, min(keys, i + offset + 1)). No causal mask = an offset past every length.
#pragma once
#include "ptx.cuh"
#include "tile_image.h"

namespace sage2 {

constexpr int kHidden = INT32_MIN;           // no INT8 dot product reaches it
constexpr int kNoCausalOffset = 1 << 30;
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

// Marks the scores of one 64 x 128 accumulator tile that rows r (limit0) and r + 8 (limit1) may not see.
// Limits count from the tile's first key; c = lane % 4 owns columns 8i + 2c + {0, 1}.
SAGE2_DEV void hide(int (&S)[64], int limit0, int limit1, int c) {
  limit0 -= 2 * c, limit1 -= 2 * c;
  #pragma unroll
  for (int i = 0; i < 16; i++)
    #pragma unroll
    for (int e = 0; e < 2; e++) {
      if (8 * i + e >= limit0) S[4 * i + e] = kHidden;
      if (8 * i + e >= limit1) S[4 * i + 2 + e] = kHidden;
    }
}

}  // namespace sage2
