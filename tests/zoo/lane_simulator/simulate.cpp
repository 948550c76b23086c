// The mma.sync attention kernels on a CPU, lane by lane: the same source, this folder's instructions. A shared library;
// test_lane_simulator.py compiles it beside a copy of the kernels' headers.
namespace sage2 {
namespace {
// Stands for the shared memory that a kernel declares: the pre-processing uses it, the attention kernels' is simulated.
alignas(1024) unsigned char smem[48 << 10];
}  // namespace
}  // namespace sage2
#include "fwd_mma.cuh"
#include "pages_attend_mma.cuh"
#include "quantize_repair.cuh"
#undef __shared__
#define __shared__ static  // one CTA runs at a time
#include "mask_tiles.cuh"

using namespace sage2;

// Mirrored by `Call` of test_lane_simulator.py. Tensors are contiguous, as in Params.
struct Call {
  const uint16_t *q;
  uint16_t *out;
  float *lse;
  uint8_t *k, *v;
  float *k_scale, *k_mean, *v_mean, *v_scale, *q_mean, *correction;
  const int32_t *kv_lens, *kv_starts, *cu_q, *cu_k;
  int2 *schedule;
  const void *mask;
  uint32_t *bits, *lists;
  int32_t *counts;
  const float *sinks;
  int32_t batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, blocks, q_tiles, total, q_blocks;
  int32_t bf16, causal, top_left, left, right, family, int4, smooth_q, all_logits, mask_kind, mask_batch, mask_heads;
  int32_t product, packed, v_channel, rotate;
  float scale, scale_log2, softcap, softcap_step;
};

template<class C> static void run(const Params &p) {
  simulator::launch(p.total, C::Here::threads, C::Here::bytes, [&] { attention_mma<C>(p); });
}
template<int DIM, Product PV, Family FAMILY> static void run(const Params &p, bool packed) {
  if constexpr (FAMILY == kAdjusted && DIM <= 128)
    if (packed) return run<MmaConfig<DIM, PV, FAMILY, true>>(p);
  run<MmaConfig<DIM, PV, FAMILY, false>>(p);
}
template<int DIM, Product PV> static void run(const Params &p, bool packed) {
  if (p.family <= kRotated) run<DIM, PV, kDense>(p, packed);
  else if constexpr (PV == kPvFp16 || PV == kPvFp8)
    p.family == kMasked ? run<DIM, PV, kMasked>(p, packed) : run<DIM, PV, kAdjusted>(p, packed);
}
template<int DIM> static void run(const Params &p, int product, bool packed) {
  if (product == kPvFp8) return run<DIM, kPvFp8>(p, packed);
  if (product == kPvFp16) return run<DIM, kPvFp16>(p, packed);
  if constexpr (DIM <= 128)
    product == kPvFp16Split ? run<DIM, kPvFp16Split>(p, packed) : run<DIM, kPvFp8Split>(p, packed);
}

