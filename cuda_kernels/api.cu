// The C entry points: argument checks, workspace layout, launches. Returns codes; messages are per thread.
#include "sage2.h"

#include <stdarg.h>
#include <stdio.h>
#include <atomic>
#include "mask.cuh"
#include "params.h"

namespace sage2 {
namespace {

thread_local char last_error[512];

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

constexpr int kMaxDevices = 64;
struct Device { std::atomic<int> ready{0}; int sms = 0; };       // ready: 0 unknown, 1 loaded
Device devices[kMaxDevices];

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
    d.sms = count;
    d.ready.store(1, std::memory_order_release);
  }
  *sms = d.sms;
  return SAGE2_OK;
}

size_t align256(size_t x) { return (x + 255) / 256 * 256; }

// Places the workspace from `base` on; returns its size.
size_t place(const Params &p, uint8_t *base, Images *out) {
  const int dim = padded_dim(p.head_dim);
  const size_t heads = (size_t)p.batch * p.kv_heads, images = heads * p.blocks, vector = align256(heads * dim * sizeof(float));
  size_t at = 0;
  auto take = [&](size_t bytes) { uint8_t *here = base + at; at += align256(bytes); return here; };
  Images w;
  w.k = take(images * k_image_bytes(dim)), w.v = take(images * v_image_bytes(dim, p.fp16_pv));
  w.k_scale = (float *)take(images * kScaleGroups * sizeof(float));
  w.k_mean = (float *)take(vector), w.v_mean = (float *)take(vector), w.v_scale = (float *)take(vector);
  w.counter = (int32_t *)take(sizeof(int32_t));
  if (out) *out = w;
  return at;
}

int shapes(const Sage2Args *a, Params *p) {
  if (!a) return fail(SAGE2_ERR_ARGUMENT, "args is null");
  if (a->size != sizeof(Sage2Args)) return fail(SAGE2_ERR_ARGUMENT, "args->size is %u, this library (version %d) expects %zu", a->size, SAGE2_VERSION, sizeof(Sage2Args));
  if (a->dtype != SAGE2_FP16 && a->dtype != SAGE2_BF16) return fail(SAGE2_ERR_ARGUMENT, "dtype %d is neither fp16 (0) nor bf16 (1)", a->dtype);
  if (a->recipe != SAGE2_PV_FP8 && a->recipe != SAGE2_PV_FP16) return fail(SAGE2_ERR_ARGUMENT, "recipe %d is neither fp8 (0) nor fp16 (1)", a->recipe);
  if (a->batch < 1 || a->heads < 1 || a->kv_heads < 1 || a->q_len < 1 || a->kv_len < 0)
    return fail(SAGE2_ERR_ARGUMENT, "batch %d, heads %d, kv_heads %d, q_len %d must be positive and kv_len %d not negative", a->batch, a->heads, a->kv_heads, a->q_len, a->kv_len);
  if (a->heads % a->kv_heads) return fail(SAGE2_ERR_ARGUMENT, "heads %d is not a multiple of kv_heads %d", a->heads, a->kv_heads);
  if (a->head_dim < 1 || a->head_dim > 128) return fail(SAGE2_ERR_UNSUPPORTED, "head_dim %d: 1 to 128 are supported", a->head_dim);
  if (a->q_len > kMaxLength / 2 || a->kv_len > kMaxLength / 2) return fail(SAGE2_ERR_UNSUPPORTED, "q_len %d or kv_len %d exceeds %d", a->q_len, a->kv_len, kMaxLength / 2);
  const int64_t heads = (int64_t)a->batch * a->heads;
  if (heads * ((a->q_len + 63) / 64) > INT32_MAX / 32) return fail(SAGE2_ERR_UNSUPPORTED, "batch x heads x q_len is too large: %lld rows", (long long)(heads * a->q_len));
  *p = Params();
  p->batch = a->batch, p->heads = a->heads, p->kv_heads = a->kv_heads, p->q_len = a->q_len, p->kv_len = a->kv_len, p->head_dim = a->head_dim;
  p->blocks = (a->kv_len + kTileTokens - 1) / kTileTokens;
  p->bf16 = a->dtype == SAGE2_BF16, p->fp16_pv = a->recipe == SAGE2_PV_FP16;
  p->causal = (a->flags & SAGE2_CAUSAL) != 0, p->top_left = (a->flags & SAGE2_TOP_LEFT) != 0;
  p->smooth_v = (a->flags & SAGE2_SMOOTH_V) != 0, p->smooth_k = !(a->flags & SAGE2_NO_SMOOTH_K);
  p->scale = a->scale, p->scale_log2 = (float)((double)a->scale * 1.4426950408889634);
  return SAGE2_OK;
}

View view(const void *data, const int64_t *strides, int batch, int heads, int tokens, int head_dim) {
  const int64_t sb = batch > 1 ? strides[0] : 0, sh = heads > 1 ? strides[1] : 0, st = tokens > 1 ? strides[2] : 0;
  return {(const uint16_t *)data, sb, sh, st, ((uintptr_t)data % 16 == 0) && !((sb | sh | st | head_dim) & 7)};
}

int fill(const Sage2Args *a, bool prepare, bool forward, Params *p, int *sms) {
  if (int code = shapes(a, p)) return code;
  if ((prepare && a->kv_len && (!a->k || !a->v)) || (forward && (!a->q || !a->out))) return fail(SAGE2_ERR_ARGUMENT, "a tensor pointer is null");
  const size_t need = place(*p, (uint8_t *)a->workspace, &p->images);
  if (!a->workspace || (uintptr_t)a->workspace % 256 || a->workspace_bytes < need)
    return fail(SAGE2_ERR_WORKSPACE, "workspace %p of %zu bytes: %zu bytes at a multiple of 256 are needed", a->workspace, a->workspace_bytes, need);
  int device;
  if (int code = load_current(&device, sms)) return code;
  if (device != a->device) return fail(SAGE2_ERR_DEVICE, "the tensors are on device %d, the current device is %d", a->device, device);
  p->q = view(a->q, a->q_strides, a->batch, a->heads, a->q_len, a->head_dim);
  p->k = view(a->k, a->k_strides, a->batch, a->kv_heads, a->kv_len, a->head_dim);
  p->v = view(a->v, a->v_strides, a->batch, a->kv_heads, a->kv_len, a->head_dim);
  p->out = view(a->out, a->out_strides, a->batch, a->heads, a->q_len, a->head_dim);
  p->lse = a->lse, p->kv_lens = a->kv_lens;
  return SAGE2_OK;
}

int run(const Sage2Args *a, bool prepare, bool forward) {
  Params p;
  int sms;
  if (int code = fill(a, prepare, forward, &p, &sms)) return code;
  const cudaStream_t stream = (cudaStream_t)a->stream;
  cudaError_t err;
  if (prepare && (err = launch_quantize(p, sms, stream)) != cudaSuccess) return fail_cuda(err, "launching the pre-processing");
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
