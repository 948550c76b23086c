// New tokens of a quantized cache: into the tail, and into every page they touch, one CTA of 512 threads per page and
// (batch, kv head). Memory and latency bound.
#include <algorithm>
#include "pages_quantize.cuh"

namespace sage2 {
namespace {

constexpr int kThreads = 512;

template<int DIM> __global__ void __launch_bounds__(kThreads, 1) append(const __grid_constant__ PageParams p) {
  extern __shared__ __align__(16) uint8_t smem[];
  auto &sh = *(PageShared<DIM, kThreads> *)smem;
  const int page = p.first_page + blockIdx.x, head = blockIdx.y;
  const auto sync = [] { __syncthreads(); };
  const PageTarget to = {record_of(p, head, page), nullptr, nullptr};
  if (p.k.vector && p.v.vector) quantize_page<DIM, kThreads, false, true>(p, head, page, p.length, p.length + p.tokens, threadIdx.x, sh, to, sync);
  else quantize_page<DIM, kThreads, false, false>(p, head, page, p.length, p.length + p.tokens, threadIdx.x, sh, to, sync);
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
  cudaError_t err = cudaSuccess;
  for (int dim = 64; dim <= 128 && err == cudaSuccess; dim *= 2) {
    const auto kernel = dim == 64 ? append<64> : append<128>;
    err = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dim == 64 ? sizeof(PageShared<64, kThreads>) : sizeof(PageShared<128, kThreads>));
    if (err == cudaSuccess) err = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  return err;
}

// Pages are written side by side, and two pages that are two apart share slots of the tail. A page that reads older tokens
// from there therefore goes first, alone, where more than one page follows it.
cudaError_t launch_pages_append(PageParams &p, cudaStream_t stream) {
  const int begun = p.length / kTileTokens, first = std::max(begun, p.first_slab << p.slab_shift);      // slabs before first_slab are gone
  const int last = (p.length + p.tokens - 1) / kTileTokens;
  const bool small = padded_dim(p.head_dim) == 64;
  const auto kernel = small ? append<64> : append<128>;
  const size_t bytes = small ? sizeof(PageShared<64, kThreads>) : sizeof(PageShared<128, kThreads>);
  const int alone = first == begun && p.length % kTileTokens && last - first >= 2 ? 1 : 0;
  // With less than a page stored everything is written anew, and so may rest on new means.
  if (p.length < kTileTokens)
    small ? means<64><<<p.batch * p.kv_heads, 128, 0, stream>>>(p) : means<128><<<p.batch * p.kv_heads, 256, 0, stream>>>(p);
  p.first_page = first;
  if (alone) kernel<<<dim3(1, p.batch * p.kv_heads), kThreads, bytes, stream>>>(p);
  p.first_page = first + alone;
  kernel<<<dim3(last - first + 1 - alone, p.batch * p.kv_heads), kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace sage2
