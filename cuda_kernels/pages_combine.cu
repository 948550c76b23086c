// The parts of a row that CTAs of attention over a quantized cache have left, combined; and how a call is cut.
// Architectures: 80 86 89 90a 100 110 120
#include <algorithm>
#include "pages_rows.cuh"

namespace sage2 {
namespace {

constexpr int kCombineThreads = 256;

// One CTA per packed row and kv head: groups of slots a channel, then the groups in order. Latency is all: the first
// loads of the sums do not wait for the rows' statistics.
template<int DIM> __global__ void __launch_bounds__(kCombineThreads) combine(const __grid_constant__ PageParams p) {
  constexpr int kGroups = kCombineThreads / DIM, kBatch = 16;
  __shared__ float reference[kMaxSlots], length[kMaxSlots], weight[kMaxSlots], sums[kGroups][DIM];
  const int row = blockIdx.x, head = blockIdx.y, b = head / p.kv_heads, kv = head - b * p.kv_heads, tid = threadIdx.x;
  const int channel = tid % DIM, group = tid / DIM, column = 2 * tid;
  const int64_t part = ((int64_t)head * p.row_tiles + row / p.span) * p.slots * p.part_rows + row % p.span;
  const float *from = p.partial + part * DIM + channel;
  const int64_t step = (int64_t)p.part_rows * DIM;
  float x[kBatch];
  auto fetch = [&](int first) {
    #pragma unroll
    for (int i = 0; i < kBatch; i++)
      x[i] = first + kGroups * i < p.slots ? __ldcg(from + (first + kGroups * i) * step) : 0.f;
  };
  fetch(group);
  float4 own = {};
  if (tid < p.slots) own = __ldcg(p.stats + part + (int64_t)tid * p.part_rows);
  const float dot = p.need_dot ? __ldcg(&p.stats[part].z) : 0.f;
  const float2 mean = tid < DIM / 2 ? __ldg((const float2 *)(p.v_mean + (int64_t)head * DIM + column)) : float2{};
  if (tid < p.slots) {
    reference[tid] = own.x;
    length[tid] = own.y;
  }
  __syncthreads();
  float m = kNoKeys, l = 0.f, sum = 0.f;
  #pragma unroll 4
  for (int s = 0; s < p.slots; s++) m = fmaxf(m, reference[s]);
  if (tid < p.slots) weight[tid] = own.y == 0.f ? 0.f : exp2_fast(own.x - m);
  __syncthreads();
  for (int first = group;; fetch(first)) {
    #pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int s = first + kGroups * i;
      // Parts without keys were never written.
      if (s < p.slots && weight[s] != 0.f) sum = fmaf(x[i], weight[s], sum);
    }
    first += kGroups * kBatch;
    if (first >= p.slots) break;
  }
  sums[group][channel] = sum;
  #pragma unroll 4
  for (int s = 0; s < p.slots; s++) l = fmaf(length[s], weight[s], l);
  __syncthreads();
  if (tid >= DIM / 2) return;
  const int token = row / p.heads_per_kv, h = kv * p.heads_per_kv + row - token * p.heads_per_kv;
  const Closing end = close_row(p, b, h, token, m, l, dot, tid == 0);
  float y0 = 0.f, y1 = 0.f;
  #pragma unroll
  for (int g = 0; g < kGroups; g++) {
    y0 += sums[g][column];
    y1 += sums[g][column + 1];
  }
  store_row(p, b, h, token, column, fmaf(y0, end.factor, mean.x * end.kept), fmaf(y1, end.factor, mean.y * end.kept));
}

}  // namespace

// The same split of L1 and shared memory for all kernels of a step: changing it waits for an idle SM.
cudaError_t load_pages_combine() {
  const cudaError_t err =
      cudaFuncSetAttribute(combine<64>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  return err == cudaSuccess ? cudaFuncSetAttribute(combine<128>, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                   cudaSharedmemCarveoutMaxShared)
                            : err;
}

// The number of splits that ends first if a CTA's time is its pages plus a few for its start and its parts.
void cut_pages(PageParams &p, int places, int span, int turns) {
  constexpr int kStart = 4;
  p.heads_per_kv = p.heads / p.kv_heads;
  p.split_tiles = turns > 1;
  p.span = span;
  p.row_tiles = (p.rows + span - 1) / span;
  p.part_rows = p.rows < span ? p.rows : span;
  const int64_t ctas = (int64_t)p.batch * p.kv_heads * p.row_tiles;
  const int64_t seen = p.left < kNoLimit ? std::min<int64_t>(p.length, (int64_t)p.left + p.tokens) : p.length;
  const int tiles = (int)(seen / kTileTokens) + 1, most = std::min(kMaxSlots / std::max(turns, 2), (tiles + 1) / 2);
  p.splits = 1;
  int64_t best = INT64_MAX;
  for (int s = 1; s <= most; s++) {
    const int64_t waves = (ctas * s + places - 1) / places, time = waves * ((tiles + s - 1) / s + kStart);
    if (time < best) {
      best = time;
      p.splits = s;
    }
    if (waves > 8) break;
  }
  p.slots = p.splits * turns;
}

cudaError_t launch_pages_combine(const PageParams &p, cudaStream_t stream) {
  const auto kernel = padded_dim(p.head_dim) == 64 ? combine<64> : combine<128>;
  kernel<<<dim3(p.rows, p.batch * p.kv_heads), kCombineThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace sage2
