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

// The page's tokens stay in shared memory between the passes over them.
template<int DIM, int THREADS> struct PageShared {
  alignas(16) uint8_t k[kTileTokens * DIM * 2], v[kTileTokens * DIM * 2];
  alignas(16) float k_mean[DIM], v_inverse[DIM], v_mean[DIM];
  float v_top[THREADS / 32][DIM];      // the largest |v - v_mean| of each warp's tokens
  uint32_t k_amax[kScaleGroups], lost[kTileTokens / 32];
};
// A token's chunks of eight channels, so that tokens two apart do not share banks.
template<int DIM> SAGE2_DEV int row_at(int token, int channel) { return token * DIM * 2 + ((channel >> 3) ^ (token & 2) << 1) * 16; }

// Where a page's record goes: to its slab, and for a CTA that reads it at once to images and scales in its shared memory.
struct PageTarget { uint8_t *record, *images, *scales; };

SAGE2_DEV uint8_t *record_of(const PageParams &p, int head, int page) {
  return (uint8_t *)__ldg((const unsigned long long *)p.slabs + (page >> p.slab_shift) - p.first_slab) +
         (((int64_t)head << p.slab_shift) + (page & ((1 << p.slab_shift) - 1))) * p.record;
}

// The store holds `held` tokens before the new ones, p.k and p.v, `end` with them. COPY: the target has images and scales.
// ALIGNED: all rows start on 16 bytes, and head_dim is a multiple of 8. Loops are rolled: this runs once a launch, from memory.
template<int DIM, int THREADS, bool COPY, bool ALIGNED, class Sync>
SAGE2_DEV void quantize_page(const PageParams &p, int head, int page, int held, int end, int tid, PageShared<DIM, THREADS> &sh, const PageTarget &to, Sync sync) {
  constexpr int kChunks = DIM / 8, kRows = THREADS / kChunks, kPasses = kTileTokens / kRows;
  const int b = head / p.kv_heads, kv = head - b * p.kv_heads, last_page = (end - 1) / kTileTokens;
  const int channel = tid % kChunks * 8, row = tid / kChunks, group = k_group(row);    // kRows is a multiple of 8: one group
  const int64_t tails = (int64_t)p.batch * p.kv_heads * kTailSlots * p.head_dim;
  const int first_key = page * kTileTokens + row;                 // this thread's first token; a page's slots of the tail lie side by side
  uint16_t *slot = p.tail + ((int64_t)head * kTailSlots + first_key % kTailSlots) * p.head_dim + (ALIGNED ? channel : 0);
  const uint16_t *new_k = p.k.data + b * p.k.batch + kv * p.k.head + (int64_t)(first_key - held) * p.k.token + (ALIGNED ? channel : 0);
  const uint16_t *new_v = p.v.data + b * p.v.batch + kv * p.v.head + (int64_t)(first_key - held) * p.v.token + (ALIGNED ? channel : 0);
  const bool keep = page >= last_page - 1;

  // 1. the tokens; those of the tail are plain loads: it is written here as well, but another page's CTA writes elsewhere in it
  #pragma unroll
  for (int j = 0; j < kPasses; j++, slot += kRows * p.head_dim, new_k += kRows * p.k.token, new_v += kRows * p.v.token) {
    const int token = row + j * kRows, t = page * kTileTokens + token;
    const bool old = t < held;
    uint4 k = {}, v = {};
    if (t < end && channel < p.head_dim) {
      if (ALIGNED) {
        k = *(const uint4 *)(old ? slot : new_k), v = *(const uint4 *)(old ? slot + tails : new_v);
        if (keep && !old) *(uint4 *)slot = k, *(uint4 *)(slot + tails) = v;
      } else {
        k = load_channels(old ? slot : new_k, channel, p.head_dim, 0), v = load_channels(old ? slot + tails : new_v, channel, p.head_dim, 0);
        if (keep && !old) {
          const uint32_t ke[4] = {k.x, k.y, k.z, k.w}, ve[4] = {v.x, v.y, v.z, v.w};
          #pragma unroll
          for (int e = 0; e < 8; e++)
            if (channel + e < p.head_dim) slot[channel + e] = (uint16_t)(ke[e / 2] >> 16 * (e % 2)), slot[tails + channel + e] = (uint16_t)(ve[e / 2] >> 16 * (e % 2));
        }
      }
    }
    *(uint4 *)(sh.k + row_at<DIM>(token, channel)) = k, *(uint4 *)(sh.v + row_at<DIM>(token, channel)) = v;
  }
  if (tid < DIM) sh.k_mean[tid] = p.k_mean[(int64_t)head * DIM + tid], sh.v_mean[tid] = p.v_mean[(int64_t)head * DIM + tid];
  if (tid < kScaleGroups) sh.k_amax[tid] = sh.lost[tid] = 0;
  sync();

  // 2. scales. A token with a number that is not finite counts as absent, and is noted as lost: rows that see it become NaN,
  // no others.
  float largest = 0.f, top[8] = {};
  auto less = [&](const uint8_t *rows, const float *mean, int token, int first, float (&f)[8]) {
    widen(*(const uint4 *)(rows + row_at<DIM>(token, first)), p.bf16, f);
    #pragma unroll
    for (int e = 0; e < 8; e++) f[e] = __fsub_rn(f[e], mean[first + e]);
  };
  #pragma unroll 1
  for (int token = row; token < kTileTokens; token += kRows) {
    float f[8], g[8], most = 0.f, most_v = 0.f;
    less(sh.k, sh.k_mean, token, channel, f), less(sh.v, sh.v_mean, token, channel, g);
    #pragma unroll
    for (int e = 0; e < 8; e++) most = max_keep_nan(most, fabsf(f[e])), most_v = max_keep_nan(most_v, fabsf(g[e]));
    bool bad = !(most < INFINITY && most_v < INFINITY);
    #pragma unroll
    for (int s = 1; s < kChunks; s *= 2) bad |= __shfl_xor_sync(~0u, bad, s);
    if (bad && channel == 0) atomicOr(&sh.lost[token / 32], 1u << token % 32);
    if (!bad && page * kTileTokens + token < end) {
      largest = fmaxf(largest, most);
      #pragma unroll
      for (int e = 0; e < 8; e++) top[e] = fmaxf(top[e], fabsf(g[e]));
    }
  }
  #pragma unroll
  for (int s = 1; s < kChunks; s *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, s));
  if (tid % kChunks == 0) atomicMax(&sh.k_amax[group], magnitude(largest));
  #pragma unroll
  for (int e = 0; e < 8; e++)
    #pragma unroll
    for (int s = kChunks; s < 32; s *= 2) top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], s));
  if (tid % 32 < kChunks) {
    float4 *to_top = (float4 *)&sh.v_top[tid / 32][channel];
    to_top[0] = make_float4(top[0], top[1], top[2], top[3]), to_top[1] = make_float4(top[4], top[5], top[6], top[7]);
  }
  sync();

  // 3. K image and the scales
  auto there = [&](int token) { return page * kTileTokens + token < end && !(sh.lost[token / 32] >> token % 32 & 1); };
  const float inverse = int8_scale(sh.k_amax[group]).inverse;
  #pragma unroll 2
  for (int token = row; token < kTileTokens; token += kRows) {
    float f[8];
    less(sh.k, sh.k_mean, token, channel, f);
    if (!there(token))
      #pragma unroll
      for (int e = 0; e < 8; e++) f[e] = 0.f;
    const uint2 x = {pack_s8(f[0], f[1], f[2], f[3], inverse), pack_s8(f[4], f[5], f[6], f[7], inverse)};
    const int at = k_offset(token, channel, DIM);
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

  // 4. V image, transposed and token-permuted: a lane takes tokens {2c, 2c+1, 2c+8, 2c+9} of 16 and eight channels (quantize.cu)
  const int lane = tid % 32;
  #pragma unroll 1
  for (int unit = tid / 32; unit < DIM / 8; unit += THREADS / 32) {
    const int first = (unit % (DIM / 32) * 4 + lane % 4) * 8, word = unit / (DIM / 32) * 8 + lane / 4, token = word / 4 * 16 + word % 4 * 2;
    float f[4][8];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const int t = token + (i & 1) + (i & 2) * 4;
      less(sh.v, sh.v_mean, t, first, f[i]);
      const bool here = there(t);
      #pragma unroll
      for (int e = 0; e < 8; e++) f[i][e] = here ? __fmul_rn(f[i][e], sh.v_inverse[first + e]) : 0.f;
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