// Mirrored by `PrepareCall`. Contiguous tensors; size: CTAs that share a head.
struct PrepareCall {
  const uint16_t *key, *value;
  uint8_t *k, *v;
  float *k_scale, *k_mean, *v_mean, *v_scale;
  const int32_t *kv_lens, *kv_starts;
  const int32_t *cu_k, *key_index;
  uint32_t *seen, *overflow;
  int32_t batch, kv_heads, kv_len, head_dim, v_head_dim, blocks, bf16, fp16_pv, int4, smooth_v, size, aligned, rotate;
  float reach, limit;
};
template<int DIM, bool FP16, Mode MODE, bool ROTATE> static void prepare(const Params &p, const PrepareCall *c) {
  const VRange range = {c->reach, c->limit};
  const int heads = p.batch * p.kv_heads, grid = heads * (1 + value_parts(p)) * c->size;
  memset(smem, 0xFF, sizeof smem);
  simulator::launch(grid, kThreads, 0, [&] { quantize<DIM, FP16, MODE, ROTATE>(p, range, c->size); });
  memset(smem, 0xFF, sizeof smem);
  simulator::launch(1, kRepairThreads, 0, [&] { repair<FP16>(p, range, c->size); });
}
template<int DIM, bool FP16, bool ROTATE> static void prepare(const Params &p, const PrepareCall *c) {
  const Mode mode = mode_of(p);
  if (mode == kAny || (DIM > 128 && (p.rotate || !is_plain(mode)))) return prepare<DIM, FP16, kAny, false>(p, c);
  if (mode == kPlainFp16) return prepare<DIM, FP16, kPlainFp16, ROTATE>(p, c);
  if (mode == kPlainBf16) return prepare<DIM, FP16, kPlainBf16, ROTATE>(p, c);
  if constexpr (DIM <= 128)
    mode == kLookedUpFp16 ? prepare<DIM, FP16, kLookedUpFp16, ROTATE>(p, c)
                          : prepare<DIM, FP16, kLookedUpBf16, ROTATE>(p, c);
}
template<int DIM, bool FP16> static void prepare(const Params &p, const PrepareCall *c) {
  p.rotate ? prepare<DIM, FP16, DIM <= 128>(p, c) : prepare<DIM, FP16, false>(p, c);
}

extern "C" int simulate_prepare(const PrepareCall *c) {
  Params p = {};
  int32_t counter = 0;
  const int64_t dim = c->head_dim, v_dim = c->v_head_dim, keys = c->kv_len, items = c->cu_k ? 0 : c->kv_heads;
  p.k = {c->key, items * keys * dim, keys * dim, dim, c->aligned};
  p.v = {c->value, items * keys * v_dim, keys * v_dim, v_dim, c->aligned};
  p.images = {c->k, c->v, c->k_scale, c->k_mean, c->v_mean, c->v_scale, 0, &counter};
  p.images.v_half = (int64_t)(c->cu_k ? 1 : c->batch) * c->kv_heads * c->blocks * v_image_bytes(128, c->fp16_pv);
  p.cu_k = c->cu_k;
  p.key_index = (int32_t *)c->key_index;
  p.mask.data = c->seen;
  p.mask.seen = c->seen;
  p.mask.mb = 1;
  p.overflow = c->overflow;
  p.kv_lens = c->kv_lens;
  p.kv_starts = c->kv_starts;
  p.batch = c->batch;
  p.kv_heads = c->kv_heads;
  p.kv_len = c->kv_len;
  p.head_dim = c->head_dim;
  p.v_head_dim = c->v_head_dim;
  p.blocks = c->blocks;
  p.bf16 = c->bf16;
  p.fp16_pv = c->fp16_pv;
  p.int4 = c->int4;
  p.smooth_k = 1;
  p.smooth_v = c->smooth_v;
  p.rotate = c->rotate;
  const int padded = padded_dim(c->head_dim);
  if (padded == 64) c->fp16_pv ? prepare<64, true>(p, c) : prepare<64, false>(p, c);
  else if (padded == 128) c->fp16_pv ? prepare<128, true>(p, c) : prepare<128, false>(p, c);
  else c->fp16_pv ? prepare<256, true>(p, c) : prepare<256, false>(p, c);
  return 0;
}

