// The end of a query tile: sums over the keys -> rows of the output and their log-sum-exp.
#pragma once
#include "consume.cuh"

namespace sage2 {
namespace {

// Divides, rescales V, adds its mean, and stores whole rows through the warp's staging area.
template<class L>
SAGE2_DEV void store_rows(const Params &p, const Consumer<L> &me, const Tile &tile, const Sums<L> &sums, float shrink0,
                          float shrink1, float kept0, float kept1) {
  const int lane = threadIdx.x & 31, c = me.c;
  const bool none0 = sums.l0 == 0.f, none1 = sums.l1 == 0.f;  // no keys: zero
  const float i0 = none0 ? 0.f : __fdividef(shrink0, sums.l0), i1 = none1 ? 0.f : __fdividef(shrink1, sums.l1);
  const int64_t vector = (int64_t)tile.kv_head * L::dim + (L::dim > 128 ? p.v_channel : 0);
  const float *v_scale = p.images.v_scale + vector, *v_mean = p.images.v_mean + vector;
  const int first = tile.row0 + 64 * me.w + me.warp * 16;  // this warp's 16 rows
  uint16_t *out = const_cast<uint16_t *>(p.out.data) + tile.b * p.out.batch + tile.h * p.out.head +
                  (int64_t)(tile.q_token + first) * p.out.token;
  const uint32_t staging = me.cta.out(me.w, me.warp);
  const uint32_t mine = staging + (lane >> 2) * L::out_pitch + c * 4;
  bulk_wait_read();  // the last tile's rows have left the staging area
  __syncwarp();
  #pragma unroll
  for (int i = 0; i < L::dv / 8; i++) {
    const float *O = sums.O + 4 * i;
    const float2 s = __ldg((const float2 *)(v_scale + 8 * i + 2 * c));
    const float2 m = __ldg((const float2 *)(v_mean + 8 * i + 2 * c));
    const float2 m0 = none0 ? make_float2(0.f, 0.f) : !L::is_dense ? make_float2(m.x * kept0, m.y * kept0) : m;
    const float2 m1 = none1 ? make_float2(0.f, 0.f) : !L::is_dense ? make_float2(m.x * kept1, m.y * kept1) : m;
    const float x0 = fmaf(O[0] * i0, s.x, m0.x), x1 = fmaf(O[1] * i0, s.y, m0.y);
    const float y0 = fmaf(O[2] * i1, s.x, m1.x), y1 = fmaf(O[3] * i1, s.y, m1.y);
    store_shared(mine + i * 16, p.bf16 ? pack_bf16(x0, x1) : pack_f16(x0, x1));
    store_shared(mine + 8 * L::out_pitch + i * 16, p.bf16 ? pack_bf16(y0, y1) : pack_f16(y0, y1));
  }
  async_proxy_fence();
  __syncwarp();
  if (p.out.vector) {
    if (lane < 16 && first + lane < tile.q_len)
      bulk_store(out + lane * p.out.token, staging + lane * L::out_pitch, p.v_head_dim * 2);
    bulk_commit();
  } else {
    for (int i = 0; i < 16 && first + i < tile.q_len; i++)
      for (int d = lane; d < p.v_head_dim; d += 32)
        out[i * p.out.token + d] = load_shared16(staging + i * L::out_pitch + 2 * d);
  }
}

template<class L>
SAGE2_DEV void close_rows(const Params &p, const Consumer<L> &me, const Tile &tile, uint32_t q_scales, Sums<L> &sums) {
  const int row = tile.row0 + 64 * me.w + me.r;
  if constexpr (L::fp16) {
    sums.l0 = quad_sum(sums.l0);
    sums.l1 = quad_sum(sums.l1);
  }
  float kept0 = 1.f, kept1 = 1.f, shrink0 = 1.f, shrink1 = 1.f;  // with sinks: the keys' share of a row's weight
  if (!L::is_dense && p.sinks) {
    const float2 dot = q_dots_of<L>(q_scales, threadIdx.x);
    const float sink = __ldg(p.sinks + tile.h) * kLog2e;
    const float lacks = L::is_logits && p.softcap != 0.f ? 0.f : kLog2e;  // smoothing took q . k_mean
    add_sink(sink - dot.x * lacks, sums.state.m0, sums.l0, shrink0, kept0);
    add_sink(sink - dot.y * lacks, sums.state.m1, sums.l1, shrink1, kept1);
  }
  store_rows(p, me, tile, sums, shrink0, shrink1, kept0, kept1);
  if (p.lse && me.c == 0) {
    const int64_t head = (int64_t)(!L::is_dense && p.cu_q ? 0 : tile.b) * p.heads + tile.h;
    float *lse = p.lse + head * p.q_len + tile.q_token;
    float2 dot = q_dots_of<L>(q_scales, threadIdx.x);
    if (L::is_logits && p.softcap != 0.f) dot = make_float2(0.f, 0.f);  // the logits have it already
    if (row < tile.q_len) lse[row] = log_sum_exp(sums.state.m0, sums.l0, dot.x);
    if (row + 8 < tile.q_len) lse[row + 8] = log_sum_exp(sums.state.m1, sums.l1, dot.y);
  }
}

}  // namespace
}  // namespace sage2
