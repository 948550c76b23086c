// The pre-processing's second launch: channels of V that hold a value beyond what their samples promised take their
// scale from their true maximum, and their heads' images are written again. Rare; where nothing overflowed, a CTA reads
// some words and ends. So it is small: it lies beside the last CTAs of the first launch, and ends with them.
//
// A CTA of 8 warps takes 64 channels of one head after the other, and two blocks at a time.
#pragma once
#include "quantize.cuh"

namespace sage2 {
namespace {

constexpr int kRepairThreads = 256, kSlice = 64;  // channels of a CTA: whole panels and rows of swizzles of an image
SAGE2_HD inline int slices_of(const Params &p) { return padded_v_dim(p.head_dim, p.v_head_dim) / kSlice; }

struct RepairShared {
  Vectors<kSlice> vectors;
  uint32_t amax[kSlice];
  Partial<kSlice> partial;
};

// The largest |v - mean| of each channel over all keys, as bits, into sh.amax. NaN does not count.
SAGE2_DEV void true_maxima(const Params &p, const Head &h, const Rows &rows, RepairShared &sh) {
  constexpr int kChunks = kSlice / 8, kAtOnce = kRepairThreads / kChunks;
  const int channel = (int)threadIdx.x % kChunks * 8;
  for (int i = threadIdx.x; i < kSlice; i += kRepairThreads) sh.amax[i] = 0;
  __syncthreads();
  Extremes range = no_values(p.bf16);
  #pragma unroll 1
  for (int first = threadIdx.x / kChunks; first < h.keys; first += 8 * kAtOnce) {
    const auto key = [&](int i) { return first + i * kAtOnce; };
    uint4 x[8];
    load_some<kAny>(p, h, rows, x, key, [&](int) { return channel; });
    #pragma unroll
    for (int i = 0; i < 8; i++)
      if (exists<kAny>(p, h, key(i))) extend(range, x[i], p.bf16);
  }
  float low[8], high[8];
  widen(as_uint4(range.low), p.bf16, low);
  widen(as_uint4(range.high), p.bf16, high);
  #pragma unroll
  for (int e = 0; e < 8; e++) {
    const float mean = sh.vectors.mean[channel + e];
    if (low[e] <= high[e])
      atomicMax(&sh.amax[channel + e],
                __float_as_uint(fmaxf(fabsf(__fsub_rn(low[e], mean)), fabsf(__fsub_rn(high[e], mean)))));
  }
  __syncthreads();
}

template<bool FP16>
SAGE2_DEV void repair_values(const Params &p, const Head &h, int head, int slice, VRange range, RepairShared &sh) {
  const Rows rows = rows_of(p.v, h.v + slice * kSlice, p.v_head_dim - slice * kSlice);
  float *const scales = p.images.v_scale + (int64_t)head * padded_dim(p.head_dim) + slice * kSlice;
  sample<kSlice, kSlice, kRepairThreads, kAny, true, FP16>(p, h, rows, range, sh.partial, sh.vectors, false, head, 0);
  true_maxima(p, h, rows, sh);
  for (int i = threadIdx.x; i < kSlice; i += kRepairThreads)
    if (range.is_beyond(__fmul_rn(__uint_as_float(sh.amax[i]), sh.vectors.inverse[i])))
      v_scale_of<FP16>(sh.amax[i], range.limit, scales[i], sh.vectors.inverse[i]);
  __syncthreads();
  constexpr int kTeams = kRepairThreads / kThreads;
  const int blocks = (h.keys + kTileTokens - 1) / kTileTokens;
  const int64_t bytes = v_image_bytes(min(padded_v_dim(p.head_dim, p.v_head_dim), 128), FP16);
  uint8_t *const images =
      p.images.v + slice / 2 * p.images.v_half + h.image * bytes + slice % 2 * v_image_bytes(kSlice, FP16);
  typename Share<kSlice, FP16, kAny>::type share(thread_index());  // not kept from head to head
  #pragma unroll 1
  for (int block = threadIdx.x / kThreads; block < blocks; block += kTeams) {
    uint8_t *const image = images + block * bytes;
    share.load_block(p, h, rows, block);
    if constexpr (FP16) share.template write_values<false>(p, h, rows, sh.vectors, image, block, Lie());
    else share.template write_values<false, false>(p, h, rows, sh.vectors, image, 0, block, Lie());
  }
  __syncthreads();
}

// Grid: CTAs that share the slices of V of all heads.
template<bool FP16>
__global__ void __launch_bounds__(kRepairThreads, 2) repair(const __grid_constant__ Params p, VRange range, int items) {
  extern __shared__ __align__(128) uint8_t smem[];
  if constexpr (has_values<FP16>()) {
    grid_dependency_trigger();
    grid_dependency_wait();
    const int slices = slices_of(p), units = p.batch * p.kv_heads * slices, parts = value_parts(p);
    #pragma unroll 1
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const int head = unit / slices, slice = unit % slices;
      const uint32_t *const overflow = p.overflow + ((int64_t)head * (1 + parts) + 1 + slice / 2) * items;
      uint32_t any = 0;
      for (int i = threadIdx.x; i < items; i += kRepairThreads) any |= overflow[i];
      if (!__syncthreads_or(any)) continue;
      repair_values<FP16>(p, head_of(p, head), head, slice, range, *(RepairShared *)smem);
    }
  }
}

}  // namespace
}  // namespace sage2
