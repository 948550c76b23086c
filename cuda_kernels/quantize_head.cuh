// Which rows of K and V the pre-processing quantizes: the keys of a head, where they lie, and how eight channels of one
// come into registers.
#pragma once
#include "int8.cuh"
#include "params.h"
#include "ptx.cuh"
#include "visibility.cuh"

namespace sage2 {
namespace {

// What the inputs are like. Plain: rows of 16-byte pieces, INT8; so rows are read ahead while others are written.
// Looked up: such rows, but an index or the bits of a mask leave some keys out. Any: one by one, for unaligned views
// and INT4.
enum Mode { kPlainFp16, kPlainBf16, kLookedUpFp16, kLookedUpBf16, kAny };
SAGE2_HD constexpr bool is_plain(Mode mode) { return mode <= kPlainBf16; }
SAGE2_HD constexpr bool is_ahead(Mode mode) { return mode < kAny; }
template<Mode MODE> SAGE2_DEV bool is_bf16(const Params &p) { return MODE == kAny ? p.bf16 : MODE % 2; }

struct Head {  // one kv head of one batch item
  const uint16_t *k, *v;
  int keys;       // visible
  int item;       // of the batch
  int64_t image;  // its first
};
SAGE2_DEV Head head_of(const Params &p, int64_t head) {
  const int b = head / p.kv_heads, kv = head - (int64_t)b * p.kv_heads;
  Head h = {p.k.data + b * p.k.batch + kv * p.k.head, p.v.data + b * p.v.batch + kv * p.v.head,
            p.kv_lens ? min(max(__ldg(p.kv_lens + b), 0), p.kv_len) : p.kv_len, b, head * p.blocks};
  if (p.cu_k || p.kv_starts) {
    int64_t start;
    if (p.cu_k) {
      const Run run = run_of(p.cu_k, b, p.kv_len);
      start = run.begin;
      h.keys = run.count;
      h.image = (int64_t)kv * p.blocks + start / kTileTokens + b;
    } else start = __ldg(p.kv_starts + b);
    h.k += start * p.k.token;
    h.v += start * p.v.token;
  }
  return h;
}
SAGE2_DEV const uint32_t *seen_keys(const Params &p, const Head &h, int block) {
  return p.mask.seen + ((int64_t)(p.mask.mb > 1 ? h.item : 0) * p.blocks + block) * 4;
}
// Whether there is a key, and no mask hides it from every query: such keys count as absent (they may be NaN).
template<Mode MODE> SAGE2_DEV bool exists(const Params &p, const Head &h, int key) {
  return key < h.keys && (is_plain(MODE) || !p.mask.data || (__ldg(seen_keys(p, h, 0) + key / 32) >> key % 32 & 1));
}

struct Rows {  // K of a head, or as many channels of its V as an image has
  const uint16_t *first;
  int64_t stride;  // elements
  int channels;    // the others are zero
  int vector;      // as View's
};
SAGE2_DEV Rows rows_of(const View &view, const uint16_t *first, int channels) {
  return {first, view.token, channels, view.vector};
}
// The mode of a call's K and V; the bytes from row to row of plain ones fit 32 bits.
inline Mode mode_of(const Params &p) {
  const auto fits = [](const View &x) { return x.vector && x.token > -(1 << 29) && x.token < 1 << 29; };
  if (!fits(p.k) || !fits(p.v) || p.int4) return kAny;
  return (Mode)((p.key_index || p.mask.data ? kLookedUpFp16 : kPlainFp16) + (p.bf16 ? 1 : 0));
}
SAGE2_DEV const int32_t *index_of(const Params &p, const Head &h) { return p.key_index + (int64_t)h.item * p.kv_len; }
template<Mode MODE> SAGE2_DEV const uint16_t *row_of(const Params &p, const Head &h, const Rows &rows, int key) {
  if (is_plain(MODE)) return rows.first + (int64_t)key * (int)rows.stride;
  const int64_t token = p.key_index ? __ldg(index_of(p, h) + key) : key;
  return rows.first + token * rows.stride;
}

// How a block's keys lie in memory.
struct Lie {
  int shift;   // tokens from a key's number to its place
  bool ahead;  // in a row, so that they are read ahead
  bool whole;  // and each of them exists
};
// Of plain rows: block `block` of those up to `last`, of which those before `whole` have all their keys.
template<Mode MODE> SAGE2_DEV Lie lie_of(const Params &p, const Head &h, int block, int whole, int last) {
  if (!is_ahead(MODE)) return {};
  Lie lie = {0, block < last, block < whole};
  if (is_plain(MODE)) return lie;
  if (p.key_index && lie.ahead) {
    const int32_t *const index = index_of(p, h);
    const int from = block * kTileTokens, to = min(from + kTileTokens, h.keys) - 1, place = __ldg(index + from);
    lie.shift = place - from;
    lie.ahead = __ldg(index + to) - place == to - from;
    lie.whole &= lie.ahead;
  }
  if (p.mask.data && lie.whole) {
    const uint4 seen = __ldg((const uint4 *)seen_keys(p, h, block));
    lie.whole = (seen.x & seen.y & seen.z & seen.w) == ~0u;
  }
  return lie;
}
// Of plain rows of such a block, where `wanted`; else x stays as it is. Behind the last key: the last one again.
SAGE2_DEV void load_plain(uint4 &x, const Head &h, const Rows &rows, int key, int channel, const Lie &lie) {
  const uint8_t *const from = (const uint8_t *)(rows.first + channel);
  load_if(x, from + (int64_t)(min(key, h.keys - 1) + lie.shift) * ((int)rows.stride * 2),
          lie.ahead && channel < rows.channels);
}
// Of plain rows, each looked up: in their index, if there is one.
template<int N, class K, class C>
SAGE2_DEV void load_looked_up(const Params &p, const Head &h, const Rows &rows, uint4 (&x)[N], K key, C channel) {
  int zero = 0;
  #pragma unroll
  for (int i = 0; i < N; i++) {
    forget(zero);  // one address after the other: registers that are not there
    int place = min(key(i) + zero, h.keys - 1);
    const int c = channel(i) + zero;
    if (p.key_index) place = __ldg(index_of(p, h) + place);
    load_if(x[i], rows.first + (int64_t)place * (int)rows.stride + c, c < rows.channels);
  }
}
// x[i] becomes eight channels, from channel(i) on, of key(i); zeros where there is no such key. Rows that are not
// aligned take turns, in one piece of code: they are rare.
template<Mode MODE, int N, class K, class C>
SAGE2_DEV void load_some(const Params &p, const Head &h, const Rows &rows, uint4 (&x)[N], K key, C channel) {
  if (is_ahead(MODE) || rows.vector) {
    int zero = 0;
    #pragma unroll
    for (int i = 0; i < N; i++) {
      if (!is_plain(MODE)) forget(zero);  // one address after the other: registers that are not there
      const int k = key(i) + zero;
      x[i] = make_uint4(0, 0, 0, 0);
      if (exists<MODE>(p, h, k)) load_if(x[i], row_of<MODE>(p, h, rows, k) + channel(i), channel(i) < rows.channels);
    }
  } else {
    #pragma unroll 1
    for (int i = 0; i < N; i++) {
      #pragma unroll
      for (int j = 1; j < N; j++) x[j - 1] = x[j];
      x[N - 1] = make_uint4(0, 0, 0, 0);
      if (exists<MODE>(p, h, key(i)))
        x[N - 1] = load_channels(row_of<MODE>(p, h, rows, key(i)), channel(i), rows.channels, 0);
    }
  }
}
// Either, of a block that was not read ahead. Of plain rows x is anything where there is no such key.
template<Mode MODE, int N, class K, class C>
SAGE2_DEV void load_rows(const Params &p, const Head &h, const Rows &rows, uint4 (&x)[N], K key, C channel) {
  if (is_ahead(MODE)) load_looked_up(p, h, rows, x, key, channel);
  else load_some<MODE>(p, h, rows, x, key, channel);
}

}  // namespace
}  // namespace sage2