// Mirrored by `MaskCall`. A contiguous mask; rows: 1 if it says the same to all rows.
struct MaskCall {
  const void *mask;
  const int32_t *kv_lens;
  uint32_t *bits, *lists, *seen;
  uint8_t *classes;
  int32_t *counts;
  int32_t kind, mb, mh, rows, q_len, kv_len, blocks, q_tiles, tile_rows, top_left, left, right;
};
extern "C" int simulate_mask(const MaskCall *c) {
  Params p = {};
  Mask &m = p.mask;
  m = {c->mask,
       (int64_t)(c->mb > 1) * c->mh * c->rows * c->kv_len,
       (int64_t)(c->mh > 1) * c->rows * c->kv_len,
       c->rows > 1 ? c->kv_len : 0,
       1,
       c->kind,
       c->mb,
       c->mh};
  m.bits = c->bits;
  m.classes = c->classes;
  m.lists = c->lists;
  m.counts = c->counts;
  m.seen = c->seen;
  m.q_pad = c->q_tiles * c->tile_rows;
  p.kv_lens = c->kv_lens;
  p.q_len = c->q_len;
  p.kv_len = c->kv_len;
  p.blocks = c->blocks;
  p.q_tiles = c->q_tiles;
  p.tile_rows = c->tile_rows;
  p.top_left = c->top_left;
  p.left = c->left;
  p.right = c->right;
  const int planes = c->mb * c->mh;
  if (c->rows == 1) return simulator::launch(planes * c->q_tiles, kKeyMaskThreads, 0, [&] { pack_key_mask(p); }), 0;
  simulator::launch(planes * (m.q_pad / kGroupRows) * c->blocks, kTileTokens, 0, [&] { pack_mask(p); });
  simulator::launch(planes * c->q_tiles, 32, 0, [&] { list_tiles(p); });
  return 0;
}

extern "C" int simulate(const Call *c) {
  Params p = {};
  const int64_t rows = (int64_t)c->q_len, dim = c->head_dim, v_dim = c->v_head_dim;
  const int32_t vector = dim % 8 == 0;
  const int64_t items = c->cu_q ? 0 : c->heads;  // heads between two items of the batch
  p.q = {c->q, items * rows * dim, rows * dim, dim, vector};
  p.out = {c->out, items * rows * v_dim, rows * v_dim, v_dim, v_dim % 8 == 0};
  p.images.k = c->k;
  p.images.v = c->v;
  p.images.k_scale = c->k_scale;
  p.images.k_mean = c->k_mean;
  p.images.v_mean = c->v_mean;
  p.images.v_scale = c->v_scale;
  p.lse = c->lse;
  p.kv_lens = c->kv_lens;
  p.kv_starts = c->kv_starts;
  p.cu_q = c->cu_q;
  p.cu_k = c->cu_k;
  p.schedule = c->schedule;
  p.batch = c->batch;
  p.heads = c->heads;
  p.kv_heads = c->kv_heads;
  p.heads_per_kv = c->heads / c->kv_heads;
  p.q_len = c->q_len;
  p.kv_len = c->kv_len;
  p.head_dim = c->head_dim;
  p.v_head_dim = c->v_head_dim;
  p.v_channel = c->v_channel;
  p.blocks = c->blocks;
  p.q_tiles = c->q_tiles;
  p.total = c->total;
  p.group = c->causal ? c->heads : 1;
  p.bf16 = c->bf16;
  p.causal = c->causal;
  p.top_left = c->top_left;
  p.scale = c->scale;
  p.scale_log2 = c->scale_log2;
  p.mask.data = c->mask;
  p.mask.kind = c->mask_kind;
  p.mask.mb = c->mask_batch;
  p.mask.mh = c->mask_heads;
  p.mask.column = 1;
  p.mask.row = c->kv_len;
  p.mask.head = c->mask_heads > 1 ? rows * c->kv_len : 0;
  p.mask.batch = c->mask_batch > 1 ? c->mask_heads * rows * c->kv_len : 0;
  p.mask.pairs = c->kv_len % 2 == 0;
  p.mask.bits = c->bits;
  p.mask.lists = c->lists;
  p.mask.counts = c->counts;
  p.sinks = c->sinks;
  p.softcap = c->softcap;
  p.softcap_step = c->softcap_step;
  p.left = c->left;
  p.right = c->right;
  p.family = c->family;
  p.tile_rows = kMmaRows;
  p.need_dot = 1;
  p.all_logits = c->all_logits;
  p.int4 = c->int4;
  p.smooth_q = c->smooth_q;
  p.rotate = c->rotate;
  p.q_blocks = c->q_blocks;
  p.q_mean = c->q_mean;
  p.correction = c->correction;
  const int padded = padded_dim(c->head_dim);
  if (padded == 64) run<64>(p, c->product, c->packed);
  else if (padded == 128) run<128>(p, c->product, c->packed);
  else run<256>(p, c->product, c->packed);
  return 0;
}

