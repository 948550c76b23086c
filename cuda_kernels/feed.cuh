// The feeding warpgroup: one lane streams the K and V images of tile after tile through the ring and draws the tiles,
// three warps load and quantize each next tile's Q while the consumers are in the one before.
#pragma once
#include "exponent.cuh"
#include "resources.cuh"

namespace sage2 {
namespace {

// K of a stage. Outside the dense family its note comes with it.
template<class L>
SAGE2_DEV void feed_k(const Params &p, const Cta<L> &cta, const KeyTiles<L::rows, L::is_dense> &key_tiles,
                      uint32_t entry, int64_t block, int stage) {
  const uint32_t full = cta.bar.k_full(stage);
  if constexpr (L::is_dense) {
    barrier_expect(full, L::k);
  } else {
    const uint32_t note = cta.note(stage);
    const bool bits = p.mask.data && (entry & kSomePartial);
    if (p.mask.data) store_shared(note + L::note_entry, entry);
    barrier_expect(full, L::k + 16 + (bits ? L::note_bits : 0));
    bulk_load(note + L::note_scales, p.images.k_scale + block * kScaleGroups, 16, full);
    if (bits) bulk_load(note, p.mask.bits + key_tiles.tile_of_mask(p, entry) * (L::note_bits / 4), L::note_bits, full);
  }
  bulk_load(cta.k(stage), p.images.k + block * L::k, L::k, full);
}

// One lane, all tiles of this CTA.
template<class L> SAGE2_DEV void feed_kv(const Params &p, const Cta<L> &cta) {
  if (threadIdx.x != 0) return;
  int t = blockIdx.x, stage = 0, parity = 1, n = 0;  // n counts this CTA's tiles
  barrier_arrive(cta.bar.tile_full(0));
  while (t >= 0) {
    const Tile tile = decode<L::rows, L::is_dense>(p, t);
    const KeyTiles<L::rows, L::is_dense> key_tiles(p, tile);
    const int tiles = key_tiles.count;
    for (int i = 0;; i++) {
      if (i < tiles) {
        const uint32_t entry = key_tiles.entry(p, i);
        const int64_t block = tile.image + (int64_t)(entry & kTileOfEntry);
        barrier_wait(cta.bar.k_empty(stage), parity);
        feed_k(p, cta, key_tiles, entry, block, stage);
        barrier_wait(cta.bar.v_empty(stage), parity);
        barrier_expect(cta.bar.v_full(stage), L::v);
        bulk_load(cta.v(stage), p.images.v + block * L::v_image, L::v, cta.bar.v_full(stage));
        if (++stage == L::stages) {
          stage = 0;
          parity ^= 1;
        }
      }
      // The next tile is announced once the ring has gone round in this one (the consumers are then past the tile
      // before it, so the Q buffer is free), early enough for its Q to be ready in time.
      if (i == min(L::stages, max(tiles - 1, 0))) {
        const int ticket = atomicAdd(p.images.counter, 1);
        if (ticket == p.total - 1) *p.images.counter = 0;  // the last draw of the launch leaves it as it was
        t = ticket + (int)gridDim.x < p.total ? ticket + (int)gridDim.x : -1;
        if (++n >= 2) barrier_wait(cta.bar.q_empty(n & 1), ((n >> 1) & 1) ^ 1);
        store_shared(cta.slot(n & 1), t);
        barrier_arrive(cta.bar.tile_full(n & 1));
      }
      if (i >= tiles - 1 && i >= min(L::stages, max(tiles - 1, 0))) break;
    }
  }
}

// prefetch_q of the family that rotates all rows. The tensor cores' softmax keeps the way of shuffles busy, so there
// are as few of them and as long steps as registers allow; addresses are formed again, not kept.
template<class L>
SAGE2_DEV void prefetch_rotated_q(const Params &p, const Tile &t, int first, const Cta<L> &cta, int buffer,
                                  int &parity) {
  constexpr int kPieces = L::dim == 128 ? 2 : 1, kLanes = L::dim / 8 / kPieces;
  const uint16_t *src = q_row(p, t, first);
  // Bytes behind the tiles' slots that nobody else uses.
  auto kv_head = [&] { return cta.slot(0) + 16 + 4 * ((thread_index() >> 5) - 1); };
  store_shared(kv_head(), t.kv_head);
  int left = uniform(t.q_len - t.row0 - first);  // rows that exist, from src on
  auto raw = [&] { return cta.raw((thread_index() >> 5) - 1); };
  auto raw_full = [&] { return cta.bar.raw_full((thread_index() >> 5) - 1); };
  auto to = [&] {
    forget(buffer);
    return cta.q_buffer(buffer);
  };
  auto chunk = [&](int row, int channel) {
    const uint4 x = load_shared4(raw() + (row * L::dim + channel) * 2);
    return channel + 8 > p.head_dim ? keep_channels(x, p.head_dim - channel) : x;
  };
  #pragma unroll 1
  for (int part = first;;) {
    const int here = min(left, L::raw_rows);
    __syncwarp();  // every lane has read the rows before
    if (!p.q.vector) {
      const uint16_t *from = src + (thread_index() & 31);
      #pragma unroll 1
      for (int i = 0; i < here; i++, from += p.q.token)
        #pragma unroll 1
        for (int d = thread_index() & 31; d < p.head_dim; d += 32)
          store_shared16(raw() + (i * L::dim + d) * 2, __ldg(from + (d - (thread_index() & 31))));
      __syncwarp();
    } else if (left > 0) {
      if ((thread_index() & 31) == 0) barrier_expect(raw_full(), here * p.head_dim * 2);
      __syncwarp();
      if ((thread_index() & 31) < here)
        bulk_load(raw() + (thread_index() & 31) * L::dim * 2, src + (thread_index() & 31) * p.q.token, p.head_dim * 2,
                  raw_full());
      barrier_wait(raw_full(), parity);
      parity ^= 1;
    }
    if (p.need_dot && (thread_index() & 31) < min(left, L::raw_rows)) {
      const int lane = thread_index() & 31;
      const float *of_k = p.images.k_mean + (int64_t)load_shared_int(kv_head()) * L::dim;
      float dot = 0.f;
      #pragma unroll 1
      for (int i = 0; i < L::dim / 8; i++) {  // turned: no bank conflicts
        const int channel = (i + lane) % (L::dim / 8) * 8;
        dot = dot8(chunk(lane, channel), p.bf16, of_k + channel, dot);
      }
      store_shared(to().dot + 4 * row_slot(part + lane), __float_as_uint(dot * p.scale));
    }
    #pragma unroll 1
    for (int i = 0; i < L::raw_rows; i += 32 / kLanes) {
      const int row = i + thread_index() % 32 / kLanes;
      float f[8 * kPieces];
      #pragma unroll
      for (int j = 0; j < kPieces; j++) {
        const int channel = (j * kLanes + thread_index() % kLanes) * 8;
        float y[8] = {};  // no such row: zeros
        if (row < left) {
          const uint4 x = chunk(row, channel);
          widen(x, p.bf16, y);
        }
        #pragma unroll
        for (int e = 0; e < 8; e++) f[8 * j + e] = y[e];
      }
      store_rotated_rows<L::dim, kLanes>(to(), part + i + thread_index() % 32 / kLanes, f, p.scale_log2);
    }
    part += L::raw_rows;
    left -= L::raw_rows;
    src += L::raw_rows * p.q.token;
    if (part % 64 == 0) break;
  }
  async_proxy_fence();
  __syncwarp();
}

// Warp w of three: Q of every tile but the first, for the consumers w, w + 3, ..
template<class L> SAGE2_DEV void feed_q(const Params &p, const Cta<L> &cta, int w) {
  int parity = 0;
  for (int n = 1;; n++) {
    const int buffer = n & 1;
    barrier_wait(cta.bar.tile_full(buffer), (n >> 1) & 1);
    const int t = uniform(load_shared_int(cta.slot(buffer)));
    for (int g = w; g < L::consumers; g += 3) {
      if (t >= 0)
        if constexpr (L::family == kRotated)
          prefetch_rotated_q<L>(p, decode<L::rows, L::is_dense>(p, t), 64 * g, cta, buffer, parity);
        else
          prefetch_q<L::dim, L::raw_rows, L::family>(p, decode<L::rows, L::is_dense>(p, t), 64 * g, cta.raw(w),
                                                     cta.bar.raw_full(w), parity, cta.q_buffer(buffer));
      if (L::by_bits && t >= 0) measure_rows<L::dim>(cta.q_buffer(buffer), cta.reach(buffer), 64 * g, 64);
      barrier_arrive_warp(cta.bar.q_full(buffer, g), 4);
    }
    if (t < 0) return;
  }
}

}  // namespace
}  // namespace sage2
