// Pre-processing without clusters, for every card from sm_80 on: the images, scales and vectors of quantize.cu, byte
// for byte. Three launches: K images and V's channel maxima, which meet in memory; V images; V's scales.
//
// Memory bound; V is read twice. No more than 38 KB of shared memory.
// Architectures: 80 86 89 100 120
#include "fwd_mma.h"
#include "quantize.cuh"

namespace sage2 {
namespace {

// How CTAs share a head's blocks: as ranks of a cluster do.
struct Share {
  int64_t head;
  int rank, size;
};
SAGE2_DEV Share share_of(int size) { return {blockIdx.x / (unsigned)size, (int)(blockIdx.x % (unsigned)size), size}; }
// V's channel maxima, as bits, wait in the place of its scales.
SAGE2_DEV uint32_t *v_maxima(const Params &p, int64_t head, int dim) {
  return (uint32_t *)p.images.v_scale + head * dim;
}

template<int DIM, Mode MODE, bool PACKED>
__global__ void __launch_bounds__(kThreads, 1) quantize_k_mma(const __grid_constant__ Params p, int size) {
  extern __shared__ __align__(16) uint8_t smem[];
  Shared<DIM> &sh = *(Shared<DIM> *)smem;
  uint8_t *const partial = smem + Shared<DIM>::at_rest;
  const Share share = share_of(size);
  const int tid = threadIdx.x;
  const Head h = head_of<MODE>(p, share.head);
  const int blocks = (h.keys + kTileTokens - 1) / kTileTokens, mine = (blocks - share.rank + size - 1) / size;
  if (blockIdx.x == 0 && tid == 0) *p.images.counter = 0;
  if (MODE != kAny && mine > 0) prefetch<DIM, MODE>(p, h, share.rank);
  smoothing_vectors<DIM, MODE>(p, h, sh, (float *)partial);
  quantize_keys<DIM, MODE, PACKED>(p, h, sh, nullptr, 0, share.rank, size, mine);
  __syncthreads();
  if (tid < DIM) {
    atomicMax(v_maxima(p, share.head, DIM) + tid, sh.v_amax[tid]);
    if (share.rank == 0) {
      p.images.k_mean[share.head * DIM + tid] = sh.k_mean[tid];
      p.images.v_mean[share.head * DIM + tid] = sh.v_mean[tid];
    }
  }
}

template<bool FP16> SAGE2_DEV constexpr bool has_values() {  // sm_80 and 86 convert no E4M3
#ifdef __CUDA_ARCH__
  return FP16 || __CUDA_ARCH__ >= 890;
#else
  return true;
#endif
}
template<int DIM, int DV, bool FP16, Mode MODE>
__global__ void __launch_bounds__(kThreads, 1) quantize_v_mma(const __grid_constant__ Params p, int size) {
  if constexpr (has_values<FP16>()) {
    extern __shared__ __align__(16) uint8_t smem[];
    Shared<DIM> &sh = *(Shared<DIM> *)smem;
    const Share share = share_of(size);
    const Head h = head_of<MODE>(p, share.head);
    const int blocks = (h.keys + kTileTokens - 1) / kTileTokens, mine = (blocks - share.rank + size - 1) / size;
    if (threadIdx.x < DIM) {
      float scale;
      v_scale_of<FP16>(v_maxima(p, share.head, DIM)[threadIdx.x], scale, sh.v_inverse[threadIdx.x]);
      sh.v_mean[threadIdx.x] = p.images.v_mean[share.head * DIM + threadIdx.x];
    }
    __syncthreads();
    write_values<DIM, DV, FP16, MODE>(p, h, sh, nullptr, 0, share.rank, size, mine);
  }
}

template<bool FP16> __global__ void finish_v_scales(float *v_scale, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float scale, inverse;
  v_scale_of<FP16>(__float_as_uint(v_scale[i]), scale, inverse);
  v_scale[i] = scale;
}

typedef void (*Kernel)(Params, int);
struct Launches { Kernel k, v; };
template<int DIM, int DV, bool FP16> Launches launches(const Params &p) {
  if constexpr (DIM <= 128)
    if (p.int4 == kPackedInt4) return {quantize_k_mma<DIM, kAny, true>, quantize_v_mma<DIM, DV, FP16, kAny>};
  if (!p.k.vector || !p.v.vector || p.int4 || p.key_index || p.mask.data)
    return {quantize_k_mma<DIM, kAny, false>, quantize_v_mma<DIM, DV, FP16, kAny>};
  return p.bf16 ? Launches{quantize_k_mma<DIM, kAlignedBf16, false>, quantize_v_mma<DIM, DV, FP16, kAlignedBf16>}
                : Launches{quantize_k_mma<DIM, kAlignedFp16, false>, quantize_v_mma<DIM, DV, FP16, kAlignedFp16>};
}
Launches launches(const Params &p, int dim) {
  if (dim == 64) return p.fp16_pv ? launches<64, 64, true>(p) : launches<64, 64, false>(p);
  if (dim == 128) return p.fp16_pv ? launches<128, 128, true>(p) : launches<128, 128, false>(p);
  if (p.v_head_dim <= 128) return p.fp16_pv ? launches<256, 128, true>(p) : launches<256, 128, false>(p);
  return p.fp16_pv ? launches<256, 256, true>(p) : launches<256, 256, false>(p);
}
template<int DIM> constexpr int shared_bytes() { return Shared<DIM>::at_rest + Shared<DIM>::partial_bytes; }
static_assert(shared_bytes<256>() <= 48 << 10, "no launch asks for more than every card gives");

}  // namespace

cudaError_t launch_quantize_mma(const Params &p, int sm_count, cudaStream_t stream) {
  const int64_t heads = (int64_t)p.batch * p.kv_heads;
  const int dim = padded_dim(p.head_dim), threads = 256;
  const int shared = dim == 64 ? shared_bytes<64>() : dim == 128 ? shared_bytes<128>() : shared_bytes<256>();
  const int blocks = p.cu_k ? (p.blocks + p.batch - 1) / p.batch : p.blocks;  // of a head; sequences: on average
  int size = 1;  // CTAs of a head: enough to fill the chip twice
  while (size * 2 <= blocks && heads * size < 4 * sm_count) size *= 2;
  const cudaError_t err = cudaMemsetAsync(p.images.v_scale, 0, (size_t)heads * dim * sizeof(float), stream);
  if (err != cudaSuccess) return err;
  const Launches to = launches(p, dim);
  const int n = (int)(heads * dim);
  to.k<<<(unsigned)(heads * size), kThreads, shared, stream>>>(p, size);
  to.v<<<(unsigned)(heads * size), kThreads, shared, stream>>>(p, size);
  (p.fp16_pv ? finish_v_scales<true> : finish_v_scales<false>)<<<(n + threads - 1) / threads, threads, 0, stream>>>(
      p.images.v_scale, n);
  return cudaGetLastError();
}

}  // namespace sage2
