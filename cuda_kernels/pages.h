// What the host side hands to the kernels of the quantized cache. Internal: the contract is sage2_pages.h.
#pragma once
#include "params.h"

namespace sage2 {

struct PageParams {
  View q, k, v, out;
  float *lse;
  const uint64_t *slabs;
  uint16_t *tail;
  const float *k_mean, *v_mean;
  const int32_t *kv_starts;
  const uint8_t *mask;
  const float *sinks;
  float *partial;                  // attend: [batch x kv_heads][row tiles][slots][part_rows][dim] unnormalised sums
  float4 *stats;                   // and of each row: reference exponent, sum, q . k_mean (natural units)
  int64_t mask_batch, mask_head, mask_row, mask_column;
  int32_t batch, heads, kv_heads, head_dim, heads_per_kv, tokens, length, bf16;
  int32_t slab_shift, first_slab, record;
  int32_t offset, left;            // row of token i sees keys in [i + offset - left, i + offset]
  int32_t mask_first, mask_columns;
  float scale, scale_log2, softcap, softcap_step;
  int32_t first_page;              // append: of this launch
  int32_t rows, row_tiles, splits, slots, part_rows;     // attend: packed rows of a kv head, and how they are cut up
  int32_t split_tiles, need_dot;   // split_tiles: the two consumers take turns on the key tiles instead of halving the rows
};

constexpr int kTailSlots = 256;
SAGE2_HD constexpr int page_scales(int dim) { return 2 * kTileTokens * dim; }          // offset of the scales in a record
SAGE2_HD constexpr int page_scale_bytes(int dim) { return (kScaleGroups + dim) * 4 + kTileTokens / 8; }      // and of the bits of lost tokens
SAGE2_HD constexpr int page_record(int dim) { return (page_scales(dim) + page_scale_bytes(dim) + 127) / 128 * 128; }

cudaError_t launch_pages_append(PageParams &p, cudaStream_t stream);
// Splits, tiles and slots of a call; then `partial` and `stats` can be placed.
void plan_pages_attend(PageParams &p, int sm_count);
size_t pages_partial_bytes(const PageParams &p);
size_t pages_stats_bytes(const PageParams &p);
cudaError_t launch_pages_attend(const PageParams &p, cudaStream_t stream);
cudaError_t load_pages();           // calls the other
cudaError_t load_pages_append();

}  // namespace sage2
