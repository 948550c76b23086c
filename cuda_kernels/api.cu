// The C entry points: argument checks, workspace layout, launches. Returns codes; messages are per thread.
#include "api.h"
#include <stdarg.h>
#include <stdio.h>
#include <atomic>
#include "mask.cuh"
#include "pages.h"

namespace sage2 {

static thread_local char last_error[512];

int fail(int code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(last_error, sizeof last_error, format, args);
  va_end(args);
  return code;
}
int fail_cuda(cudaError_t err, const char *what) {
  return fail(SAGE2_ERR_CUDA, "%s: %s (%s)", what, cudaGetErrorString(err), cudaGetErrorName(err));
}

namespace {
constexpr int kMaxDevices = 64;
struct Device { std::atomic<int> ready{0}; int sms = 0; };       // ready: 0 unknown, 1 loaded
Device devices[kMaxDevices];
}  // namespace

int load_current(int *device, int *sms) {
  cudaError_t err = cudaGetDevice(device);
  if (err != cudaSuccess) return fail_cuda(err, "cudaGetDevice");
  if (*device >= kMaxDevices) return fail(SAGE2_ERR_DEVICE, "device index %d: at most %d devices are supported", *device, kMaxDevices);
  Device &d = devices[*device];
  if (!d.ready.load(std::memory_order_acquire)) {
    int major = 0, minor = 0, count = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, *device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, *device);
    if ((err = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, *device)) != cudaSuccess) return fail_cuda(err, "cudaDeviceGetAttribute");
    if (major != 9 || minor != 0) return fail(SAGE2_ERR_DEVICE, "device %d has compute capability %d.%d; this library holds kernels for 9.0", *device, major, minor);
    if ((err = load_quantize()) != cudaSuccess) return fail_cuda(err, "loading the pre-processing kernels");
    if ((err = load_forward_sm90()) != cudaSuccess) return fail_cuda(err, "loading the attention kernels");
    if ((err = load_pages()) != cudaSuccess) return fail_cuda(err, "loading the kernels of the quantized cache");
    d.sms = count;
    d.ready.store(1, std::memory_order_release);
  }
  *sms = d.sms;
  return SAGE2_OK;
}

