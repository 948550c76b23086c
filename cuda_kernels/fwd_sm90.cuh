// Attention forward for Hopper (sm_90a): INT8 Q K^T, then FP8 or FP16 P V. Compiled for three families (params.h): what
// a call does not ask for costs it nothing. Outside the dense one a note travels with every K image: its scales and, with a
// mask tensor, which key tile it is and what each consumer's rows see of it.
//
// A CTA is one feeding warpgroup and three consumers over 192 query rows (dense dim 64 FP8: four over 256; kAdjusted and
// dim 256: two over 128). Of the feeder, warp 0 streams K and V images through a ring of bulk copies, warps 1..3 load and
// quantize the next tile's Q. A consumer owns 64 rows and runs strictly serially, scores -> softmax -> P V; tensor cores and
// softmax overlap between consumers, not in one. Of 256 channels of V a launch computes one half.
//
// What it may use of registers and shared memory: layout.cuh.
#pragma once
#include <type_traits>
#include "dump.cuh"
#include "layout.cuh"
#include "logits.cuh"
#include "mask.cuh"
#include "params.h"
#include "ptx.cuh"
#include "query.cuh"
#include "softmax.cuh"
#include "tile.cuh"

namespace sage2 {
namespace {

// ------------------------------------------------------------------ the kernel
template<int DIM, bool FP16, Family FAMILY>
__global__ void __launch_bounds__(Layout<DIM, FP16, FAMILY>::threads, 1) attention(const __grid_constant__ Params p) {
  using L = Layout<DIM, FP16, FAMILY>;
  constexpr bool kIsDense = FAMILY == kDense, kSmooths = FAMILY == kAdjusted && DIM <= 128;     // INT4, Q's means
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t s0 = smem_address(smem);
  const Barriers<L::stages, L::consumers> bar(s0 + L::at_barrier);
  const uint32_t slot = s0 + L::at_slot;                       // the tile of each Q buffer; -1 ends the loop
  const int group = uniform(threadIdx.x >> 7), warp = uniform(threadIdx.x >> 5) & 3;

  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(bar.tile_full + 8 * i, 1);
      barrier_init(bar.q_empty + 8 * i, 4 * L::consumers);
      for (int w = 0; w < L::consumers; w++) barrier_init(bar.q_full + 8 * (i * L::consumers + w), 4);
    }
    for (int i = 0; i < L::stages; i++) {
      barrier_init(bar.k_full + 8 * i, 1), barrier_init(bar.k_empty + 8 * i, 4 * L::consumers);
      barrier_init(bar.v_full + 8 * i, 1), barrier_init(bar.v_empty + 8 * i, 4 * L::consumers);
    }
    for (int w = 0; w < 3; w++) barrier_init(bar.raw_full + 8 * w, 1);
    barrier_init_fence();
    store_shared(slot, blockIdx.x);
  }
  if (!FP16)                                                   // E4M3 ones; the bulk copies never touch these rows
    for (int st = 0; st < L::stages; st++)
      for (int i = threadIdx.x; i < 8 * kVPitch / 4; i += L::threads) store_shared(s0 + L::at_v + st * L::v_stage + L::v + 4 * i, 0x38383838u);
  async_proxy_fence();
  __syncthreads();
  grid_dependency_wait();

