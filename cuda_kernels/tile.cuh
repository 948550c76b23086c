// Which 64-row groups of queries a CTA works on, in which order, and against how many key tiles.
#pragma once
#include "mask.cuh"
#include "params.h"
#include "ptx.cuh"

namespace sage2 {

SAGE2_DEV int thread_index() { int t; asm volatile("mov.u32 %0,%%tid.x;" : "=r"(t)); return t; }      // read again, not kept
SAGE2_DEV int uniform(int x) { return (int)__reduce_or_sync(~0u, (unsigned)x); }   // tells the compiler that a warp agrees on x

struct Tile { int b, h, kv_head, row0, keys, offset; };
template<int ROWS> SAGE2_DEV Tile decode(const Params &p, int t) {     // ROWS: of a CTA's tile
  // Longest first inside a group of heads that share L2; the last group may be smaller. Non-causal: group = 1.
  const int g = t / (p.group * p.q_tiles), r = t - g * p.group * p.q_tiles;
  const int heads = min(p.group, p.batch * p.heads - g * p.group);
  const int bh = g * p.group + r % heads, b = bh / p.heads, h = bh - b * p.heads;
  const int keys = p.kv_lens ? min(max(__ldg(p.kv_lens + b), 0), p.kv_len) : p.kv_len;
  const int offset = !p.causal ? kNoCausalOffset : p.top_left ? 0 : keys - p.q_len;
  return {b, h, b * p.kv_heads + h / p.heads_per_kv, (p.q_tiles - 1 - r / heads) * ROWS, keys, offset};
}
template<int ROWS> SAGE2_DEV int key_tiles(const Params &p, const Tile &t) {     // of the whole CTA; the ring runs from the last to the first
  return tile_span(t.row0, min(t.row0 + ROWS, p.q_len) - 1, p.q_len, t.keys, t.offset).seen;
}

}  // namespace sage2
