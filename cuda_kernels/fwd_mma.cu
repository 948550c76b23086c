#include "fwd_mma.cuh"
namespace sage2 {
template __global__ void attention_mma<MmaConfig<128, kPvFp16, kDense, false>>(Params);
}
