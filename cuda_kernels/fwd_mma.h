// The mma.sync family's host side: what its units offer each other and the table of backends.
#pragma once
#include "params.h"

namespace sage2 {

// Params::int4 where Q and K images hold INT4 two a byte, for the tensor cores of sm_80 to sm_89. Elsewhere the same
// integers go through INT8: the same scores.
constexpr int kPackedInt4 = 2;
constexpr int kMmaRows = 128;        // of a query tile
constexpr float kSplitVMax = 2.25f;  // E4M3 images of V whose products with P are summed in fp16 (else kE4m3Max)

// split: P V is summed in fp16, 64 keys at a time, at twice the rate on GeForce; the dense kernels alone have it for
// FP16, and the others take its images of E4M3 as any. small: the code is that for SMs with 100 KB of shared memory.
cudaError_t launch_forward_mma(Params &p, bool split, bool small, cudaStream_t stream);
// Loads the kernels that the device has code for and raises their shared-memory limits.
cudaError_t load_forward_mma(int capability);

// One family's kernels, each family in a unit of its own, so that all compile at the same time.
template<Family FAMILY> cudaError_t launch_family_mma(const Params &p, bool split, bool small, cudaStream_t stream);
template<Family FAMILY> cudaError_t load_family_mma(int capability);

}  // namespace sage2
