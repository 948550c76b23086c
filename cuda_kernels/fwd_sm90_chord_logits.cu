// The attention kernels of changed logits with the exponent kChord (exponent.cuh), for the tiles of int32 scores among them.
// Architectures: 90a
#include "fwd_sm90.cuh"

namespace sage2 {

template cudaError_t load_family_sm90<kAdjusted, kChord>();
template cudaError_t launch_family_sm90<kAdjusted, kChord>(Params &, int, bool, cudaStream_t);

}  // namespace sage2
