// Pre-processing without clusters, for every card from sm_80 on: the images, scales and vectors of quantize.cu, byte
// for byte. Three launches: K images and V's channel maxima, which meet in memory; V images; V's scales.
//
// Memory bound; V is read twice. No more than 38 KB of shared memory.
// Architectures: 80 86 89 100 110 120
#include "fwd_mma.h"
#include "quantize_mma.cuh"

namespace sage2 {
namespace {

struct Launches {
  void (*k)(Params, int);
  void (*v)(Params, int, float);
};
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

cudaError_t launch_quantize_mma(const Params &p, bool split, int sm_count, cudaStream_t stream) {
  const float v_max = split ? kSplitVMax : kE4m3Max;
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
  to.v<<<(unsigned)(heads * size), kThreads, shared, stream>>>(p, size, v_max);
  (p.fp16_pv ? finish_v_scales<true> : finish_v_scales<false>)<<<(n + threads - 1) / threads, threads, 0, stream>>>(
      p.images.v_scale, n, v_max);
  return cudaGetLastError();
}

}  // namespace sage2
