// What the mma.sync kernels add to the index maps of tile_image.h: INT4 rows packed two a byte, and where a 64-key half
// of an image goes in shared memory. One truth for the pre-processing, the kernels and host tests.
#pragma once
#include "tile_image.h"

namespace sage2 {

constexpr int kHalfTokens = 64;  // keys that the kernels take at a time: half an image

// The XOR of a 16-byte chunk's index, so that eight rows of a matrix fall into different banks; pitch: bytes of a row.
SAGE2_HD constexpr int swizzle_bits(int row, int pitch) {
  return pitch == 128 ? row & 7 : pitch == 64 ? (row >> 1) & 3 : (row >> 2) & 1;
}
SAGE2_HD constexpr int swizzle_any(int row, int byte, int pitch) {
  return row * pitch + ((((byte >> 4) ^ swizzle_bits(row, pitch)) << 4) | (byte & 15));
}

// INT4 K image: rows of dim / 2 bytes; channel 2 i is the low nibble of byte i, 2 i + 1 the high one. m16n8k64 takes
// eight nibbles a register, lowest first; any order that Q and K share gives the same product.
SAGE2_HD constexpr int k4_offset(int token, int channel, int dim) { return swizzle_any(token, channel / 2, dim / 2); }

}  // namespace sage2