// Mirrored by `PagesCall`. One slab; contiguous tensors; cut as cut_pages does.
struct PagesCall {
  const uint16_t *q;
  uint16_t *out;
  float *lse, *k_mean, *v_mean, *partial, *stats;
  const uint64_t *slabs;
  const int32_t *kv_starts;
  const uint8_t *mask;
  const float *sinks;
  int32_t batch, heads, kv_heads, head_dim, tokens, length, bf16, slab_pages, record, causal, left, rotate;
  int32_t span, splits, turns, mask_columns;
  float scale, scale_log2, softcap, softcap_step;
};
template<int DIM, bool TURNS> static void attend_pages(const PageParams &p) {
  simulator::launch(
      0, kPageThreads, PageConfig<DIM, TURNS>::bytes,
      [&] { p.mask || p.softcap != 0.f ? attend_mma<DIM, TURNS, true>(p) : attend_mma<DIM, TURNS, false>(p); },
      {(unsigned)p.splits, (unsigned)p.row_tiles, (unsigned)(p.batch * p.kv_heads)});
}
extern "C" int simulate_pages(const PagesCall *c) {
  PageParams p = {};
  const int64_t dim = c->head_dim, rows = c->tokens;
  p.q = {c->q, c->heads * rows * dim, rows * dim, dim, dim % 8 == 0};
  p.out = {c->out, c->heads * rows * dim, rows * dim, dim, dim % 8 == 0};
  p.lse = c->lse;
  p.slabs = c->slabs;
  p.k_mean = c->k_mean;
  p.v_mean = c->v_mean;
  p.kv_starts = c->kv_starts;
  p.sinks = c->sinks;
  p.partial = c->partial;
  p.stats = (float4 *)c->stats;
  p.mask = c->mask;
  p.mask_columns = c->mask_columns;
  p.mask_first = c->length - c->mask_columns;
  p.mask_column = 1;
  p.mask_row = c->mask_columns;
  p.mask_batch = rows * c->mask_columns;
  p.batch = c->batch;
  p.heads = c->heads;
  p.kv_heads = c->kv_heads;
  p.head_dim = c->head_dim;
  p.heads_per_kv = c->heads / c->kv_heads;
  p.tokens = c->tokens;
  p.length = c->length;
  p.bf16 = c->bf16;
  while (1 << p.slab_shift < c->slab_pages) p.slab_shift++;
  p.record = c->record;
  p.offset = c->causal ? c->length - c->tokens : kNoCausalOffset;
  p.left = !c->causal ? INT32_MAX : c->left < 0 ? kNoLimit : c->left;
  p.scale = c->scale;
  p.scale_log2 = c->scale_log2;
  p.softcap = c->softcap;
  p.softcap_step = c->softcap_step;
  p.rotate = c->rotate;
  p.need_dot = 1;
  p.rows = c->tokens * p.heads_per_kv;
  p.span = c->span;
  p.splits = c->splits;
  p.split_tiles = c->turns > 1;
  p.slots = c->splits * c->turns;
  p.row_tiles = (p.rows + p.span - 1) / p.span;
  p.part_rows = min(p.rows, p.span);
  const bool wide = padded_dim(c->head_dim) == 128;
  if (p.split_tiles) wide ? attend_pages<128, true>(p) : attend_pages<64, true>(p);
  else wide ? attend_pages<128, false>(p) : attend_pages<64, false>(p);
  return 0;
}
