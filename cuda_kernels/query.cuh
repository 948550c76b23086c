// Q on its way into the attention kernel: rows of any 16-bit view -> INT8 rows swizzled for wgmma, one scale a row, and on
// request the row's dot product with K's smoothing vector.
#pragma once
#include "int8.cuh"
#include "tile.cuh"

namespace sage2 {

SAGE2_DEV int row_slot(int row) { return (row & ~15) | (row & 7) * 2 | (row >> 3 & 1); }   // rows r and r + 8 side by side
struct QBuffer { uint32_t q, scale, dot; };                    // addresses: INT8 rows, their scales, their dots with K's mean

template<int DIM> SAGE2_DEV void store_q(const QBuffer &to, int row, int channel, const uint4 &x, bool bf16, float inverse) {
  float f[8];
  widen(x, bf16, f);
  store_shared2(to.q + row / 64 * (64 * DIM) + row_offset(row % 64, channel, DIM, 64), pack_s8(f[0], f[1], f[2], f[3], inverse), pack_s8(f[4], f[5], f[6], f[7], inverse));
}
SAGE2_DEV float dot8(const uint4 &x, bool bf16, const float *mean, float sum) {     // with K's mean: what smoothing took from the logits
  float f[8];
  widen(x, bf16, f);
  #pragma unroll
  for (int e = 0; e < 8; e++) sum = fmaf(f[e], __ldg(mean + e), sum);
  return sum;
}
SAGE2_DEV const uint16_t *q_row(const Params &p, const Tile &t, int row) {
  return p.q.data + t.b * p.q.batch + t.h * p.q.head + (int64_t)(t.q_token + t.row0 + row) * p.q.token;
}
template<int DIM> SAGE2_DEV const float *k_mean(const Params &p, const Tile &t) { return p.images.k_mean + (int64_t)t.kv_head * DIM; }

// Straight from memory: 16 rows of a CTA's first tile, which nothing can hide. DIM / 8 lanes hold a row, 8 channels each.
template<int DIM> SAGE2_DEV void load_q(const Params &p, const Tile &t, int first, const QBuffer &to) {
  constexpr int kLanes = DIM / 8, kPass = 32 / kLanes;         // lanes of a row, rows of a pass
  const int lane = threadIdx.x & 31, channel = lane % kLanes * 8;
  #pragma unroll 1
  for (int part = 0; part < 16; part += 4 * kPass) {
    uint4 x[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = first + part + i * kPass + lane / kLanes;
      x[i] = make_uint4(0, 0, 0, 0);
      if (t.row0 + row < t.q_len) x[i] = load_channels(q_row(p, t, row), channel, p.head_dim, p.q.vector);
    }
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = first + part + i * kPass + lane / kLanes;
      uint32_t top = max_magnitude(0, x[i]);
      #pragma unroll
      for (int s = 1; s < kLanes; s *= 2) top = max_magnitude(top, __shfl_xor_sync(~0u, top, s));
      const Int8Scale s8 = int8_scale(widen_magnitude(top, p.bf16));
      store_q<DIM>(to, row, channel, x[i], p.bf16, s8.inverse);
      if (channel == 0) store_shared(to.scale + 4 * row_slot(row), __float_as_uint(__fmul_rn(s8.scale, p.scale_log2)));
      if (p.need_dot) {
        float dot = dot8(x[i], p.bf16, k_mean<DIM>(p, t) + channel, 0.f);
        #pragma unroll
        for (int s = 1; s < kLanes; s *= 2) dot += __shfl_xor_sync(~0u, dot, s);
        if (channel == 0) store_shared(to.dot + 4 * row_slot(row), __float_as_uint(dot * p.scale));
      }
    }
  }
  async_proxy_fence();                                         // wgmma reads what plain stores wrote
  __syncwarp();
}
SAGE2_HD constexpr int prefetch_rows(int dim) { return dim > 128 ? 16 : 32; }
// Behind the consumers' backs, with few registers: 64 rows by one warp, through `raw`, kRows at a time. A lane finds the
// scale of a whole row by itself (no shuffles), then the warp quantizes row by row.
template<int DIM, int ROWS>
SAGE2_DEV void prefetch_q(const Params &p, const Tile &t, int first, uint32_t raw, uint32_t raw_full, int &parity, const QBuffer &to) {
  constexpr int kChunks = DIM / 8, kPass = 32 / kChunks, kRows = ROWS;
  const int lane = thread_index() & 31;
  const uint16_t *src = q_row(p, t, first);
  const int kv_head = t.kv_head;
  int left = uniform(t.q_len - t.row0 - first);                // rows that exist, from src on
  #pragma unroll 1
  for (int part = first; part < first + 64; part += kRows, left -= kRows, src += kRows * p.q.token) {
    const int here = min(left, kRows);
    __syncwarp();                                              // every lane has read the rows before
    if (!p.q.vector) {
      const uint16_t *from = src + lane;
      #pragma unroll 1
      for (int i = 0; i < here; i++, from += p.q.token)
        #pragma unroll
        for (int d = 0; d < DIM; d += 32)
          if (d + lane < p.head_dim) store_shared16(raw + (i * DIM + d + lane) * 2, __ldg(from + d));
      __syncwarp();
    } else if (left > 0) {
      if (lane == 0) barrier_expect(raw_full, here * p.head_dim * 2);
      __syncwarp();
      if (lane < here) bulk_load(raw + lane * DIM * 2, src + (thread_index() & 31) * p.q.token, p.head_dim * 2, raw_full);   // not kept: registers are short
      barrier_wait(raw_full, parity);
      parity ^= 1;
    }
    auto chunk = [&](int row, int channel) {
      uint4 x = load_shared4(raw + (row * DIM + channel) * 2);
      return channel + 8 > p.head_dim ? keep_channels(x, p.head_dim - channel) : x;
    };
    uint32_t top = 0;
    float dot = 0.f;
    if (lane < here) {
      #pragma unroll 4
      for (int i = 0; i < kChunks; i++) top = max_magnitude(top, chunk(lane, (i + lane) % kChunks * 8));     // rotated: no bank conflicts
      if (p.need_dot) {
        const float *mean = p.images.k_mean + (int64_t)kv_head * DIM;
        #pragma unroll 1
        for (int i = 0; i < kChunks; i++) dot = dot8(chunk(lane, (i + lane) % kChunks * 8), p.bf16, mean + (i + lane) % kChunks * 8, dot);
      }
    }
    const Int8Scale s8 = int8_scale(widen_magnitude(top, p.bf16));           // no such row: scale and inverse are zero
    if (kRows == 32 || lane < kRows) {
      store_shared(to.scale + 4 * row_slot(part + lane), __float_as_uint(__fmul_rn(s8.scale, p.scale_log2)));
      store_shared(to.dot + 4 * row_slot(part + lane), __float_as_uint(dot * p.scale));
    }
    #pragma unroll 2
    for (int i = 0; i < kRows; i += kPass) {
      const int row = i + lane / kChunks, channel = lane % kChunks * 8;
      store_q<DIM>(to, part + row, channel, chunk(row, channel), p.bf16, __shfl_sync(~0u, s8.inverse, row));
    }
  }
  async_proxy_fence();
  __syncwarp();
}

}  // namespace sage2
