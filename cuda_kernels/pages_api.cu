// The C entry points of the quantized cache: argument checks, workspace, launches.
#include "sage2_pages.h"
#include "api.h"
#include "mask.cuh"
#include "pages.h"

namespace sage2 {
namespace {

int shapes(const Sage2Pages *a, bool attend, PageParams *p) {
  if (!a) return fail(SAGE2_ERR_ARGUMENT, "args is null");
  if (a->size != sizeof(Sage2Pages)) return fail(SAGE2_ERR_ARGUMENT, "args->size is %u, this library (version %d) expects %zu", a->size, SAGE2_VERSION, sizeof(Sage2Pages));
  if (a->dtype != SAGE2_FP16 && a->dtype != SAGE2_BF16) return fail(SAGE2_ERR_ARGUMENT, "dtype %d is neither fp16 (0) nor bf16 (1)", a->dtype);
  if (a->batch < 1 || a->heads < 1 || a->kv_heads < 1 || a->tokens < 1 || a->length < 0 || a->first_slab < 0)
    return fail(SAGE2_ERR_ARGUMENT, "batch %d, heads %d, kv_heads %d and tokens %d must be positive, length %d and first_slab %d not negative", a->batch, a->heads, a->kv_heads, a->tokens, a->length, a->first_slab);
  if (a->heads % a->kv_heads) return fail(SAGE2_ERR_ARGUMENT, "heads %d is not a multiple of kv_heads %d", a->heads, a->kv_heads);
  if (!sage2_page_bytes(a->head_dim)) return fail(SAGE2_ERR_UNSUPPORTED, "head_dim %d: pages support 1 to 128", a->head_dim);
  if (a->slab_pages < 1 || (a->slab_pages & (a->slab_pages - 1))) return fail(SAGE2_ERR_ARGUMENT, "slab_pages %d is not a power of two", a->slab_pages);
  if (a->length > kMaxLength / 2 - a->tokens) return fail(SAGE2_ERR_UNSUPPORTED, "length %d and tokens %d exceed %d", a->length, a->tokens, kMaxLength / 2);
  if (a->batch * (int64_t)a->kv_heads > 65535) return fail(SAGE2_ERR_UNSUPPORTED, "batch %d x kv_heads %d is too large: at most 65535", a->batch, a->kv_heads);
  if (attend && (int64_t)a->tokens * (a->heads / a->kv_heads) > 128 * 65535LL) return fail(SAGE2_ERR_UNSUPPORTED, "tokens %d are too large for %d query heads of a kv head", a->tokens, a->heads / a->kv_heads);
  if (a->left >= kNoLimit) return fail(SAGE2_ERR_ARGUMENT, "left %d must be below %d", a->left, kNoLimit);
  if (attend && a->left >= 0 && !a->causal) return fail(SAGE2_ERR_UNSUPPORTED, "a window needs causal attention over a cache");
  if (attend && a->causal && a->tokens > a->length) return fail(SAGE2_ERR_ARGUMENT, "tokens %d are more than the store holds, %d", a->tokens, a->length);
  *p = PageParams();
  p->batch = a->batch, p->heads = a->heads, p->kv_heads = a->kv_heads, p->head_dim = a->head_dim, p->tokens = a->tokens, p->length = a->length;
  p->bf16 = a->dtype == SAGE2_BF16, p->first_slab = a->first_slab, p->record = (int)sage2_page_bytes(a->head_dim);
  while (1 << p->slab_shift < a->slab_pages) p->slab_shift++;
  p->offset = a->causal ? a->length - a->tokens : kNoCausalOffset, p->left = !a->causal ? INT32_MAX : a->left < 0 ? kNoLimit : a->left;
  p->scale = a->scale, p->scale_log2 = (float)((double)a->scale * 1.4426950408889634);
  p->softcap = (float)(a->softcap * 1.4426950408889634), p->softcap_step = a->softcap != 0.f ? 2.f / a->softcap : 0.f;
  p->lse = a->lse, p->sinks = a->sinks, p->kv_starts = a->kv_starts, p->slabs = a->slabs, p->k_mean = a->k_mean, p->v_mean = a->v_mean, p->tail = (uint16_t *)a->tail;
  p->mask = a->mask, p->mask_batch = a->mask_strides[0], p->mask_head = a->mask_strides[1], p->mask_row = a->mask_strides[2], p->mask_column = a->mask_strides[3];
  p->mask_first = a->mask_first, p->mask_columns = a->mask_columns;
  p->need_dot = a->lse || a->sinks || a->softcap != 0.f;
  return SAGE2_OK;
}

int device_of(const Sage2Pages *a, int *sms) {
  int device;
  if (int code = load_current(&device, sms)) return code;
  return device == a->device ? SAGE2_OK : fail(SAGE2_ERR_DEVICE, "the tensors are on device %d, the current device is %d", a->device, device);
}

size_t align256(size_t x) { return (x + 255) / 256 * 256; }

}  // namespace
}  // namespace sage2

