// The rotation of a row of Q or K before it is quantized: its vector times a Hadamard matrix, over the row's width. A
// Hadamard matrix is a product of one factor for each bit of the channel's number. Two orders of work:
//
// rotate(), of fp32: each number over the width first, which is exact; then sums and differences of channels 1, 2, 4,
// .. apart, each rounded to fp32 (sage_patch/reference/rotation.py). Pages use it, and vectors of means.
//
// rotate_piece(), of 16-bit rows as they lie in memory: the tensor cores do bits 0 and 2 to 4, 16 channels an
// instruction, and sums and differences in registers the others (sage_patch/reference/emulator/rotation.py). No number
// moves between lanes. What is to be subtracted from the rows, rotated likewise, is what the sums start from.
#pragma once
#include "mma_ptx.cuh"

namespace sage2 {

// (a, b) -> (a + b, a - b) of the registers of a lane that are `distance` apart.
template<int N> SAGE2_DEV void butterflies(float (&f)[N], int distance) {
  #pragma unroll
  for (int i = 0; i < N; i++) {
    if (i & distance) continue;
    const float a = f[i], b = f[i + distance];
    f[i] = __fadd_rn(a, b);
    f[i + distance] = __fsub_rn(a, b);
  }
}

template<int N> SAGE2_DEV void butterflies(float (&f)[N], float (&g)[N]) {
  #pragma unroll
  for (int i = 0; i < N; i++) {
    const float a = f[i], b = g[i];
    f[i] = __fadd_rn(a, b);
    g[i] = __fsub_rn(a, b);
  }
}
// Those of numbers that are 1, 2, .. to before LANES lanes apart.
template<int LANES, int N> SAGE2_DEV void exchange(float (&f)[N]) {
  const int lane = thread_index();  // read again, not kept, as are the signs: registers are short
  #pragma unroll
  for (int lanes = 1; lanes < LANES; lanes *= 2) {
    const float sign = lane & lanes ? -1.f : 1.f;  // a lane keeps a + b, or as the later one a - b
    #pragma unroll
    for (int i = 0; i < N; i++) f[i] = __fmaf_rn(f[i], sign, __shfl_xor_sync(~0u, f[i], lanes));
  }
}

// Rotates rows of N * LANES channels, 64, 128 or 256, in place. A row lies in LANES neighbouring lanes, LANES a power
// of two, as pieces of eight channels: f[8 i + e] of the row's lane l is channel (i * LANES + l) * 8 + e. Channels past
// head_dim hold zero. Every lane of the warp must be here. A row with NaN or infinity becomes one of NaN and
// infinities. Costs log2(LANES) shuffles a number: few lanes with long pieces are cheaper than many with one.
template<int LANES, int N> SAGE2_DEV void rotate(float (&f)[N]) {
  static_assert(N % 8 == 0 && LANES <= 32, "pieces of eight channels in the lanes of a warp");
  #pragma unroll
  for (int i = 0; i < N; i++) f[i] = __fmul_rn(f[i], 1.f / (N * LANES));
  #pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) butterflies(f, distance);
  exchange<LANES>(f);
  #pragma unroll
  for (int distance = 8; distance < N; distance *= 2) butterflies(f, distance);
}

// The matrix of one instruction as a lane holds it: two signs over WIDTH.
template<int WIDTH> SAGE2_DEV uint32_t rotation_signs(bool bf16) {
  constexpr int kLog = WIDTH == 64 ? 6 : WIDTH == 128 ? 7 : 8;
  const int n = thread_index() % 32 / 4, k = thread_index() % 4 * 2;
  const uint32_t one = bf16 ? (127 - kLog) << 7 : (15 - kLog) << 10;
  return one * 0x10001u ^ (uint32_t)(__popc(k & n) & 1) << 15 ^ (uint32_t)__popc((k + 1) & n) << 31;
}
// A piece is 32 channels of eight rows: lane (g, t) holds channels 8 t .. 8 t + 7 of row g. The instruction's rows g
// and g + 8 are the channels of the row whose bit 1 is clear and set, its two halves of k those whose bit 2 is. f, of
// one half of the piece (bit 2 of what comes out): channels 8 t + 4 half + {0, 1} and {2, 3}, between which bit 1 is
// left to do; on entry what the sums start from.
SAGE2_DEV void rotate_piece(float (&f)[4], const uint4 &x, int half, uint32_t signs, bool bf16) {
  const uint32_t a[4] = {x.x, x.y, x.z, x.w}, last = half ? signs ^ 0x80008000u : signs;
  if (bf16) mma_bf16(f, a, signs, last);
  else mma_f16(f, a, signs, last);
}
// Bit 1, and the bits of the piece's number from 1 to before LAST.
template<int LAST, int N> SAGE2_DEV void rotate_pieces(float (&f)[N][4]) {
  #pragma unroll
  for (int i = 0; i < N; i++) butterflies(f[i], 2);
  #pragma unroll
  for (int distance = 1; distance < LAST; distance *= 2)
    #pragma unroll
    for (int i = 0; i < N; i++)
      if (!(i & distance)) butterflies(f[i], f[i + distance]);
}
// The largest magnitude when pieces N / 2 apart, which are yet to be turned, are: of |a + b| and |a - b| the larger is
// |a| + |b|, rounded too.
template<int N> SAGE2_DEV float largest_turned(const float (&f)[N][4], float top) {
  #pragma unroll
  for (int i = 0; i < N / 2; i++)
    #pragma unroll
    for (int e = 0; e < 4; e++) top = max_keep_nan(top, __fadd_rn(fabsf(f[i][e]), fabsf(f[i + N / 2][e])));
  return top;
}

}  // namespace sage2
