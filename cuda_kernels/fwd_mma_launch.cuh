// Which mma.sync kernel a call of one family needs, and its launch. Host code; each family's unit instantiates it.
#pragma once
#include "fwd_mma.cuh"

namespace sage2 {
namespace {

typedef void (*Kernel)(Params);
struct Shape { int bytes, threads; };
struct Entry {
  Kernel kernel;
  Shape usual, small;  // what it needs on most SMs, and on small ones
};
template<int DIM, Product PV, Family FAMILY, bool PACKED = false> Entry entry() {
  typedef MmaConfig<DIM, PV, FAMILY, PACKED> C;
  return {attention_mma<C>, {C::bytes, C::threads}, {C::Small::bytes, C::Small::threads}};
}
bool is_fp8(Product pv) { return pv == kPvFp8 || pv == kPvFp8Split; }
template<int DIM, Family FAMILY> Entry entry(Product pv, bool packed) {
  if constexpr (FAMILY == kAdjusted)
    if (packed) return is_fp8(pv) ? entry<DIM, kPvFp8, FAMILY, true>() : entry<DIM, kPvFp16, FAMILY, true>();
  if constexpr (FAMILY == kDense) {
    if (pv == kPvFp16Split) return entry<DIM, kPvFp16Split, FAMILY>();
    if (pv == kPvFp8Split) return entry<DIM, kPvFp8Split, FAMILY>();
  }
  return is_fp8(pv) ? entry<DIM, kPvFp8, FAMILY>() : entry<DIM, kPvFp16, FAMILY>();
}
template<Family FAMILY> Entry entry(int dim, Product pv, bool packed) {
  if (dim == 64) return entry<64, FAMILY>(pv, packed);
  if (dim == 128) return entry<128, FAMILY>(pv, packed);
  return is_fp8(pv) ? entry<256, kPvFp8, FAMILY>() : entry<256, kPvFp16, FAMILY>();
}

}  // namespace

template<Family FAMILY> cudaError_t load_family_mma(int capability) {
  for (int i = 0; i < 3 * 4 * 2; i++) {
    const int dim = 64 << i % 3;
    const Product pv = (Product)(i / 3 % 4);
    const bool packed = i / 12;
    if (is_fp8(pv) && capability < 89) continue;
    if (packed && capability > 90) continue;
    const Entry e = entry<FAMILY>(dim, pv, packed);
    const int bytes = e.small.bytes > e.usual.bytes ? e.small.bytes : e.usual.bytes;
    const cudaError_t err = cudaFuncSetAttribute(e.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (err != cudaSuccess) return err;
  }
  return cudaSuccess;
}
template<Family FAMILY> cudaError_t launch_family_mma(const Params &p, bool split, bool small, cudaStream_t stream) {
  const Product pv = !p.fp16_pv ? (split ? kPvFp8Split : kPvFp8) : split ? kPvFp16Split : kPvFp16;
  const Entry e = entry<FAMILY>(padded_dim(p.head_dim), pv, p.int4 == kPackedInt4);
  const Shape shape = small ? e.small : e.usual;
  e.kernel<<<p.total, shape.threads, shape.bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace sage2