  if (group == 0) {
    registers_shrink<L::feeder_registers>();
    if (warp == 0) {
      // ------------------------------------------------------ one lane: tile order, K and V
      if (threadIdx.x != 0) return;
      int t = blockIdx.x, stage = 0, parity = 1, n = 0;        // n counts this CTA's tiles
      barrier_arrive(bar.tile_full);
      while (t >= 0) {
        const Tile tile = decode<L::rows, kIsDense>(p, t);
        const KeyTiles<L::rows, kIsDense> ring_tiles(p, tile);
        const int tiles = ring_tiles.count;
        for (int i = 0; ; i++) {
          if (i < tiles) {
            const uint32_t entry = ring_tiles.entry(p, i);
            const int64_t block = tile.image + (int64_t)(entry & kTileOfEntry);
            barrier_wait(bar.k_empty + 8 * stage, parity);
            if constexpr (kIsDense) barrier_expect(bar.k_full + 8 * stage, L::k);
            else {
              const uint32_t note = s0 + L::at_note + stage * L::note;
              const bool bits = p.mask.data && (entry & kSomePartial);
              if (p.mask.data) store_shared(note + L::note_entry, entry);
              barrier_expect(bar.k_full + 8 * stage, L::k + 16 + (bits ? L::note_bits : 0));
              bulk_load(note + L::note_scales, p.images.k_scale + block * kScaleGroups, 16, bar.k_full + 8 * stage);
              if (bits) bulk_load(note, p.mask.bits + ring_tiles.tile_of_mask(p, entry) * (L::note_bits / 4), L::note_bits, bar.k_full + 8 * stage);
            }
            bulk_load(s0 + L::at_k + stage * L::k, p.images.k + block * L::k, L::k, bar.k_full + 8 * stage);
            barrier_wait(bar.v_empty + 8 * stage, parity);
            barrier_expect(bar.v_full + 8 * stage, L::v);
            bulk_load(s0 + L::at_v + stage * L::v_stage, p.images.v + block * L::v, L::v, bar.v_full + 8 * stage);
            if (++stage == L::stages) stage = 0, parity ^= 1;
          }
          // The next tile is announced once the ring has gone round in this one (the consumers are then past the tile
          // before it, so the Q buffer is free), early enough for its Q to be ready in time.
          if (i == min(L::stages, max(tiles - 1, 0))) {
            const int ticket = atomicAdd(p.images.counter, 1);
            if (ticket == p.total - 1) *p.images.counter = 0;  // the last draw of the launch leaves it as it was
            t = ticket + (int)gridDim.x < p.total ? ticket + (int)gridDim.x : -1;
            if (++n >= 2) barrier_wait(bar.q_empty + 8 * (n & 1), ((n >> 1) & 1) ^ 1);
            store_shared(slot + 4 * (n & 1), t);
            barrier_arrive(bar.tile_full + 8 * (n & 1));
          }
          if (i >= tiles - 1 && i >= min(L::stages, max(tiles - 1, 0))) break;
        }
      }
    } else {
      // ------------------------------------------------------ three warps: Q of every tile but the first
      const int w = warp - 1;
      int parity = 0;
      for (int n = 1; ; n++) {
        const int buffer = n & 1;
        barrier_wait(bar.tile_full + 8 * buffer, (n >> 1) & 1);
        const int t = uniform(load_shared_int(slot + 4 * buffer));
        for (int g = w; g < L::consumers; g += 3) {            // consumer group g's 64 rows
          if (t >= 0)
            prefetch_q<DIM, L::raw_rows, kSmooths>(p, decode<L::rows, kIsDense>(p, t), 64 * g, s0 + L::at_raw + w * L::raw, bar.raw_full + 8 * w, parity,
                          {s0 + L::at_q + buffer * L::consumers * L::q, s0 + L::at_q_scale + buffer * L::rows * 4,
                           s0 + L::at_q_dot + buffer * L::rows * 4});
          barrier_arrive_warp(bar.q_full + 8 * (buffer * L::consumers + g), 4);
        }
        if (t < 0) return;
      }
    }
    return;
  }

  // ---------------------------------------------------------- consumers
  registers_grow<L::registers>();
  constexpr bool kPingPong = !FP16;                            // takes turns on the tensor cores; pays for FP8 only
  constexpr int DV = L::DV, kOut = DV / 2;                                // accumulators of a thread
  const int w = group - 1, lane = threadIdx.x & 31, c = lane & 3, r = warp * 16 + (lane >> 2);   // row in the warpgroup
  const uint32_t desc_k = desc_low(s0 + L::at_k), desc_v = desc_low(s0 + L::at_v, FP16 ? kTileTokens * 128 : 16);
  if (kPingPong && w == L::consumers - 1) named_arrive(1, 256);
  auto my_turn = [&] { if (kPingPong) named_sync(w + 1, 256); };
  auto pass_turn = [&] { if (kPingPong) named_arrive(w + 1 == L::consumers ? 1 : w + 2, 256); };

