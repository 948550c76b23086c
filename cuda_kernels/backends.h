// A backend is a family of kernels for some devices: what the C entry points call through. One unit a family fills its
// row in (backend_sm90.cu), backends.cu lists which devices it serves.
#pragma once
#include "pages.h"
#include "params.h"

namespace sage2 {

struct Backend {
  cudaError_t (*load)();  // the kernels onto the current device, and what they need of it
  int (*query_tile_rows)(int dim, bool fp16, Family family);
  cudaError_t (*prepare)(const Params &p, int sm_count, cudaStream_t stream);  // K and V -> images
  // `overlap` lets its start overlap the end of the launch before it
  cudaError_t (*forward)(Params &p, int sm_count, bool overlap, cudaStream_t stream);
  // Of the quantized cache; null: there is none
  cudaError_t (*append)(PageParams &p, cudaStream_t stream);
  void (*plan_attend)(PageParams &p, int sm_count);
  cudaError_t (*attend)(const PageParams &p, cudaStream_t stream);
  int fp16_head_dim;   // the widest heads with FP16 P V
  bool has_exponents;  // SAGE2_EXP_DUO, SAGE2_EXP_CHORD
  bool fp16_sums;      // takes Params::fp16_sums
};

// The backend of devices of this compute capability (10 * major + minor) whose machine code this library holds, or null
// and a message that says what it holds.
const Backend *backend_of(int capability);
// From now on the library holds this architecture alone: its kernels were loaded (late_kernels.cu).
void hold(int architecture);
// The current device, its kernels loaded, and its SM count; refuses another device or capability than the caller's.
int load_current(const Backend &backend, int device, int capability, int *sms);

}  // namespace sage2
