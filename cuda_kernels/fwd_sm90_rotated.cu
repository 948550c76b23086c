// The attention kernels of the dense family with rotation.
// Architectures: 90a
#include "fwd_sm90.cuh"

namespace sage2 {

template cudaError_t load_family_sm90<kRotated, kExact>();
template cudaError_t launch_family_sm90<kRotated, kExact>(Params &, int, bool, cudaStream_t);

}  // namespace sage2