  int turn = 0;                                                // key tiles so far: stage = turn % stages, its parity = turn / stages % 2
  for (int n = 0; ; n++) {
    const uint32_t at_rows = s0 + L::at_q_scale + ((n & 1) * L::rows + 64 * w) * 4;                // (tid & 0x7C) * 2 = 4 * row_slot(r)
    if (n == 0) {                                              // nobody is ahead of the first tile: each warp loads its own rows
      load_q<DIM, kSmooths>(p, decode<L::rows, kIsDense>(p, blockIdx.x), 64 * w + warp * 16, {s0 + L::at_q, s0 + L::at_q_scale, s0 + L::at_q_dot});
      barrier_arrive_warp(bar.q_full + 8 * w);
    }
    barrier_wait(bar.q_full + 8 * ((n & 1) * L::consumers + w), (n >> 1) & 1);
    const int t = uniform(load_shared_int(slot + 4 * (n & 1)));
    if (t < 0) break;

    float O[kOut], l0 = 0.f, l1 = 0.f;
    RowState state = {kNoKeys, kNoKeys, 1.f, 1.f};
    #pragma unroll
    for (int i = 0; i < kOut; i++) O[i] = 0.f;
    {
      int end, end_masked, end_dead, end_whole = 0, end_low = 0, last = 0;        // turns; last: the key tile of turn 0
      [[maybe_unused]] const float *k_scales;                  // of this head's key tiles, four each
      // What a masked tile needs, kept in memory: keys, newest key our first row may see, rows left, and where the values of
      // our rows of the mask begin, and their correction for Q's mean.
      const uint32_t limits = s0 + L::at_limits + L::limits * (4 * w + warp);
      {
        const Tile tile = decode<L::rows, kIsDense>(p, t);
        if constexpr (!kIsDense) {
          const KeyTiles<L::rows, kIsDense> ring_tiles(p, tile);
          end = turn + uniform(ring_tiles.count), last = turn + uniform(ring_tiles.last);
          const int first = tile.row0 + 64 * w, below = min(first + 64, tile.q_len) - 1;
          const Limits l = {tile.keys, tile.offset, p.left, p.right};
          const TileRange seen = tile_range(first, below, l);
          const int whole_end = end_key(first, l) / kTileTokens, whole_begin = min(whole_end, (first_key(below, l) + kTileTokens - 1) / kTileTokens);
          const bool none = first > below;                     // from the last tile on: unseen, partial, whole, partial, unseen
          end_dead = none ? end : last - uniform(seen.end) + 1, end_masked = none ? end : max(end_dead, last - uniform(whole_end) + 1);
          end_whole = none ? end : max(end_masked, last - uniform(whole_begin) + 1), end_low = none ? end : max(end_whole, last - uniform(seen.begin) + 1);
          if (kSmooths && p.smooth_q) {
            const uint64_t at = (uint64_t)(p.correction + (int64_t)q_block(p, tile, 64 * w) * p.blocks * kTileTokens);
            store_shared2(limits + 32, at, at >> 32);
          }
          if (FAMILY == kAdjusted && p.mask.data) {
            const int size = p.mask.kind == kFloat32 ? 4 : p.mask.kind == kBool ? 1 : 2;
            const uint64_t bias = (uint64_t)p.mask.data + (tile.b * p.mask.batch + tile.h * p.mask.head + (tile.row0 + 64 * w) * p.mask.row) * size;
            store_shared2(limits + 16, bias, bias >> 32);
            store_shared(limits + 8, tile.q_len - 1 - tile.row0 - 64 * w);
          }
        } else {
          const TileSpan span = tile_span(tile.row0 + 64 * w, tile.row0 + 64 * w + 63, p.q_len, tile.keys, tile.offset);
          const int tiles = uniform(key_tiles<L::rows>(p, tile));
          end = turn + tiles, end_masked = end - uniform(span.full), end_dead = end - min(uniform(span.seen), tiles);
          k_scales = p.images.k_scale + (int64_t)uniform(tile.kv_head) * p.blocks * kScaleGroups;
        }
        store_shared2(limits, tile.keys, tile.row0 + 64 * w + tile.offset);    // every lane the same
        __syncwarp();
      }
      const uint32_t desc_q = desc_low(s0 + L::at_q + ((n & 1) * L::consumers + w) * L::q);

      // One key tile.
      auto step = [&](auto kind, auto key_tile, bool partial) {
        constexpr Scores kKind = decltype(kind)::value;
        const int stage = turn & (L::stages - 1), parity = turn >> L::log_stages & 1;
        const uint32_t ring = bar.k_full + 8 * stage;
        // Marks are set before our turn, while the tensor cores are others'. They are in two branches, which the compiler
        // does not move behind the hand-over.
        constexpr bool kStarted = kKind == kManyHidden;
        constexpr int kToKEmpty = 8 * L::stages, kToVFull = 16 * L::stages, kToVEmpty = 24 * L::stages;
        int S[64];
        float k_scale;
        float2 q_scale, seen = {};                             // seen: which columns rows r and r + 8 see, as bits
        bool vanish = true;                                    // hidden scores need no further care
        if constexpr (kIsDense) {
          barrier_wait(ring, parity);                          // the others have waited: they needed the entry
          k_scale = __ldg(k_scales + key_tile() * kScaleGroups + (thread_index() & 3));
        } else {
          const uint32_t note = s0 + L::at_note + stage * L::note;
          k_scale = load_shared(note + L::note_scales + (thread_index() & 3) * 4);
          if (kKind != kAllSeen && partial && p.mask.data) {
            seen = load_shared2(note + 8 * (thread_index() - 128));
            if (kStarted) start_scores(S, __float_as_uint(seen.x), __float_as_uint(seen.y));
          } else if (kStarted) {
            #pragma unroll
            for (int i = 0; i < 64; i++) S[i] = 0;
            hide_by_limits<true, kBarred>(S, limits, thread_index(), key_tile() * kTileTokens, p.left, p.right);
          }
        }
        auto meanwhile = [&] {
          if (kStarted) q_scale = load_shared2(at_rows + (thread_index() & 0x7C) * 2), vanish = hidden_vanish(k_scale, q_scale.x, q_scale.y);
        };
        my_turn();
        if (DIM > 128 && p.head_dim <= 192) scores<DIM, 6, kStarted>(S, desc_q, desc_k + stage * (L::k / 16), meanwhile);
        else scores<DIM, DIM / 32, kStarted>(S, desc_q, desc_k + stage * (L::k / 16), meanwhile);
        pass_turn();
        barrier_arrive_warp(ring + kToKEmpty);
        // Fetched here each time: registers are short, and a load that everything below needs also keeps the compiler
        // from moving the softmax above the hand-over.
        const int tid = thread_index();
        if constexpr (!kStarted) q_scale = load_shared2(at_rows + (tid & 0x7C) * 2);
        if (kKind != kAllSeen && !kStarted && partial) {
          if (!kIsDense && p.mask.data) hide(S, __float_as_uint(seen.x), __float_as_uint(seen.y));
          else hide_by_limits<!kIsDense, kHidden>(S, limits, tid, key_tile() * kTileTokens, p.left, kIsDense ? 0 : p.right);
        }
        SAGE2_DUMP_ONLY(const DumpAt at = dump_at(p, decode<L::rows, kIsDense>(p, t), 64 * w + r, c, key_tile()); dump_scores(at, S);)
        if constexpr (kKind == kLogits) {
          const float2 dot = load_shared2(at_rows + (tid & 0x7C) * 2 + L::at_q_dot - L::at_q_scale);
          const float2 at = load_shared2(limits + 16);
          const int last_row = load_shared_int(limits + 8), mine = (tid >> 5 & 3) * 16 + (tid >> 2 & 7), size = p.mask.kind == kFloat32 ? 4 : 2;
          const uint8_t *bias = (const uint8_t *)((uint64_t)__float_as_uint(at.y) << 32 | __float_as_uint(at.x)) + key_tile() * kTileTokens * p.mask.column * size;
          const float most = p.int4 ? kMaxStepInt4 : kMaxStep;
          const float *correction = nullptr;
          if (kSmooths && p.smooth_q) {
            const float2 rows = load_shared2(limits + 32);
            correction = (const float *)((uint64_t)__float_as_uint(rows.y) << 32 | __float_as_uint(rows.x)) + key_tile() * kTileTokens;
          }
          logits(S, step_of(k_scale, q_scale.x, most), step_of(k_scale, q_scale.y, most), dot.x * kLog2e, dot.y * kLog2e, {p.softcap, p.softcap_step},
                 {bias + min(mine, last_row) * p.mask.row * size, bias + min(mine + 8, last_row) * p.mask.row * size, p.mask.column,
                  partial && p.mask.data ? p.mask.kind : kNoMask, p.kv_len - 1 - key_tile() * kTileTokens, p.mask.pairs != 0},
                 correction, tid & 3);
        }
        if constexpr (FP16) {
          uint32_t P[32];
          bool moved;
          if (vanish) moved = softmax_fp16<kKind>(S, P, k_scale, q_scale.x, q_scale.y, state, l0, l1);
          else mark_hidden(S), moved = softmax_fp16<kSomeHidden>(S, P, k_scale, q_scale.x, q_scale.y, state, l0, l1);
          if (moved)
            #pragma unroll
            for (int i = 0; i < kOut; i++) O[i] *= i & 2 ? state.a1 : state.a0;
          barrier_wait(ring + kToVFull, parity);
          SAGE2_DUMP_ONLY(dump_probabilities(at, P);)
          weigh_fp16(O, P, desc_v + stage * (L::v_stage / 16));
          barrier_arrive_warp(ring + kToVEmpty);
          SAGE2_DUMP_ONLY(dump_sums<DV>(at, O, state.m0, state.m1, quad_sum(l0), quad_sum(l1));)
        } else {
          uint32_t P[16];
          if (vanish) softmax_fp8<kKind>(S, P, k_scale, q_scale.x, q_scale.y, state);
          else mark_hidden(S), softmax_fp8<kSomeHidden>(S, P, k_scale, q_scale.x, q_scale.y, state);
          barrier_wait(ring + kToVFull, parity);
          SAGE2_DUMP_ONLY(dump_probabilities(at, P);)
          float T[kOut + 4];                                   // and the row sums, each twice
          weigh_fp8(T, P, desc_v + stage * (L::v_stage / 16));
          barrier_arrive_warp(ring + kToVEmpty);
          SAGE2_DUMP_ONLY(dump_sums<DV>(at, T, state.m0, state.m1, T[kOut], T[kOut + 2]);)
          #pragma unroll
          for (int i = 0; i < kOut; i++) O[i] = fmaf(O[i], i & 2 ? state.a1 : state.a0, T[i]);
          l0 = fmaf(l0, state.a0, T[kOut]), l1 = fmaf(l1, state.a1, T[kOut + 2]);
        }
        turn++;
      };
      typedef std::integral_constant<Scores, kAllSeen> AllSeen;
      typedef std::integral_constant<Scores, kSomeHidden> SomeHidden;
      auto k_arrived = [&] { barrier_wait(bar.k_full + 8 * (turn & (L::stages - 1)), turn >> L::log_stages & 1); };
      auto let_pass = [&] {                                    // none of our rows sees it
        const uint32_t ring = bar.k_full + 8 * (turn & (L::stages - 1)), parity = turn >> L::log_stages & 1;
        barrier_wait(ring, parity), barrier_wait(ring + 16 * L::stages, parity);
        my_turn(), pass_turn();
        barrier_arrive_warp(ring + 8 * L::stages), barrier_arrive_warp(ring + 24 * L::stages);
        turn++;
      };
      if constexpr (!kIsDense) {
        while (turn < end) {
          bool unseen, partial;
          int tile = last - turn;
          k_arrived();
          if (p.mask.data) {
            const int entry = uniform(load_shared_int(s0 + L::at_note + (turn & (L::stages - 1)) * L::note + L::note_entry));
            const int seen = entry >> (24 + 2 * w) & 3;
            unseen = seen == kUnseen, partial = seen == kPartial, tile = entry & kTileOfEntry;
          } else unseen = turn < end_dead || turn >= end_low, partial = turn < end_masked || turn >= end_whole;
          auto key_tile = [&] { return tile; };
          if (unseen) let_pass();
          else if constexpr (FAMILY == kAdjusted) {
            if (p.all_logits || partial) step(std::integral_constant<Scores, kLogits>(), key_tile, partial);
            else step(AllSeen(), key_tile, false);
          } else if (partial) step(std::integral_constant<Scores, kManyHidden>(), key_tile, true);
          else step(AllSeen(), key_tile, false);
        }
      } else {
        auto key_tile = [&] { return end - 1 - turn; };
        while (turn < end_dead) let_pass();
        while (turn < end_masked) step(SomeHidden(), key_tile, true);
        while (turn < end) step(AllSeen(), key_tile, false);
      }
    }

    // -------------------------------------------------------- epilogue: divide, rescale V, add its mean, store whole rows
    const Tile tile = decode<L::rows, kIsDense>(p, uniform(load_shared_int(slot + 4 * (n & 1))));   // again: cheaper than keeping it
    const int row = tile.row0 + 64 * w + r;
    if constexpr (FP16) l0 = quad_sum(l0), l1 = quad_sum(l1);
    float kept0 = 1.f, kept1 = 1.f, shrink0 = 1.f, shrink1 = 1.f;                // with sinks: the keys' share of a row's weight
    if (!kIsDense && p.sinks) {
      const float2 dot = load_shared2(at_rows + (threadIdx.x & 0x7C) * 2 + L::at_q_dot - L::at_q_scale);
      const float sink = __ldg(p.sinks + tile.h) * kLog2e, lacks = FAMILY == kAdjusted && p.softcap != 0.f ? 0.f : kLog2e;      // smoothing took q . k_mean
      add_sink(sink - dot.x * lacks, state.m0, l0, shrink0, kept0), add_sink(sink - dot.y * lacks, state.m1, l1, shrink1, kept1);
    }
    const float i0 = l0 == 0.f ? 0.f : __fdividef(shrink0, l0), i1 = l1 == 0.f ? 0.f : __fdividef(shrink1, l1);   // no keys: zero
    const int64_t vector = (int64_t)tile.kv_head * DIM + (DIM > 128 ? p.v_channel : 0);
    const float *v_scale = p.images.v_scale + vector, *v_mean = p.images.v_mean + vector;
    const int first = tile.row0 + 64 * w + warp * 16;          // this warp's 16 rows
    uint16_t *out = const_cast<uint16_t *>(p.out.data) + tile.b * p.out.batch + tile.h * p.out.head + (int64_t)(tile.q_token + first) * p.out.token;
    const uint32_t staging = s0 + L::at_out + (w * 64 + warp * 16) * L::out_pitch, mine = staging + (lane >> 2) * L::out_pitch + c * 4;
    bulk_wait_read();                                          // the last tile's rows have left the staging area
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < DV / 8; i++) {
      const float2 s = __ldg((const float2 *)(v_scale + 8 * i + 2 * c)), m = __ldg((const float2 *)(v_mean + 8 * i + 2 * c));
      const float2 m0 = l0 == 0.f ? make_float2(0.f, 0.f) : !kIsDense ? make_float2(m.x * kept0, m.y * kept0) : m;
      const float2 m1 = l1 == 0.f ? make_float2(0.f, 0.f) : !kIsDense ? make_float2(m.x * kept1, m.y * kept1) : m;
      const float x0 = fmaf(O[4 * i] * i0, s.x, m0.x), x1 = fmaf(O[4 * i + 1] * i0, s.y, m0.y);
      const float y0 = fmaf(O[4 * i + 2] * i1, s.x, m1.x), y1 = fmaf(O[4 * i + 3] * i1, s.y, m1.y);
      store_shared(mine + i * 16, p.bf16 ? pack_bf16(x0, x1) : pack_f16(x0, x1));
      store_shared(mine + 8 * L::out_pitch + i * 16, p.bf16 ? pack_bf16(y0, y1) : pack_f16(y0, y1));
    }
    async_proxy_fence();
    __syncwarp();
    if (p.out.vector) {
      if (lane < 16 && first + lane < tile.q_len) bulk_store(out + lane * p.out.token, staging + lane * L::out_pitch, p.v_head_dim * 2);
      bulk_commit();
    } else {
      for (int i = 0; i < 16 && first + i < tile.q_len; i++)
        for (int d = lane; d < p.v_head_dim; d += 32) {
          uint16_t x;
          asm volatile("ld.shared.u16 %0,[%1];" : "=h"(x) : "r"(staging + i * L::out_pitch + 2 * d) : "memory");
          out[i * p.out.token + d] = x;
        }
    }
    if (p.lse && c == 0) {                                     // natural log of the true scaled scores
      float *lse = p.lse + ((int64_t)(!kIsDense && p.cu_q ? 0 : tile.b) * p.heads + tile.h) * p.q_len + tile.q_token;
      float2 dot = load_shared2(at_rows + (threadIdx.x & 0x7C) * 2 + L::at_q_dot - L::at_q_scale);
      if (FAMILY == kAdjusted && p.softcap != 0.f) dot = make_float2(0.f, 0.f);          // the logits have it already
      if (row < tile.q_len) lse[row] = l0 == 0.f ? -INFINITY : fmaf(state.m0 + __log2f(l0), 0.6931471806f, dot.x);
      if (row + 8 < tile.q_len) lse[row + 8] = l1 == 0.f ? -INFINITY : fmaf(state.m1 + __log2f(l1), 0.6931471806f, dot.y);
    }
    __syncwarp();
    barrier_arrive_warp(bar.q_empty + 8 * (n & 1));
  }
  if (kPingPong && w == 0) named_sync(1, 256);                 // takes the last hand-over
  bulk_wait();
}

