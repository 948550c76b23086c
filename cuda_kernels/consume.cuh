// A consumer: 64 query rows against the key tiles of the ring, one after the other. What it walks is in turns, what it
// does in one turn is consume_tile(): scores -> (hidden keys, changed logits) -> softmax -> P V.
#pragma once
#include "dump.cuh"
#include "exponent.cuh"
#include "logits.cuh"
#include "resources.cuh"

namespace sage2 {
namespace {

// What a consumer warp knows in every tile.
template<class L> struct Consumer {
  Cta<L> cta;
  int w, warp;              // consumer warpgroup; warp in it
  int r, c;                 // a thread's rows in the warpgroup are r and r + 8, its columns 8 i + 2 c + {0, 1}
  uint32_t desc_k, desc_v;  // descriptors of the ring's first stage
  SAGE2_DEV Consumer(const Cta<L> &cta, int w, int warp)
      : cta(cta), w(w), warp(warp), r(warp * 16 + ((threadIdx.x & 31) >> 2)), c(threadIdx.x & 3),
        desc_k(desc_low(cta.k(0))), desc_v(desc_low(cta.v(0), L::fp16 ? kTileTokens * 128 : 16)) {}
  // FP8: the consumers take turns on the tensor cores; named barriers, the first of them open at the start.
  SAGE2_DEV void open_turns() const {
    if (L::ping_pong && w == L::consumers - 1) named_arrive(1, 256);
  }
  SAGE2_DEV void my_turn() const {
    if (L::ping_pong) named_sync(w + 1, 256);
  }
  SAGE2_DEV void pass_turn() const {
    if (L::ping_pong) named_arrive(w + 1 == L::consumers ? 1 : w + 2, 256);
  }
  SAGE2_DEV void close_turns() const {
    if (L::ping_pong && w == 0) named_sync(1, 256);  // takes the last hand-over
  }
};

// And in one query tile.
struct Rows {
  int t;                  // the tile
  uint32_t desc_q;        // of the warpgroup's 64 rows
  uint32_t q_scales;      // where their scales begin, and behind them their dots with K's mean
  uint32_t scratch;       // Scratch
  const float *k_scales;  // dense family: of this head's key tiles, four each
};
// Over the keys so far. References: as members of one struct they cost the FP16 kernels moves in their main loop.
template<class L> struct Sums {
  float (&O)[L::sums];
  float &l0, &l1;  // of rows r and r + 8
  RowState &state;
  SAGE2_DUMP_ONLY(DumpAt at = {};)
};

// A turn is a key tile of the ring, counted over all tiles of the CTA; in one query tile they run from the last key
// tile to the first. By what the warpgroup's 64 rows see of them, without a mask tensor:
//
//   turn ->  [dead)      [masked)     [whole)     [low-masked)  [unseen)
//            no row      some rows,   all rows    some rows     no row
//                        the diagonal             the window's first keys
//
// Each end is the first turn that is no more of its kind. The dense family has no windows: whole is the last kind.
struct Turns { int end_dead, end_masked, end_whole, end_low, end, last; };  // last: the key tile of turn 0

template<class L> SAGE2_DEV Turns turns_of(const Params &p, const Tile &tile, int w, int turn) {
  Turns turns = {};
  if constexpr (L::is_dense) {
    const TileSpan span = tile_span(tile.row0 + 64 * w, tile.row0 + 64 * w + 63, p.q_len, tile.keys, tile.offset);
    const int tiles = uniform(key_tiles<L::rows>(p, tile));
    turns.end = turn + tiles;
    turns.end_masked = turns.end - uniform(span.full);
    turns.end_dead = turns.end - min(uniform(span.seen), tiles);
  } else {
    const KeyTiles<L::rows, L::is_dense> key_tiles(p, tile);
    const int end = turn + uniform(key_tiles.count), last = turn + uniform(key_tiles.last);
    const int first = tile.row0 + 64 * w, below = min(first + 64, tile.q_len) - 1;
    const Limits l = {tile.keys, tile.offset, p.left, p.right};
    const TileRange seen = tile_range(first, below, l);
    const int whole_end = end_key(first, l) / kTileTokens;
    const int whole_begin = min(whole_end, (first_key(below, l) + kTileTokens - 1) / kTileTokens);
    const bool none = first > below;
    turns.end = end;
    turns.last = last;
    turns.end_dead = none ? end : last - uniform(seen.end) + 1;
    turns.end_masked = none ? end : max(turns.end_dead, last - uniform(whole_end) + 1);
    turns.end_whole = none ? end : max(turns.end_masked, last - uniform(whole_begin) + 1);
    turns.end_low = none ? end : max(turns.end_whole, last - uniform(seen.begin) + 1);
  }
  return turns;
}

// What later steps need of a tile and registers have no room for. Every lane writes the same.
template<class L> SAGE2_DEV void fill_scratch(const Params &p, const Tile &tile, int w, uint32_t scratch) {
  const int row0 = tile.row0 + 64 * w;
  if (L::smooths && p.smooth_q) {
    const float *from = p.correction + (int64_t)q_block(p, tile, 64 * w) * p.blocks * kTileTokens;
    store_shared_pointer(scratch + Scratch::correction, (uint64_t)from);
  }
  if (L::is_logits && p.mask.data) {
    const int size = p.mask.kind == kFloat32 ? 4 : p.mask.kind == kBool ? 1 : 2;
    const int64_t at = tile.b * p.mask.batch + tile.h * p.mask.head + row0 * p.mask.row;
    store_shared_pointer(scratch + Scratch::bias, (uint64_t)p.mask.data + at * size);
    store_shared(scratch + Scratch::last_row, tile.q_len - 1 - row0);
  }
  store_shared2(scratch + Scratch::keys, tile.keys, row0 + tile.offset);  // and Scratch::newest
  __syncwarp();
}

// Int32 scores -> float logits: softcap, an additive mask, Q's mean.
template<class L>
SAGE2_DEV void change_logits(const Params &p, const Rows &rows, int (&S)[64], int key_tile, bool partial, float k_scale,
                             float2 q_scale, int tid) {
  const float2 dot = q_dots_of<L>(rows.q_scales, tid);
  const int size = p.mask.kind == kFloat32 ? 4 : 2, first = key_tile * kTileTokens;
  const uint8_t *bias = load_shared_pointer<uint8_t>(rows.scratch + Scratch::bias) + first * p.mask.column * size;
  const int last_row = load_shared_int(rows.scratch + Scratch::last_row);
  const int mine = (tid >> 5 & 3) * 16 + (tid >> 2 & 7);
  const float most = p.int4 ? kMaxStepInt4 : kMaxStep;
  const float *correction = nullptr;
  if (L::smooths && p.smooth_q) correction = load_shared_pointer<float>(rows.scratch + Scratch::correction) + first;
  const BiasRows bias_rows = {bias + min(mine, last_row) * p.mask.row * size,
                              bias + min(mine + 8, last_row) * p.mask.row * size,
                              p.mask.column,
                              partial && p.mask.data ? p.mask.kind : kNoMask,
                              p.kv_len - 1 - first,
                              p.mask.pairs != 0};
  logits(S, step_of(k_scale, q_scale.x, most), step_of(k_scale, q_scale.y, most), dot.x * kLog2e, dot.y * kLog2e,
         {p.softcap, p.softcap_step}, bias_rows, correction, tid & 3);
}

// Softmax of a tile and its P V, folded into the sums. vanish: hidden scores need no further care.
template<Scores KIND, class L>
SAGE2_DEV void weigh_tile(const Consumer<L> &me, const Rows &rows, int stage, int parity, int (&S)[64], bool vanish,
                          float k_scale, float2 q_scale, Sums<L> &sums) {
  const Barriers<L> &bar = me.cta.bar;
  RowState &state = sums.state;
  if constexpr (L::fp16) {
    uint32_t P[32];
    bool moved;
    if (vanish) {
      moved = softmax_fp16<KIND>(S, P, k_scale, q_scale.x, q_scale.y, state, sums.l0, sums.l1);
    } else {
      mark_hidden(S);
      moved = softmax_fp16<kSomeHidden>(S, P, k_scale, q_scale.x, q_scale.y, state, sums.l0, sums.l1);
    }
    if (moved)
      #pragma unroll
      for (int i = 0; i < L::sums; i++) sums.O[i] *= i & 2 ? state.a1 : state.a0;
    barrier_wait(bar.v_full(stage), parity);
    SAGE2_DUMP_ONLY(dump_probabilities(sums.at, P);)
    weigh_fp16(sums.O, P, me.desc_v + stage * (L::v_stage / 16));
    barrier_arrive_warp(bar.v_empty(stage));
    SAGE2_DUMP_ONLY(dump_sums<L::dv>(sums.at, sums.O, state.m0, state.m1, quad_sum(sums.l0), quad_sum(sums.l1));)
  } else {
    uint32_t P[16];
    if constexpr (L::by_bits && KIND == kAllSeen) {
      softmax_bits<L::exponent>(S, P, k_scale, q_scale, reaches_of<L>(rows.q_scales, thread_index()), state);
    } else if (vanish) {
      softmax_fp8<KIND>(S, P, k_scale, q_scale.x, q_scale.y, state);
    } else {
      mark_hidden(S);
      softmax_fp8<kSomeHidden>(S, P, k_scale, q_scale.x, q_scale.y, state);
    }
    barrier_wait(bar.v_full(stage), parity);
    SAGE2_DUMP_ONLY(dump_probabilities(sums.at, P);)
    float T[L::sums + 4];  // and the row sums, each twice
    weigh_fp8(T, P, me.desc_v + stage * (L::v_stage / 16));
    barrier_arrive_warp(bar.v_empty(stage));
    SAGE2_DUMP_ONLY(dump_sums<L::dv>(sums.at, T, state.m0, state.m1, T[L::sums], T[L::sums + 2]);)
    #pragma unroll
    for (int i = 0; i < L::sums; i++) sums.O[i] = fmaf(sums.O[i], i & 2 ? state.a1 : state.a0, T[i]);
    sums.l0 = fmaf(sums.l0, state.a0, T[L::sums]);
    sums.l1 = fmaf(sums.l1, state.a1, T[L::sums + 2]);
  }
}

// One turn: our 64 rows against a key tile. partial: some row does not see some key of it.
template<Scores KIND, class L>
SAGE2_DEV void consume_tile(const Params &p, const Consumer<L> &me, const Rows &rows, int turn, int key_tile,
                            bool partial, Sums<L> &sums) {
  // Marks are set before our turn, while the tensor cores are others'. They are in two branches, which the compiler
  // does not move behind the hand-over.
  constexpr bool kStarted = KIND == kManyHidden;
  const int stage = turn & (L::stages - 1), parity = turn >> L::log_stages & 1;
  const Barriers<L> &bar = me.cta.bar;
  int S[64];  // int32 scores; with kLogits float bits from change_logits() on, and in all kinds from the softmax on
  float k_scale;
  float2 q_scale, seen = {};  // seen: which columns rows r and r + 8 see, as bits
  bool vanish = true;
  if constexpr (L::is_dense) {
    barrier_wait(bar.k_full(stage), parity);  // the others have waited: they needed the entry
    k_scale = __ldg(rows.k_scales + key_tile * kScaleGroups + (thread_index() & 3));
  } else {
    const uint32_t note = me.cta.note(stage);
    k_scale = load_shared(note + L::note_scales + (thread_index() & 3) * 4);
    if (KIND != kAllSeen && partial && p.mask.data) {
      seen = load_shared2(note + 8 * (thread_index() - 128));
      if (kStarted) start_scores(S, __float_as_uint(seen.x), __float_as_uint(seen.y));
    } else if (kStarted) {
      #pragma unroll
      for (int i = 0; i < 64; i++) S[i] = 0;
      hide_by_limits<true, kBarred>(S, rows.scratch, thread_index(), key_tile * kTileTokens, p.left, p.right);
    }
  }
  auto meanwhile = [&] {
    if (!kStarted) return;
    q_scale = q_scales_of(rows.q_scales, thread_index());
    vanish = hidden_vanish(k_scale, q_scale.x, q_scale.y);
  };
  me.my_turn();
  const uint32_t desc_k = me.desc_k + stage * (L::k / 16);
  if (L::dim > 128 && p.head_dim <= 192) scores<L::dim, 6, kStarted>(S, rows.desc_q, desc_k, meanwhile);
  else scores<L::dim, (L::dv == kNarrow ? kNarrow : L::dim) / 32, kStarted>(S, rows.desc_q, desc_k, meanwhile);
  me.pass_turn();
  barrier_arrive_warp(bar.k_empty(stage));
  // Fetched here each time: registers are short, and a load that everything below needs also keeps the compiler from
  // moving the softmax above the hand-over.
  const int tid = thread_index();
  if constexpr (!kStarted) q_scale = q_scales_of(rows.q_scales, tid);
  if (KIND != kAllSeen && !kStarted && partial) {
    const int first = key_tile * kTileTokens, right = L::is_dense ? 0 : p.right;
    if (!L::is_dense && p.mask.data) hide(S, __float_as_uint(seen.x), __float_as_uint(seen.y));
    else hide_by_limits<!L::is_dense, kHidden>(S, rows.scratch, tid, first, p.left, right);
  }
  SAGE2_DUMP_ONLY(sums.at = dump_at<L>(p, rows.t, 64 * me.w, key_tile);)
  SAGE2_DUMP_ONLY(dump_scores(sums.at, S);)
  if constexpr (KIND == kLogits) change_logits<L>(p, rows, S, key_tile, partial, k_scale, q_scale, tid);
  weigh_tile<KIND>(me, rows, stage, parity, S, vanish, k_scale, q_scale, sums);
}

// A turn that none of our rows sees.
template<class L> SAGE2_DEV void let_pass(const Consumer<L> &me, int turn) {
  const int stage = turn & (L::stages - 1), parity = turn >> L::log_stages & 1;
  const Barriers<L> &bar = me.cta.bar;
  barrier_wait(bar.k_full(stage), parity);
  barrier_wait(bar.v_full(stage), parity);
  me.my_turn();
  me.pass_turn();
  barrier_arrive_warp(bar.k_empty(stage));
  barrier_arrive_warp(bar.v_empty(stage));
}

// All turns of a query tile.
template<class L>
SAGE2_DEV void walk(const Params &p, const Consumer<L> &me, const Rows &rows, const Turns &turns, int &turn,
                    Sums<L> &sums) {
  if constexpr (L::is_dense) {
    for (; turn < turns.end_dead; turn++) let_pass(me, turn);
    for (; turn < turns.end_masked; turn++)
      consume_tile<kSomeHidden>(p, me, rows, turn, turns.end - 1 - turn, true, sums);
    for (; turn < turns.end; turn++) consume_tile<kAllSeen>(p, me, rows, turn, turns.end - 1 - turn, false, sums);
  } else {
    for (; turn < turns.end; turn++) {
      const int stage = turn & (L::stages - 1);
      bool unseen, partial;
      int tile = turns.last - turn;
      barrier_wait(me.cta.bar.k_full(stage), turn >> L::log_stages & 1);
      if (p.mask.data) {
        const int entry = uniform(load_shared_int(me.cta.note(stage) + L::note_entry));
        const int seen = entry >> (24 + 2 * me.w) & 3;
        unseen = seen == kUnseen;
        partial = seen == kPartial;
        tile = entry & kTileOfEntry;
      } else {
        unseen = turn < turns.end_dead || turn >= turns.end_low;
        partial = turn < turns.end_masked || turn >= turns.end_whole;
      }
      if (unseen) let_pass(me, turn);
      else if (L::is_logits ? p.all_logits || partial : partial)
        consume_tile<L::is_logits ? kLogits : kManyHidden>(p, me, rows, turn, tile, partial, sums);
      else consume_tile<kAllSeen>(p, me, rows, turn, tile, false, sums);
    }
  }
}

}  // namespace
}  // namespace sage2
