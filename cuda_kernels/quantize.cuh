// The pre-processing's work on K and V of one head, whatever shares it out (quantize.cu: clusters, quantize_mma.cu: two
// launches): smoothing vectors, INT8 K images, V's channel maxima, E4M3 or FP16 V images. A CTA of kThreads takes key
// blocks rank, rank + size, ... of a head.
#pragma once
#include "int8.cuh"
#include "params.h"
#include "mma_image.h"
#include "ptx.cuh"
#include "rotation.cuh"
#include "visibility.cuh"

namespace sage2 {
namespace {

constexpr int kThreads = 512;
constexpr int kCacheBytes = 96 << 10;

// What the inputs are like. Aligned: rows of 16-byte pieces, every key of a head. Picked: the same, but only the keys
// that an index or the bits of a mask name. Any: looked up, for unaligned views and INT4.
enum Mode { kAlignedFp16, kAlignedBf16, kPickedFp16, kPickedBf16, kAny, kModes };
template<Mode MODE> SAGE2_DEV bool is_bf16(const Params &p) {
  return MODE == kAny ? p.bf16 : MODE == kAlignedBf16 || MODE == kPickedBf16;
}
template<Mode MODE> SAGE2_DEV int aligned(const View &view) { return MODE == kAny ? view.vector : 1; }
SAGE2_HD constexpr bool picks(Mode mode) { return mode != kAlignedFp16 && mode != kAlignedBf16; }

struct Head {  // one kv head of one batch item
  const uint16_t *k, *v;
  int keys;              // visible
  int64_t image;         // its first
  const int32_t *index;  // the token of key i, or null: i
  // Bits: keys that any query sees, or null: all. The others count as absent (they may be NaN).
  const uint32_t *seen;
};
// Key i of a head: its row's place, and whether it is there.
template<Mode MODE> SAGE2_DEV int64_t token_of(const Head &h, int i) {
  return picks(MODE) && h.index ? __ldg(h.index + i) : i;
}
template<Mode MODE> SAGE2_DEV bool exists(const Head &h, int i) {
  return i < h.keys && (!picks(MODE) || !h.seen || (__ldg(h.seen + i / 32) >> i % 32 & 1));
}

template<int DIM> struct Shared {
  float k_mean[DIM], v_mean[DIM], v_inverse[DIM];
  uint32_t v_amax[DIM], v_top[DIM], k_amax[2][kScaleGroups];
  // Then, at different times: partial sums [2][kMeanGroups][DIM], or cached V blocks [blocks][128 tokens][DIM] of 16
  // bits
  static constexpr int at_rest = (5 * DIM + 2 * kScaleGroups) * 4, partial_bytes = 2 * kMeanGroups * DIM * 4;
  static constexpr int block_bytes = kTileTokens * DIM * 2, cache_blocks = kCacheBytes / block_bytes;
};

// One sample group of a smoothing vector: sums into `partial`, the largest magnitude into `top`. Non-finite counts as
// zero.
template<int DIM, Mode MODE>
SAGE2_DEV void sample(const Params &p, const Head &h, const View &view, const uint16_t *rows, int head_dim, int group,
                      int channel, float *partial, uint32_t *top) {
  constexpr int kEach = kMeanSamples / kMeanGroups;
  const int samples = mean_samples(h.keys);
  uint4 x[kEach];
  #pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int s = group + i * kMeanGroups;
    x[i] = make_uint4(0, 0, 0, 0);
    if (s >= samples) continue;
    const int t = mean_token(s, h.keys);
    if (exists<MODE>(h, t))
      x[i] = load_channels(rows + token_of<MODE>(h, t) * view.token, channel, head_dim, aligned<MODE>(view));
  }
  float sum[8] = {};
  uint32_t largest[8] = {};
  #pragma unroll
  for (int i = 0; i < kEach; i++) {
    float f[8];
    widen(x[i], is_bf16<MODE>(p), f);
    #pragma unroll
    for (int e = 0; e < 8; e++) {
      if (magnitude(f[e]) >= kInfBits) f[e] = 0.f;
      sum[e] = __fadd_rn(sum[e], f[e]);
      largest[e] = max(largest[e], magnitude(f[e]));
    }
  }
  #pragma unroll
  for (int e = 0; e < 8; e++) {
    partial[group * DIM + channel + e] = sum[e];
    if (top) atomicMax(top + channel + e, largest[e]);
  }
}
template<int DIM, Mode MODE> SAGE2_DEV float total_mean(const Head &h, const float *partial, int channel) {
  float sum = 0.f;
  int samples = mean_samples(h.keys);
  for (int g = 0; g < kMeanGroups; g++) sum = __fadd_rn(sum, partial[g * DIM + channel]);
  if (picks(MODE) && h.seen) {  // whole warps come here: each lane looks at its share of the samples
    int there = 0;
    for (int i = 0; i < samples; i += 32) {
      const int mine = i + (int)threadIdx.x % 32;
      there += __popc(__ballot_sync(~0u, mine < samples && exists<MODE>(h, mean_token(mine, h.keys))));
    }
    samples = there;
  }
  return samples ? __fdiv_rn(sum, (float)samples) : 0.f;
}

// Smallest and largest value of eight channels, on packed 16-bit floats; NaN does not count. fp32 subtraction is
// monotone, so the largest |v - mean| is that of one of the two.
struct Range { uint32_t low[4], high[4]; };
SAGE2_DEV void extend(Range &range, const uint4 &x, bool bf16) {
  const uint32_t w[4] = {x.x, x.y, x.z, x.w};
  #pragma unroll
  for (int i = 0; i < 4; i++)
    if (bf16) extend_bf16x2(range.low[i], range.high[i], w[i]);
    else extend_f16x2(range.low[i], range.high[i], w[i]);
}
// Asks the L2 for a block of K and V, a 128-byte line a thread: a later block's way from memory overlaps this one's
// work.
template<int DIM, Mode MODE> SAGE2_DEV void prefetch(const Params &p, const Head &h, int block) {
  constexpr int kLines = DIM * 2 / 128;
  const int token = threadIdx.x / 2 / kLines, t = block * kTileTokens + token;
  if (token >= kTileTokens || t >= h.keys) return;
  const int64_t from = token_of<MODE>(h, t);
  const uint16_t *row = threadIdx.x % 2 ? h.v + from * p.v.token : h.k + from * p.k.token;
  const int channel = threadIdx.x / 2 % kLines * 64;
  if (channel < p.head_dim) prefetch_l2(row + channel);
}

// Eight vector elements from shared memory.
SAGE2_DEV void load8(const float *from, float (&to)[8]) {
  const float4 a = *(const float4 *)from, b = *(const float4 *)(from + 4);
  to[0] = a.x;
  to[1] = a.y;
  to[2] = a.z;
  to[3] = a.w;
  to[4] = b.x;
  to[5] = b.y;
  to[6] = b.z;
  to[7] = b.w;
}
// Eight channels of a V token: from the cache, or from memory.
template<int DIM, Mode MODE>
SAGE2_DEV uint4 v_channels(const Params &p, const Head &h, const uint8_t *cached, int block, int token, int channel) {
  if (cached) return *(const uint4 *)(cached + cache_offset<DIM>(token, channel));
  const int t = block * kTileTokens + token;
  return exists<MODE>(h, t)
             ? load_channels(h.v + token_of<MODE>(h, t) * p.v.token, channel, p.v_head_dim, aligned<MODE>(p.v))
             : make_uint4(0, 0, 0, 0);
}

// A warp's share of an E4M3 V block, transposed and token-permuted: 4 chunks x 8 words. A lane takes tokens
// {2c, 2c+1, 2c+8, 2c+9} of one 16-token group and eight channels, which are eight words of the image.
template<int DIM, int DV, Mode MODE>
SAGE2_DEV void write_v_fp8(const Params &p, const Head &h, const Shared<DIM> &sh, const uint8_t *cached, uint8_t *image,
                           int block, int unit) {
  const int lane = threadIdx.x % 32;
  const int channel = (unit % (DV / 32) * 4 + lane % 4) * 8;
  const int word = unit / (DV / 32) * 8 + lane / 4;
  const int token = word / 4 * 16 + word % 4 * 2;
  uint4 x[4];
  #pragma unroll
  for (int i = 0; i < 4; i++) x[i] = v_channels<DIM, MODE>(p, h, cached, block, token + (i & 1) + (i & 2) * 4, channel);
  float f[4][8], mean[8], inverse[8];
  load8(sh.v_mean + channel, mean);
  load8(sh.v_inverse + channel, inverse);
  const int last = h.keys - block * kTileTokens - token;  // tokens past the end: zeros
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    widen(x[i], is_bf16<MODE>(p), f[i]);
    #pragma unroll
    for (int e = 0; e < 8; e++) f[i][e] = __fmul_rn(__fsub_rn(f[i][e], mean[e]), inverse[e]);
  }
  if ((block + 1) * kTileTokens > h.keys)
    #pragma unroll
    for (int i = 0; i < 4; i++)
      #pragma unroll
      for (int e = 0; e < 8; e++) f[i][e] = (i & 1) + (i & 2) * 4 < last ? f[i][e] : 0.f;
  #pragma unroll
  for (int e = 0; e < 8; e++)
    *(uint32_t *)(image + channel / 128 * p.images.v_half + v_offset(token, channel % 128 + e)) =
        pack_e4m3(f[0][e], f[1][e], f[2][e], f[3][e]);
}
// A warp's share of a 16-bit V block: 8 tokens (dim 128; 16 at dim 64) as they are, scaled so that any bf16 fits fp16.
template<int DIM, int DV, Mode MODE>
SAGE2_DEV void write_v_fp16(const Params &p, const Head &h, const Shared<DIM> &sh, const uint8_t *cached,
                            uint8_t *image, int block, int unit) {
  constexpr int kChunks = DV / 8, kRows = 32 / kChunks;
  const int lane = threadIdx.x % 32, channel = lane % kChunks * 8;
  float mean[8], inverse[8];
  load8(sh.v_mean + channel, mean);
  load8(sh.v_inverse + channel, inverse);
  #pragma unroll 2
  for (int i = 0; i < 4; i++) {
    const int token = (unit * 4 + i) * kRows + lane / kChunks;
    const uint4 x = v_channels<DIM, MODE>(p, h, cached, block, token, channel);
    uint4 y = {0, 0, 0, 0};
    if (block * kTileTokens + token < h.keys) {
      float f[8];
      widen(x, is_bf16<MODE>(p), f);
      #pragma unroll
      for (int e = 0; e < 8; e++) f[e] = __fmul_rn(__fsub_rn(f[e], mean[e]), inverse[e]);
      y = {pack_f16(f[0], f[1]), pack_f16(f[2], f[3]), pack_f16(f[4], f[5]), pack_f16(f[6], f[7])};
    }
    *(uint4 *)(image + (DV > 128 ? channel / 128 * p.images.v_half : 0) +
               v16_offset(token, DV > 128 ? channel % 128 : channel)) = y;
  }
}

