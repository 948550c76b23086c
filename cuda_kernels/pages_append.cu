// New tokens of a quantized cache: into the tail, and every page they touch is quantized from its 16-bit tokens, those of
// the tail and the new ones. One CTA per page and (batch, kv head), so a page's numbers never depend on how its tokens came.
//
// 512 threads; the page's V stays in shared memory (16 or 32 KB) between its two passes. Memory and latency bound.
#include <algorithm>
#include "int8.cuh"
#include "pages.h"
#include "ptx.cuh"

namespace sage2 {
namespace {

constexpr int kThreads = 512;
constexpr float kE4m3Max = 448.f, kSignificance = 8.f;      // as in quantize.cu

template<int DIM> struct Shared {
  alignas(16) uint8_t v[kTileTokens * DIM * 2];
  alignas(16) float v_inverse[DIM], v_mean[DIM];
  float v_top[kThreads / 32][DIM];     // the largest |v - v_mean| of each warp's tokens
  uint32_t k_amax[kScaleGroups], lost[kTileTokens / 32];
};
// A token's chunks of eight channels, so that tokens two apart do not share banks.
template<int DIM> SAGE2_DEV int v_at(int token, int channel) { return token * DIM * 2 + ((channel >> 3) ^ (token & 2) << 1) * 16; }

template<int DIM> __global__ void __launch_bounds__(kThreads, 1) append(const __grid_constant__ PageParams p) {
  constexpr int kChunks = DIM / 8, kRows = kThreads / kChunks, kPasses = kTileTokens / kRows;
  __shared__ Shared<DIM> sh;
  const int tid = threadIdx.x, page = p.first_page + blockIdx.x, head = blockIdx.y, b = head / p.kv_heads, kv = head - b * p.kv_heads;
  const int end = p.length + p.tokens, last_page = (end - 1) / kTileTokens;
  const int channel = tid % kChunks * 8, row = tid / kChunks, group = k_group(row);    // kRows is a multiple of 8
  const int64_t tails = (int64_t)p.batch * p.kv_heads * kTailSlots * p.head_dim;
  uint16_t *const tail = p.tail + (int64_t)head * kTailSlots * p.head_dim;
  const int tail_vector = p.head_dim % 8 == 0;
  const bool keep = page >= last_page - 1;
  uint8_t *const record = (uint8_t *)__ldg((const unsigned long long *)p.slabs + (page >> p.slab_shift) - p.first_slab) +
                          (((int64_t)head << p.slab_shift) + (page & ((1 << p.slab_shift) - 1))) * p.record;
  if (tid < DIM) sh.v_mean[tid] = p.v_mean[(int64_t)head * DIM + tid];
  if (tid < kScaleGroups) sh.k_amax[tid] = sh.lost[tid] = 0;

  // Loads; tokens of the tail are plain loads: another page's CTA writes elsewhere in it, this one after its own reads.
  uint4 k[kPasses], v[kPasses];
  #pragma unroll
  for (int j = 0; j < kPasses; j++) {
    const int t = page * kTileTokens + row + j * kRows;
    k[j] = v[j] = make_uint4(0, 0, 0, 0);
    if (t >= end || channel >= p.head_dim) continue;
    if (t < p.length) {
      const uint16_t *from = tail + t % kTailSlots * (int64_t)p.head_dim;
      if (tail_vector) k[j] = *(const uint4 *)(from + channel), v[j] = *(const uint4 *)(from + tails + channel);
      else k[j] = load_channels(from, channel, p.head_dim, 0), v[j] = load_channels(from + tails, channel, p.head_dim, 0);
    } else {
      const int64_t i = t - p.length;
      k[j] = load_channels(p.k.data + b * p.k.batch + kv * p.k.head + i * p.k.token, channel, p.head_dim, p.k.vector);
      v[j] = load_channels(p.v.data + b * p.v.batch + kv * p.v.head + i * p.v.token, channel, p.head_dim, p.v.vector);
      if (keep) {
        uint16_t *to = tail + t % kTailSlots * (int64_t)p.head_dim + channel;
        if (tail_vector) *(uint4 *)to = k[j], *(uint4 *)(to + tails) = v[j];
        else {
          const uint32_t ke[4] = {k[j].x, k[j].y, k[j].z, k[j].w}, ve[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
          #pragma unroll
          for (int e = 0; e < 8; e++)
            if (channel + e < p.head_dim) to[e] = (uint16_t)(ke[e / 2] >> 16 * (e % 2)), to[tails + e] = (uint16_t)(ve[e / 2] >> 16 * (e % 2));
        }
      }
    }
  }
  __syncthreads();

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
  __syncthreads();

  const Int8Scale s8 = int8_scale(sh.k_amax[group]);
  #pragma unroll
  for (int j = 0; j < kPasses; j++) {
    float f[8];
    widen(k[j], p.bf16, f);
    #pragma unroll
    for (int e = 0; e < 8; e++) f[e] = there(j) ? __fsub_rn(f[e], k_mean[e]) : 0.f;
    *(uint2 *)(record + k_offset(row + j * kRows, channel, DIM)) = {pack_s8(f[0], f[1], f[2], f[3], s8.inverse), pack_s8(f[4], f[5], f[6], f[7], s8.inverse)};
  }
  float *const scales = (float *)(record + page_scales(DIM));
  if (tid < kScaleGroups) scales[tid] = int8_scale(sh.k_amax[tid]).scale, ((uint32_t *)scales)[kScaleGroups + DIM + tid] = sh.lost[tid];
  if (tid < DIM) {
    float amax = 0.f;
    #pragma unroll
    for (int i = 0; i < kThreads / 32; i++) amax = fmaxf(amax, sh.v_top[i][tid]);
    const bool constant = amax < kTiny;                           // the mean is the answer
    const float scale = constant ? 0.f : __fmul_rn(amax, 1.f / kE4m3Max), inverse = constant ? 0.f : __fdiv_rn(kE4m3Max, amax);
    scales[kScaleGroups + tid] = scale, sh.v_inverse[tid] = inverse;
  }
  __syncthreads();
  // V, transposed and token-permuted: a lane takes tokens {2c, 2c+1, 2c+8, 2c+9} of 16 and eight channels (quantize.cu).
  uint8_t *const image = record + kTileTokens * DIM;
  const int lane = tid % 32;
  #pragma unroll 1
  for (int unit = tid / 32; unit < DIM / 8; unit += kThreads / 32) {
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
    for (int e = 0; e < 8; e++) *(uint32_t *)(image + v_offset(token, first + e)) = pack_e4m3(f[0][e], f[1][e], f[2][e], f[3][e]);
  }
}

// The smoothing vectors of a store that has no whole page yet, from samples of all its tokens and the new ones, as quantize.cu
// forms them: partial sum g of samples g, g + 16, g + 32, g + 48, then the partial sums in order; one thread per channel of K or V.
template<int DIM> __global__ void __launch_bounds__(2 * DIM) means(const __grid_constant__ PageParams p) {
  const int head = blockIdx.x, b = head / p.kv_heads, kv = head - b * p.kv_heads, channel = threadIdx.x % DIM;
  const bool is_v = threadIdx.x >= DIM;
  const View &view = is_v ? p.v : p.k;
  const uint16_t *fresh = view.data + b * view.batch + kv * view.head + channel;
  const uint16_t *tail = p.tail + ((int64_t)(is_v * p.batch * p.kv_heads) + head) * kTailSlots * p.head_dim + channel;
  const int end = p.length + p.tokens, count = mean_samples(end);
  float sum = 0.f, top = 0.f;
  if (channel < p.head_dim)
    #pragma unroll 4
    for (int g = 0; g < kMeanGroups; g++) {
      float partial = 0.f;
      #pragma unroll
      for (int i = 0; i < kMeanSamples / kMeanGroups; i++) {
        const int s = g + i * kMeanGroups, t = s < count ? mean_token(s, end) : 0;
        float lo, hi;
        widen(s < count ? t < p.length ? tail[(int64_t)t * p.head_dim] : fresh[(int64_t)(t - p.length) * view.token] : (uint16_t)0, p.bf16, lo, hi);
        if (magnitude(lo) >= kInfBits) lo = 0.f;
        partial = __fadd_rn(partial, lo), top = fmaxf(top, fabsf(lo));
      }
      sum = __fadd_rn(sum, partial);
    }
  const float mean = __fdiv_rn(sum, (float)count);
  float *to = (is_v ? p.v_mean : p.k_mean) + (int64_t)head * DIM + channel;
  *to = !is_v || fabsf(mean) * kSignificance >= top ? mean : 0.f;
}

}  // namespace

cudaError_t load_pages_append() {
  const cudaError_t err = cudaFuncSetAttribute(append<64>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  return err == cudaSuccess ? cudaFuncSetAttribute(append<128>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared) : err;
}

// Pages are written side by side, and two pages that are two apart share slots of the tail. A page that reads older tokens
// from there therefore goes first, alone, where more than one page follows it.
cudaError_t launch_pages_append(PageParams &p, cudaStream_t stream) {
  const int begun = p.length / kTileTokens, first = std::max(begun, p.first_slab << p.slab_shift);      // slabs before first_slab are gone
  const int last = (p.length + p.tokens - 1) / kTileTokens;
  const auto kernel = padded_dim(p.head_dim) == 64 ? append<64> : append<128>;
  const int alone = first == begun && p.length % kTileTokens && last - first >= 2 ? 1 : 0;
  // With less than a page stored everything is written anew, and so may rest on new means.
  if (p.length < kTileTokens)
    padded_dim(p.head_dim) == 64 ? means<64><<<p.batch * p.kv_heads, 128, 0, stream>>>(p) : means<128><<<p.batch * p.kv_heads, 256, 0, stream>>>(p);
  p.first_page = first;
  if (alone) kernel<<<dim3(1, p.batch * p.kv_heads), kThreads, 0, stream>>>(p);
  p.first_page = first + alone;
  kernel<<<dim3(last - first + 1 - alone, p.batch * p.kv_heads), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace sage2
