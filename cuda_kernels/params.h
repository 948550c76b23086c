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

struct Mask {                      // an attention mask and what masks.cu makes of it; mb x mh planes, 1 where it is broadcast
  const void *data;                // or null
  int64_t batch, head, row, column;   // strides in elements, 0 where broadcast
  int32_t kind, mb, mh;            // MaskKind
  int32_t pairs;                   // two neighbouring columns can be read at once
  uint32_t *bits;                  // [mb][mh][q_tiles][blocks][tile_rows / 64][256]: which keys each row sees, causal limits and
                                   // windows included; in the order in which a consumer's threads read them (mask_word)
  uint8_t *classes;                // [mb][mh][q_pad / 64][blocks]: TileClass of 64 rows and a key tile
  uint32_t *lists;                 // [mb][mh][q_tiles][blocks]: the key tiles a query tile walks, the last one first
  int32_t *counts;                 // [mb][mh][q_tiles]
  uint32_t *seen;                  // [mb][blocks][4]: keys that any row of the item sees
  int32_t q_pad;                   // rows, in whole query tiles
};
enum MaskKind { kNoMask, kBool, kFloat16, kBfloat16, kFloat32 };
enum TileClass { kUnseen, kWhole, kPartial };   // kWhole: every row sees every key, and nothing is added

struct Images {                    // the workspace
  uint8_t *k, *v;                  // [batch * kv_heads][blocks][image]; v of 256 channels: twice, of 128 each
  float *k_scale;                  // [batch * kv_heads][blocks][4]
  float *k_mean, *v_mean, *v_scale;   // [batch * kv_heads][padded head_dim]
  int64_t v_half;                  // bytes from the first half of v's images to the second
  int32_t *counter;                // the tile counter of the forward kernel, zero between launches
};

struct Params {
  View q, k, v, out;
  Images images;
  float *lse;                      // [batch][heads][q_len], or null
  const int32_t *kv_lens;          // [batch], or null: how many keys an item has, from its first one on
  int32_t batch, heads, kv_heads, q_len, kv_len, head_dim;
  int32_t blocks;                  // key tiles of one head
  int32_t heads_per_kv;
  int32_t q_tiles, total, group;   // forward: query tiles of a head, of the call, and heads that are interleaved
  int32_t bf16, causal, top_left, smooth_k, smooth_v, fp16_pv;
  float scale, scale_log2;         // softmax scale, and times log2(e)
  int32_t v_head_dim, v_channel;   // forward: of the half that a launch computes, and its first channel
  // What the dense family does not read (last on purpose: the place of a field decides how it is loaded):
  const int32_t *kv_starts;        // [batch], or null: where its first key is
  const uint8_t *key_padding;      // [batch or 1][kv_len], or null: 0 = no such key; row stride key_padding_batch
  int64_t key_padding_batch;
  int32_t *key_index;              // [batch][kv_len]: the keys that exist, in order (made from key_padding, as are kv_lens)
  const int32_t *cu_q, *cu_k;      // [batch + 1], or null: sequences laid end to end; q_len and kv_len are then totals
  int2 *schedule;                  // with cu_q: (sequence, first row) of each query tile, or (-1, 0)
  Mask mask;
  const float *sinks;              // [heads], or null
  float softcap, softcap_step;     // in log2 units, 0: none; and 2 / softcap in natural units
  int32_t left, right;             // keys seen on each side of the diagonal, kNoLimit: all
  int32_t family, tile_rows;       // Family, and the query rows of its tiles
  int32_t need_dot;                // q . k_mean matters: for the log-sum-exp, sinks and softcap
};

// The attention kernels, from the least to the most: each knows what the one before it knows.
enum Family {
  kDense,                          // causal or not, lengths
  kMasked,                         // mask tensors of truth values, windows, sinks, sequences laid end to end
  kAdjusted                        // softcap, added masks
};
SAGE2_HD constexpr int padded_dim(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }
SAGE2_HD constexpr int padded_v_dim(int head_dim, int v_head_dim) { return head_dim > 128 && v_head_dim <= 128 ? 128 : padded_dim(head_dim); }
SAGE2_HD constexpr size_t k_image_bytes(int dim) { return (size_t)kTileTokens * dim; }
SAGE2_HD constexpr size_t v_image_bytes(int dim, bool fp16) { return (size_t)kTileTokens * dim * (fp16 ? 2 : 1); }

// Masks, padding and sequences -> what the other launches read. Nothing to do: no launch.
cudaError_t launch_masks(const Params &p, cudaStream_t stream);
// Both return a CUDA error code; `overlap` lets the forward kernel's start overlap the end of the pre-processing.
cudaError_t launch_quantize(const Params &p, int sm_count, cudaStream_t stream);
cudaError_t launch_forward_sm90(Params &p, int sm_count, bool overlap, cudaStream_t stream);
template<Family FAMILY> cudaError_t launch_family_sm90(Params &p, int sm_count, bool overlap, cudaStream_t stream);
// Loads the kernels on the current device and raises their shared-memory limits.
cudaError_t load_quantize();
cudaError_t load_forward_sm90();
template<Family FAMILY> cudaError_t load_family_sm90();
int query_tile_rows(int dim, bool fp16, Family family);

}  // namespace sage2
