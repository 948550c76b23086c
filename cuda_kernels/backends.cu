// Which kernels serve which device. A new family: one weak name, one row a compute capability.
// Architectures: all
#include "backends.h"
#include <stdio.h>
#include <string.h>
#include <atomic>
#include <iterator>
#include "host.h"

#ifndef SAGE2_ARCHITECTURES
#define SAGE2_ARCHITECTURES 90  // of this build, with commas
#endif

namespace sage2 {

// Weak: a build for other architectures leaves the units of a family out, and its row is then not there.
extern const Backend sm90 __attribute__((weak));
extern const Backend mma __attribute__((weak)), mma_small __attribute__((weak));
extern const Backend mma_int4 __attribute__((weak)), mma_int4_small __attribute__((weak));

namespace {

constexpr int kHeld[] = {SAGE2_ARCHITECTURES};
const struct {
  int capability, architecture;  // of the device, and whose machine code it runs
  const Backend *backend;
} kServed[] = {
    {80, 80, &mma_int4},
    {86, 86, &mma_int4_small},
    {87, 86, &mma_int4_small},
    {89, 89, &mma_int4_small},
#ifdef SAGE2_TEST_BACKEND  // tests run the rows for other cards on a Hopper card
    {90, 90, &SAGE2_TEST_BACKEND},
#endif
    {90, 90, &sm90},
    {100, 100, &mma},
    {103, 100, &mma},
    {110, 110, &mma},
    {120, 120, &mma_small},
    {121, 120, &mma_small},
};
constexpr int kLater = 120;  // newer cards than those above run this architecture's PTX

std::atomic<int> late{0};  // 0, or the architecture whose kernels were loaded later: from then on the only one

bool is_held(int architecture) {
  if (const int only = late.load(std::memory_order_acquire)) return architecture == only;
  for (int held : kHeld)
    if (held == architecture) return true;
  return false;
}

constexpr int kMaxDevices = 64;
struct Device {
  std::atomic<int> sms{0};  // 0: its kernels are not loaded
  int capability = 0;
} devices[kMaxDevices];

}  // namespace

void hold(int architecture) { late.store(architecture, std::memory_order_release); }

const Backend *backend_of(int capability) {
  char held[128] = "";
  for (const auto &row : kServed) {
    if (!is_held(row.architecture) || !row.backend) continue;
    if (row.capability == capability) return row.backend;
    snprintf(held + strlen(held), sizeof held - strlen(held), "%s%d.%d", *held ? ", " : "", row.capability / 10,
             row.capability % 10);
  }
  if (capability > kServed[std::size(kServed) - 1].capability && is_held(kLater) && &mma_small) return &mma_small;
  fail(SAGE2_ERR_DEVICE, "compute capability %d.%d: this library holds kernels for %s", capability / 10,
       capability % 10, *held ? held : "none");
  return nullptr;
}

int load_current(const Backend &backend, int wanted, int capability, int *sms) {
  int device;
  cudaError_t err = cudaGetDevice(&device);
  if (err != cudaSuccess) return fail_cuda(err, "cudaGetDevice");
  if (device != wanted)
    return fail(SAGE2_ERR_DEVICE, "the tensors are on device %d, the current device is %d", wanted, device);
  if (device >= kMaxDevices)
    return fail(SAGE2_ERR_DEVICE, "device index %d: at most %d devices are supported", device, kMaxDevices);
  Device &d = devices[device];
  *sms = d.sms.load(std::memory_order_acquire);
  if (!*sms) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    err = cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device);
    if (err != cudaSuccess) return fail_cuda(err, "cudaDeviceGetAttribute");
    d.capability = 10 * major + minor;
    if (d.capability == capability) {
      if ((err = backend.load()) != cudaSuccess) return fail_cuda(err, "loading the kernels");
      d.sms.store(*sms, std::memory_order_release);
    }
  }
  if (d.capability == capability) return SAGE2_OK;
  return fail(SAGE2_ERR_DEVICE, "the arguments are for compute capability %d.%d, device %d has %d.%d", capability / 10,
              capability % 10, device, d.capability / 10, d.capability % 10);
}

}  // namespace sage2

extern "C" int sage2_cuda_version(void) { return CUDART_VERSION; }
extern "C" int sage2_architectures(int *out, int capacity) {
  const int late = sage2::late.load();
  int count = 0;
  for (int held : sage2::kHeld) {
    if (late) held = late;
    if (count < capacity) out[count] = held;
    count++;
    if (late) break;
  }
  return count;
}
