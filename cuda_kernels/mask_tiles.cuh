// Mask tensors -> bits of partly hidden key tiles, lists of the key tiles that a query tile walks, the keys that any
// row sees: what Mask of params.h points to. Two ways: a mask of rows and keys is looked at everywhere, by two
// launches; a mask that says the same to all rows once a key, by one.
#pragma once
#include "params.h"
#include "ptx.cuh"
#include "visibility.cuh"

namespace sage2 {
namespace {

constexpr int kGroupRows = 64;  // query rows of one consumer warpgroup

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1000
constexpr int kPackCtas = 12;  // an SM holds; with fewer registers than that allows it spills there
#else
constexpr int kPackCtas = 0;  // as many as the compiler finds good
#endif

// A thread is a key, a CTA 64 rows and a key tile of one plane: their bits, their class, and which keys any row sees.
__global__ void __launch_bounds__(kTileTokens, kPackCtas) pack_mask(const __grid_constant__ Params p) {
  grid_dependency_trigger();
  const Mask &m = p.mask;
  const int groups = m.q_pad / kGroupRows;
  const int64_t unit = blockIdx.x / p.blocks;
  const int block = blockIdx.x % p.blocks, row0 = unit % groups * kGroupRows;
  const int64_t plane = unit / groups;
  const int b = plane / m.mh, h = plane - (int64_t)b * m.mh;
  const int keys = p.kv_lens ? min(max(__ldg(p.kv_lens + b), 0), p.kv_len) : p.kv_len;
  const Limits limits = {keys, p.top_left ? 0 : keys - p.q_len, p.left, p.right};
  const int key = block * kTileTokens + threadIdx.x, rows = min(kGroupRows, p.q_len - row0);
  const int64_t first = b * m.batch + h * m.head + row0 * m.row + key * m.column;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = row0 / kGroupRows, tile_groups = p.tile_rows / kGroupRows;
  const int64_t q_tile = plane * p.q_tiles + group / tile_groups;
  uint8_t *bits = (uint8_t *)(m.bits + ((q_tile * p.blocks + block) * tile_groups + group % tile_groups) * kMaskWords);
  uint8_t *const byte = bits + warp;
  auto look = [&](int i, bool &plain) {  // row i at this key
    if (m.kind == kBool) return __ldg((const uint8_t *)m.data + first + i * m.row) != 0;
    const float x = mask_value(m.data, m.kind, first + i * m.row);
    plain = x == 0.f;
    return x != -INFINITY;
  };
  const int begin = block * kTileTokens, end = begin + kTileTokens, last = row0 + rows - 1;
  const bool hidden = rows <= 0 || end <= first_key(row0, limits) || begin >= end_key(last, limits);
  bool any = false, all = !hidden;  // all: seen, and nothing added
  if (!hidden) {
    #pragma unroll 8
    for (int i = 0; i < kGroupRows; i++) {
      const int row = row0 + i;
      bool plain = true, visible = i < rows && key >= first_key(row, limits) && key < end_key(row, limits);
      if (visible) visible = look(i, plain);
      any |= visible;
      all &= i >= rows || (visible && plain);
      // A byte of word `lane`, in the order of hide().
      const uint32_t seen = __ballot_sync(~0u, visible) >> 2 * (lane & 3);
      if (lane < 4)
        byte[4 * mask_word(i, lane)] = (seen & 3) | (seen >> 6 & 12) | (seen >> 12 & 48) | (seen >> 18 & 192);
    }
  }
  const uint32_t seen = __ballot_sync(~0u, any);
  if (lane == 0 && seen) atomicOr(m.seen + ((int64_t)b * p.blocks + block) * 4 + warp, seen);
  const bool some = __syncthreads_or(any), whole = __syncthreads_and(all);
  if (threadIdx.x == 0)
    m.classes[(plane * groups + group) * p.blocks + block] = !some ? kUnseen : whole ? kWhole : kPartial;
}

// A warp lists the key tiles that a query tile walks, the last one first (KeyTiles of schedule.cuh).
__global__ void __launch_bounds__(32) list_tiles(const __grid_constant__ Params p) {
  grid_dependency_trigger();
  const int groups = p.tile_rows / kGroupRows;
  grid_dependency_wait();
  const Mask &m = p.mask;
  const int64_t q_tile = blockIdx.x;  // of all planes
  const uint8_t *classes = m.classes + q_tile * groups * p.blocks;
  uint32_t *list = m.lists + q_tile * p.blocks;
  int count = 0;
  for (int from = p.blocks - 1; from >= 0; from -= 32) {
    const int tile = from - (int)threadIdx.x;
    uint32_t entry = 0;
    if (tile >= 0)
      for (int w = 0; w < groups; w++) entry |= (uint32_t)classes[w * p.blocks + tile] << (24 + 2 * w);
    const uint32_t walked = __ballot_sync(~0u, entry != 0);
    if (entry) list[count + __popc(walked & ((1u << threadIdx.x) - 1))] = entry | tile;
    count += __popc(walked);
  }
  if (threadIdx.x == 0) m.counts[q_tile] = count;
}

// A mask that says the same to all rows of a plane: a CTA makes all that the two kernels above do for a query tile,
// from one look at each key, kChunk key tiles at a time, the last ones first.
constexpr int kKeyMaskThreads = 256, kChunk = 32;
__global__ void __launch_bounds__(kKeyMaskThreads) pack_key_mask(const __grid_constant__ Params p) {
  __shared__ uint32_t seen[4 * kChunk], whole[4 * kChunk];  // a bit for each key: seen; and nothing is added
  __shared__ uint32_t entries[kChunk];
  grid_dependency_trigger();
  const Mask &m = p.mask;
  const int plane = blockIdx.x / p.q_tiles, q_tile = blockIdx.x % p.q_tiles, b = plane / m.mh, h = plane % m.mh;
  const int keys = p.kv_lens ? min(max(__ldg(p.kv_lens + b), 0), p.kv_len) : p.kv_len;
  const Limits limits = {keys, p.top_left ? 0 : keys - p.q_len, p.left, p.right};
  const int groups = p.tile_rows / kGroupRows, row0 = q_tile * p.tile_rows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first = b * m.batch + h * m.head;
  int count = 0;
  for (int end = p.blocks; end > 0; end -= kChunk) {
    const int begin = max(end - kChunk, 0), words = 4 * (end - begin);
    #pragma unroll 4
    for (int word = warp; word < words; word += kKeyMaskThreads / 32) {
      const int key = begin * kTileTokens + word * 32 + lane;
      bool visible = key < keys, plain = true;
      if (visible && m.kind == kBool) visible = __ldg((const uint8_t *)m.data + first + key * m.column) != 0;
      else if (visible) {
        const float x = mask_value(m.data, m.kind, first + key * m.column);
        visible = x != -INFINITY;
        plain = x == 0.f;
      }
      const uint32_t here = __ballot_sync(~0u, visible), all = __ballot_sync(~0u, visible && plain);
      if (lane == 0) {
        seen[word] = here;
        whole[word] = all;
      }
      if (q_tile == 0) {  // one look at a key decides for all rows, whose limits follow one another without a gap
        const bool in_reach = key >= first_key(0, limits) && key < end_key(p.q_len - 1, limits);
        const uint32_t reached = __ballot_sync(~0u, visible && in_reach);
        uint32_t *const to = m.seen + (int64_t)b * p.blocks * 4 + begin * 4 + word;
        if (lane == 0 && m.mh == 1) *to = reached;
        else if (lane == 0 && reached) atomicOr(to, reached);
      }
    }
    __syncthreads();
    // The bits of the keys [from, to) of a tile.
    const auto within = [&](int tile, int word, int from, int to) {
      const int at = (begin + tile) * kTileTokens + word * 32, low = min(max(from - at, 0), 32), high = to - at;
      const uint32_t below = high <= 0 ? 0u : high >= 32 ? ~0u : (1u << high) - 1;
      return low >= 32 ? 0u : below >> low << low;
    };
    if (warp == 0) {
      const int tile = end - 1 - lane - begin;  // the last one first
      uint32_t entry = 0;
      for (int w = 0; w < groups && tile >= 0; w++) {
        const int row = row0 + w * kGroupRows, last = min(row + kGroupRows, p.q_len) - 1;
        if (row > last) break;
        const int from = (begin + tile) * kTileTokens, to = from + kTileTokens;
        uint32_t any = 0, all = ~0u;
        for (int word = 0; word < 4; word++) {
          any |= seen[4 * tile + word] & within(tile, word, first_key(row, limits), end_key(last, limits));
          all &= whole[4 * tile + word];
        }
        const bool inside = from >= first_key(last, limits) && to <= end_key(row, limits);
        entry |= (uint32_t)(!any ? kUnseen : inside && all == ~0u ? kWhole : kPartial) << (24 + 2 * w);
      }
      const uint32_t walked = __ballot_sync(~0u, entry != 0);
      if (entry) {
        const int64_t list = ((int64_t)plane * p.q_tiles + q_tile) * p.blocks;
        m.lists[list + count + __popc(walked & ((1u << lane) - 1))] = entry | (begin + tile);
      }
      count += __popc(walked);
      if (tile >= 0) entries[tile] = entry;
    }
    __syncthreads();
    for (int i = warp; i < (end - begin) * groups; i += kKeyMaskThreads / 32) {  // a warp writes the bits of 64 rows
      const int tile = i / groups, w = i % groups;
      if ((entries[tile] >> (24 + 2 * w) & 3) != kPartial) continue;
      const int64_t place = (((int64_t)plane * p.q_tiles + q_tile) * p.blocks + begin + tile) * groups + w;
      uint4 *const to = (uint4 *)(m.bits + place * kMaskWords);
      #pragma unroll
      for (int j = lane; j < kMaskWords / 4; j += 32) {  // words 4 j ..: of rows r and r + 8, each columns c and c + 1
        const int r = j / 16 * 16 + j % 16 / 2, c = j % 2 * 2;
        uint32_t out[4] = {};
        #pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = row0 + w * kGroupRows + r + 8 * half;
          #pragma unroll
          for (int word = 0; word < 4; word++) {
            uint32_t x = seen[4 * tile + word] & within(tile, word, first_key(row, limits), end_key(row, limits));
            if (row >= p.q_len) x = 0;
            #pragma unroll
            for (int e = 0; e < 2; e++) {  // a byte of the word of columns c + e, in the order of hide()
              const uint32_t y = x >> 2 * (c + e);
              out[2 * e + half] |= ((y & 3) | (y >> 6 & 12) | (y >> 12 & 48) | (y >> 18 & 192)) << 8 * word;
            }
          }
        }
        to[j] = {out[0], out[1], out[2], out[3]};
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) m.counts[(int64_t)plane * p.q_tiles + q_tile] = count;
}

}  // namespace
}  // namespace sage2
