// Which family of attention kernels a call needs, and the order of its tiles. The dense family is compiled here.
#include "fwd_sm90.cuh"

namespace sage2 {

constexpr int kL2Group = 20 << 20;           // causal: heads whose K and V images fit here run interleaved

template cudaError_t load_family_sm90<kDense>();
template cudaError_t launch_family_sm90<kDense>(Params &, int, bool, cudaStream_t);
extern template cudaError_t load_family_sm90<kMasked>();
extern template cudaError_t launch_family_sm90<kMasked>(Params &, int, bool, cudaStream_t);
extern template cudaError_t load_family_sm90<kAdjusted>();
extern template cudaError_t launch_family_sm90<kAdjusted>(Params &, int, bool, cudaStream_t);

int query_tile_rows(int dim, bool fp16, Family family) {
  if (family == kAdjusted) return Layout<128, false, kAdjusted>::rows;
  return dim == 128 || family == kMasked ? Layout<128, false, kMasked>::rows : fp16 ? Layout<64, true, kDense>::rows : Layout<64, false, kDense>::rows;
}

cudaError_t load_forward_sm90() {
  cudaError_t err = load_family_sm90<kDense>();
  if (err == cudaSuccess) err = load_family_sm90<kMasked>();
  return err == cudaSuccess ? load_family_sm90<kAdjusted>() : err;
}

cudaError_t launch_forward_sm90(Params &p, int sm_count, bool overlap, cudaStream_t stream) {
  const int dim = padded_dim(p.head_dim);
  const size_t head_bytes = (k_image_bytes(dim) + v_image_bytes(dim, p.fp16_pv)) * p.blocks;
  const size_t fit = kL2Group / (head_bytes ? head_bytes : 1), kv_heads = (size_t)p.batch * p.kv_heads;
  p.group = !p.causal ? 1 : (int)(fit < 1 ? 1 : fit > kv_heads ? kv_heads : fit) * p.heads_per_kv;
  const auto launch = p.family == kDense ? launch_family_sm90<kDense> : p.family == kMasked ? launch_family_sm90<kMasked> : launch_family_sm90<kAdjusted>;
  return launch(p, sm_count, overlap, stream);
}

}  // namespace sage2
