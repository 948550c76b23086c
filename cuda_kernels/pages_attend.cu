// Attention over a quantized cache: few query rows, long keys. Memory bound: a page is read once for all query heads that
// share its kv head (their rows are packed, token by token), and the keys are split over the chip; the parts are combined
// in a fixed order.
//
// A CTA is a feeder, one lane that streams whole pages through a ring of bulk copies, and two consumer warpgroups of 64 rows.
// With at most 64 packed rows the two take turns on the pages and each writes a part of its own; with more, both see every
// page and hold different rows. A page brings its own V scales, so T = P V of a page is folded into O with them:
// O = O a + T s, in fp32.
//
// Registers: 2 x 128 x 232 + 128 x 40 = 64512. Shared memory, dim 128 / 64: Q 16 / 8 KB, 6 / 10
// pages of 34 / 18 KB (K, V, eight rows of ones under V^T for the row sums, scales): 220 / 188 KB.
#include <algorithm>
#include "layout.cuh"
#include "logits.cuh"
#include "pages.h"

namespace sage2 {
namespace {

constexpr int kThreads = 384, kCombineThreads = 256, kMaxSlots = 128;
constexpr int kReady = 3, kReadyThreads = 256 + 32;                       // a barrier of the consumers and the feeder's warp
constexpr int kFeederRegisters = 40, kConsumerRegisters = 232;

template<int DIM> struct Ring {
  static constexpr int stages = DIM == 128 ? 6 : 10;
  static constexpr int q = 64 * DIM, images = page_scales(DIM), at_ones = images, at_scales = at_ones + 1024, stage = at_scales + 1024;
  static constexpr int at_stages = 2 * q, at_rows = at_stages + stages * stage;          // per row: scale (slots as in query.cuh), dot
  static constexpr int at_barrier = at_rows + 2 * 2 * 64 * 4, bytes = at_barrier + 16 * stages;
  static_assert(bytes + 1024 <= 232448, "shared memory of one SM");
};

// What a CTA works on: packed rows [row0, row_end) of one kv head of one item against pages [begin, end).
struct Work { int b, kv, row0, row_end, start, begin, end; };
SAGE2_DEV Work work_of(const PageParams &p) {
  Work w;
  const int head = blockIdx.z, span = p.split_tiles ? 64 : 128;
  w.b = head / p.kv_heads, w.kv = head - w.b * p.kv_heads;
  w.row0 = (gridDim.y - 1 - blockIdx.y) * span, w.row_end = min(w.row0 + span, p.rows);          // the longest first
  w.start = max(p.kv_starts ? __ldg(p.kv_starts + w.b) : 0, p.first_slab * kTileTokens << p.slab_shift);
  const int first = w.row0 / p.heads_per_kv + p.offset, last = (w.row_end - 1) / p.heads_per_kv + p.offset;
  const int from = max(w.start, first - p.left) / kTileTokens, to = (min(p.length, last + 1) + kTileTokens - 1) / kTileTokens;
  const int tiles = max(to - from, 0), each = (tiles + p.splits - 1) / p.splits;
  w.begin = from + min(tiles, (int)blockIdx.x * each), w.end = from + min(tiles, ((int)blockIdx.x + 1) * each);
  return w;
}

// A warpgroup's packed rows into shared memory as INT8, with their scales and their dots with K's mean. DIM / 8 lanes hold a row.
// Rolled up: the code of a step runs once and comes from memory, so its length is time.
template<int DIM> SAGE2_DEV void load_rows(const PageParams &p, const Work &work, int row0, const QBuffer &to) {
  constexpr int kLanes = DIM / 8;
  const int tid = threadIdx.x & 127, channel = tid % kLanes * 8;
  #pragma unroll 1
  for (int slot = tid / kLanes; slot - tid % 32 / kLanes < min(64, work.row_end - row0); slot += 128 / kLanes) {      // the same for a warp
    const int row = row0 + slot, token = row / p.heads_per_kv, h = work.kv * p.heads_per_kv + row - token * p.heads_per_kv;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row < work.row_end) x = load_channels(p.q.data + work.b * p.q.batch + h * p.q.head + token * p.q.token, channel, p.head_dim, p.q.vector);
    uint32_t top = max_magnitude(0, x);
    #pragma unroll
    for (int s = 1; s < kLanes; s *= 2) top = max_magnitude(top, __shfl_xor_sync(~0u, top, s));
    const Int8Scale s8 = int8_scale(widen_magnitude(top, p.bf16));
    store_q<DIM>(to, slot, channel, x, p.bf16, s8.inverse);
    if (channel == 0) store_shared(to.scale + 4 * row_slot(slot), __float_as_uint(__fmul_rn(s8.scale, p.scale_log2)));
    if (p.need_dot) {
      float dot = dot8(x, p.bf16, p.k_mean + ((int64_t)work.b * p.kv_heads + work.kv) * DIM + channel, 0.f);
      #pragma unroll
      for (int s = 1; s < kLanes; s *= 2) dot += __shfl_xor_sync(~0u, dot, s);
      if (channel == 0) store_shared(to.dot + 4 * row_slot(slot), __float_as_uint(dot * p.scale));
    }
  }
  async_proxy_fence();
}

// Keys that a boolean mask hides from a row; `row` points at the row's first column. Rare: read byte by byte.
SAGE2_DEV void hide_by_mask(int (&S)[64], const PageParams &p, const uint8_t *row0, const uint8_t *row1, int first, int c) {
  #pragma unroll
  for (int i = 0; i < 16; i++)
    #pragma unroll
    for (int e = 0; e < 2; e++) {
      const int column = first + 8 * i + 2 * c + e;
      const bool in = column >= 0 && column < p.mask_columns;
      const int64_t at = column * p.mask_column;
      if (!in || !__ldg(row0 + at)) S[4 * i + e] = kHidden;
      if (!in || !__ldg(row1 + at)) S[4 * i + 2 + e] = kHidden;
    }
}

// Keys that had a number that is not finite (their K and V are zero): a row that sees one is NaN, and stays so by its sum.
SAGE2_DEV void see_lost(const int (&S)[64], const uint4 &lost, int c, float &l0, float &l1) {
  const uint32_t word[4] = {lost.x, lost.y, lost.z, lost.w};
  bool bad0 = false, bad1 = false;
  #pragma unroll
  for (int i = 0; i < 16; i++)
    #pragma unroll
    for (int e = 0; e < 2; e++)
      if (word[i / 4] >> (8 * (i % 4) + 2 * c + e) & 1) bad0 |= S[4 * i + e] != kHidden, bad1 |= S[4 * i + 2 + e] != kHidden;
  #pragma unroll
  for (int s = 1; s < 4; s *= 2) bad0 |= __shfl_xor_sync(~0u, bad0, s), bad1 |= __shfl_xor_sync(~0u, bad1, s);
  if (bad0) l0 = __uint_as_float(0x7FFFFFFFu);
  if (bad1) l1 = __uint_as_float(0x7FFFFFFFu);
}

SAGE2_DEV void store_row(const PageParams &p, int b, int h, int token, int column, float x, float y) {
  uint16_t *to = const_cast<uint16_t *>(p.out.data) + b * p.out.batch + h * p.out.head + token * p.out.token + column;
  const uint32_t w = p.bf16 ? pack_bf16(x, y) : pack_f16(x, y);
  if (column + 1 < p.head_dim && ((uintptr_t)to & 3) == 0) *(uint32_t *)to = w;
  else {
    if (column < p.head_dim) to[0] = (uint16_t)w;
    if (column + 1 < p.head_dim) to[1] = (uint16_t)(w >> 16);
  }
}

// The last step of a row: sum and reference take the sink in, and the log-sum-exp is written.
struct Closing { float factor, kept; };      // of the sums over the keys; of v_mean
SAGE2_DEV Closing close_row(const PageParams &p, int b, int h, int token, float m, float l, float dot, bool write_lse) {
  float shrink = 1.f, kept = 1.f;
  if (p.sinks) add_sink((__ldg(p.sinks + h) - (p.softcap != 0.f ? 0.f : dot)) * kLog2e, m, l, shrink, kept);
  if (write_lse && p.lse)
    p.lse[((int64_t)b * p.heads + h) * p.tokens + token] = l == 0.f ? -INFINITY : fmaf(m + __log2f(l), 0.6931471806f, p.softcap != 0.f ? 0.f : dot);
  return l == 0.f ? Closing{0.f, 0.f} : Closing{__fdividef(shrink, l), kept};
}

// EXTRA: with a mask or softcap; apart, for the same reason.
template<int DIM, bool EXTRA> __global__ void __launch_bounds__(kThreads, 1) attend(const __grid_constant__ PageParams p) {
  using R = Ring<DIM>;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t s0 = smem_address(smem), full = s0 + R::at_barrier, empty = full + 8 * R::stages;
  const int warp = uniform(threadIdx.x >> 5) & 3, w = uniform(threadIdx.x >> 7);      // warp in the warpgroup, warpgroup; 2: the feeder
  const Work work = work_of(p);
  const int tiles = work.end - work.begin;

  if (w == 2) {
    registers_shrink<kFeederRegisters>();
    if (warp != 0) return;
    const int64_t head = (int64_t)blockIdx.z << p.slab_shift;
    auto load = [&](int i) {
      const int page = work.begin + i, stage = i % R::stages;
      const uint8_t *record = (const uint8_t *)__ldg((const unsigned long long *)p.slabs + (page >> p.slab_shift) - p.first_slab) +
                              (head + (page & ((1 << p.slab_shift) - 1))) * p.record;
      const uint32_t to = s0 + R::at_stages + stage * R::stage;
      barrier_expect(full + 8 * stage, R::images + page_scale_bytes(DIM));
      bulk_load(to, record, R::images, full + 8 * stage);
      bulk_load(to + R::at_scales, record + R::images, page_scale_bytes(DIM), full + 8 * stage);
    };
    const bool feeds = (threadIdx.x & 31) == 0;
    if (feeds) {                                                          // the first pages are on their way before the others are ready
      for (int i = 0; i < R::stages; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, p.split_tiles ? 4 : 8);
      barrier_init_fence();
      for (int i = 0; i < min(R::stages, tiles); i++) load(i);
    }
    __syncwarp();
    named_arrive(kReady, kReadyThreads);
    if (feeds)
      for (int i = R::stages; i < tiles; i++) barrier_wait(empty + 8 * (i % R::stages), (i / R::stages & 1) ^ 1), load(i);
    return;
  }

  registers_grow<kConsumerRegisters>();
  for (int st = 0; st < R::stages; st++)                                  // E4M3 ones; the bulk copies never touch these rows
    store_shared(s0 + R::at_stages + st * R::stage + R::at_ones + 4 * threadIdx.x, 0x38383838u);
  constexpr int kOut = DIM / 2;
  const int lane = threadIdx.x & 31, c = lane & 3;
  const int rows_from = p.split_tiles ? 0 : 64 * w;                       // this warpgroup's 64 rows, counted from work.row0
  const QBuffer q = {s0 + w * R::q, s0 + R::at_rows + w * 512, s0 + R::at_rows + w * 512 + 256};
  load_rows<DIM>(p, work, work.row0 + rows_from, q);
  named_sync(kReady, kReadyThreads);                                                // Q, the ones and the barriers are ready
  const int r = warp * 16 + (lane >> 2), row0 = work.row0 + rows_from + r;                // a thread holds rows row0 and row0 + 8
  const int token0 = row0 / p.heads_per_kv, token1 = (row0 + 8) / p.heads_per_kv;
  const bool idle = work.row0 + rows_from + warp * 16 >= work.row_end;    // none of this warp's rows exists
  const float2 q_scale = load_shared2(q.scale + 4 * row_slot(r)), dot = p.need_dot ? load_shared2(q.dot + 4 * row_slot(r)) : make_float2(0.f, 0.f);
  const int end0 = min(p.length, token0 + p.offset + 1), end1 = min(p.length, token1 + p.offset + 1);
  const int begin0 = max(work.start, token0 + p.offset - p.left), begin1 = max(work.start, token1 + p.offset - p.left);
  const int warp_last = max(__reduce_max_sync(~0u, begin0), __reduce_max_sync(~0u, begin1)), warp_end = min(__reduce_min_sync(~0u, end0), __reduce_min_sync(~0u, end1));
  const uint8_t *mask0 = nullptr, *mask1 = nullptr;
  if (EXTRA && p.mask) {
    auto row_of = [&](int row, int token) {
      row = min(row, p.rows - 1), token = min(token, p.tokens - 1);
      return p.mask + work.b * p.mask_batch + (work.kv * p.heads_per_kv + row % p.heads_per_kv) * p.mask_head + token * p.mask_row;
    };
    mask0 = row_of(row0, token0), mask1 = row_of(row0 + 8, token1);
  }

  float O[kOut], l0 = 0.f, l1 = 0.f;
  RowState state = {kNoKeys, kNoKeys, 1.f, 1.f};
  #pragma unroll
  for (int i = 0; i < kOut; i++) O[i] = 0.f;
  const uint32_t desc_q = desc_low(q.q);
  const int stride = p.split_tiles ? 2 : 1;
  for (int i = p.split_tiles ? w : 0; i < tiles; i += stride) {
    const int stage = i % R::stages, first = (work.begin + i) * kTileTokens;
    const uint32_t at = s0 + R::at_stages + stage * R::stage;
    barrier_wait(full + 8 * stage, i / R::stages & 1);
    int S[64];
    scores<DIM, DIM / 32, false>(S, desc_q, desc_low(at), [] {});
    uint32_t P[16];
    if (!idle) {
      const float k_scale = load_shared(at + R::at_scales + 4 * c);
      const bool partial = first < warp_last || first + kTileTokens > warp_end;
      if (partial) hide(S, end0 - first, end1 - first, c), hide_before(S, begin0 - first, begin1 - first, c);
      if (EXTRA && p.mask) hide_by_mask(S, p, mask0, mask1, first - p.mask_first, c);
      const uint4 lost = load_shared4(at + R::at_scales + 4 * (kScaleGroups + DIM));
      if (lost.x | lost.y | lost.z | lost.w) see_lost(S, lost, c, l0, l1);
      if (EXTRA && p.softcap != 0.f) {
        logits(S, step_of(k_scale, q_scale.x), step_of(k_scale, q_scale.y), dot.x * kLog2e, dot.y * kLog2e, {p.softcap, p.softcap_step}, {nullptr, nullptr, 0, kNoMask, 0, false}, nullptr, c);
        softmax_fp8<kLogits>(S, P, k_scale, q_scale.x, q_scale.y, state);
      } else if (partial || (EXTRA && p.mask)) softmax_fp8<kSomeHidden>(S, P, k_scale, q_scale.x, q_scale.y, state);
      else softmax_fp8<kAllSeen>(S, P, k_scale, q_scale.x, q_scale.y, state);
    } else {
      #pragma unroll
      for (int j = 0; j < 16; j++) P[j] = 0;
    }
    float T[kOut + 4];
    weigh_fp8(T, P, desc_low(at + kTileTokens * DIM, 16));
    if (!idle) {
      #pragma unroll
      for (int j = 0; j < DIM / 8; j++) {
        const float2 s = load_shared2(at + R::at_scales + 4 * (kScaleGroups + 8 * j + 2 * c));
        O[4 * j] = fmaf(T[4 * j], s.x, O[4 * j] * state.a0), O[4 * j + 1] = fmaf(T[4 * j + 1], s.y, O[4 * j + 1] * state.a0);
        O[4 * j + 2] = fmaf(T[4 * j + 2], s.x, O[4 * j + 2] * state.a1), O[4 * j + 3] = fmaf(T[4 * j + 3], s.y, O[4 * j + 3] * state.a1);
      }
      l0 = fmaf(l0, state.a0, T[kOut]), l1 = fmaf(l1, state.a1, T[kOut + 2]);
    }
    __syncwarp();
    barrier_arrive_warp(empty + 8 * stage);
  }
  if (idle) return;

  const int h0 = work.kv * p.heads_per_kv + row0 - token0 * p.heads_per_kv, h1 = work.kv * p.heads_per_kv + row0 + 8 - token1 * p.heads_per_kv;
  if (p.slots == 1) {                                                     // nothing to combine with
    const float *v_mean = p.v_mean + (int64_t)blockIdx.z * DIM;
    const bool here0 = row0 < work.row_end, here1 = row0 + 8 < work.row_end;
    Closing a = {0.f, 0.f}, b = {0.f, 0.f};
    if (here0) a = close_row(p, work.b, h0, token0, state.m0, l0, dot.x, c == 0);
    if (here1) b = close_row(p, work.b, h1, token1, state.m1, l1, dot.y, c == 0);
    #pragma unroll
    for (int j = 0; j < DIM / 8; j++) {
      const int column = 8 * j + 2 * c;
      const float2 m = __ldg((const float2 *)(v_mean + column));
      if (here0) store_row(p, work.b, h0, token0, column, fmaf(O[4 * j], a.factor, m.x * a.kept), fmaf(O[4 * j + 1], a.factor, m.y * a.kept));
      if (here1) store_row(p, work.b, h1, token1, column, fmaf(O[4 * j + 2], b.factor, m.x * b.kept), fmaf(O[4 * j + 3], b.factor, m.y * b.kept));
    }
    return;
  }
  const int slot = blockIdx.x * stride + (p.split_tiles ? w : 0);
  const int64_t part = (((int64_t)blockIdx.z * p.row_tiles + work.row0 / (p.split_tiles ? 64 : 128)) * p.slots + slot) * p.part_rows + rows_from + r;
  auto write = [&](int half, float m, float l, float d) {
    if (row0 + 8 * half >= work.row_end) return;
    if (c == 0) p.stats[part + 8 * half] = make_float4(m, l, d, 0.f);
    float *to = p.partial + (part + 8 * half) * DIM + 2 * c;
    if (l != 0.f)                                                         // the others are not read
      #pragma unroll
      for (int j = 0; j < DIM / 8; j++) *(float2 *)(to + 8 * j) = make_float2(O[4 * j + 2 * half], O[4 * j + 2 * half + 1]);
  };
  write(0, state.m0, l0, dot.x), write(1, state.m1, l1, dot.y);
}

// One CTA per packed row and kv head: groups of slots a channel, then the groups in order. Latency is
// all: the first loads of the sums do not wait for the rows' statistics.
template<int DIM> __global__ void __launch_bounds__(kCombineThreads) combine(const __grid_constant__ PageParams p) {
  constexpr int kGroups = kCombineThreads / DIM, kBatch = 16;
  __shared__ float reference[kMaxSlots], length[kMaxSlots], weight[kMaxSlots], sums[kGroups][DIM];
  const int row = blockIdx.x, head = blockIdx.y, b = head / p.kv_heads, kv = head - b * p.kv_heads, tid = threadIdx.x;
  const int span = p.split_tiles ? 64 : 128, channel = tid % DIM, group = tid / DIM, column = 2 * tid;
  const int64_t part = ((int64_t)head * p.row_tiles + row / span) * p.slots * p.part_rows + row % span;
  const float *from = p.partial + part * DIM + channel;
  const int64_t step = (int64_t)p.part_rows * DIM;
  float x[kBatch];
  auto fetch = [&](int first) {
    #pragma unroll
    for (int i = 0; i < kBatch; i++) x[i] = first + kGroups * i < p.slots ? __ldcg(from + (first + kGroups * i) * step) : 0.f;
  };
  fetch(group);
  float4 own = {};
  if (tid < p.slots) own = __ldcg(p.stats + part + (int64_t)tid * p.part_rows);
  const float dot = p.need_dot ? __ldcg(&p.stats[part].z) : 0.f;
  const float2 mean = tid < DIM / 2 ? __ldg((const float2 *)(p.v_mean + (int64_t)head * DIM + column)) : float2{};
  if (tid < p.slots) reference[tid] = own.x, length[tid] = own.y;
  __syncthreads();
  float m = kNoKeys, l = 0.f, sum = 0.f;
  #pragma unroll 4
  for (int s = 0; s < p.slots; s++) m = fmaxf(m, reference[s]);
  if (tid < p.slots) weight[tid] = own.y == 0.f ? 0.f : exp2_fast(own.x - m);
  __syncthreads();
  for (int first = group; ; fetch(first)) {
    #pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int s = first + kGroups * i;
      if (s < p.slots && weight[s] != 0.f) sum = fmaf(x[i], weight[s], sum);     // parts without keys were never written
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
  for (int g = 0; g < kGroups; g++) y0 += sums[g][column], y1 += sums[g][column + 1];
  store_row(p, b, h, token, column, fmaf(y0, end.factor, mean.x * end.kept), fmaf(y1, end.factor, mean.y * end.kept));
}

struct Entry { void (*attend)(PageParams), (*combine)(PageParams); int bytes; };
Entry entry(int head_dim, bool extra) {
  if (padded_dim(head_dim) == 64) return {extra ? attend<64, true> : attend<64, false>, combine<64>, Ring<64>::bytes};
  return {extra ? attend<128, true> : attend<128, false>, combine<128>, Ring<128>::bytes};
}

}  // namespace

cudaError_t load_pages() {
  cudaError_t err = load_pages_append();
  for (int i = 0; i < 4 && err == cudaSuccess; i++) {
    const Entry e = entry(64 << i / 2, i % 2);
    err = cudaFuncSetAttribute(e.attend, cudaFuncAttributeMaxDynamicSharedMemorySize, e.bytes);
    // The same split of L1 and shared memory for all kernels of a step: changing it waits for an idle SM.
    if (err == cudaSuccess) err = cudaFuncSetAttribute(e.combine, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  return err;
}

// The number of splits that ends first if a CTA's time is its pages plus a few for its start and its parts.
void plan_pages_attend(PageParams &p, int sm_count) {
  constexpr int kStart = 4;
  p.heads_per_kv = p.heads / p.kv_heads, p.rows = p.tokens * p.heads_per_kv;
  p.split_tiles = p.rows <= 64;
  const int span = p.split_tiles ? 64 : 128;
  p.row_tiles = (p.rows + span - 1) / span, p.part_rows = p.rows < span ? p.rows : span;
  const int64_t ctas = (int64_t)p.batch * p.kv_heads * p.row_tiles;
  const int64_t seen = p.left < kNoLimit ? std::min<int64_t>(p.length, (int64_t)p.left + p.tokens) : p.length;
  const int tiles = (int)(seen / kTileTokens) + 1, most = std::min(kMaxSlots / 2, (tiles + 1) / 2);
  p.splits = 1;
  int64_t best = INT64_MAX;
  for (int s = 1; s <= most; s++) {
    const int64_t waves = (ctas * s + sm_count - 1) / sm_count, time = waves * ((tiles + s - 1) / s + kStart);
    if (time < best) best = time, p.splits = s;
    if (waves > 8) break;
  }
  p.slots = p.splits * (p.split_tiles ? 2 : 1);
}
size_t pages_partial_bytes(const PageParams &p) {
  return p.slots == 1 ? 0 : (size_t)p.batch * p.kv_heads * p.row_tiles * p.slots * p.part_rows * padded_dim(p.head_dim) * sizeof(float);
}
size_t pages_stats_bytes(const PageParams &p) {
  return p.slots == 1 ? 0 : (size_t)p.batch * p.kv_heads * p.row_tiles * p.slots * p.part_rows * sizeof(float4);
}

cudaError_t launch_pages_attend(const PageParams &p, cudaStream_t stream) {
  const Entry e = entry(p.head_dim, p.mask || p.softcap != 0.f);
  const int heads = p.batch * p.kv_heads;
  e.attend<<<dim3(p.splits, p.row_tiles, heads), kThreads, e.bytes, stream>>>(p);
  if (p.slots > 1) e.combine<<<dim3(p.rows, heads), kCombineThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace sage2
