// The pre-processing's first launch: K and V are read once. A CTA of four warps quantizes some blocks of one part of a
// head: its K, or (up to) 128 channels of its V. After the smoothing vectors no K warp waits for another; the warps of
// a V block meet once, when its image is whole. A warp's share of a block lies in registers, and each row is read again
// from the next block as soon as it is written, so loads are always on their way.
//
// E4M3, dim  CTAs an SM  registers  KB on their way, K / V
//    64      4           128        64 / 64
//   128      4           128        128 / 128
//   256      2           255        128 / 64
// FP16 V, rotated keys: 2 CTAs at 255. So too where rows are not aligned, and INT4; nothing is read ahead there.
// Shared memory: shared_bytes(), at most 34 KB.
#pragma once
#include "quantize_columns.cuh"
#include "quantize_rotated.cuh"
#include "quantize_rows.cuh"

namespace sage2 {
namespace {

constexpr int kThreads = 128;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
constexpr int kMostCtas = 4;
#else
constexpr int kMostCtas = 2;  // 128 registers do not do there
#endif
// An SM. Rotated keys take 168 registers, fewer fit where they are looked up.
SAGE2_HD constexpr int ctas(int dim, bool fp16, Mode mode, bool rotate) {
  if (!is_ahead(mode) || dim > 128 || fp16 || (rotate && !is_plain(mode))) return 2;
  return rotate && dim == 128 && kMostCtas > 3 ? 3 : kMostCtas;
}
template<int DIM> constexpr int kValues = DIM > 128 ? 128 : DIM;  // channels of V that a part has

// Vectors, then partial sums, then two V images in turn.
template<int DIM, bool FP16> constexpr int shared_bytes() {
  constexpr int kV = kValues<DIM>, keys = kMeanGroups * DIM * 4, values = (int)sizeof(Partial<kV>);
  constexpr int images = FP16 ? 0 : 2 * kTileTokens * kV, sums = keys > values ? keys : values;
  return (int)sizeof(Vectors<DIM>) + (sums > images ? sums : images);
}
static_assert(shared_bytes<256, false>() <= 48 << 10, "no launch asks for more than every card gives");

SAGE2_HD inline int value_parts(const Params &p) { return p.v_head_dim > 128 ? 2 : 1; }
// What a CTA does: a part of V, or K (-1), of a head that it shares with others.
struct Work { int head, part, rank; };
SAGE2_DEV Work work_of(const Params &p, int items) {
  const int cta = block_index(), parts = 1 + value_parts(p), unit = cta / items;
  return {unit / parts, unit % parts - 1, cta % items};
}
// The blocks of one of `items` CTAs that share a head: [first, last), those from `whole` on end inside.
struct Span { int first, whole, last; };
SAGE2_DEV Span span_of(const Head &h, int rank, int items) {
  const int blocks = (h.keys + kTileTokens - 1) / kTileTokens, each = (blocks + items - 1) / items;
  const int first = rank * each, last = min(first + each, blocks);
  return {first, min(last, h.keys / kTileTokens), last};
}

template<bool FP16> SAGE2_DEV constexpr bool has_values() {  // sm_80 and 86 convert no E4M3
#ifdef __CUDA_ARCH__
  return FP16 || __CUDA_ARCH__ >= 890;
#else
  return true;
#endif
}
template<int DIM, bool FP16, Mode MODE> struct Share { typedef ColumnShare<DIM, MODE> type; };
template<int DIM, Mode MODE> struct Share<DIM, true, MODE> { typedef RowShare<DIM, MODE> type; };

SAGE2_DEV Rows values_of(const Params &p, const Head &h, int part) {
  return rows_of(p.v, h.v + part * 128, p.v_head_dim - part * 128);
}
template<int DIM, bool FP16> SAGE2_DEV uint8_t *value_image(const Params &p, const Head &h, int part, int block) {
  return p.images.v + part * p.images.v_half + (h.image + block) * (int64_t)v_image_bytes(DIM, FP16);
}

// The schedule of packed sequences, which the attention kernel reads, is there when this launch ends.
SAGE2_DEV void let_the_next_begin() {
  grid_dependency_wait();
  grid_dependency_trigger();
}

// A CTA's first block. Plain rows are on their way while the smoothing vectors are formed; where keys are looked up
// there are no registers for that.
template<Mode MODE, class S>
SAGE2_DEV void load_first(const Params &p, const Head &h, const Rows &rows, const Span &span, S &share) {
  if (is_ahead(MODE)) share.load(h, rows, span.first, lie_of<MODE>(p, h, span.first, span.whole, span.last));
}

template<bool B> struct Bool { static constexpr bool value = B; };

// A CTA's blocks, one after the other: write(Bool<ALL>, block, how the next one lies) has the keys of `block` in
// `share`. ALL: all 128 exist, and it reads the next block ahead.
template<Mode MODE, class S, class F>
SAGE2_DEV void walk(const Params &p, const Head &h, const Rows &rows, const Span &span, S &share, F write) {
  Lie lie = lie_of<MODE>(p, h, span.first, span.whole, span.last);
  #pragma unroll 1
  for (int block = span.first; block < span.last;) {
    if (!is_plain(MODE) && !lie.ahead) share.load_block(p, h, rows, block);
    if (is_ahead(MODE) && lie.whole) {
      #pragma unroll 1
      do {
        const Lie next = lie_of<MODE>(p, h, block + 1, span.whole, span.last);
        write(Bool<is_ahead(MODE)>(), block++, next);
        lie = next;
      } while (lie.whole);
    } else {
      write(Bool<false>(), block++, lie);
      if (is_plain(MODE)) return;
      lie = lie_of<MODE>(p, h, block, span.whole, span.last);
      lie.ahead = false;
    }
  }
}

template<int DIM, Mode MODE>
SAGE2_DEV void quantize_keys(const Params &p, int head, int rank, int items, uint8_t *smem) {
  const Head h = head_of(p, head);
  const Span span = span_of(h, rank, items);
  Vectors<DIM> &vectors = *(Vectors<DIM> *)smem;
  const Rows rows = rows_of(p.k, h.k, p.head_dim);
  RowShare<DIM, MODE> share(threadIdx.x);
  if (is_plain(MODE)) load_first<MODE>(p, h, rows, span, share);
  sample<DIM, DIM, kThreads, MODE, false, false>(p, h, rows, VRange(), *(Partial<DIM> *)(&vectors + 1), vectors,
                                                 rank == 0, head, 0);
  if (!is_plain(MODE)) load_first<MODE>(p, h, rows, span, share);
  let_the_next_begin();
  float mean[8];
  if (is_ahead(MODE)) load8(vectors.mean + share.channel, mean);
  walk<MODE>(p, h, rows, span, share, [&](auto all, int block, const Lie &next) {
    if (!is_ahead(MODE)) load8(vectors.mean + share.channel, mean);  // not kept from block to block
    share.template write_keys<decltype(all)::value>(p, h, rows, mean, block, next);
  });
}

// The same of keys that are rotated, whose lanes have too many channels for their means to be kept.
template<int DIM, Mode MODE>
SAGE2_DEV void quantize_rotated_keys(const Params &p, int head, int rank, int items, uint8_t *smem) {
  const Head h = head_of(p, head);
  const Span span = span_of(h, rank, items);
  Vectors<DIM> &vectors = *(Vectors<DIM> *)smem;
  const Rows rows = rows_of(p.k, h.k, p.head_dim);
  RotatedShare<DIM, MODE> share;
  if (is_plain(MODE)) load_first<MODE>(p, h, rows, span, share);
  sample<DIM, DIM, kThreads, MODE, false, false>(p, h, rows, VRange(), *(Partial<DIM> *)(&vectors + 1), vectors,
                                                 rank == 0, head, 0);
  if (!is_plain(MODE)) load_first<MODE>(p, h, rows, span, share);
  float4 *const start = (float4 *)(&vectors + 1);  // in the place of the partial sums
  if (threadIdx.x < 32) share.start_from(vectors.mean, start);
  __syncthreads();
  const uint32_t signs = rotation_signs<DIM>(is_bf16<MODE>(p));
  let_the_next_begin();
  walk<MODE>(p, h, rows, span, share, [&](auto all, int block, const Lie &next) {
    share.template write_keys<decltype(all)::value>(p, h, rows, start, signs, block, next);
  });
}

// An image that the CTA has put together in shared memory to where it belongs, whole lines at a time. The CTA meets
// once for a block: who is late still reads the other image.
SAGE2_DEV void send_image(uint8_t *to, const uint8_t *from, int bytes) {
  __syncthreads();
  #pragma unroll 4
  for (int i = 0; i < bytes; i += kThreads * 16) {
    const int at = i + threadIdx.x * 16;
    *(uint4 *)(to + at) = *(const uint4 *)(from + staged(at));
  }
}

// A block of V: E4M3 through shared memory, at `at` of `images`.
template<bool ALL, int DIM, bool FP16, class S>
SAGE2_DEV void write_values(const Params &p, const Head &h, const Rows &rows, S &share, const Vectors<DIM> &vectors,
                            uint8_t *images, int at, uint8_t *image, int block, const Lie &next) {
  if constexpr (FP16) share.template write_values<ALL>(p, h, rows, vectors, image, block, next);
  else {
    share.template write_values<ALL, true>(p, h, rows, vectors, images, at, block, next);
    send_image(image, images + at, v_image_bytes(DIM, false));
  }
}

template<int DIM, int STRIDE, bool FP16, Mode MODE>
SAGE2_DEV void quantize_values(const Params &p, VRange range, int items, uint8_t *smem) {
  Vectors<DIM> &vectors = *(Vectors<DIM> *)smem;
  uint8_t *const images = (uint8_t *)(&vectors + 1);
  typename Share<DIM, FP16, MODE>::type share(threadIdx.x);
  {
    const Work work = work_of(p, items);
    const Head h = head_of(p, work.head);
    const Rows rows = values_of(p, h, work.part);
    const Span span = span_of(h, work.rank, items);
    if (is_plain(MODE)) load_first<MODE>(p, h, rows, span, share);
    sample<DIM, STRIDE, kThreads, MODE, true, FP16>(p, h, rows, range, *(Partial<DIM> *)images, vectors, work.rank == 0,
                                                    work.head, work.part * 128);
    if (!is_plain(MODE)) load_first<MODE>(p, h, rows, span, share);
    if (DIM < STRIDE && work.rank == 0 && value_parts(p) == 1) {  // nothing is there
      const int64_t place = (int64_t)work.head * STRIDE + DIM + threadIdx.x;
      p.images.v_mean[place] = p.images.v_scale[place] = 0.f;
    }
  }
  let_the_next_begin();
  const Work work = work_of(p, items);  // all of it formed again: the samples need the registers
  const Head h = head_of(p, work.head);
  const Rows rows = values_of(p, h, work.part);
  const Span span = span_of(h, work.rank, items);
  uint8_t *image = value_image<DIM, FP16>(p, h, work.part, span.first);
  int at = 0;
  walk<MODE>(p, h, rows, span, share, [&](auto all, int block, const Lie &next) {
    write_values<decltype(all)::value, DIM, FP16>(p, h, rows, share, vectors, images, at, image, block, next);
    at ^= (int)v_image_bytes(DIM, false);
    image += v_image_bytes(DIM, FP16);
  });
  const int any = __syncthreads_or(range.is_beyond(share.worst));
  if (threadIdx.x == 0) p.overflow[blockIdx.x] = any;
}

// Grid: [batch * kv_heads][K, parts of V][items]
template<int DIM, bool FP16, Mode MODE, bool ROTATE>
__global__ void __launch_bounds__(kThreads, ctas(DIM, FP16, MODE, ROTATE))
    quantize(const __grid_constant__ Params p, VRange range, int items) {
  extern __shared__ __align__(128) uint8_t smem[];
  if (p.key_index || p.mask.data) grid_dependency_wait();  // for the keys' index and number, or bits of a mask
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.images.counter = 0;
  const Work work = work_of(p, items);
  if (work.part < 0) {
    if (ROTATE || (MODE == kAny && p.rotate)) quantize_rotated_keys<DIM, MODE>(p, work.head, work.rank, items, smem);
    else quantize_keys<DIM, MODE>(p, work.head, work.rank, items, smem);
  } else if constexpr (has_values<FP16>()) quantize_values<kValues<DIM>, DIM, FP16, MODE>(p, range, items, smem);
}

}  // namespace
}  // namespace sage2
