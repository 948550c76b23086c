// The mma.sync family: which kernels a call needs. The dense ones are compiled here.
// Architectures: 80 86 89 100 110 120
#include "fwd_mma_launch.cuh"
#include "launch_order.h"

namespace sage2 {

template cudaError_t load_family_mma<kDense>(int);
template cudaError_t launch_family_mma<kDense>(const Params &, bool, bool, cudaStream_t);
extern template cudaError_t load_family_mma<kMasked>(int);
extern template cudaError_t launch_family_mma<kMasked>(const Params &, bool, bool, cudaStream_t);
extern template cudaError_t load_family_mma<kAdjusted>(int);
extern template cudaError_t launch_family_mma<kAdjusted>(const Params &, bool, bool, cudaStream_t);

cudaError_t load_forward_mma(int capability) {
  cudaError_t err = load_family_mma<kDense>(capability);
  if (err == cudaSuccess) err = load_family_mma<kMasked>(capability);
  return err == cudaSuccess ? load_family_mma<kAdjusted>(capability) : err;
}

cudaError_t launch_forward_mma(Params &p, bool split, bool small, cudaStream_t stream) {
  order_tiles(p);
  const auto launch = p.family <= kRotated  ? launch_family_mma<kDense>  // rotation costs it nothing to know
                      : p.family == kMasked ? launch_family_mma<kMasked>
                                            : launch_family_mma<kAdjusted>;
  return launch_halves(p, [&](bool) { return launch(p, split, small, stream); });
}

}  // namespace sage2