template<Mode MODE> SAGE2_DEV Head head_of(const Params &p, int64_t head) {
  const int b = head / p.kv_heads, kv = head - (int64_t)b * p.kv_heads;
  Head h = {p.k.data + b * p.k.batch + kv * p.k.head,
            p.v.data + b * p.v.batch + kv * p.v.head,
            p.kv_lens ? min(max(__ldg(p.kv_lens + b), 0), p.kv_len) : p.kv_len,
            head * p.blocks,
            nullptr,
            nullptr};
  if (p.cu_k || p.kv_starts) {
    int64_t start;
    if (p.cu_k) {
      const Run run = run_of(p.cu_k, b, p.kv_len);
      start = run.begin;
      h.keys = run.count;
      h.image = (int64_t)kv * p.blocks + start / kTileTokens + b;
    } else start = __ldg(p.kv_starts + b);
    h.k += start * p.k.token;
    h.v += start * p.v.token;
  }
  if (picks(MODE)) {
    if (p.key_index) h.index = p.key_index + (int64_t)b * p.kv_len;
    if (p.mask.data) h.seen = p.mask.seen + (int64_t)(p.mask.mb > 1 ? b : 0) * p.blocks * 4;
  }
  return h;
}

// 1. Both smoothing vectors into sh, from units of (K or V, sample group, chunk); sh.v_amax becomes 0.
template<int DIM, Mode MODE>
SAGE2_DEV void smoothing_vectors(const Params &p, const Head &h, Shared<DIM> &sh, float *partial) {
  constexpr int kChunks = DIM / 8;
  const int tid = threadIdx.x;
  if (tid < DIM) sh.v_amax[tid] = sh.v_top[tid] = 0;
  __syncthreads();
  for (int u = tid; u < 2 * kMeanGroups * kChunks; u += kThreads) {
    const int channel = u % kChunks * 8, group = u / kChunks % kMeanGroups;
    if (u < kMeanGroups * kChunks) sample<DIM, MODE>(p, h, p.k, h.k, p.head_dim, group, channel, partial, nullptr);
    else sample<DIM, MODE>(p, h, p.v, h.v, p.v_head_dim, group, channel, partial + kMeanGroups * DIM, sh.v_top);
  }
  __syncthreads();
  if (tid < DIM) sh.k_mean[tid] = p.smooth_k ? total_mean<DIM, MODE>(h, partial, tid) : 0.f;
  else if (tid < 2 * DIM) {
    const float mean = total_mean<DIM, MODE>(h, partial + kMeanGroups * DIM, tid - DIM);
    const float top = __uint_as_float(sh.v_top[tid - DIM]);
    sh.v_mean[tid - DIM] = p.smooth_v && fabsf(mean) * kSignificance >= top ? mean : 0.f;
  }
  __syncthreads();
}

