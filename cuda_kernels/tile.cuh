// Which 64-row groups of queries a CTA works on, in which order, and against which key tiles.
#pragma once
#include "mask.cuh"
#include "params.h"
#include "ptx.cuh"

namespace sage2 {

SAGE2_DEV int thread_index() { int t; asm volatile("mov.u32 %0,%%tid.x;" : "=r"(t)); return t; }      // read again, not kept
SAGE2_DEV int uniform(int x) { return (int)__reduce_or_sync(~0u, (unsigned)x); }   // tells the compiler that a warp agrees on x

struct Tile {
  int b, h, kv_head, row0, keys, offset;     // kv_head: of the whole batch
  int q_len, q_token, image;                 // the item's rows, the token of its row 0, its first K and V image
};
template<int ROWS, bool DENSE = true> SAGE2_DEV Tile decode(const Params &p, int t) {     // ROWS: of a CTA's tile
  if (!DENSE && p.cu_q) {
    const int j = t / p.heads, h = t - j * p.heads, kv = h / p.heads_per_kv;
    const int2 s = __ldg(p.schedule + j);
    if (s.x < 0) return {0, h, kv, 0, 0, 0, 0, 0, 0};                       // a tile that no sequence needs
    const int q0 = __ldg(p.cu_q + s.x), q_len = __ldg(p.cu_q + s.x + 1) - q0;
    const int k0 = __ldg(p.cu_k + s.x), keys = __ldg(p.cu_k + s.x + 1) - k0;
    return {s.x, h, s.x * p.kv_heads + kv, s.y, keys, p.top_left ? 0 : keys - q_len, q_len, q0, kv * p.blocks + k0 / kTileTokens + s.x};
  }
  // Longest first inside a group of heads that share L2; the last group may be smaller. Non-causal: group = 1.
  const int g = t / (p.group * p.q_tiles), r = t - g * p.group * p.q_tiles;
  const int heads = min(p.group, p.batch * p.heads - g * p.group);
  const int bh = g * p.group + r % heads, b = bh / p.heads, h = bh - b * p.heads;
  const int keys = p.kv_lens ? min(max(__ldg(p.kv_lens + b), 0), p.kv_len) : p.kv_len;
  int offset = !p.causal ? kNoCausalOffset : p.top_left ? 0 : keys - p.q_len;
  if (!DENSE) offset = p.top_left ? (p.kv_starts ? -__ldg(p.kv_starts + b) : 0) : keys - p.q_len;
  const int kv_head = b * p.kv_heads + h / p.heads_per_kv;
  return {b, h, kv_head, (p.q_tiles - 1 - r / heads) * ROWS, keys, offset, p.q_len, 0, kv_head * p.blocks};
}
template<int ROWS> SAGE2_DEV int key_tiles(const Params &p, const Tile &t) {     // of the whole CTA; the ring runs from the last to the first
  return tile_span(t.row0, min(t.row0 + ROWS, p.q_len) - 1, p.q_len, t.keys, t.offset).seen;
}

SAGE2_DEV int mask_plane(const Params &p, const Tile &t) { return (p.mask.mb > 1 ? t.b : 0) * p.mask.mh + (p.mask.mh > 1 ? t.h : 0); }

// The key tiles of a CTA in the order in which the ring brings them, the last one first. An entry is a tile's number and,
// outside the dense family, from bit 24 on two bits for each consumer warpgroup: the TileClass of its 64 rows. The feeder
// has few registers: it keeps the warpgroups' spans in shared memory, at `spans`, 16 bytes each.
constexpr uint32_t kTileOfEntry = 0xFFFFFF;
template<int ROWS, bool DENSE> struct KeyTiles {
  int count;
  SAGE2_DEV KeyTiles(const Params &p, const Tile &t) : count(key_tiles<ROWS>(p, t)) {}
  SAGE2_DEV void keep_spans(const Params &, const Tile &, uint32_t) const {}
  SAGE2_DEV uint32_t entry(const Params &, int i, uint32_t) const { return count - 1 - i; }
};
template<int ROWS> struct KeyTiles<ROWS, false> {
  int count, last;                 // last: the tile of entry 0, or with a mask tensor the index of the query tile's list
  SAGE2_DEV KeyTiles(const Params &p, const Tile &t) : count(0), last(0) {
    if (p.mask.data) {
      last = mask_plane(p, t) * p.q_tiles + t.row0 / ROWS;
      count = __ldg(p.mask.counts + last);
    } else if (t.row0 < t.q_len) {
      const TileRange r = tile_range(t.row0, min(t.row0 + ROWS, t.q_len) - 1, {t.keys, t.offset, p.left, p.right});
      count = r.end - r.begin, last = r.end - 1;
    }
  }
  SAGE2_DEV void keep_spans(const Params &p, const Tile &t, uint32_t spans) const {
    if (p.mask.data) return;
    #pragma unroll 1
    for (int w = 0; w < ROWS / 64; w++) {
      const int first = t.row0 + 64 * w, end = min(first + 64, t.q_len) - 1;
      const Limits l = {t.keys, t.offset, p.left, p.right};
      const TileRange seen = tile_range(first, end, l);
      store_shared4(spans + 16 * w, seen.begin, first > end ? seen.begin : seen.end,
                    (first_key(end, l) + kTileTokens - 1) / kTileTokens, end_key(first, l) / kTileTokens);
    }
  }
  SAGE2_DEV uint32_t entry(const Params &p, int i, uint32_t spans) const {
    if (p.mask.data) return __ldg(p.mask.lists + (int64_t)last * p.blocks + i);
    const int tile = last - i;
    uint32_t entry = tile;
    #pragma unroll 1
    for (int w = 0; w < ROWS / 64; w++) {
      const uint4 s = load_shared4(spans + 16 * w);          // seen from, to, whole from, to
      const int kind = tile < (int)s.x || tile >= (int)s.y ? kUnseen : tile >= (int)s.z && tile < (int)s.w ? kWhole : kPartial;
      entry |= kind << (24 + 2 * w);
    }
    return entry;
  }
};

}  // namespace sage2
