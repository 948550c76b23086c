/* Attention over a quantized key/value cache: the part of the contract that sage2.h leaves out. Same rules: plain C, raw
 * pointers, no allocation, no synchronisation, current device.
 *
 * The store of one layer. A page holds 128 tokens of one kv head of one batch item, as one record of bytes:
 *   INT8 K image | E4M3 V image | 4 float K scales | dim float V scales | 128 bits | padding to a multiple of 128
 * where bit t says that token t had a key or value that is not finite: a row that sees it is NaN
 * (dim: head_dim rounded up to 64 or 128; the images are those of tile_image.h). Records lie in slabs
 * [batch][kv_heads][slab_pages][record]; `slabs` lists the slabs that are kept, in order, the first of them slab
 * number `first_slab`. K is stored minus k_mean, V minus v_mean, sampled means of the tokens that came before the store held
 * a whole page, which stay from then on. `tail` keeps the last tokens as they came, [K, V][batch][kv_heads][256][head_dim], token t at slot
 * t % 256, so that a page that is not full is quantized anew from its own tokens.
 */
#ifndef SAGE2_PAGES_H
#define SAGE2_PAGES_H
#include "sage2.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Sage2Pages {
  uint32_t size;                 /* sizeof(Sage2Pages) */
  int32_t device, dtype;         /* SAGE2_FP16 or SAGE2_BF16 */
  int32_t batch, heads, kv_heads, head_dim;
  int32_t tokens;                /* append: new tokens; attend: query rows, the last tokens of the store where causal */
  int32_t length;                /* tokens of the store: append: before the new ones; attend: all, dropped ones counted */
  int32_t slab_pages, first_slab;
  int32_t causal, left;          /* attend: row i sees keys up to i + length - tokens; and at most `left` before that one, -1: no limit */
  float scale, softcap;          /* as in Sage2Args */
  int32_t mask_first;            /* the key of the mask's first column */
  int32_t mask_columns;          /* keys outside them are hidden */
  int32_t reserved;
  const void *q, *k, *v;         /* q: attend, [batch, heads, tokens, head_dim]; k, v: append, [batch, kv_heads, tokens, head_dim] */
  void *out;                     /* as q */
  float *lse;                    /* [batch, heads, tokens], or null */
  const uint64_t *slabs;         /* on the device: addresses of the slabs that are kept */
  void *tail;                    /* append */
  float *k_mean, *v_mean;        /* [batch, kv_heads, dim]; append sets them while less than a page is stored */
  const int32_t *kv_starts;      /* on the device, [batch]: keys before it do not exist; or null */
  const uint8_t *mask;           /* on the device, [batch, heads, tokens, mask_columns] or broadcast: 0 = hidden; or null */
  const float *sinks;            /* on the device, [heads]; or null */
  void *workspace;               /* attend; 256-byte aligned */
  size_t workspace_bytes;
  void *stream;
  int64_t q_strides[3], k_strides[3], v_strides[3], out_strides[3];   /* batch, head, token */
  int64_t mask_strides[4];
} Sage2Pages;

/* Bytes of one page's record, 0 for a head_dim that has none. */
SAGE2_API size_t sage2_page_bytes(int head_dim);
/* New tokens into the tail and the pages they touch; every touched page is quantized from 16-bit values. */
SAGE2_API int sage2_pages_append(const Sage2Pages *args);
/* Attention of `tokens` query rows over the store. */
SAGE2_API int sage2_pages_attend(const Sage2Pages *args);
SAGE2_API size_t sage2_pages_workspace_bytes(const Sage2Pages *args);

#ifdef __cplusplus
}
#endif
#endif
