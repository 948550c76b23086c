// What a CTA of the attention kernels may use: registers of its warpgroups, shared memory, barriers; and the two matrix
// products of a warpgroup on operands that lie there.
//
// Registers: 3 consumers x 128 x 160 + 128 x 32 = 65536 (dim 64 FP8: 4 x 128 x 112 + 128 x 32 = 61440; two consumers:
// 2 x 128 x 232 + 128 x 40 = 64512, all that 384 threads are given).
//   A consumer's ledger, dim 128 FP8: O 64, sums 2, T 68 + P 16 (in the place of S 64), row state 4, six to spare.
//   FP8: T holds one key tile's P V and is folded into O in full fp32, O = O a + T, because the FP8 accumulator keeps only
//        13 bits and truncates. The row sum is one more output column: eight rows of ones under V^T (N = 136 or 72).
//   FP16: P V accumulates in O directly and O is rescaled only when a row maximum moves by more than the slack.
// Shared memory, dim 128 FP8 / FP16: Q 2 x 24 KB, K 2 x 16 KB, V 2 x 17 / 32 KB, O staging 51 KB,
// arriving Q 24 KB: 189 + 3 / 219 + 3 KB. Masked: notes 6 KB; FP16 then receives Q in 12 KB.
#pragma once
#include "params.h"
#include "ptx.cuh"
#include "query.cuh"

namespace sage2 {
namespace {

constexpr int align1k(int x) { return (x + 1023) / 1024 * 1024; }

template<int DIM, bool FP16, Family FAMILY> struct Layout {
  static constexpr int DV = DIM < 128 ? DIM : 128;       // channels of V and the output in one launch
  static constexpr int consumers = FAMILY == kAdjusted || DIM > 128 ? 2 : DIM == 64 && !FP16 && FAMILY == kDense ? 4 : 3, rows = 64 * consumers, threads = 128 * (consumers + 1);
  static constexpr int registers = consumers == 4 ? 112 : consumers == 3 ? 160 : 232, feeder_registers = consumers == 2 ? 40 : 32;
  static constexpr int stages = DIM >= 128 ? 2 : 4, log_stages = DIM >= 128 ? 1 : 2;   // small tiles need more in flight
  // Shared memory, bytes from its 1024-byte aligned start:
  static constexpr int q = 64 * DIM;                     // one warpgroup's Q
  static constexpr int k = kTileTokens * DIM;
  static constexpr int v = kTileTokens * DV * (FP16 ? 2 : 1);
  static constexpr int v_stage = align1k(v + (FP16 ? 0 : 8 * kVPitch));     // the rows of ones lie under V^T
  static constexpr int out_pitch = DV * 2 + 16;          // staging rows, padded against bank conflicts
  static constexpr int at_q = 0, at_k = at_q + 2 * consumers * q, at_v = at_k + stages * k;
  static constexpr int raw_rows = DIM == 128 && FP16 && FAMILY == kMasked ? 16 : prefetch_rows(DIM);
  static constexpr int raw = raw_rows * DIM * 2;         // one warp's landing place for 16-bit Q rows
  static constexpr int at_out = at_v + stages * v_stage, at_raw = at_out + rows * out_pitch;
  static constexpr int at_q_scale = at_raw + (consumers < 3 ? consumers : 3) * raw, at_q_dot = at_q_scale + 2 * rows * 4;
  static constexpr int at_slot = at_q_dot + 2 * rows * 4;
  static constexpr int limits = 48, at_limits = at_slot + 16 * (2 + consumers);           // of a consumer warp; the gap keeps the dense family's addresses
  // A stage's note, outside the dense family: mask bits of each consumer's rows, K's four scales, the entry (tile.cuh).
  static constexpr int note_bits = 4 * kMaskWords * consumers, note_scales = note_bits, note_entry = note_scales + 16, note = note_entry + 16;
  static constexpr int at_note = at_limits + limits * 4 * consumers;
  static constexpr int at_barrier = at_note + (FAMILY == kDense ? 0 : stages * note);
  static constexpr int bytes = at_barrier + 8 * (7 + 2 * consumers + 4 * stages);
  static_assert(bytes <= 232448, "shared memory of one SM");
};

template<int STAGES, int CONSUMERS> struct Barriers {                     // addresses of the mbarriers
  uint32_t tile_full, q_full, q_empty, raw_full, k_full, k_empty, v_full, v_empty;
  SAGE2_DEV explicit Barriers(uint32_t at)
      : tile_full(at), q_full(at + 16), q_empty(q_full + 16 * CONSUMERS), raw_full(q_empty + 16), k_full(raw_full + 24),
        k_empty(k_full + 8 * STAGES), v_full(k_empty + 8 * STAGES), v_empty(v_full + 8 * STAGES) {}
};

// ------------------------------------------------------------------ the two matrix products
// STEPS: of 32 channels; ADD: to what S holds; meanwhile: called while the product is formed
template<int DIM, int STEPS, bool ADD, class F> SAGE2_DEV void scores(int (&S)[64], uint32_t q, uint32_t k, F meanwhile) {
  constexpr int kPitch = DIM > 128 ? 128 : DIM, kQPanel = 64 * 128 / 16, kKPanel = kTileTokens * 128 / 16;
  wgmma_fence();
  if (ADD) mma_s8_next(S, desc<kPitch>(q), desc<kPitch>(k));
  else mma_s8_first(S, desc<kPitch>(q), desc<kPitch>(k));
  #pragma unroll
  for (int i = 1; i < STEPS; i++) mma_s8_next(S, desc<kPitch>(q + i / 4 * kQPanel + 2 * (i % 4)), desc<kPitch>(k + i / 4 * kKPanel + 2 * (i % 4)));
  wgmma_commit();
  meanwhile();
  wgmma_wait_all();
}
template<int N> SAGE2_DEV void weigh_fp8(float (&T)[N], const uint32_t (&P)[16], uint32_t v) {
  wgmma_fence();
  mma_e4m3_first(T, P, desc<kVPitch>(v));
  #pragma unroll
  for (int i = 1; i < 4; i++) mma_e4m3_next(T, P + 4 * i, desc<kVPitch>(v + 2 * i));
  wgmma_commit();
  wgmma_wait_all();
}
template<int N> SAGE2_DEV void weigh_fp16(float (&O)[N], const uint32_t (&P)[32], uint32_t v) {
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < 8; i++) mma_f16_next(O, P + 4 * i, desc<128>(v + 128 * i));
  wgmma_commit();
  wgmma_wait_all();
}

}  // namespace
}  // namespace sage2
