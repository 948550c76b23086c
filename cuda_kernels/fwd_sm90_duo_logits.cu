// The kernels of changed logits with another exponent (exponent.cuh), for the tiles of integer scores among them.
// Architectures: 90a
#include "fwd_sm90.cuh"

namespace sage2 {

template cudaError_t load_family_sm90<kAdjusted, kDuo>();
template cudaError_t launch_family_sm90<kAdjusted, kDuo>(Params &, int, bool, cudaStream_t);

}  // namespace sage2