extern "C" {
size_t sage2_page_bytes(int head_dim) { return head_dim < 1 || head_dim > 128 ? 0 : sage2::page_record(sage2::padded_dim(head_dim)); }

int sage2_pages_append(const Sage2Pages *a) {
  using namespace sage2;
  PageParams p;
  int sms;
  if (int code = shapes(a, false, &p)) return code;
  if (!a->k || !a->v || !a->slabs || !a->tail || !a->k_mean || !a->v_mean) return fail(SAGE2_ERR_ARGUMENT, "a tensor pointer is null");
  if (int code = device_of(a, &sms)) return code;
  p.k = view(a->k, a->k_strides, a->batch, a->kv_heads, a->tokens, a->head_dim), p.v = view(a->v, a->v_strides, a->batch, a->kv_heads, a->tokens, a->head_dim);
  const cudaError_t err = launch_pages_append(p, (cudaStream_t)a->stream);
  return err == cudaSuccess ? SAGE2_OK : fail_cuda(err, "launching the append to a quantized cache");
}

size_t sage2_pages_workspace_bytes(const Sage2Pages *a) {
  using namespace sage2;
  PageParams p;
  int device, sms;
  if (shapes(a, true, &p) || load_current(&device, &sms)) return 0;
  plan_pages_attend(p, sms);
  return align256(pages_partial_bytes(p)) + align256(pages_stats_bytes(p)) + 256;
}

int sage2_pages_attend(const Sage2Pages *a) {
  using namespace sage2;
  PageParams p;
  int sms;
  if (int code = shapes(a, true, &p)) return code;
  if (!a->q || !a->out || !a->slabs || !a->k_mean || !a->v_mean) return fail(SAGE2_ERR_ARGUMENT, "a tensor pointer is null");
  if (int code = device_of(a, &sms)) return code;
  plan_pages_attend(p, sms);
  const size_t partial = align256(pages_partial_bytes(p)), need = partial + align256(pages_stats_bytes(p));
  if (need && (!a->workspace || (uintptr_t)a->workspace % 256 || a->workspace_bytes < need))
    return fail(SAGE2_ERR_WORKSPACE, "workspace %p of %zu bytes: %zu bytes at a multiple of 256 are needed", a->workspace, a->workspace_bytes, need);
  p.partial = (float *)a->workspace, p.stats = (float4 *)((uint8_t *)a->workspace + partial);
  p.q = view(a->q, a->q_strides, a->batch, a->heads, a->tokens, a->head_dim), p.out = view(a->out, a->out_strides, a->batch, a->heads, a->tokens, a->head_dim);
  const cudaError_t err = launch_pages_attend(p, (cudaStream_t)a->stream);
  return err == cudaSuccess ? SAGE2_OK : fail_cuda(err, "launching the attention over a quantized cache");
}
}
