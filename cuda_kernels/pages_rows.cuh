// Packed query rows of attention over a quantized cache, for every family of its kernels: which rows and pages a CTA
// works on, what a row sees of them, and what becomes of its sums. A thread holds rows r and r + 8, columns 8 i + 2 c +
// {0, 1} (the layout of scores in wgmma and in mma.sync).
#pragma once
#include "logits.cuh"
#include "pages.h"

namespace sage2 {
namespace {

constexpr int kMaxSlots = 128;

// What a CTA works on: packed rows [row0, row_end) of one kv head of one item against pages [begin, end).
struct PageWork { int b, kv, row0, row_end, start, begin, end, length, offset; };
SAGE2_DEV PageWork work_of(const PageParams &p) {
  PageWork w;
  const int head = blockIdx.z;
  w.b = head / p.kv_heads;
  w.kv = head - w.b * p.kv_heads;
  w.row0 = (gridDim.y - 1 - blockIdx.y) * p.span;
  w.row_end = min(w.row0 + p.span, p.rows);  // the longest first
  w.start = max(p.kv_starts ? __ldg(p.kv_starts + w.b) : 0, p.first_slab * kTileTokens << p.slab_shift);
  w.length = length_of(p);
  w.offset = offset_of(p, w.length);
  const int first = w.row0 / p.heads_per_kv + w.offset, last = (w.row_end - 1) / p.heads_per_kv + w.offset;
  const int from = max(w.start, first - p.left) / kTileTokens;
  const int to = (min(w.length, last + 1) + kTileTokens - 1) / kTileTokens;
  const int tiles = max(to - from, 0), each = (tiles + p.splits - 1) / p.splits;
  w.begin = from + min(tiles, (int)blockIdx.x * each);
  w.end = from + min(tiles, ((int)blockIdx.x + 1) * each);
  return w;
}

// Where this thread's rows begin and end to see keys, without a mask; over a warp's rows, where the last one begins and
// the first one ends; where the mask's rows begin, or null.
struct Seen {
  int begin0, begin1, end0, end1, warp_last, warp_end;
  const uint8_t *mask0, *mask1;
};
template<bool MASKED> SAGE2_DEV Seen seen_from(const PageParams &p, const PageWork &work, int row0) {
  const int token0 = row0 / p.heads_per_kv, token1 = (row0 + 8) / p.heads_per_kv;
  Seen s = {max(work.start, token0 + work.offset - p.left),
            max(work.start, token1 + work.offset - p.left),
            min(work.length, token0 + work.offset + 1),
            min(work.length, token1 + work.offset + 1),
            0,
            0,
            nullptr,
            nullptr};
  s.warp_last = max(__reduce_max_sync(~0u, s.begin0), __reduce_max_sync(~0u, s.begin1));
  s.warp_end = min(__reduce_min_sync(~0u, s.end0), __reduce_min_sync(~0u, s.end1));
  if (MASKED && p.mask && !(p.mask_until && __ldg(p.mask_until + work.b) >= work.length)) {
    auto row_of = [&](int row, int token) {
      row = min(row, p.rows - 1);
      token = min(token, p.tokens - 1);
      return p.mask + work.b * p.mask_batch + (work.kv * p.heads_per_kv + row % p.heads_per_kv) * p.mask_head +
             token * p.mask_row;
    };
    s.mask0 = row_of(row0, token0);
    s.mask1 = row_of(row0 + 8, token1);
  }
  return s;
}

// Keys that a boolean mask hides from a row; `row` points at the row's first column. Rare: read byte by byte.
template<int N>
SAGE2_DEV void hide_by_mask(int (&S)[N], const PageParams &p, const uint8_t *row0, const uint8_t *row1, int first,
                            int c) {
  #pragma unroll
  for (int i = 0; i < N / 4; i++)
    #pragma unroll
    for (int e = 0; e < 2; e++) {
      const int column = first + 8 * i + 2 * c + e;
      const bool in = column >= 0 && column < p.mask_columns;
      const int64_t at = column * p.mask_column;
      if (!in || !__ldg(row0 + at)) S[4 * i + e] = kHidden;
      if (!in || !__ldg(row1 + at)) S[4 * i + 2 + e] = kHidden;
    }
}

// Keys that had a number that is not finite (their K and V are zero): a row that sees one is NaN, and stays so by its
// sum. word: the bits of the 2 N keys.
template<int N>
SAGE2_DEV void see_lost(const int (&S)[N], const uint32_t (&word)[N / 16], int c, float &l0, float &l1) {
  bool bad0 = false, bad1 = false;
  #pragma unroll
  for (int i = 0; i < N / 4; i++)
    #pragma unroll
    for (int e = 0; e < 2; e++)
      if (word[i / 4] >> (8 * (i % 4) + 2 * c + e) & 1) {
        bad0 |= S[4 * i + e] != kHidden;
        bad1 |= S[4 * i + 2 + e] != kHidden;
      }
  #pragma unroll
  for (int s = 1; s < 4; s *= 2) {
    bad0 |= __shfl_xor_sync(~0u, bad0, s);
    bad1 |= __shfl_xor_sync(~0u, bad1, s);
  }
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
struct Closing { float factor, kept; };  // of the sums over the keys; of v_mean
SAGE2_DEV Closing close_row(const PageParams &p, int b, int h, int token, float m, float l, float dot, bool write_lse) {
  float shrink = 1.f, kept = 1.f;
  if (p.sinks) add_sink((__ldg(p.sinks + h) - (p.softcap != 0.f ? 0.f : dot)) * kLog2e, m, l, shrink, kept);
  if (write_lse && p.lse)
    p.lse[((int64_t)b * p.heads + h) * p.tokens + token] = log_sum_exp(m, l, p.softcap != 0.f ? 0.f : dot);
  return l == 0.f ? Closing{0.f, 0.f} : Closing{__fdividef(shrink, l), kept};
}

// The sums O, l of rows row0 and row0 + 8 (references m) become outputs, or part `slot` of them.
template<int DIM>
SAGE2_DEV void leave(const PageParams &p, const PageWork &work, int row0, int slot, const float (&O)[DIM / 2], float2 m,
                     float2 l, float2 dot, int c) {
  const int token0 = row0 / p.heads_per_kv, token1 = (row0 + 8) / p.heads_per_kv;
  const int h0 = work.kv * p.heads_per_kv + row0 - token0 * p.heads_per_kv;
  const int h1 = work.kv * p.heads_per_kv + row0 + 8 - token1 * p.heads_per_kv;
  if (p.slots == 1) {  // nothing to combine with
    const float *v_mean = p.v_mean + (int64_t)blockIdx.z * DIM;
    const bool here0 = row0 < work.row_end, here1 = row0 + 8 < work.row_end;
    Closing a = {0.f, 0.f}, b = {0.f, 0.f};
    if (here0) a = close_row(p, work.b, h0, token0, m.x, l.x, dot.x, c == 0);
    if (here1) b = close_row(p, work.b, h1, token1, m.y, l.y, dot.y, c == 0);
    #pragma unroll
    for (int j = 0; j < DIM / 8; j++) {
      const int column = 8 * j + 2 * c;
      const float2 mean = __ldg((const float2 *)(v_mean + column));
      if (here0)
        store_row(p, work.b, h0, token0, column, fmaf(O[4 * j], a.factor, mean.x * a.kept),
                  fmaf(O[4 * j + 1], a.factor, mean.y * a.kept));
      if (here1)
        store_row(p, work.b, h1, token1, column, fmaf(O[4 * j + 2], b.factor, mean.x * b.kept),
                  fmaf(O[4 * j + 3], b.factor, mean.y * b.kept));
    }
    return;
  }
  const int64_t part =
      (((int64_t)blockIdx.z * p.row_tiles + work.row0 / p.span) * p.slots + slot) * p.part_rows + row0 - work.row0;
  auto write = [&](int half, float m, float l, float d) {
    if (row0 + 8 * half >= work.row_end) return;
    if (c == 0) p.stats[part + 8 * half] = make_float4(m, l, d, 0.f);
    float *to = p.partial + (part + 8 * half) * DIM + 2 * c;
    if (l != 0.f)  // the others are not read
      #pragma unroll
      for (int j = 0; j < DIM / 8; j++)
        *(float2 *)(to + 8 * j) = make_float2(O[4 * j + 2 * half], O[4 * j + 2 * half + 1]);
  };
  write(0, m.x, l.x, dot.x);
  write(1, m.y, l.y, dot.y);
}

}  // namespace
}  // namespace sage2
