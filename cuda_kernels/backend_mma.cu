// The rows of the mma.sync family: cards whose tensor cores have INT4 (sm_80 to sm_89), and those without; of each,
// those whose machine code is for small SMs (sm_86, 89 and 120).
// Architectures: 80 86 89 100 110 120
#include "backends.h"
#include "fwd_mma.h"

namespace sage2 {
namespace {

cudaError_t load() {
  int device = 0, major = 0, minor = 0;
  cudaError_t err = cudaGetDevice(&device);
  if (err == cudaSuccess) err = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (err == cudaSuccess) err = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (err == cudaSuccess) err = load_quantize();
  if (err == cudaSuccess) err = load_forward_mma(10 * major + minor);
  return err == cudaSuccess ? load_pages_mma() : err;
}
int rows(int, bool, Family) { return kMmaRows; }
template<bool PACKED> cudaError_t prepare(const Params &p, int sm_count, cudaStream_t stream) {
  Params with = p;
  if (PACKED && p.int4) with.int4 = kPackedInt4;
  return launch_quantize(with, p.fp16_sums, false, sm_count, stream);
}
template<bool PACKED, bool SMALL> cudaError_t forward(Params &p, int, bool, cudaStream_t stream) {
  if (PACKED && p.int4) p.int4 = kPackedInt4;
  return launch_forward_mma(p, p.fp16_sums, SMALL, stream);
}
template<bool PACKED, bool SMALL> constexpr Backend row() {
  return {load,
          rows,
          prepare<PACKED>,
          forward<PACKED, SMALL>,
          launch_pages_append,
          plan_pages_attend_mma,
          launch_pages_attend_mma,
          256,
          false,
          true};
}

}  // namespace

extern const Backend mma, mma_small, mma_int4, mma_int4_small;
const Backend mma = row<false, false>(), mma_small = row<false, true>();
const Backend mma_int4 = row<true, false>(), mma_int4_small = row<true, true>();

}  // namespace sage2
