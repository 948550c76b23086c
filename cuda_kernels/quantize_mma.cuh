// The kernels of the pre-processing without clusters: K images and V's channel maxima, which meet in memory; V images;
// V's scales.
#pragma once
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
__global__ void __launch_bounds__(kThreads, 1) quantize_v_mma(const __grid_constant__ Params p, int size, float v_max) {
  if constexpr (has_values<FP16>()) {
    extern __shared__ __align__(16) uint8_t smem[];
    Shared<DIM> &sh = *(Shared<DIM> *)smem;
    const Share share = share_of(size);
    const Head h = head_of<MODE>(p, share.head);
    const int blocks = (h.keys + kTileTokens - 1) / kTileTokens, mine = (blocks - share.rank + size - 1) / size;
    if (threadIdx.x < DIM) {
      float scale;
      v_scale_of<FP16>(v_maxima(p, share.head, DIM)[threadIdx.x], scale, sh.v_inverse[threadIdx.x], v_max);
      sh.v_mean[threadIdx.x] = p.images.v_mean[share.head * DIM + threadIdx.x];
    }
    __syncthreads();
    write_values<DIM, DV, FP16, MODE>(p, h, sh, nullptr, 0, share.rank, size, mine);
  }
}

template<bool FP16> __global__ void finish_v_scales(float *v_scale, int n, float v_max) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float scale, inverse;
  v_scale_of<FP16>(__float_as_uint(v_scale[i]), scale, inverse, v_max);
  v_scale[i] = scale;
}

}  // namespace
}  // namespace sage2
