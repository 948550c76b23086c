// The rotation of a row of Q or K before it is quantized: its vector times a Hadamard matrix, over the row's width. One
// order of work for all kernels, that of sage_patch/reference/rotation.py, so that the numbers are the same everywhere:
// each number over the width first, which is exact; then sums and differences of channels 1, 2, 4, .. apart, each
// rounded to fp32.
#pragma once
#include "ptx.cuh"

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
  const int lane = thread_index();  // read again, not kept, as are the signs: registers are short
  #pragma unroll
  for (int lanes = 1; lanes < LANES; lanes *= 2) {
    const float sign = lane & lanes ? -1.f : 1.f;  // a lane keeps a + b, or as the later one a - b
    #pragma unroll
    for (int i = 0; i < N; i++) f[i] = __fmaf_rn(f[i], sign, __shfl_xor_sync(~0u, f[i], lanes));
  }
  #pragma unroll
  for (int distance = 8; distance < N; distance *= 2) butterflies(f, distance);
}

}  // namespace sage2
