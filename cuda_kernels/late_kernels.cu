// Kernels compiled after this library, for a card that it holds no machine code for: images with kernels of the same
// names, which every launch and every setting of an attribute is then sent to. The library's own code says how kernels
// are launched in both cases, and does not know which it is.
//
// The linker sends the runtime's functions here first (--wrap). A kernel is known to the runtime by the address of a
// host function; which name belongs to it is said once, when the library is loaded. kernel<<<...>>> asks for a handle
// of it once (__cudaGetKernel, CUDA 13) or launches by address (cudaLaunchKernel, before).
//
// Architectures: all
#include <string.h>
#include <atomic>
#include "backends.h"
#include "host.h"

namespace sage2 {
namespace {

struct Known {
  const void *own, *late;  // the handle the code launches; that of the kernel in its place, or null
  const char *name;
};
constexpr int kMaxKernels = 4096;
Known known[kMaxKernels];
int known_count;
std::atomic<bool> any_late;

const void *current(const void *kernel) {
  if (!any_late.load(std::memory_order_acquire)) return kernel;
  for (int i = 0; i < known_count; i++)
    if (known[i].own == kernel && known[i].late) return known[i].late;
  return kernel;
}

// A mangled name from its file on. nvcc and NVRTC number a file's unnamed namespace differently:
// _ZN5sage2 44 _GLOBAL__N__092e501e_11_fwd_sm90_cu_314be576 9attentionI...
struct Name {
  const char *file, *rest;
  size_t file_length;
};
Name parse(const char *mangled) {
  const char *space = strstr(mangled, "_GLOBAL__N__"), *end = space ? strstr(space, "_cu_") : nullptr;
  if (!end || space < mangled + 2) return {"", mangled, 0};
  const char *file = space + sizeof "_GLOBAL__N__00000000";
  return {file, space + 10 * (space[-2] - '0') + space[-1] - '0', (size_t)(end - file)};
}
bool is_same(const Name &a, const Name &b) {
  return a.file_length == b.file_length && !strncmp(a.file, b.file, a.file_length) && !strcmp(a.rest, b.rest);
}

int load(const void *image) {
  constexpr unsigned kMost = 512;  // kernels of one file
  cudaKernel_t kernels[kMost];
  cudaLibrary_t library;
  unsigned count = 0;
  cudaError_t err = cudaLibraryLoadData(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (err == cudaSuccess) err = cudaLibraryGetKernelCount(&count, library);
  if (err == cudaSuccess && count > kMost) return fail(SAGE2_ERR_ARGUMENT, "an image of %u kernels", count);
  if (err == cudaSuccess) err = cudaLibraryEnumerateKernels(kernels, count, library);
  for (unsigned k = 0; k < count && err == cudaSuccess; k++) {
    const char *mangled;
    if ((err = cudaFuncGetName(&mangled, (const void *)kernels[k])) != cudaSuccess) break;
    const Name name = parse(mangled);
    int found = 0;
    for (int i = 0; i < known_count; i++)
      if (is_same(parse(known[i].name), name)) known[i].late = (const void *)kernels[k], found++;
    if (found != 1)
      return fail(SAGE2_ERR_ARGUMENT, "%d kernels of this library are named as the image's %s", found, mangled);
  }
  return err == cudaSuccess ? SAGE2_OK : fail_cuda(err, "loading compiled kernels");
}

}  // namespace
}  // namespace sage2

extern "C" {
int sage2_load_kernels(const void *const *images, int count, int architecture) {
  for (int i = 0; i < count; i++)
    if (int code = sage2::load(images[i])) return code;
  sage2::hold(architecture);
  sage2::any_late.store(true, std::memory_order_release);
  return SAGE2_OK;
}

void __real___cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *,
                                   int *);
void __wrap___cudaRegisterFunction(void **fatbin, const char *own, char *device_name, const char *name, int limit,
                                   uint3 *tid, uint3 *bid, dim3 *block, dim3 *grid, int *warp_size) {
  using namespace sage2;
  if (known_count < kMaxKernels) known[known_count++] = {own, nullptr, name};
  __real___cudaRegisterFunction(fatbin, own, device_name, name, limit, tid, bid, block, grid, warp_size);
}
#if CUDART_VERSION >= 13000
cudaError_t __real___cudaGetKernel(cudaKernel_t *, const void *);
cudaError_t __wrap___cudaGetKernel(cudaKernel_t *handle, const void *kernel) {
  const void *const late = sage2::current(kernel);
  if (late == kernel) return __real___cudaGetKernel(handle, kernel);
  *handle = (cudaKernel_t)late;
  return cudaSuccess;
}
#endif
cudaError_t __real_cudaFuncSetAttribute(const void *, cudaFuncAttribute, int);
cudaError_t __wrap_cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value) {
  return __real_cudaFuncSetAttribute(sage2::current(kernel), attribute, value);
}
cudaError_t __real_cudaFuncGetAttributes(cudaFuncAttributes *, const void *);
cudaError_t __wrap_cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel) {
  return __real_cudaFuncGetAttributes(attributes, sage2::current(kernel));
}
cudaError_t __real_cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t);
cudaError_t __wrap_cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared,
                                    cudaStream_t stream) {
  return __real_cudaLaunchKernel(sage2::current(kernel), grid, block, args, shared, stream);
}
cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **);
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **args) {
  return __real_cudaLaunchKernelExC(config, sage2::current(kernel), args);
}
}
