// Attention over a quantized cache on mma.sync, for every card from sm_80 on that has no wgmma. The same pages, rows
// and parts as on Hopper (pages_rows.cuh); 64 keys, half a page, are taken at a time.
//
// V's E4M3 codes become FP16 in registers, which is exact, and P V is formed in FP16 with fp32 sums on all these cards:
// half of them have no FP8 products, reading a page costs more than multiplying it, and so all compute the same
// numbers. A code's bits, moved into an FP16 number, are 2^-8 of its value; O gets the 2^8 at the end.
//
// A CTA has four warps. With at most 16 packed rows the warps take turns on the half pages, each loads its own and
// leaves a part of its own; with more, all see every half and hold 16 rows each. One buffer of K and one of V: the next
// K arrives during softmax and P V, the next V during the scores; other warps fill the gaps.
//
// Shared memory, dim 128: turns 2 + 4 x 16.6 = 69 KB, else 8 + 16.6 KB.
#pragma once
#include "fwd_mma.cuh"
#include "pages_rows.cuh"

namespace sage2 {
namespace {

constexpr int kPageThreads = 128, kPageWarps = kPageThreads / 32;

// What scores() and softmax() of the other mma.sync kernels ask for, and where things are in shared memory.
template<int DIM, bool TURNS> struct PageConfig {
  static constexpr int dim = DIM, dv = DIM, row = DIM, pitch = DIM;
  static constexpr bool packed = false, fp8 = false;
  static constexpr int fragments = 1, rows = TURNS ? 16 : 16 * kPageWarps;
  static constexpr int steps = kHalfTokens / 16;
  static constexpr float offset = kFp16Offset, slack = 0.f;
  // Bytes from the start of a buffer, and of shared memory.
  static constexpr int v = kHalfTokens * DIM, v_scale = 2 * v, k_scale = v_scale + 4 * DIM, lost = k_scale + 16;
  static constexpr int buffer = (lost + 16 + 127) / 128 * 128;
  static constexpr int at_scale = rows * DIM, at_dot = at_scale + 4 * rows, at_buffers = at_dot + 4 * rows;
  static constexpr int bytes = at_buffers + (TURNS ? kPageWarps : 1) * buffer;
  static_assert(bytes <= 99 << 10, "shared memory of a CTA");
};

// The packed rows into shared memory as INT8, with their scales and their dots with K's mean. DIM / 8 lanes hold a row.
template<class C> SAGE2_DEV void load_rows(const PageParams &p, const PageWork &work, uint32_t s0) {
  constexpr int kLanes = C::dim / 8;
  const int channel = threadIdx.x % kLanes * 8;
  #pragma unroll 1
  for (int slot = threadIdx.x / kLanes; slot < C::rows; slot += kPageThreads / kLanes) {
    const int row = work.row0 + slot, token = row / p.heads_per_kv;
    const int h = work.kv * p.heads_per_kv + row - token * p.heads_per_kv;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row < work.row_end)
      x = load_channels(p.q.data + work.b * p.q.batch + h * p.q.head + token * p.q.token, channel, p.head_dim,
                        p.q.vector);
    float f[8];
    widen(x, p.bf16, f);
    if (p.rotate) rotate<kLanes>(f);
    uint32_t top = 0;
    #pragma unroll
    for (int e = 0; e < 8; e++) top = max(top, magnitude(f[e]));
    #pragma unroll
    for (int s = 1; s < kLanes; s *= 2) top = max(top, __shfl_xor_sync(~0u, top, s));
    const Int8Scale s8 = int8_scale(top);
    store_shared2(s0 + swizzle_any(slot, channel, C::pitch), pack_s8(f[0], f[1], f[2], f[3], s8.inverse),
                  pack_s8(f[4], f[5], f[6], f[7], s8.inverse));
    if (channel == 0) store_shared(s0 + C::at_scale + 4 * slot, __float_as_uint(__fmul_rn(s8.scale, p.scale_log2)));
    if (p.need_dot) {
      float dot = dot8(x, p.bf16, p.k_mean + ((int64_t)work.b * p.kv_heads + work.kv) * C::dim + channel, 0.f);
      #pragma unroll
      for (int s = 1; s < kLanes; s *= 2) dot += __shfl_xor_sync(~0u, dot, s);
      if (channel == 0) store_shared(s0 + C::at_dot + 4 * slot, __float_as_uint(dot * p.scale));
    }
  }
}

// Two E4M3 codes of `codes`, those that `pick` puts into the high bytes of its halves, as FP16 times 2^-8.
SAGE2_DEV uint32_t halves_of(uint32_t codes, uint32_t pick) {
  const uint32_t high = __byte_perm(codes, 0, pick);
  return (high & 0x80008000u) | (high >> 1 & 0x3F803F80u);
}

// O = O a + P V s, V's scales s.
template<class C>
SAGE2_DEV void weigh_codes(RowSums<C> &sums, const Probabilities<C> &P, const float (&factors)[2], uint32_t v,
                           uint32_t scales, int lane, int never) {
  const int row = lane / 16 * 8 + lane % 8;
  const uint32_t v_lane = v + row * kHalfTokens + ((lane / 8 % 2 ^ swizzle_bits(row, kHalfTokens)) << 4);
  scales += 8 * (lane & 3);
  unrolled<0, C::dv / 16>([&](auto index) {
    constexpr int pair = decltype(index)::value;
    schedule_fence<pair>(never);
    float T[2][4] = {};
    #pragma unroll
    for (int step = 0; step < 2; step++) {  // of 32 keys
      uint32_t b[4];
      load_matrices(b, (v_lane ^ step << 5) + pair * 16 * kHalfTokens);
      #pragma unroll
      for (int u = 0; u < 2; u++)
        #pragma unroll
        for (int j = 0; j < 2; j++) {
          const uint32_t codes = b[2 * j + u];
          mma_f16(T[j], P[2 * step + u], halves_of(codes, 0x1404), halves_of(codes, 0x3424));
        }
    }
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      const float2 s = load_shared2(scales + 4 * (16 * pair + 8 * j));
      float (&O)[4] = sums.O[0][2 * pair + j];
      #pragma unroll
      for (int e = 0; e < 4; e++) O[e] = fmaf(T[j][e], e % 2 ? s.y : s.x, O[e] * factors[e / 2]);
    }
  });
}

