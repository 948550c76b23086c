// A debug build (-DSAGE2_DUMP=NAME) writes what the attention kernels form between their inputs and their output, for
// comparison with sage_patch/reference/sm90.py. NAME is the exported function that says where the kernels of this unit write;
// each unit has its own. In the product build nothing of this exists: the hooks expand to no tokens.
#pragma once

#ifndef SAGE2_DUMP
#define SAGE2_DUMP_ONLY(...)
#else
#define SAGE2_DUMP_ONLY(...) __VA_ARGS__
#include "tile.cuh"

// Device memory of the caller, zeroed; n = 128 * tiles. Tiles that a row's warpgroup does not walk are not written.
// Sequences laid end to end: batch 1, tiles as in the workspace (Params::blocks), each sequence's own first ones in its rows.
struct Sage2Dump {
  int32_t *scores;                 // [batch][heads][q_len][n], after masking (INT32_MIN = hidden)
  void *p;                         // E4M3 bytes or fp16, the same shape
  float *m;                        // [batch][heads][q_len][tiles]: reference exponents after each tile
  float *t;                        // [batch][heads][q_len][tiles][dim + 1]: fp8: P V and row sum of each tile; fp16: O and l after it
};

namespace sage2 {
namespace {

__constant__ Sage2Dump dump;

// Where a thread's accumulators belong: rows r (elements 4i, 4i+1) and r + 8 (4i+2, 4i+3), columns 8i + 2c + {0, 1}.
struct DumpAt {
  int64_t first;                   // of this head's (sequence's) rows
  int rows, row, c, tiles, key_tile;
  SAGE2_DEV bool exists(int element) const { return row + (element & 2) * 4 < rows; }
  SAGE2_DEV int64_t tile(int element) const { return (first + row + (element & 2) * 4) * tiles + key_tile; }
  SAGE2_DEV int column(int element) const { return element / 4 * 8 + 2 * c + (element & 1); }
};
SAGE2_DEV DumpAt dump_at(const Params &p, const Tile &t, int row, int c, int key_tile) {
  return {((int64_t)(p.cu_q ? 0 : t.b) * p.heads + t.h) * p.q_len + t.q_token, t.q_len, t.row0 + row, c, p.blocks, key_tile};
}
SAGE2_DEV void dump_scores(const DumpAt &at, const int (&S)[64]) {
  for (int i = 0; i < 64; i++)
    if (at.exists(i)) dump.scores[at.tile(i) * kTileTokens + at.column(i)] = S[i];
}
SAGE2_DEV void dump_probabilities(const DumpAt &at, const uint32_t (&P)[16]) {      // pack_probabilities' order
  for (int i = 0; i < 64; i++) {
    const int element = i / 8 * 8 + (i & 4) / 2 + (i & 2) * 2 + (i & 1);          // of byte i % 4 of register i / 4
    if (at.exists(element)) ((uint8_t *)dump.p)[at.tile(element) * kTileTokens + at.column(element)] = P[i / 4] >> i % 4 * 8;
  }
}
SAGE2_DEV void dump_probabilities(const DumpAt &at, const uint32_t (&P)[32]) {
  for (int i = 0; i < 64; i++)
    if (at.exists(i)) ((uint16_t *)dump.p)[at.tile(i) * kTileTokens + at.column(i)] = P[i / 2] >> i % 2 * 16;
}
// l0, l1: row sums of rows r and r + 8, the same in all lanes of a quad.
template<int DIM, int N> SAGE2_DEV void dump_sums(const DumpAt &at, const float (&T)[N], float m0, float m1, float l0, float l1) {
  for (int i = 0; i < DIM / 2; i++)
    if (at.exists(i)) dump.t[at.tile(i) * (DIM + 1) + at.column(i)] = T[i];
  if (at.c == 0)
    for (int i = 0; i < 4; i += 2)
      if (at.exists(i)) dump.t[at.tile(i) * (DIM + 1) + DIM] = i ? l1 : l0, dump.m[at.tile(i)] = i ? m1 : m0;
}

}  // namespace
}  // namespace sage2

// Where this unit's kernels write from now on, on the current device. Returns a CUDA error code.
extern "C" __attribute__((visibility("default"))) int SAGE2_DUMP(const Sage2Dump *to) {
  return (int)cudaMemcpyToSymbol(sage2::dump, to, sizeof *to);
}
#endif
