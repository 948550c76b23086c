// How the attention kernels of every family are launched: the order of their tiles, and wide values in two halves.
#pragma once
#include "params.h"

namespace sage2 {

constexpr size_t kL2Group = 20 << 20;  // causal: heads whose K and V images fit here run interleaved

// Which heads' query tiles run side by side; without causality one head comes after the other.
inline void order_tiles(Params &p) {
  const int dim = padded_dim(p.head_dim), v_dim = padded_v_dim(p.head_dim, p.v_head_dim);
  const size_t head_bytes = (k_image_bytes(dim) + v_image_bytes(v_dim, p.fp16_pv)) * p.blocks;
  const size_t fit = kL2Group / (head_bytes ? head_bytes : 1), kv_heads = (size_t)(p.cu_q ? 1 : p.batch) * p.kv_heads;
  if (p.cu_q) p.q_tiles = p.total / p.heads;
  p.group = !p.causal ? 1 : (int)(fit < 1 ? 1 : fit > kv_heads ? kv_heads : fit) * p.heads_per_kv;
}

// launch(is_first) computes at most 128 channels of V: 256 and the scores do not fit the registers of a thread.
template<class F> cudaError_t launch_halves(Params &p, F launch) {
  if (p.v_head_dim <= 128) return launch(true);
  const int v_head_dim = p.v_head_dim;
  p.v_head_dim = 128;
  const cudaError_t err = launch(true);
  if (err != cudaSuccess) return err;
  p.v_head_dim = v_head_dim - 128;
  p.v_channel = 128;
  p.images.v += p.images.v_half;
  p.out.data += 128;
  return launch(false);
}

}  // namespace sage2