namespace {

size_t align256(size_t x) { return (x + 255) / 256 * 256; }

// Places the workspace from `base` on; returns its size.
size_t place(Params &p, uint8_t *base, Images *out) {
  const int dim = padded_dim(p.head_dim);
  const size_t heads = (size_t)p.batch * p.kv_heads, images = (p.cu_q ? p.kv_heads : heads) * p.blocks, vector = align256(heads * dim * sizeof(float));
  size_t at = 0;
  auto take = [&](size_t bytes) { uint8_t *here = base + at; at += align256(bytes); return here; };
  Images w;
  w.k = take(images * k_image_bytes(dim)), w.v = take(images * v_image_bytes(padded_v_dim(p.head_dim, p.v_head_dim), p.fp16_pv));
  w.v_half = (int64_t)(images * v_image_bytes(128, false));
  w.k_scale = (float *)take(images * kScaleGroups * sizeof(float));
  w.k_mean = (float *)take(vector), w.v_mean = (float *)take(vector), w.v_scale = (float *)take(vector);
  w.counter = (int32_t *)take(sizeof(int32_t));
  if (out) *out = w;
  if (p.key_padding) {
    p.key_index = (int32_t *)take((size_t)p.batch * p.kv_len * sizeof(int32_t));
    p.kv_lens = (const int32_t *)take(p.batch * sizeof(int32_t));
  }
  if (p.cu_q) p.schedule = (int2 *)take((size_t)(p.total / p.heads) * sizeof(int2));
  if (p.mask.data) {
    Mask &m = p.mask;
    const size_t planes = (size_t)m.mb * m.mh;
    m.bits = (uint32_t *)take(planes * m.q_pad * p.blocks * 16);
    m.classes = take(planes * (m.q_pad / 64) * p.blocks);
    m.lists = (uint32_t *)take(planes * p.q_tiles * p.blocks * sizeof(uint32_t));
    m.counts = (int32_t *)take(planes * p.q_tiles * sizeof(int32_t));
    m.seen = (uint32_t *)take((size_t)m.mb * p.blocks * 16);
  }
  if (p.smooth_q) {
    const size_t blocks = (size_t)(p.cu_q ? 1 : p.batch) * p.heads * p.q_blocks;
    p.q_mean = (float *)take(blocks * dim * sizeof(float));
    p.correction = (float *)take(blocks * p.blocks * kTileTokens * sizeof(float));
  }
  return at;
}

// Masks, windows, sequences: which family of kernels a call needs, and how many tiles it has.
int visibility(const Sage2Args *a, Params *p) {
  p->kv_starts = a->kv_starts, p->key_padding = a->key_padding, p->key_padding_batch = a->key_padding_stride;
  p->cu_q = a->cu_seqlens_q, p->cu_k = a->cu_seqlens_k, p->sinks = a->sinks;
  p->softcap = (float)(a->softcap * 1.4426950408889634), p->softcap_step = a->softcap != 0.f ? 2.f / a->softcap : 0.f;
  p->left = a->left < 0 ? kNoLimit : a->left, p->right = p->causal ? 0 : a->right < 0 ? kNoLimit : a->right;
  if (a->left >= kNoLimit || a->right >= kNoLimit) return fail(SAGE2_ERR_ARGUMENT, "left %d and right %d must be below %d", a->left, a->right, kNoLimit);
  if (!a->cu_seqlens_q != !a->cu_seqlens_k) return fail(SAGE2_ERR_ARGUMENT, "cu_seqlens_q and cu_seqlens_k belong together");
  const bool windows = a->left >= 0 || p->right < kNoLimit;
  if (a->mask && (a->mask_kind < SAGE2_MASK_BOOL || a->mask_kind > SAGE2_MASK_FP32)) return fail(SAGE2_ERR_ARGUMENT, "mask_kind %d is unknown", a->mask_kind);
  if (p->key_padding && (a->mask || windows || a->kv_lens || a->kv_starts || p->cu_q)) return fail(SAGE2_ERR_UNSUPPORTED, "key_padding does not support a mask, causal, windows, kv_lens, kv_starts or cu_seqlens beside it");
  if (p->kv_starts && (a->mask || !a->kv_lens || p->cu_q)) return fail(SAGE2_ERR_UNSUPPORTED, "kv_starts needs kv_lens and does not support a mask or cu_seqlens beside it");
  if (p->cu_q && (a->mask || a->kv_lens)) return fail(SAGE2_ERR_UNSUPPORTED, "cu_seqlens does not support a mask or kv_lens beside it");
  const bool masked = a->left >= 0 || (!p->causal && a->right >= 0) || a->mask || a->sinks || p->cu_q || (p->kv_starts && p->top_left);
  p->int4 = (a->flags & SAGE2_INT4) != 0, p->smooth_q = (a->flags & SAGE2_SMOOTH_Q) != 0;
  p->all_logits = a->softcap != 0.f || p->int4 || p->smooth_q;
  p->family = p->all_logits || a->mask_kind > SAGE2_MASK_BOOL ? kAdjusted : masked ? kMasked : kDense;
  p->heads_per_kv = p->heads / p->kv_heads;
  p->need_dot = a->lse || a->sinks || a->softcap != 0.f;
  const int rows = p->tile_rows = query_tile_rows(padded_dim(p->head_dim), p->fp16_pv, (Family)p->family);
  p->q_tiles = (p->q_len + rows - 1) / rows;
  p->total = p->batch * p->heads * p->q_tiles;
  if (p->cu_q) p->blocks = p->kv_len / kTileTokens + p->batch, p->total = p->heads * (p->q_len / rows + p->batch);
  p->q_blocks = p->cu_q ? p->q_len / kSmoothRows + p->batch : (p->q_len + kSmoothRows - 1) / kSmoothRows;
  if (p->smooth_q && smooth_q_ctas(*p) > INT32_MAX) return fail(SAGE2_ERR_UNSUPPORTED, "SAGE2_SMOOTH_Q: batch %d x heads %d x q_len %d x kv_len %d is too large", p->batch, p->heads, p->q_len, p->kv_len);
  if (a->mask) {
    Mask &m = p->mask;
    const int64_t *s = a->mask_strides;
    m.data = a->mask, m.batch = s[0], m.head = s[1], m.row = s[2], m.column = s[3], m.kind = a->mask_kind;
    m.mb = p->batch > 1 && (s[0] || a->kv_lens) ? p->batch : 1, m.mh = p->heads > 1 && s[1] ? p->heads : 1;
    m.q_pad = p->q_tiles * rows;
    m.pairs = s[3] == 1 && !((s[0] | s[1] | s[2]) & 1) && (uintptr_t)a->mask % (a->mask_kind == SAGE2_MASK_FP32 ? 8 : 4) == 0;
    if ((int64_t)m.mb * m.mh * (m.q_pad / 64) * p->blocks > INT32_MAX) return fail(SAGE2_ERR_UNSUPPORTED, "a mask of %d x %d planes of %d x %d is too large", m.mb, m.mh, p->q_len, p->kv_len);
  }
  return SAGE2_OK;
}

int shapes(const Sage2Args *a, Params *p) {
  if (!a) return fail(SAGE2_ERR_ARGUMENT, "args is null");
  if (a->size != sizeof(Sage2Args)) return fail(SAGE2_ERR_ARGUMENT, "args->size is %u, this library (version %d) expects %zu", a->size, SAGE2_VERSION, sizeof(Sage2Args));
  if (a->dtype != SAGE2_FP16 && a->dtype != SAGE2_BF16) return fail(SAGE2_ERR_ARGUMENT, "dtype %d is neither fp16 (0) nor bf16 (1)", a->dtype);
  if (a->recipe != SAGE2_PV_FP8 && a->recipe != SAGE2_PV_FP16) return fail(SAGE2_ERR_ARGUMENT, "recipe %d is neither fp8 (0) nor fp16 (1)", a->recipe);
  if (a->batch < 1 || a->heads < 1 || a->kv_heads < 1 || a->q_len < 1 || a->kv_len < 0)
    return fail(SAGE2_ERR_ARGUMENT, "batch %d, heads %d, kv_heads %d, q_len %d must be positive and kv_len %d not negative", a->batch, a->heads, a->kv_heads, a->q_len, a->kv_len);
  if (a->heads % a->kv_heads) return fail(SAGE2_ERR_ARGUMENT, "heads %d is not a multiple of kv_heads %d", a->heads, a->kv_heads);
  const int widest = a->recipe == SAGE2_PV_FP16 || a->flags & (SAGE2_INT4 | SAGE2_SMOOTH_Q) ? 128 : 256;
  if (a->head_dim < 1 || a->head_dim > widest) return fail(SAGE2_ERR_UNSUPPORTED, "head_dim %d: 1 to %d are supported", a->head_dim, widest);
  if (a->v_head_dim < 1 || a->v_head_dim > padded_dim(a->head_dim)) return fail(SAGE2_ERR_UNSUPPORTED, "v_head_dim %d: 1 to %d are supported beside head_dim %d", a->v_head_dim, padded_dim(a->head_dim), a->head_dim);
  if (a->q_len > kMaxLength / 2 || a->kv_len > kMaxLength / 2) return fail(SAGE2_ERR_UNSUPPORTED, "q_len %d or kv_len %d exceeds %d", a->q_len, a->kv_len, kMaxLength / 2);
  const int64_t heads = (int64_t)a->batch * a->heads;
  if (heads * ((a->q_len + 63) / 64) > INT32_MAX / 32) return fail(SAGE2_ERR_UNSUPPORTED, "batch x heads x q_len is too large: %lld rows", (long long)(heads * a->q_len));
  *p = Params();
  p->batch = a->batch, p->heads = a->heads, p->kv_heads = a->kv_heads, p->q_len = a->q_len, p->kv_len = a->kv_len, p->head_dim = a->head_dim, p->v_head_dim = a->v_head_dim;
  p->blocks = (a->kv_len + kTileTokens - 1) / kTileTokens;
  p->bf16 = a->dtype == SAGE2_BF16, p->fp16_pv = a->recipe == SAGE2_PV_FP16;
  p->causal = (a->flags & SAGE2_CAUSAL) != 0, p->top_left = (a->flags & SAGE2_TOP_LEFT) != 0;
  p->smooth_v = (a->flags & SAGE2_SMOOTH_V) != 0, p->smooth_k = !(a->flags & SAGE2_NO_SMOOTH_K);
  p->scale = a->scale, p->scale_log2 = (float)((double)a->scale * 1.4426950408889634);
  p->lse = a->lse, p->kv_lens = a->kv_lens;
  return visibility(a, p);
}

}  // namespace

