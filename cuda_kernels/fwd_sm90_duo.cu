// The dense and masked attention kernels with another exponent (exponent.cuh): a unit of their own, so that all
// compile at the same time.
// Architectures: 90a
#include "fwd_sm90.cuh"

namespace sage2 {

template cudaError_t load_family_sm90<kDense, kDuo>();
template cudaError_t launch_family_sm90<kDense, kDuo>(Params &, int, bool, cudaStream_t);
template cudaError_t load_family_sm90<kMasked, kDuo>();
template cudaError_t launch_family_sm90<kMasked, kDuo>(Params &, int, bool, cudaStream_t);

}  // namespace sage2
