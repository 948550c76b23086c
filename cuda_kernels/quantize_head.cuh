// Which rows of K and V the pre-processing quantizes: the keys of a head, where they lie, and how eight channels of one
// come into registers.
#pragma once
#include "int8.cuh"
#include "params.h"
#include "ptx.cuh"
#include "visibility.cuh"

namespace sage2 {
namespace {

// What the inputs are like. Plain: every key of a head, rows of 16-byte pieces, INT8; so rows are read ahead while
// others are written. Any: looked up, for what an index or the bits of a mask leave of the keys, unaligned views and
// INT4.
enum Mode { kPlainFp16, kPlainBf16, kAny };
SAGE2_HD constexpr bool is_plain(Mode mode) { return mode != kAny; }
template<Mode MODE> SAGE2_DEV bool is_bf16(const Params &p) { return MODE == kAny ? p.bf16 : MODE == kPlainBf16; }

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
// Whether there is a key, and no mask hides it from every query: such keys count as absent (they may be NaN).
template<Mode MODE> SAGE2_DEV bool exists(const Params &p, const Head &h, int key) {
  if (key >= h.keys) return false;
  if (is_plain(MODE) || !p.mask.data) return true;
  const int64_t word = (int64_t)(p.mask.mb > 1 ? h.item : 0) * p.blocks * 4 + key / 32;
  return __ldg(p.mask.seen + word) >> key % 32 & 1;
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
  if (!fits(p.k) || !fits(p.v) || p.key_index || p.mask.data || p.int4) return kAny;
  return p.bf16 ? kPlainBf16 : kPlainFp16;
}
template<Mode MODE> SAGE2_DEV const uint16_t *row_of(const Params &p, const Head &h, const Rows &rows, int key) {
  if (is_plain(MODE)) return rows.first + (int64_t)key * (int)rows.stride;
  const int64_t token = p.key_index ? __ldg(p.key_index + (int64_t)h.item * p.kv_len + key) : key;
  return rows.first + token * rows.stride;
}
// Of plain rows, where `wanted`; else x stays as it is. Behind the last key: the last one again.
SAGE2_DEV void load_plain(uint4 &x, const Head &h, const Rows &rows, int key, int channel, bool wanted) {
  const uint8_t *const from = (const uint8_t *)(rows.first + channel);
  load_if(x, from + (int64_t)min(key, h.keys - 1) * ((int)rows.stride * 2), wanted && channel < rows.channels);
}
// x[i] becomes eight channels, from channel(i) on, of key(i); zeros where there is no such key. Rows that are not
// aligned take turns, in one piece of code: they are rare.
template<Mode MODE, int N, class K, class C>
SAGE2_DEV void load_some(const Params &p, const Head &h, const Rows &rows, uint4 (&x)[N], K key, C channel) {
  if (is_plain(MODE) || rows.vector) {
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

}  // namespace
}  // namespace sage2
