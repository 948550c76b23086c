// What the C entry points share: error codes with a message, the device at hand, views from pointers and strides.
#pragma once
#include "params.h"
#include "sage2.h"

namespace sage2 {

// Keeps the message for sage2_last_error and returns the code.
int fail(int code, const char *format, ...);
int fail_cuda(cudaError_t err, const char *what);
// The current device and its SM count, its kernels loaded; refuses what the library has no code for.
int load_current(int *device, int *sms);
View view(const void *data, const int64_t *strides, int batch, int heads, int tokens, int head_dim);

}  // namespace sage2