View view(const void *data, const int64_t *strides, int batch, int heads, int tokens, int head_dim) {
  const int64_t sb = batch > 1 ? strides[0] : 0, sh = heads > 1 ? strides[1] : 0, st = tokens > 1 ? strides[2] : 0;
  return {(const uint16_t *)data, sb, sh, st, ((uintptr_t)data % 16 == 0) && !((sb | sh | st | head_dim) & 7)};
}

namespace {

int fill(const Sage2Args *a, bool prepare, bool forward, Params *p, int *sms) {
  if (int code = shapes(a, p)) return code;
  if ((forward && p->smooth_q && a->kv_len && !a->k) || (prepare && a->kv_len && (!a->k || !a->v)) || (forward && (!a->q || !a->out))) return fail(SAGE2_ERR_ARGUMENT, "a tensor pointer is null");
  const size_t need = place(*p, (uint8_t *)a->workspace, &p->images);
  if (!a->workspace || (uintptr_t)a->workspace % 256 || a->workspace_bytes < need)
    return fail(SAGE2_ERR_WORKSPACE, "workspace %p of %zu bytes: %zu bytes at a multiple of 256 are needed", a->workspace, a->workspace_bytes, need);
  int device;
  if (int code = load_current(&device, sms)) return code;
  if (device != a->device) return fail(SAGE2_ERR_DEVICE, "the tensors are on device %d, the current device is %d", a->device, device);
  const int items = p->cu_q ? 1 : a->batch;
  p->q = view(a->q, a->q_strides, items, a->heads, a->q_len, a->head_dim);
  p->k = view(a->k, a->k_strides, items, a->kv_heads, a->kv_len, a->head_dim);
  p->v = view(a->v, a->v_strides, items, a->kv_heads, a->kv_len, a->v_head_dim);
  p->out = view(a->out, a->out_strides, items, a->heads, a->q_len, a->v_head_dim);
  return SAGE2_OK;
}

int run(const Sage2Args *a, bool prepare, bool forward) {
  Params p;
  int sms;
  if (int code = fill(a, prepare, forward, &p, &sms)) return code;
  const cudaStream_t stream = (cudaStream_t)a->stream;
  cudaError_t err;
  if (prepare && (err = launch_masks(p, stream)) != cudaSuccess) return fail_cuda(err, "launching the mask kernels");
  if (prepare && (err = launch_quantize(p, sms, stream)) != cudaSuccess) return fail_cuda(err, "launching the pre-processing");
  if (forward && (err = launch_smooth_q(p, stream)) != cudaSuccess) return fail_cuda(err, "launching the smoothing of Q");
  if (forward && (err = launch_forward_sm90(p, sms, prepare, stream)) != cudaSuccess) return fail_cuda(err, "launching the attention kernel");
  return SAGE2_OK;
}

}  // namespace
}  // namespace sage2

extern "C" {
int sage2_version(void) { return SAGE2_VERSION; }
int sage2_architectures(int *out, int capacity) {
  if (capacity > 0) out[0] = 90;
  return 1;
}
const char *sage2_last_error(void) { return sage2::last_error; }
size_t sage2_workspace_bytes(const Sage2Args *args) {
  sage2::Params p;
  return sage2::shapes(args, &p) ? 0 : sage2::place(p, nullptr, nullptr);
}
int sage2_load(void) {
  int device, sms;
  return sage2::load_current(&device, &sms);
}
int sage2_prepare(const Sage2Args *args) { return sage2::run(args, true, false); }
int sage2_forward(const Sage2Args *args) { return sage2::run(args, false, true); }
int sage2_prepare_and_forward(const Sage2Args *args) { return sage2::run(args, true, true); }
}
