// What the other launches read instead of a mask: bits and lists of key tiles from a mask tensor, an index of the keys that
// exist from a padding mask, an order of query tiles from sequence offsets. Nothing here waits for the host.
#include "mask.cuh"
#include "params.h"
#include "ptx.cuh"

namespace sage2 {
namespace {

constexpr int kGroupRows = 64;               // query rows of one consumer warpgroup
constexpr int kCompactThreads = 1024;

SAGE2_DEV float mask_value(const Mask &m, int64_t i) {
  if (m.kind == kFloat32) return __ldg((const float *)m.data + i);
  const uint32_t w = __ldg((const uint16_t *)m.data + i);
  if (m.kind == kBfloat16) return __uint_as_float(w << 16);
  float x;
  asm("cvt.f32.f16 %0,%1;" : "=f"(x) : "h"((uint16_t)w));
  return x;
}

// A thread is a key, a CTA 64 rows and a key tile of one plane: their bits, their class, and which keys any row sees.
__global__ void __launch_bounds__(kTileTokens) pack_mask(const __grid_constant__ Params p) {
  const Mask &m = p.mask;
  const int groups = m.q_pad / kGroupRows;
  const int64_t unit = blockIdx.x / p.blocks;
  const int block = blockIdx.x % p.blocks, row0 = unit % groups * kGroupRows;
  const int64_t plane = unit / groups;
  const int b = plane / m.mh, h = plane - (int64_t)b * m.mh;
  const int keys = p.kv_lens ? min(max(__ldg(p.kv_lens + b), 0), p.kv_len) : p.kv_len;
  const Limits limits = {keys, p.top_left ? 0 : keys - p.q_len, p.left, p.right};
  const int key = block * kTileTokens + threadIdx.x;
  const int64_t first = b * m.batch + h * m.head + row0 * m.row + key * m.column;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t *bits = (uint8_t *)(m.bits + ((plane * m.q_pad + row0) * p.blocks + block) * 4) + lane * 4 + warp;   // of lanes 0..3
  bool any = false, all = true;              // all: seen, and nothing added
  #pragma unroll 8
  for (int i = 0; i < kGroupRows; i++) {
    const int row = row0 + i;
    bool visible = row < p.q_len && key >= first_key(row, limits) && key < end_key(row, limits), plain = true;
    if (visible) {
      if (m.kind == kBool) visible = __ldg((const uint8_t *)m.data + first + i * m.row) != 0;
      else {
        const float x = mask_value(m, first + i * m.row);
        visible = x != -INFINITY, plain = x == 0.f;
      }
    }
    any |= visible;
    all &= row >= p.q_len || (visible && plain);
    const uint32_t seen = __ballot_sync(~0u, visible) >> 2 * (lane & 3);     // a byte of word `lane`, in the order of hide()
    if (lane < 4) bits[(int64_t)i * p.blocks * 16] = (seen & 3) | (seen >> 6 & 12) | (seen >> 12 & 48) | (seen >> 18 & 192);
  }
  const uint32_t seen = __ballot_sync(~0u, any);
  if (lane == 0 && seen) atomicOr(m.seen + ((int64_t)b * p.blocks + block) * 4 + warp, seen);
  const bool some = __syncthreads_or(any), whole = __syncthreads_and(all);
  if (threadIdx.x == 0) m.classes[(plane * groups + row0 / kGroupRows) * p.blocks + block] = !some ? kUnseen : whole ? kWhole : kPartial;
}

// A warp lists the key tiles that a query tile walks, the last one first (KeyTiles of tile.cuh).
__global__ void __launch_bounds__(32) list_tiles(const __grid_constant__ Params p) {
  const int groups = p.tile_rows / kGroupRows;
  const Mask &m = p.mask;
  const int64_t q_tile = blockIdx.x;         // of all planes
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

// A CTA is a batch item: the keys that its padding mask keeps, in order, and how many they are.
__global__ void __launch_bounds__(kCompactThreads) compact_keys(const __grid_constant__ Params p) {
  __shared__ int sums[kCompactThreads / 32];
  const uint8_t *exists = p.key_padding + blockIdx.x * p.key_padding_batch;
  int32_t *index = p.key_index + (int64_t)blockIdx.x * p.kv_len;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int total = 0;
  for (int from = 0; from < p.kv_len; from += kCompactThreads) {
    const int key = from + threadIdx.x;
    const bool keep = key < p.kv_len && __ldg(exists + key) != 0;
    const uint32_t kept = __ballot_sync(~0u, keep);
    if (lane == 0) sums[warp] = __popc(kept);
    __syncthreads();
    int before = total, all = 0;
    for (int w = 0; w < kCompactThreads / 32; w++) {
      const int n = sums[w];
      if (w < warp) before += n;
      all += n;
    }
    if (keep) index[before + __popc(kept & ((1u << lane) - 1))] = key;
    total += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) const_cast<int32_t *>(p.kv_lens)[blockIdx.x] = total;
}

// Query tile j belongs to the last sequence b with first_tile(b) <= j; tiles that no sequence needs are marked.
SAGE2_DEV int first_tile(const Params &p, int b) { return __ldg(p.cu_q + b) / p.tile_rows + b; }
__global__ void schedule_tiles(const __grid_constant__ Params p, int tiles) {
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= tiles) return;
  int low = 0, high = p.batch;               // first_tile(low) <= j < first_tile(high), where they exist
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_tile(p, middle) <= j ? low : high) = middle;
  }
  const int row0 = (j - first_tile(p, low)) * p.tile_rows, q_len = __ldg(p.cu_q + low + 1) - __ldg(p.cu_q + low);
  p.schedule[j] = row0 >= 0 && row0 < q_len ? make_int2(low, row0) : make_int2(-1, 0);
}

}  // namespace

cudaError_t launch_masks(const Params &p, cudaStream_t stream) {
  if (p.mask.data) {
    const int64_t planes = (int64_t)p.mask.mb * p.mask.mh, units = planes * (p.mask.q_pad / kGroupRows) * p.blocks;
    const cudaError_t err = cudaMemsetAsync(p.mask.seen, 0, (size_t)p.mask.mb * p.blocks * 16, stream);
    if (err != cudaSuccess) return err;
    pack_mask<<<(unsigned)units, kTileTokens, 0, stream>>>(p);
    list_tiles<<<(unsigned)(planes * p.q_tiles), 32, 0, stream>>>(p);
  }
  if (p.key_padding) compact_keys<<<p.batch, kCompactThreads, 0, stream>>>(p);
  if (p.cu_q) {
    const int tiles = p.total / p.heads;
    schedule_tiles<<<(tiles + 127) / 128, 128, 0, stream>>>(p, tiles);
  }
  return cudaGetLastError();
}

}  // namespace sage2
