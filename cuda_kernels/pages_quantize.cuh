// One page of a quantized cache from its 16-bit tokens, those of the tail and new ones, by the threads of one CTA; new tokens
// also go into the tail. The page's numbers never depend on how its tokens came. Used by append (a launch of its own) and by
// attend (on its way).
#pragma once
#include "int8.cuh"
#include "pages.h"
#include "ptx.cuh"

namespace sage2 {
namespace {

constexpr float kE4m3Max = 448.f, kSignificance = 8.f;      // as in quantize.cu

// Between the two passes a page's V stays in shared memory.
template<int DIM, int THREADS> struct PageShared {
  alignas(16) uint8_t v[kTileTokens * DIM * 2];
  alignas(16) float v_inverse[DIM], v_mean[DIM];
  float v_top[THREADS / 32][DIM];      // the largest |v - v_mean| of each warp's tokens
  uint32_t k_amax[kScaleGroups], lost[kTileTokens / 32];
};
// A token's chunks of eight channels, so that tokens two apart do not share banks.
template<int DIM> SAGE2_DEV int v_at(int token, int channel) { return token * DIM * 2 + ((channel >> 3) ^ (token & 2) << 1) * 16; }

// Where a page's record goes: to its slab, and for a CTA that reads it at once to images and scales in its shared memory.
struct PageTarget { uint8_t *record, *images, *scales; };

SAGE2_DEV uint8_t *record_of(const PageParams &p, int head, int page) {
  return (uint8_t *)__ldg((const unsigned long long *)p.slabs + (page >> p.slab_shift) - p.first_slab) +
         (((int64_t)head << p.slab_shift) + (page & ((1 << p.slab_shift) - 1))) * p.record;
}

// The store holds `held` tokens before the new ones, p.k and p.v, `end` with them. COPY: the target has images and scales.
template<int DIM, int THREADS, bool COPY, class Sync>
SAGE2_DEV void quantize_page(const PageParams &p, int head, int page, int held, int end, int tid, PageShared<DIM, THREADS> &sh, const PageTarget &to, Sync sync) {
  constexpr int kChunks = DIM / 8, kRows = THREADS / kChunks, kPasses = kTileTokens / kRows;
  const int b = head / p.kv_heads, kv = head - b * p.kv_heads, last_page = (end - 1) / kTileTokens;
  const int channel = tid % kChunks * 8, row = tid / kChunks, group = k_group(row);    // kRows is a multiple of 8
  const int64_t tails = (int64_t)p.batch * p.kv_heads * kTailSlots * p.head_dim;
  uint16_t *const tail = p.tail + (int64_t)head * kTailSlots * p.head_dim;
  const int tail_vector = p.head_dim % 8 == 0;
  const bool keep = page >= last_page - 1;
  if (tid < DIM) sh.v_mean[tid] = p.v_mean[(int64_t)head * DIM + tid];
  if (tid < kScaleGroups) sh.k_amax[tid] = sh.lost[tid] = 0;

  // Loads; tokens of the tail are plain loads: another page's CTA writes elsewhere in it, this one after its own reads.
  uint4 k[kPasses], v[kPasses];
  #pragma unroll
  for (int j = 0; j < kPasses; j++) {
    const int t = page * kTileTokens + row + j * kRows;
    k[j] = v[j] = make_uint4(0, 0, 0, 0);
    if (t >= end || channel >= p.head_dim) continue;
    if (t < held) {
      const uint16_t *from = tail + t % kTailSlots * (int64_t)p.head_dim;
      if (tail_vector) k[j] = *(const uint4 *)(from + channel), v[j] = *(const uint4 *)(from + tails + channel);
      else k[j] = load_channels(from, channel, p.head_dim, 0), v[j] = load_channels(from + tails, channel, p.head_dim, 0);
    } else {
      const int64_t i = t - held;
      k[j] = load_channels(p.k.data + b * p.k.batch + kv * p.k.head + i * p.k.token, channel, p.head_dim, p.k.vector);
      v[j] = load_channels(p.v.data + b * p.v.batch + kv * p.v.head + i * p.v.token, channel, p.head_dim, p.v.vector);
      if (keep) {
        uint16_t *slot = tail + t % kTailSlots * (int64_t)p.head_dim + channel;
        if (tail_vector) *(uint4 *)slot = k[j], *(uint4 *)(slot + tails) = v[j];
        else {
          const uint32_t ke[4] = {k[j].x, k[j].y, k[j].z, k[j].w}, ve[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
          #pragma unroll
          for (int e = 0; e < 8; e++)
            if (channel + e < p.head_dim) slot[e] = (uint16_t)(ke[e / 2] >> 16 * (e % 2)), slot[tails + e] = (uint16_t)(ve[e / 2] >> 16 * (e % 2));
        }
      }
    }
  }
  sync();

  // A token with a number that is not finite counts as absent, and is noted as lost: rows that see it become NaN, no others.
  uint32_t lost = 0;                                              // bit j: the token of pass j
  auto there = [&](int j) { return page * kTileTokens + row + j * kRows < end && !(lost >> j & 1); };
  float k_mean[8], v_mean[8], largest = 0.f, top[8] = {};
  #pragma unroll
  for (int e = 0; e < 8; e++) k_mean[e] = p.k_mean[(int64_t)head * DIM + channel + e], v_mean[e] = sh.v_mean[channel + e];
  #pragma unroll
  for (int j = 0; j < kPasses; j++) {
    float f[8], g[8], most = 0.f, most_v = 0.f;
    widen(k[j], p.bf16, f), widen(v[j], p.bf16, g);
    #pragma unroll
    for (int e = 0; e < 8; e++) {
      f[e] = fabsf(__fsub_rn(f[e], k_mean[e])), g[e] = fabsf(__fsub_rn(g[e], v_mean[e]));
      most = max_keep_nan(most, f[e]), most_v = max_keep_nan(most_v, g[e]);
    }
    bool bad = !(most < INFINITY && most_v < INFINITY);
    #pragma unroll
    for (int s = 1; s < kChunks; s *= 2) bad |= __shfl_xor_sync(~0u, bad, s);
    lost |= (uint32_t)bad << j;
    if (there(j)) {
      largest = fmaxf(largest, most);
      #pragma unroll
      for (int e = 0; e < 8; e++) top[e] = fmaxf(top[e], g[e]);
    }
    *(uint4 *)(sh.v + v_at<DIM>(row + j * kRows, channel)) = v[j];
    const int token = row + j * kRows;
    if (bad && channel == 0) atomicOr(&sh.lost[token / 32], 1u << token % 32);
  }
  // A warp covers 32 / kChunks neighbouring rows; pairs of rows share a K group.
  #pragma unroll
  for (int s = 1; s < kChunks; s *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, s));
  if (tid % kChunks == 0) atomicMax(&sh.k_amax[group], magnitude(largest));
  #pragma unroll
  for (int e = 0; e < 8; e++) {
    #pragma unroll
    for (int s = kChunks; s < 32; s *= 2) top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], s));
  }
  if (tid % 32 < kChunks) {
    float4 *to = (float4 *)&sh.v_top[tid / 32][channel];
    to[0] = make_float4(top[0], top[1], top[2], top[3]), to[1] = make_float4(top[4], top[5], top[6], top[7]);
  }
  sync();

  const Int8Scale s8 = int8_scale(sh.k_amax[group]);
  #pragma unroll
  for (int j = 0; j < kPasses; j++) {
    float f[8];
    widen(k[j], p.bf16, f);
    #pragma unroll
    for (int e = 0; e < 8; e++) f[e] = there(j) ? __fsub_rn(f[e], k_mean[e]) : 0.f;
    const uint2 x = {pack_s8(f[0], f[1], f[2], f[3], s8.inverse), pack_s8(f[4], f[5], f[6], f[7], s8.inverse)};
    const int at = k_offset(row + j * kRows, channel, DIM);
    *(uint2 *)(to.record + at) = x;
    if (COPY) *(uint2 *)(to.images + at) = x;
  }
  auto put = [&](int i, uint32_t bits) {
    ((uint32_t *)(to.record + page_scales(DIM)))[i] = bits;
    if (COPY) ((uint32_t *)to.scales)[i] = bits;
  };
  if (tid < kScaleGroups) put(tid, __float_as_uint(int8_scale(sh.k_amax[tid]).scale)), put(kScaleGroups + DIM + tid, sh.lost[tid]);
  if (tid < DIM) {
    float amax = 0.f;
    #pragma unroll
    for (int i = 0; i < THREADS / 32; i++) amax = fmaxf(amax, sh.v_top[i][tid]);
    const bool constant = amax < kTiny;                           // the mean is the answer
    put(kScaleGroups + tid, constant ? 0u : __float_as_uint(__fmul_rn(amax, 1.f / kE4m3Max)));
    sh.v_inverse[tid] = constant ? 0.f : __fdiv_rn(kE4m3Max, amax);
  }
  sync();
  // V, transposed and token-permuted: a lane takes tokens {2c, 2c+1, 2c+8, 2c+9} of 16 and eight channels (quantize.cu).
  const int lane = tid % 32;
  #pragma unroll 1
  for (int unit = tid / 32; unit < DIM / 8; unit += THREADS / 32) {
    const int first = (unit % (DIM / 32) * 4 + lane % 4) * 8, word = unit / (DIM / 32) * 8 + lane / 4;
    const int token = word / 4 * 16 + word % 4 * 2;
    float f[4][8];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const int t = token + (i & 1) + (i & 2) * 4;
      const bool there = page * kTileTokens + t < end && !(sh.lost[t / 32] >> t % 32 & 1);
      widen(*(const uint4 *)(sh.v + v_at<DIM>(t, first)), p.bf16, f[i]);
      #pragma unroll
      for (int e = 0; e < 8; e++) f[i][e] = there ? __fmul_rn(__fsub_rn(f[i][e], sh.v_mean[first + e]), sh.v_inverse[first + e]) : 0.f;
    }
    #pragma unroll
    for (int e = 0; e < 8; e++) {
      const uint32_t x = pack_e4m3(f[0][e], f[1][e], f[2][e], f[3][e]);
      const int at = kTileTokens * DIM + v_offset(token, first + e);
      *(uint32_t *)(to.record + at) = x;
      if (COPY) *(uint32_t *)(to.images + at) = x;
    }
  }
}

}  // namespace
}  // namespace sage2
