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

// Warp w of three: Q of every tile but the first, for the consumers w, w + 3, ..
template<class L> SAGE2_DEV void feed_q(const Params &p, const Cta<L> &cta, int w) {
  int parity = 0;
  for (int n = 1;; n++) {
    const int buffer = n & 1;
    barrier_wait(cta.bar.tile_full(buffer), (n >> 1) & 1);
    const int t = uniform(load_shared_int(cta.slot(buffer)));
    for (int g = w; g < L::consumers; g += 3) {
      if (t >= 0)
        prefetch_q<L::dim, L::raw_rows, L::smooths>(p, decode<L::rows, L::is_dense>(p, t), 64 * g, cta.raw(w),
                                                    cta.bar.raw_full(w), parity, cta.q_buffer(buffer));
      if (L::by_bits && t >= 0) measure_rows<L::dim>(cta.q_buffer(buffer), cta.reach(buffer), 64 * g, 64);
      barrier_arrive_warp(cta.bar.q_full(buffer, g), 4);
    }
    if (t < 0) return;
  }
}

}  // namespace
}  // namespace sage2