// Rotated K images of this CTA's blocks. Four lanes hold a key, so that little of the rotation is shuffles; each number
// is formed once.
template<int DIM, Mode MODE, bool PACKED>
SAGE2_DEV void quantize_rotated_keys(const Params &p, Shared<DIM> &sh, int keys, int rank, int size) {
  constexpr int kLanes = kThreads / kTileTokens, kPieces = DIM / 8 / kLanes;  // pieces of eight channels of a lane
  #pragma unroll 1
  for (int block = rank, turn = 0; block * kTileTokens < keys; block += size, turn ^= 1) {
    const Head h = head_of<MODE>(p, block_index() / size);  // looked up again, not kept: registers are short
    int tid = thread_index();
    auto row = [&] { return tid / kLanes; };
    auto channel = [&](int j) { return (j * kLanes + tid % kLanes) * 8; };
    const int key = block * kTileTokens + row();
    const bool there = exists<MODE>(h, key);
    const uint16_t *from = h.k + (there ? token_of<MODE>(h, key) : 0) * p.k.token;
    uint4 k[kPieces];
    #pragma unroll
    for (int j = 0; j < kPieces; j++)
      k[j] = there ? load_channels(from, channel(j), p.head_dim, aligned<MODE>(p.k)) : make_uint4(0, 0, 0, 0);
    uint32_t *const amax = sh.k_amax[turn];  // in turns: a slow warp may still read the last one
    if (threadIdx.x < kScaleGroups) amax[threadIdx.x] = 0;
    __syncthreads();
    float f[8 * kPieces], largest = 0.f;
    #pragma unroll
    for (int j = 0; j < kPieces; j++) {
      float x[8], mean[8];
      widen(k[j], is_bf16<MODE>(p), x);
      load8(sh.k_mean + channel(j), mean);
      #pragma unroll
      for (int e = 0; e < 8; e++) f[8 * j + e] = there ? __fsub_rn(x[e], mean[e]) : 0.f;
    }
    rotate<kLanes>(f);
    #pragma unroll
    for (int e = 0; e < 8 * kPieces; e++) largest = max_keep_nan(largest, fabsf(f[e]));
    #pragma unroll
    for (int s = 1; s < 2 * kLanes; s *= 2)  // two neighbouring keys share a group
      largest = max_keep_nan(largest, __shfl_xor_sync(~0u, largest, s));
    tid = thread_index();
    if (tid % (2 * kLanes) == 0) atomicMax(&amax[k_group(row())], magnitude(largest));  // NaN > Inf > the rest
    __syncthreads();
    const Int8Scale s8 = int8_scale_in_line(amax[k_group(row())], MODE == kAny && p.int4);
    const int64_t image = h.image + block;
    if (row() < 2 * kScaleGroups && row() % 2 == 0) p.images.k_scale[image * kScaleGroups + k_group(row())] = s8.scale;
    tid = thread_index();
    uint8_t *const out = p.images.k + image * (int64_t)(k_image_bytes(DIM) / (PACKED ? 2 : 1));
    #pragma unroll
    for (int j = 0; j < kPieces; j++) {
      float x[8];
      #pragma unroll
      for (int e = 0; e < 8; e++) x[e] = f[8 * j + e];
      if constexpr (PACKED) *(uint32_t *)(out + k4_offset(row(), channel(j), DIM)) = pack_s4(x, s8.inverse);
      else
        *(uint2 *)(out + k_offset(row(), channel(j), DIM)) = {pack_s8(x[0], x[1], x[2], x[3], s8.inverse),
                                                           pack_s8(x[4], x[5], x[6], x[7], s8.inverse)};
    }
  }
}

