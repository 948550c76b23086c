// What a CTA of the mma.sync attention kernels may use of registers and shared memory, and how K, V and Q get there.
//
// A CTA has 128 query rows and takes 64 keys at a time, half an image. A warp owns 16 rows (a fragment) or 32 and all
// 64 keys.
// Registers, dim 128, two fragments: O 128, S 64 (P in its place), row state 8, 40 for addresses and operands: 255, two
// CTAs of four warps an SM. One fragment (changed logits, sums in fp16, masked FP8, dim 256, FP16
// on small SMs): O 64, S 32; eight warps.
// Shared memory: Q once, two stages of K and V. Dim 128 FP16: 16 + 2 (8 + 16) = 64 KB, FP8: 16 + 2 (8 + 8) = 48 KB;
// dim 256 (128 channels of V): 32 + 2 (16 + 8 or 16) = 80 or 96 KB. A CTA of sm_86, 89 and 120 may have 99 KB, and an
// SM 100, of which each CTA costs one more: two CTAs fit if they have 49 KB each, so the dense kernels keep q . k_mean
// in the place of the log-sum-exp that it is for.
#pragma once
#include "mma_image.h"
#include "mma_ptx.cuh"
#include "query.cuh"

namespace sage2 {
namespace {

enum Product {   // the second one, P V
  kPvFp16,       // FP16, summed into O in fp32 by the tensor core
  kPvFp16Split,  // FP16, 64 keys summed in fp16, folded into O in fp32: twice the rate on GeForce
  kPvFp8,        // E4M3, 64 keys summed by the tensor core, folded into O in fp32
  kPvFp8Split    // the same summed in fp16; V's images reach kSplitVMax
};
// SMs of sm_86, 89 and 120 have 100 KB of shared memory and hold one CTA of 64 KB, or two of 33, which then have eight
// warps each.
#if defined(SAGE2_SMALL_SM)  // for tests
constexpr bool kSmallSm = true;
#elif defined(__CUDA_ARCH__)
constexpr bool kSmallSm = __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200;
#else
constexpr bool kSmallSm = false;
#endif
template<int DIM, Product PV, Family FAMILY, bool PACKED, bool SMALL = false> struct MmaConfig {
  static constexpr bool gets_small = PV == kPvFp16 && FAMILY != kAdjusted && DIM <= 128;
  typedef MmaConfig<DIM, PV, FAMILY, PACKED, gets_small> Small;             // on small SMs
  typedef MmaConfig<DIM, PV, FAMILY, PACKED, gets_small && kSmallSm> Here;  // on the SM that is being compiled for
  static constexpr int dim = DIM, dv = DIM < 128 ? DIM : 128;               // channels of V and O in one launch
  static constexpr Product pv = PV;
  static constexpr Family family = FAMILY;
  static constexpr bool packed = PACKED;  // INT4, two a byte
  static constexpr bool fp8 = PV == kPvFp8 || PV == kPvFp8Split, split = PV == kPvFp16Split || PV == kPvFp8Split;
  static constexpr bool dense = FAMILY == kDense;
  static constexpr bool smooths = FAMILY == kAdjusted && DIM <= 128;  // INT4, Q's means
  static constexpr bool narrow = FAMILY == kAdjusted || PV == kPvFp16Split || DIM > 128;
  static constexpr int fragments = narrow || SMALL || (FAMILY == kMasked && fp8 && DIM == 128) ? 1 : 2;
  static constexpr int rows = 128, warp_rows = 16 * fragments, threads = 2 * rows / fragments;
  static constexpr int ctas = fragments == 1 ? 1 : DIM == 64 && dense ? 3 : 2;  // an SM has registers for
  static constexpr int steps = kHalfTokens / (fp8 ? 32 : 16);                   // of keys, in P V
  static constexpr float offset = fp8 ? kFp8Offset : PV == kPvFp16Split ? 8.f : kFp16Offset;
  static constexpr float slack = PV == kPvFp16 ? kFp16Slack : 0.f;
  // Shared memory, bytes from its 1024-byte aligned start:
  static constexpr int row = PACKED ? DIM / 2 : DIM, pitch = row > 128 ? 128 : row, panels = row / pitch;  // Q and K
  static constexpr int k_image = kTileTokens * row, v_image = kTileTokens * dv * (fp8 ? 1 : 2);
  static constexpr int k_stage = k_image / 2, v_stage = v_image / 2;
  static constexpr int v_pitch = fp8 ? kHalfTokens : 128;
  static constexpr int at_q = 0, at_k = rows * row, at_v = at_k + 2 * k_stage, at_scale = at_v + 2 * v_stage;
  static constexpr int at_dot = at_scale + 4 * rows, at_scratch = at_dot + (dense ? 0 : 4 * rows);
  static constexpr int bytes = at_scratch + threads / 32 * 16;
  static_assert(bytes <= 99 << 10, "shared memory of a CTA");
  static_assert(!(dense && fp8 && DIM == 128) || bytes <= 49 << 10, "two CTAs on an SM with 100 KB");
};
// Neither FP8 products nor packed INT4 are compiled where they would be emulated, but for Hopper, whose mma kernels are
// there for tests. FP8: sm_89, sm_120. INT4: sm_80 to sm_89.
template<class C> SAGE2_DEV constexpr bool compiled_here() {
#ifdef __CUDA_ARCH__
  constexpr int kArch = __CUDA_ARCH__;
  return (!C::fp8 || kArch == 890 || kArch == 900 || kArch >= 1200) && (!C::packed || kArch < 1000);
#else
  return true;
#endif
}

// A loop whose steps are apart: its index is a constant, and each can have a fence of its own.
template<int N> struct Constant { static constexpr int value = N; };
template<int I, int END, int STEP = 1, class F> SAGE2_DEV void unrolled(F f) {
  if constexpr (I < END) {
    f(Constant<I>());
    unrolled<I + STEP, END, STEP>(f);
  }
}

// Copies `bytes` from one place to another, 16 bytes a thread and step: `to` and `from` are this thread's own.
template<int BYTES, int THREADS, int GAP = 1> SAGE2_DEV void copy(uint32_t to, const uint8_t *from, int tid) {
  #pragma unroll
  for (int at = 0; at < BYTES; at += 16 * THREADS)
    if (at + 16 * THREADS <= BYTES || at + 16 * tid < BYTES) copy_async16(to + at, from + GAP * at);
}
// Half an image of K and of V on its way into a stage. Halves of K and of 16-bit V are runs of whole rows of each
// panel; of V in E4M3 a half is half of each row, whose chunks are swizzled anew for rows of 64 bytes.
template<class C> SAGE2_DEV void load_stage(uint32_t s0, int stage, const uint8_t *k, const uint8_t *v, int half) {
  const int tid = thread_index();  // not kept: 64-bit addresses would be spilled
  const uint32_t to_k = s0 + C::at_k + stage * C::k_stage + 16 * tid, to_v = s0 + C::at_v + stage * C::v_stage;
  constexpr int kPanel = kHalfTokens * C::pitch, kVPanel = kHalfTokens * 128;
  k += half * kPanel + 16 * tid;
  #pragma unroll
  for (int i = 0; i < C::panels; i++) copy<kPanel, C::threads>(to_k + i * kPanel, k + 2 * i * kPanel, tid);
  if constexpr (C::fp8) {  // both swizzles repeat after eight rows
    v += swizzle_any(tid / 4, half * kHalfTokens + 16 * (tid % 4), 128);
    copy<C::v_stage, C::threads, 2>(to_v + swizzle_any(tid / 4, 16 * (tid % 4), kHalfTokens), v, tid);
  } else {
    v += half * kVPanel + 16 * tid;
    #pragma unroll
    for (int i = 0; i < C::dv / kHalfPanel; i++)
      copy<kVPanel, C::threads>(to_v + 16 * tid + i * kVPanel, v + 2 * i * kVPanel, tid);
  }
  copy_commit();
}

// Of a row of a tile.
SAGE2_DEV float *log_sum_exp_of(const Params &p, const Tile &t, int row) {
  return p.lse + ((int64_t)t.b * p.heads + t.h) * p.q_len + t.q_token + t.row0 + row;
}

// 16-bit rows -> quantized rows, their scales, and on request their dots with K's mean. A warp loads its own rows;
// DIM / 8 lanes hold one, eight channels each.
template<class C> SAGE2_DEV void load_rows(const Params &p, const Tile &t, uint32_t s0) {
  constexpr int kLanes = C::dim / 8, kPass = 32 / kLanes;
  const int lane = threadIdx.x & 31, channel = lane % kLanes * 8, first = threadIdx.x / 32 * C::warp_rows;
  const float *mean = nullptr;
  if (C::smooths && p.smooth_q) mean = p.q_mean + (int64_t)q_block(p, t, first) * C::dim + channel;
  #pragma unroll 2
  for (int i = 0; i < C::warp_rows; i += kPass) {
    const int row = first + i + lane / kLanes;
    const bool exists = t.row0 + row < t.q_len;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (exists) x = load_channels(q_row(p, t, row), channel, p.head_dim, p.q.vector);
    float f[8];
    if (mean && exists) centred(x, p.bf16, mean, f);
    else widen(x, p.bf16, f);
    if (p.rotate) rotate<kLanes>(f);
    uint32_t top = 0;
    #pragma unroll
    for (int e = 0; e < 8; e++) top = max(top, magnitude(f[e]));
    #pragma unroll
    for (int s = 1; s < kLanes; s *= 2) top = max(top, __shfl_xor_sync(~0u, top, s));
    const Int8Scale s8 = int8_scale(top, C::smooths && p.int4);
    const uint32_t to = s0 + C::at_q + channel / 128 * (C::rows * 128);
    if constexpr (C::packed) store_shared(to + swizzle_any(row, channel / 2, C::pitch), pack_s4(f, s8.inverse));
    else
      store_shared2(to + swizzle_any(row, channel % 128, C::pitch), pack_s8(f[0], f[1], f[2], f[3], s8.inverse),
                    pack_s8(f[4], f[5], f[6], f[7], s8.inverse));
    if (channel == 0) store_shared(s0 + C::at_scale + 4 * row, __float_as_uint(__fmul_rn(s8.scale, p.scale_log2)));
    if (p.need_dot) {
      float dot = dot8(x, p.bf16, k_mean<C::dim>(p, t) + channel, 0.f);
      #pragma unroll
      for (int s = 1; s < kLanes; s *= 2) dot += __shfl_xor_sync(~0u, dot, s);
      if (channel == 0) {
        if constexpr (!C::dense) store_shared(s0 + C::at_dot + 4 * row, __float_as_uint(dot * p.scale));
        else if (exists) *log_sum_exp_of(p, t, row) = dot * p.scale;  // need_dot: there is one
      }
    }
  }
  __syncwarp();
}

}  // namespace
}  // namespace sage2
