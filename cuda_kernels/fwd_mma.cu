// The mma.sync family: the order of its tiles and which kernels a call needs. The dense ones are compiled here.
// Architectures: 80 86 89 100 120
#include "fwd_mma_launch.cuh"

namespace sage2 {

constexpr int kL2Group = 20 << 20;  // causal: heads whose K and V images fit here run interleaved

template cudaError_t load_family_mma<kDense>(int);
template cudaError_t launch_family_mma<kDense>(const Params &, bool, cudaStream_t);
extern template cudaError_t load_family_mma<kMasked>(int);
extern template cudaError_t launch_family_mma<kMasked>(const Params &, bool, cudaStream_t);
extern template cudaError_t load_family_mma<kAdjusted>(int);
extern template cudaError_t launch_family_mma<kAdjusted>(const Params &, bool, cudaStream_t);

cudaError_t load_forward_mma(int capability) {
  cudaError_t err = load_family_mma<kDense>(capability);
  if (err == cudaSuccess) err = load_family_mma<kMasked>(capability);
  return err == cudaSuccess ? load_family_mma<kAdjusted>(capability) : err;
}

cudaError_t launch_forward_mma(Params &p, bool split, cudaStream_t stream) {
  const size_t head_bytes =
      (k_image_bytes(padded_dim(p.head_dim)) + v_image_bytes(padded_v_dim(p.head_dim, p.v_head_dim), p.fp16_pv)) *
      p.blocks;
  const size_t fit = kL2Group / (head_bytes ? head_bytes : 1), kv_heads = (size_t)(p.cu_q ? 1 : p.batch) * p.kv_heads;
  if (p.cu_q) p.q_tiles = p.total / p.heads;
  p.group = !p.causal ? 1 : (int)(fit < 1 ? 1 : fit > kv_heads ? kv_heads : fit) * p.heads_per_kv;
  const auto launch = p.family == kDense    ? launch_family_mma<kDense>
                      : p.family == kMasked ? launch_family_mma<kMasked>
                                            : launch_family_mma<kAdjusted>;
  if (p.v_head_dim <= 128) return launch(p, split, stream);
  // 256 output channels and the scores do not fit a warp's registers: each half of V has its own launch.
  const int v_head_dim = p.v_head_dim;
  p.v_head_dim = 128;
  const cudaError_t err = launch(p, split, stream);
  if (err != cudaSuccess) return err;
  p.v_head_dim = v_head_dim - 128;
  p.v_channel = 128;
  p.images.v += p.images.v_half;
  p.out.data += 128;
  return launch(p, split, stream);
}

}  // namespace sage2