// 2. K images, and V's channel maxima over this CTA's blocks into sh.v_amax; the first cache_blocks of V into the
// cache. PACKED: INT4, two a byte.
template<int DIM, Mode MODE, bool PACKED = false>
SAGE2_DEV void quantize_keys(const Params &p, const Head &h, Shared<DIM> &sh, uint8_t *cache, int cache_blocks,
                             int rank, int size, int mine) {
  constexpr int kChunks = DIM / 8, kRows = kThreads / kChunks, kPasses = kTileTokens / kRows;
  const int tid = threadIdx.x;
  // kRows is a multiple of 8: the same group in every pass.
  const int channel = tid % kChunks * 8, row = tid / kChunks, group = k_group(row);
  Range range;
  #pragma unroll
  for (int e = 0; e < 4; e++) {  // +Inf, -Inf
    range.low[e] = is_bf16<MODE>(p) ? 0x7F807F80u : 0x7C007C00u;
    range.high[e] = range.low[e] | 0x80008000u;
  }
  for (int i = 0; i < mine; i++) {
    const int block = rank + i * size, first = block * kTileTokens + row;
    uint32_t there = 0;  // bit j: the key of pass j exists
    if (picks(MODE))
      #pragma unroll
      for (int j = 0; j < kPasses; j++) there |= (uint32_t)exists<MODE>(h, first + j * kRows) << j;
    auto present = [&](int j) { return picks(MODE) ? there >> j & 1 : first + j * kRows < h.keys; };
    auto load = [&](uint4(&x)[kPasses], const View &view, const uint16_t *rows, int head_dim) {
      const uint16_t *from = rows + first * view.token;
      #pragma unroll
      for (int j = 0; j < kPasses; j++, from += kRows * view.token) {
        x[j] = make_uint4(0, 0, 0, 0);
        const int key = first + j * kRows;
        if (picks(MODE)) {
          if (present(j))
            x[j] = load_channels(rows + token_of<MODE>(h, key) * view.token, channel, head_dim, aligned<MODE>(view));
        } else if (key < h.keys) x[j] = load_channels(from, channel, head_dim, 1);
      }
    };
    {
      uint4 v[kPasses];
      load(v, p.v, h.v, p.v_head_dim);
      #pragma unroll
      for (int j = 0; j < kPasses; j++) {
        if (i < cache_blocks)
          *(uint4 *)(cache + i * Shared<DIM>::block_bytes + cache_offset<DIM>(row + j * kRows, channel)) = v[j];
        if (present(j)) extend(range, v[j], is_bf16<MODE>(p));
      }
    }
    if (MODE != kAny && i + 1 < mine) prefetch<DIM, MODE>(p, h, block + size);
    if (p.rotate) continue;  // K comes afterwards
    uint4 k[kPasses];
    load(k, p.k, h.k, p.head_dim);
    uint32_t *const amax = sh.k_amax[i & 1];  // in turns: a slow warp may still read the last one
    if (tid < kScaleGroups) amax[tid] = 0;
    __syncthreads();
    float largest = 0.f;
    auto centred = [&](int j, float (&f)[8]) {  // tokens past the end: zeros
      float mean[8];
      load8(sh.k_mean + channel, mean);
      widen(k[j], is_bf16<MODE>(p), f);
      #pragma unroll
      for (int e = 0; e < 8; e++) f[e] = present(j) ? __fsub_rn(f[e], mean[e]) : 0.f;
    };
    #pragma unroll
    for (int j = 0; j < kPasses; j++) {
      float f[8];
      centred(j, f);
      #pragma unroll
      for (int e = 0; e < 8; e++) largest = max_keep_nan(largest, fabsf(f[e]));
    }
    #pragma unroll
    // A half warp is in one group.
    for (int s = 1; s < 16; s *= 2) largest = max_keep_nan(largest, __shfl_xor_sync(~0u, largest, s));
    if (tid % 16 == 0) atomicMax(&amax[group], magnitude(largest));  // NaN > Inf > the rest
    __syncthreads();
    const bool int4 = MODE == kAny && p.int4;
    const Int8Scale s8 = int8_scale(amax[group], int4);
    const int64_t image = h.image + block;
    if (tid < kScaleGroups) p.images.k_scale[image * kScaleGroups + tid] = int8_scale(amax[tid], int4).scale;
    constexpr int kPanel = PACKED ? DIM / 2 : DIM > 128 ? 128 : DIM;  // bytes of a row
    uint8_t *const out = p.images.k + image * (int64_t)(k_image_bytes(DIM) / (PACKED ? 2 : 1)) +
                         (PACKED ? k4_offset(row, channel, DIM) : k_offset(row, channel, DIM));
    #pragma unroll
    for (int j = 0; j < kPasses; j++) {  // the swizzle repeats every 8 rows
      float f[8];
      // Centred again: 32 registers that are not there.
      forget(k[j].x, k[j].y, k[j].z, k[j].w);
      centred(j, f);
      if constexpr (PACKED) *(uint32_t *)(out + j * kRows * kPanel) = pack_s4(f, s8.inverse);
      else
        *(uint2 *)(out + j * kRows * kPanel) = {pack_s8(f[0], f[1], f[2], f[3], s8.inverse),
                                                pack_s8(f[4], f[5], f[6], f[7], s8.inverse)};
    }
  }
  float low[8], high[8], mean[8];
  widen(uint4{range.low[0], range.low[1], range.low[2], range.low[3]}, is_bf16<MODE>(p), low);
  widen(uint4{range.high[0], range.high[1], range.high[2], range.high[3]}, is_bf16<MODE>(p), high);
  load8(sh.v_mean + channel, mean);
  #pragma unroll
  for (int e = 0; e < 8; e++) {
    // No token here.
    float top = low[e] <= high[e] ? fmaxf(fabsf(__fsub_rn(low[e], mean[e])), fabsf(__fsub_rn(high[e], mean[e]))) : 0.f;
    #pragma unroll
    for (int s = kChunks; s < 32; s *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, s));
    if (tid % 32 < kChunks) atomicMax(&sh.v_amax[channel + e], __float_as_uint(top));
  }
  if (p.rotate) quantize_rotated_keys<DIM, MODE, PACKED>(p, sh, h.keys, rank, size);
}

