/* The whole contract of the library: plain C, raw pointers, no allocation, no synchronisation, no exception.
 *
 * Every call works on the current CUDA device, which must be the one that owns the pointers and the stream, and is never
 * changed. Calls may be captured into a CUDA graph; replays read the tensors' values at replay time. Same inputs, same bits.
 *
 * Attention: out = softmax(scale * q k^T + mask) v, with K, V and Q quantized on the way.
 * A row that sees no key is 0, its log-sum-exp -inf. Keys that lengths, padding or a mask tensor hide from every row may hold
 * anything; keys that only causal limits or windows hide count for the scale of their tile.
 *   recipe fp8:  INT8 q k^T, E4M3 p v      recipe fp16: INT8 q k^T, FP16 p v, FP32 sums
 * With SAGE2_INT4 the integers of q and k are -7..7; they still go through the INT8 tensor cores.
 * Non-finite inputs: a NaN or Inf in q makes its row NaN; in k, every row of the tiles that see it; a NaN in v,
 * its channel in those tiles; an Inf in v, its channel of that head.
 */
#ifndef SAGE2_H
#define SAGE2_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#define SAGE2_API __attribute__((visibility("default")))

#define SAGE2_VERSION 2

enum { SAGE2_OK = 0, SAGE2_ERR_ARGUMENT = 1, SAGE2_ERR_UNSUPPORTED = 2, SAGE2_ERR_WORKSPACE = 3, SAGE2_ERR_DEVICE = 4, SAGE2_ERR_CUDA = 5 };
enum { SAGE2_FP16 = 0, SAGE2_BF16 = 1 };
enum { SAGE2_PV_FP8 = 0, SAGE2_PV_FP16 = 1 };
enum { SAGE2_MASK_NONE = 0, SAGE2_MASK_BOOL = 1, SAGE2_MASK_FP16 = 2, SAGE2_MASK_BF16 = 3, SAGE2_MASK_FP32 = 4 };   /* bool: 0 = hidden; float: added */
enum {
  SAGE2_CAUSAL = 1,        /* row i sees key j where j <= i + kv_len - q_len (the item's own kv length) */
  SAGE2_TOP_LEFT = 2,      /* with SAGE2_CAUSAL: j <= i instead */
  SAGE2_SMOOTH_V = 4,      /* quantize V minus a per-channel vector, add it back to the output */
  SAGE2_NO_SMOOTH_K = 8,   /* for experiments: K keeps its mean */
  SAGE2_INT4 = 16,         /* q and k are quantized to 4 bits; head_dim at most 128 */
  SAGE2_SMOOTH_Q = 32      /* quantize 64 rows of q at a time minus their mean, whose logits are added in fp32; head_dim at most
                              128. The workspace grows by q_len / 64 x kv_len floats a head; sage2_forward reads k too */
};

/* Strides count elements: batch, head, token; the last dimension is contiguous. Strides of dimensions of size 1 are ignored.
 * Pointers need the alignment of their element only; 16-byte aligned rows are faster. */
typedef struct Sage2Args {
  uint32_t size;                 /* sizeof(Sage2Args) */
  uint32_t flags;
  int32_t device, dtype, recipe;
  int32_t batch, heads, kv_heads, q_len, kv_len, head_dim;
  int32_t v_head_dim;            /* of v and out; at most head_dim rounded up to 64, 128 or 256 */
  float scale;                   /* of the softmax, before any log2(e) */
  int32_t reserved;
  const void *q, *k, *v;         /* [batch, heads, q_len, head_dim], [batch, kv_heads, kv_len, head_dim or v_head_dim] */
  void *out;                     /* as q but for v_head_dim, same dtype */
  float *lse;                    /* [batch, heads, q_len] contiguous, natural log of the sum of exp of the true scaled scores; or null */
  const int32_t *kv_lens;        /* on the device, [batch]: item b sees keys [0, kv_lens[b]); or null */
  void *workspace;               /* 256-byte aligned */
  size_t workspace_bytes;
  void *stream;                  /* cudaStream_t */
  int64_t q_strides[3], k_strides[3], v_strides[3], out_strides[3];
  /* Which keys there are. At most one of kv_starts and key_padding; neither with cu_seqlens. */
  const int32_t *kv_starts;      /* on the device, [batch]: item b's keys are [kv_starts[b], kv_starts[b] + kv_lens[b]); needs kv_lens */
  const uint8_t *key_padding;    /* on the device, [batch or 1, kv_len], contiguous rows: 0 = no such key; not with a mask, causal,
                                    windows or kv_lens, whose distances between keys it would change */
  int64_t key_padding_stride;    /* of the batch, 0 where it is broadcast */
  const int32_t *cu_seqlens_q, *cu_seqlens_k;   /* on the device, [batch + 1]: `batch` sequences laid end to end in one item; q_len and
                                    kv_len are the totals, batch strides are ignored, lse is [heads, q_len]. Tokens of no sequence
                                    are not written. Both or neither */
  /* Which keys a row sees, beside SAGE2_CAUSAL. */
  const void *mask;              /* on the device, [batch, heads, q_len, kv_len] or broadcast (stride 0); or null */
  int64_t mask_strides[4];
  const float *sinks;            /* on the device, [heads]: one more key per row of this logit and no value; or null */
  float softcap;                 /* logits become softcap * tanh(logit / softcap), before the mask is added; 0: not */
  int32_t left, right;           /* row i sees keys at most so far left and right of its diagonal, -1: no limit */
  int32_t mask_kind;             /* SAGE2_MASK_... */
} Sage2Args;

SAGE2_API int sage2_version(void);
/* Compute capabilities the library holds code for, e.g. 90; returns how many, writes at most `capacity`. */
SAGE2_API int sage2_architectures(int *out, int capacity);
/* Message of this thread's last failed call. */
SAGE2_API const char *sage2_last_error(void);
/* Bytes of workspace for these shapes, recipe and lengths (pointers and strides are not looked at); 0 for invalid arguments. */
SAGE2_API size_t sage2_workspace_bytes(const Sage2Args *args);
/* Loads the kernels on the current device; optional, the first call does it. */
SAGE2_API int sage2_load(void);

/* K and V -> workspace. */
SAGE2_API int sage2_prepare(const Sage2Args *args);
/* Attention against a workspace that sage2_prepare filled with the same shapes. */
SAGE2_API int sage2_forward(const Sage2Args *args);
SAGE2_API int sage2_prepare_and_forward(const Sage2Args *args);

#ifdef __cplusplus
}
#endif
#endif