typedef void (*Kernel)(Params);
struct Entry { Kernel kernel; int smem, rows, threads; };
template<int DIM, bool FP16, Family FAMILY> Entry entry() {
  using L = Layout<DIM, FP16, FAMILY>;
  return {attention<DIM, FP16, FAMILY>, L::bytes, L::rows, L::threads};
}
template<Family FAMILY> Entry entry(int dim, bool fp16) {
  if (dim == 64) return fp16 ? entry<64, true, FAMILY>() : entry<64, false, FAMILY>();
  if (dim == 128) return fp16 ? entry<128, true, FAMILY>() : entry<128, false, FAMILY>();
  return entry<256, false, FAMILY>();
}

}  // namespace

template<Family FAMILY> cudaError_t load_family_sm90() {
  for (int i = 0; i < 5; i++) {
    const Entry e = entry<FAMILY>(64 << i / 2, i % 2);
    const cudaError_t err = cudaFuncSetAttribute(e.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, e.smem);
    if (err != cudaSuccess) return err;
  }
  return cudaSuccess;
}
template<Family FAMILY> cudaError_t launch_family_sm90(Params &p, int sm_count, bool overlap, cudaStream_t stream) {
  const Entry e = entry<FAMILY>(padded_dim(p.head_dim), p.fp16_pv);
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = dim3(p.total < sm_count ? p.total : sm_count), cfg.blockDim = dim3(e.threads);
  cfg.dynamicSmemBytes = e.smem, cfg.stream = stream;
  cudaLaunchAttribute attr[1];
  attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attr[0].val.programmaticStreamSerializationAllowed = 1;
  cfg.attrs = attr, cfg.numAttrs = overlap ? 1 : 0;
  void *args[] = {&p};
  return cudaLaunchKernelExC(&cfg, (const void *)e.kernel, args);
}

}  // namespace sage2