// EXTRA: with a mask or softcap.
template<int DIM, bool TURNS, bool EXTRA>
__global__ void __launch_bounds__(kPageThreads, TURNS   ? 1
                                                : EXTRA ? 2
                                                        : 3) attend_mma(const __grid_constant__ PageParams p) {
  typedef PageConfig<DIM, TURNS> C;
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, c = lane & 3;
  const uint32_t s0 = smem_address(smem), buffer = s0 + C::at_buffers + (TURNS ? warp * C::buffer : 0);
  const PageWork work = work_of(p);
  // Who shares a buffer.
  constexpr int kSharing = TURNS ? 32 : kPageThreads;
  const int tid = TURNS ? lane : threadIdx.x;
  auto together = [] {
    if (TURNS) __syncwarp();
    else __syncthreads();
  };
  const int64_t head = (int64_t)blockIdx.z << p.slab_shift;
  auto record_of = [&](int page) {
    return (const uint8_t *)__ldg((const unsigned long long *)p.slabs + (page >> p.slab_shift) - p.first_slab) +
           (head + (page & ((1 << p.slab_shift) - 1))) * p.record;
  };
  auto load_k = [&](int half) {
    const uint8_t *const record = record_of(half / 2), *const scales = record + page_scales(DIM);
    copy<kHalfTokens * DIM, kSharing>(buffer + 16 * tid, record + half % 2 * (kHalfTokens * DIM) + 16 * tid, tid);
    if (tid < 2) copy_async16(buffer + C::k_scale + 16 * tid, scales + tid * 4 * (kScaleGroups + DIM));
  };
  auto load_v = [&](int half) {  // half of each row, whose chunks are swizzled anew for rows of 64 bytes (load_stage)
    const uint8_t *const record = record_of(half / 2), *const scales = record + page_scales(DIM) + 4 * kScaleGroups;
    copy<kHalfTokens * DIM, kSharing, 2>(
        buffer + C::v + swizzle_any(tid / 4, 16 * (tid % 4), kHalfTokens),
        record + kTileTokens * DIM + swizzle_any(tid / 4, half % 2 * kHalfTokens + 16 * (tid % 4), kVPitch), tid);
    copy<4 * DIM, kSharing>(buffer + C::v_scale + 16 * tid, scales + 16 * tid, tid);
  };
  constexpr int kStride = TURNS ? kPageWarps : 1;
  const int end = 2 * work.end;
  int half = 2 * work.begin + (TURNS ? warp : 0);
  if (half < end) load_k(half);
  copy_commit();
  if (half < end) load_v(half);
  copy_commit();
  load_rows<C>(p, work, s0);
  __syncthreads();

  const int rows_from = TURNS ? 0 : 16 * warp, r = rows_from + lane / 4, row0 = work.row0 + r;
  const Seen seen = seen_from<EXTRA>(p, work, row0);
  float2 dot = make_float2(0.f, 0.f);
  if (p.need_dot) dot = make_float2(load_shared(s0 + C::at_dot + 4 * r), load_shared(s0 + C::at_dot + 4 * r + 32));
  RowSums<C> sums;
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    sums.m[0][h] = kNoKeys;
    sums.l[0][h] = 0.f;
  }
  #pragma unroll
  for (int n = 0; n < DIM / 8; n++)
    #pragma unroll
    for (int e = 0; e < 4; e++) sums.O[0][n][e] = 0.f;
  #pragma unroll 1
  for (; half < end; half += kStride) {
    copy_wait<1>();  // K is here, V may be on its way
    together();
    const bool caps = EXTRA && p.softcap != 0.f;
    const float k_scale = load_shared(buffer + C::k_scale + 4 * c);
    const float2 lost = load_shared2(buffer + C::lost + half % 2 * 8);
    int S[1][8][4];
    scores<C>(S, caps ? 0 : kMagicBits, s0 + rows_from * C::pitch, buffer, lane, p.rows);
    together();
    if (half + kStride < end) load_k(half + kStride);
    copy_commit();

    const int first = half * kHalfTokens;
    const bool partial = first < seen.warp_last || first + kHalfTokens > seen.warp_end;
    if (partial) {
      hide_outside(S[0], 0, seen.begin0 - first, seen.end0 - first, c);
      hide_outside(S[0], 1, seen.begin1 - first, seen.end1 - first, c);
    }
    int (&flat)[32] = reinterpret_cast<int (&)[32]>(S);
    if (EXTRA && seen.mask0) hide_by_mask(flat, p, seen.mask0, seen.mask1, first - p.mask_first, c);
    const uint32_t words[2] = {__float_as_uint(lost.x), __float_as_uint(lost.y)};
    if (words[0] | words[1]) see_lost(flat, words, c, sums.l[0][0], sums.l[0][1]);
    Probabilities<C> P;
    float factors[2];
    const uint32_t q_scales = s0 + C::at_scale + 4 * r;
    if (caps) {
      logits(flat, step_of(k_scale, load_shared(q_scales)), step_of(k_scale, load_shared(q_scales + 32)),
             dot.x * kLog2e, dot.y * kLog2e, {p.softcap, p.softcap_step}, {nullptr, nullptr, 0, kNoMask, 0, false},
             nullptr, c);
      softmax<C, kLogits>(S[0], P, sums, 0, factors, k_scale, q_scales);
    } else if (partial || (EXTRA && seen.mask0)) softmax<C, kSomeHidden>(S[0], P, sums, 0, factors, k_scale, q_scales);
    else softmax<C, kAllSeen>(S[0], P, sums, 0, factors, k_scale, q_scales);

    copy_wait<1>();
    together();
    weigh_codes<C>(sums, P, factors, buffer + C::v, buffer + C::v_scale, lane, p.rows);
    together();
    if (half + kStride < end) load_v(half + kStride);
    copy_commit();
  }

  float (&O)[DIM / 2] = reinterpret_cast<float (&)[DIM / 2]>(sums.O);
  #pragma unroll
  for (int i = 0; i < DIM / 2; i++) O[i] *= 256.f;
  leave<DIM>(p, work, row0, TURNS ? blockIdx.x * kPageWarps + warp : blockIdx.x, O,
             make_float2(sums.m[0][0], sums.m[0][1]), make_float2(quad_sum(sums.l[0][0]), quad_sum(sums.l[0][1])), dot,
             c);
}

}  // namespace
}  // namespace sage2
