// What the host side hands to the kernels, and how the workspace is laid out. Internal: the public contract is sage2.h.
#pragma once
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>
#include "tile_image.h"

namespace sage2 {

struct View {                      // a 4-D tensor whose last dimension has stride 1; strides in elements
  const uint16_t *data;
  int64_t batch, head, token;
  int32_t vector;                  // 1: every row starts on 16 bytes and head_dim is a multiple of 8
};

struct Images {                    // the workspace
  uint8_t *k, *v;                  // [batch * kv_heads][blocks][image]
  float *k_scale;                  // [batch * kv_heads][blocks][4]
  float *k_mean, *v_mean, *v_scale;   // [batch * kv_heads][padded head_dim]
  int32_t *counter;                // the tile counter of the forward kernel, zero between launches
};

struct Params {
  View q, k, v, out;
  Images images;
  float *lse;                      // [batch][heads][q_len], or null
  const int32_t *kv_lens;          // [batch], or null
  int32_t batch, heads, kv_heads, q_len, kv_len, head_dim;
  int32_t blocks;                  // key tiles of one head
  int32_t heads_per_kv;
  int32_t q_tiles, total, group;   // forward: query tiles of a head, of the call, and heads that are interleaved
  int32_t bf16, causal, top_left, smooth_k, smooth_v, fp16_pv;
  float scale, scale_log2;         // softmax scale, and times log2(e)
};

SAGE2_HD constexpr int padded_dim(int head_dim) { return head_dim <= 64 ? 64 : 128; }
SAGE2_HD constexpr size_t k_image_bytes(int dim) { return (size_t)kTileTokens * dim; }
SAGE2_HD constexpr size_t v_image_bytes(int dim, bool fp16) { return (size_t)kTileTokens * dim * (fp16 ? 2 : 1); }

// Both return a CUDA error code; `overlap` lets the forward kernel's start overlap the end of the pre-processing.
cudaError_t launch_quantize(const Params &p, int sm_count, cudaStream_t stream);
cudaError_t launch_forward_sm90(Params &p, int sm_count, bool overlap, cudaStream_t stream);
// Loads the kernels on the current device and raises their shared-memory limits.
cudaError_t load_quantize();
cudaError_t load_forward_sm90();

}  // namespace sage2
