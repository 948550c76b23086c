// The attention kernels for softcap and added masks: a unit of their own, so that all families compile at the same time.
#include "fwd_sm90.cuh"

namespace sage2 {

template cudaError_t load_family_sm90<kAdjusted>();
template cudaError_t launch_family_sm90<kAdjusted>(Params &, int, bool, cudaStream_t);

}  // namespace sage2
