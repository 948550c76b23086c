// The mma.sync kernels for softcap, added masks, INT4 and Q smoothing: a unit of their own, so that all
// families compile at the same time.
// Architectures: 80 86 89 100 110 120
#include "fwd_mma_launch.cuh"

namespace sage2 {

template cudaError_t load_family_mma<kAdjusted>(int);
template cudaError_t launch_family_mma<kAdjusted>(const Params &, bool, bool, cudaStream_t);

}  // namespace sage2
