// Attention over a quantized cache on mma.sync: which kernel a call needs, and its launch.
// Architectures: 80 86 89 100 110 120
#include "pages_attend_mma.cuh"

namespace sage2 {
namespace {

struct Kernel {
  void (*attend)(PageParams);
  int bytes;
};
template<int DIM, bool TURNS> Kernel kernel(bool extra) {
  return {extra ? attend_mma<DIM, TURNS, true> : attend_mma<DIM, TURNS, false>, PageConfig<DIM, TURNS>::bytes};
}
Kernel kernel(int head_dim, bool turns, bool extra) {
  if (padded_dim(head_dim) == 64) return turns ? kernel<64, true>(extra) : kernel<64, false>(extra);
  return turns ? kernel<128, true>(extra) : kernel<128, false>(extra);
}

}  // namespace

cudaError_t load_pages_mma() {
  cudaError_t err = load_pages_append();
  if (err == cudaSuccess) err = load_pages_combine();
  for (int i = 0; i < 8 && err == cudaSuccess; i++) {
    const Kernel k = kernel(64 << i / 4, i / 2 % 2, i % 2);
    err = cudaFuncSetAttribute(k.attend, cudaFuncAttributeMaxDynamicSharedMemorySize, k.bytes);
  }
  return err;
}

void plan_pages_attend_mma(PageParams &p, int sm_count) {
  p.rows = p.tokens * (p.heads / p.kv_heads);
  if (p.rows <= 16) cut_pages(p, sm_count, 16, kPageWarps);
  else cut_pages(p, 3 * sm_count, 16 * kPageWarps, 1);
}

cudaError_t launch_pages_attend_mma(const PageParams &p, cudaStream_t stream) {
  const Kernel k = kernel(p.head_dim, p.split_tiles, p.mask || p.softcap != 0.f);
  k.attend<<<dim3(p.splits, p.row_tiles, p.batch * p.kv_heads), kPageThreads, k.bytes, stream>>>(p);
  return p.slots > 1 ? launch_pages_combine(p, stream) : cudaGetLastError();
}

}  // namespace sage2