// A V channel's scale and what its values are multiplied by, from the bits of its largest magnitude, which becomes
// v_max in E4M3.
template<bool FP16> SAGE2_DEV void v_scale_of(uint32_t bits, float &scale, float &inverse, float v_max = kE4m3Max) {
  const float amax = __uint_as_float(bits);
  if (amax < kTiny) scale = inverse = 0.f;  // a constant channel: the mean is the answer
  else if (bits >= kInfBits) {              // an Inf: the channel is NaN
    scale = __uint_as_float(0x7FFFFFFFu);
    inverse = 0.f;
  } else if (FP16) {
    scale = __uint_as_float(bits & kInfBits);
    inverse = __fdiv_rn(1.f, scale);
  } else {
    scale = __fmul_rn(amax, 1.f / v_max);
    inverse = __fdiv_rn(v_max, amax);
  }
}

// 3. V images: DV / 8 units of a block, each a warp's.
template<int DIM, int DV, bool FP16, Mode MODE>
SAGE2_DEV void write_values(const Params &p, const Head &h, const Shared<DIM> &sh, const uint8_t *cache,
                            int cache_blocks, int rank, int size, int mine) {
  constexpr int kWarps = kThreads / 32;
  constexpr int kUnits = DV / 8;  // of a warp
  #pragma unroll 1
  for (int u = threadIdx.x / 32; u < mine * kUnits; u += kWarps) {
    const int i = u / kUnits, block = rank + i * size;
    const uint8_t *cached = i < cache_blocks ? cache + i * Shared<DIM>::block_bytes : nullptr;
    uint8_t *image = p.images.v + (h.image + block) * (int64_t)v_image_bytes(DV > 128 ? 128 : DV, FP16);
    if (FP16) write_v_fp16<DIM, DV, MODE>(p, h, sh, cached, image, block, u % kUnits);
    else write_v_fp8<DIM, DV, MODE>(p, h, sh, cached, image, block, u % kUnits);
  }
}

}  // namespace
}  // namespace sage2
