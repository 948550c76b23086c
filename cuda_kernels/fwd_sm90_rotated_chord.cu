// The attention kernels of the dense family with rotation and the exponent kChord (exponent.cuh).
// Architectures: 90a
#include "fwd_sm90.cuh"

namespace sage2 {

template cudaError_t load_family_sm90<kRotated, kChord>();
template cudaError_t launch_family_sm90<kRotated, kChord>(Params &, int, bool, cudaStream_t);

}  // namespace sage2
