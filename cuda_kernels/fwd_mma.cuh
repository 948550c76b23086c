// Attention forward on mma.sync, for every card from sm_80 on that has no wgmma: INT8 (or packed INT4) Q K^T, then FP16
// or FP8 P V, from the images, scales, masks and lists of the Hopper kernels. Compiled for the same three families
// (params.h): what a call does not ask for costs it nothing.
//
// A CTA is one query tile; the chip takes them in the order of their numbers, longest first (decode). Two stages of 64
// keys: while a half image is worked on the next one arrives. A warp runs strictly serially, scores -> softmax -> P V;
// tensor cores and softmax overlap between the warps of a scheduler. Of 256 channels of V a launch computes one half.
//
// FP16: O accumulates inside the tensor core and is rescaled only when a row maximum moves by more than the slack.
// FP8 and split sums: 64 keys are summed apart and folded into O in full fp32, O = O a + T. The tensor core's FP8 sums
// keep 13 bits; those in fp16 stay in range, FP16 by the offset: 64 keys x 2^8 x |v| < 2 = 32768, FP8 by V's images: 64
// keys x 448 x kSplitVMax = 64512.
//
// What it may use of registers and shared memory: mma_tile.cuh.
#pragma once
#include "fwd_mma.h"
#include "mma_softmax.cuh"
#include "schedule.cuh"

namespace sage2 {
namespace {

// The halves of key tiles that a CTA walks, from the last key on. An entry is a half's number (half image h % 2 of key
// tile h / 2) and, with a mask tensor, the classes of KeyTiles.
template<class C> struct Halves {
  int count, last;  // last: the half of entry 0, or with a mask tensor the index of the query tile's list
  SAGE2_DEV Halves(int count, int last) : count(count), last(last) {}
  SAGE2_DEV Halves(const Params &p, const Tile &t) : count(0), last(0) {
    const int below = min(t.row0 + C::rows, t.q_len) - 1;
    if constexpr (C::dense) {
      if (t.row0 <= below) count = (max(visible_keys(below, t.keys, t.offset), 0) + kHalfTokens - 1) / kHalfTokens;
      last = count - 1;
    } else if (p.mask.data) {
      last = mask_plane(p, t) * p.q_tiles + t.row0 / C::rows;
      count = 2 * __ldg(p.mask.counts + last);
    } else if (t.row0 <= below) {
      const Limits l = {t.keys, t.offset, p.left, p.right};
      const int begin = first_key(t.row0, l) / kHalfTokens, end = (end_key(below, l) + kHalfTokens - 1) / kHalfTokens;
      count = max(end - begin, 0);
      last = end - 1;
    }
  }
  SAGE2_DEV uint32_t entry(const Params &p, int i) const {
    if (C::dense || !p.mask.data) return last - i;
    const uint32_t tile = __ldg(p.mask.lists + (int64_t)last * p.blocks + i / 2);
    return ((tile & kTileOfEntry) * 2 + 1 - i % 2) | (tile & ~kTileOfEntry);
  }
};

// Of a warp, in shared memory: registers are short.
struct WarpScratch {
  static constexpr int keys = 0,
                       newest = 4;    // the item's keys; the newest that the warp's first row may see (right = 0)
  static constexpr int last_row = 8;  // that exists, counted from the warp's first
  static constexpr int list = 12;     // with a mask tensor: the query tile's list
  static constexpr int bytes = 16;
};

// ------------------------------------------------------------------ the two matrix products
// Two blocks of eight keys and 32 bytes of a row are four 8 x 16-byte matrices.
template<class C>
SAGE2_DEV void scores(int (&S)[C::fragments][8][4], int start, uint32_t q, uint32_t k, int lane, int never) {
  const uint32_t q_lane = q + lane % 16 * C::pitch + ((lane / 16 ^ swizzle_bits(lane % 16, C::pitch)) << 4);
  const int row = lane / 16 * 8 + lane % 8;
  const uint32_t k_lane = k + row * C::pitch + ((lane / 8 % 2 ^ swizzle_bits(row, C::pitch)) << 4);
  #pragma unroll
  for (int m = 0; m < C::fragments; m++)
    #pragma unroll
    for (int i = 0; i < 8; i++)
      #pragma unroll
      for (int e = 0; e < 4; e++) S[m][i][e] = start;
  unrolled<0, C::row / 32>([&](auto step) {
    constexpr int n = decltype(step)::value, panel = 32 * n / C::pitch, byte = 32 * n % C::pitch;
    if constexpr (n > 0) schedule_fence<1100 + n>(never);
    uint32_t a[C::fragments][4];
    #pragma unroll
    for (int m = 0; m < C::fragments; m++)
      load_matrices(a[m], (q_lane ^ byte) + panel * (C::rows * C::pitch) + m * 16 * C::pitch);
    #pragma unroll
    for (int i = 0; i < 8; i += 2) {
      uint32_t b[4];
      load_matrices(b, (k_lane ^ byte) + panel * (kHalfTokens * C::pitch) + i * 8 * C::pitch);
      #pragma unroll
      for (int m = 0; m < C::fragments; m++)
        #pragma unroll
        for (int j = 0; j < 2; j++) {
          if constexpr (C::packed) mma_s4(S[m][i + j], a[m], b[2 * j], b[2 * j + 1]);
          else mma_s8(S[m][i + j], a[m], b[2 * j], b[2 * j + 1]);
        }
    }
  });
}

// Two blocks of eight channels and one step of keys are four matrices. E4M3: their rows are channels. FP16: tokens.
template<class C>
SAGE2_DEV void weigh(RowSums<C> &sums, const uint32_t (&P)[C::fragments][C::steps][4],
                     const float (&factors)[C::fragments][2], bool moved, uint32_t v, int lane, int never) {
  const int row = C::fp8 ? lane / 16 * 8 + lane % 8 : lane % 16, chunk = C::fp8 ? lane / 8 % 2 : lane / 16;
  const uint32_t v_lane = v + row * C::v_pitch + ((chunk ^ swizzle_bits(row, C::v_pitch)) << 4);
  auto load = [&](uint32_t (&b)[4], int pair, int step) {
    if constexpr (C::fp8) load_matrices(b, (v_lane ^ step << 5) + pair * 16 * C::v_pitch);
    else load_matrices_transposed(b, (v_lane ^ (pair & 3) << 5) + step * 16 * 128 + pair / 4 * (kHalfTokens * 128));
  };
  if constexpr (C::pv == kPvFp16) {
    if (moved)
      #pragma unroll
      for (int m = 0; m < C::fragments; m++)
        #pragma unroll
        for (int n = 0; n < C::dv / 8; n++)
          #pragma unroll
          for (int e = 0; e < 4; e++) sums.O[m][n][e] *= factors[m][e / 2];
    schedule_fence<999>(never);
    #pragma unroll
    for (int step = 0; step < C::steps; step++)
      #pragma unroll
      for (int pair = 0; pair < C::dv / 16; pair++) {
        uint32_t b[4];
        load(b, pair, step);
        #pragma unroll
        for (int m = 0; m < C::fragments; m++)
          #pragma unroll
          for (int j = 0; j < 2; j++) mma_f16(sums.O[m][2 * pair + j], P[m][step], b[2 * j], b[2 * j + 1]);
      }
  } else {
    unrolled<0, C::dv / 16>([&](auto index) {
      constexpr int pair = decltype(index)::value;
      schedule_fence<pair>(never);
      float T[C::fragments][2][4] = {};
      [[maybe_unused]] uint32_t half[C::fragments][2][2] = {};
      #pragma unroll
      for (int step = 0; step < C::steps; step++) {
        uint32_t b[4];
        load(b, pair, step);
        #pragma unroll
        for (int m = 0; m < C::fragments; m++)
          #pragma unroll
          for (int j = 0; j < 2; j++) {
            if constexpr (!C::split) mma_e4m3(T[m][j], P[m][step], b[2 * j], b[2 * j + 1]);
            else if constexpr (C::fp8) mma_e4m3_split(half[m][j], P[m][step], b[2 * j], b[2 * j + 1]);
            else mma_f16_split(half[m][j], P[m][step], b[2 * j], b[2 * j + 1]);
          }
      }
      #pragma unroll
      for (int m = 0; m < C::fragments; m++)
        #pragma unroll
        for (int j = 0; j < 2; j++) {
          if constexpr (C::split) {
            widen(half[m][j][0], false, T[m][j][0], T[m][j][1]);
            widen(half[m][j][1], false, T[m][j][2], T[m][j][3]);
          }
          #pragma unroll
          for (int e = 0; e < 4; e++) fold(sums.O[m][2 * pair + j][e], factors[m][e / 2], T[m][j][e]);
        }
    });
  }
}

// ------------------------------------------------------------------ 64 keys
// Marks what this thread's rows of fragment m do not see of half `half`.
template<class C> SAGE2_DEV void hide(const Params &p, int (&S)[8][4], uint32_t scratch, int m, int half, int tid) {
  const int r = tid % 32 / 4, c = tid & 3;
  if (!C::dense && p.mask.data) {
    const int first = tid / 32 * C::warp_rows;
    const int64_t tile = (int64_t)load_shared_int(scratch + WarpScratch::list) * p.blocks + half / 2;
    const uint32_t *bits = p.mask.bits + (tile * (C::rows / 64) + first / 64) * kMaskWords;
    const uint2 seen = __ldg((const uint2 *)(bits + mask_word(first % 64 + 16 * m + r, c)));  // rows r and r + 8
    hide_unset(S, 0, seen.x >> 16 * (half % 2));
    hide_unset(S, 1, seen.y >> 16 * (half % 2));
    return;
  }
  const int first = half * kHalfTokens, keys = load_shared_int(scratch + WarpScratch::keys);
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const int mine = load_shared_int(scratch + WarpScratch::newest) + r + 16 * m + 8 * h;
    const int begin = C::dense || p.left >= kNoLimit ? 0 : mine - p.left - first;
    hide_outside(S, h, begin, visible_keys(mine, keys, C::dense ? 0 : p.right) - first, c);
  }
}

// Softcap, added masks, what Q's mean adds: a fragment's scores become float logits.
template<class C>
SAGE2_DEV void change(const Params &p, const Tile &tile, int (&S)[8][4], uint32_t s0, uint32_t scratch, float k_scale,
                      int half, int lane, bool biased) {
  const int first = threadIdx.x / 32 * C::warp_rows, r = lane / 4,
            last_row = load_shared_int(scratch + WarpScratch::last_row);
  const uint32_t mine = s0 + C::at_scale + 4 * (first + r);
  const float most = p.int4 ? kMaxStepInt4 : kMaxStep;
  const float g0 = step_of(k_scale, load_shared(mine), most), g1 = step_of(k_scale, load_shared(mine + 32), most);
  float d0 = 0.f, d1 = 0.f;
  if (p.softcap != 0.f) {
    d0 = load_shared(mine + C::at_dot - C::at_scale) * kLog2e;
    d1 = load_shared(mine + 32 + C::at_dot - C::at_scale) * kLog2e;
  }
  const float *correction = nullptr;
  if (C::smooths && p.smooth_q)
    correction = p.correction + (int64_t)q_block(p, tile, first) * p.blocks * kTileTokens + half * kHalfTokens;
  BiasRows bias = {nullptr, nullptr, p.mask.column, kNoMask, p.kv_len - 1 - half * kHalfTokens, p.mask.pairs != 0};
  if (biased) {
    const int size = p.mask.kind == kFloat32 ? 4 : 2;
    const uint8_t *at =
        (const uint8_t *)p.mask.data + (tile.b * p.mask.batch + tile.h * p.mask.head +
                                        (tile.row0 + first) * p.mask.row + half * kHalfTokens * p.mask.column) *
                                           size;
    bias.row0 = at + min(r, last_row) * p.mask.row * size;
    bias.row1 = at + min(r + 8, last_row) * p.mask.row * size;
    bias.kind = p.mask.kind;
  }
  logits(reinterpret_cast<int (&)[32]>(S), g0, g1, d0, d1, {p.softcap, p.softcap_step}, bias, correction, lane & 3);
}

// partial: some row of the warp does not see some key, or a mask adds something.
template<class C, Scores KIND>
SAGE2_DEV void consume(const Params &p, RowSums<C> &sums, uint32_t s0, uint32_t scratch, int stage, int64_t image,
                       int half, bool partial) {
  const int tid = thread_index(), lane = tid & 31, first = tid / 32 * C::warp_rows;  // read again, not kept
  const float k_scale = __ldg(p.images.k_scale + image * kScaleGroups + (lane & 3));
  int S[C::fragments][8][4];
  scores<C>(S, KIND == kLogits ? 0 : kMagicBits, s0 + C::at_q + first * C::pitch, s0 + C::at_k + stage * C::k_stage,
            lane, p.q_len);
  schedule_fence<1000>(p.q_len);
  uint32_t P[C::fragments][C::steps][4];
  float factors[C::fragments][2];
  bool moved = false;
  unrolled<0, C::fragments>([&](auto index) {
    constexpr int m = decltype(index)::value;
    if constexpr (m > 0) schedule_fence<1200 + m>(p.q_len);
    if (KIND == kSomeHidden || (KIND == kLogits && partial)) {
      hide<C>(p, S[m], scratch, m, half, thread_index());
      schedule_fence<1300 + m>(p.q_len);
    }
    if constexpr (KIND == kLogits)
      change<C>(p, decode<C::rows, C::dense>(p, blockIdx.x), S[m], s0, scratch, k_scale, half, lane,
                partial && p.mask.data && p.mask.kind > kBool);
    moved |= softmax<C, KIND>(S[m], P[m], sums, m, factors[m], k_scale, s0 + C::at_scale + 4 * (first + lane / 4));
  });
  weigh<C>(sums, P, factors, C::pv == kPvFp16 && __any_sync(~0u, moved), s0 + C::at_v + stage * C::v_stage, lane,
           p.q_len);
}

// ------------------------------------------------------------------ the end: divide, rescale V, add its mean
template<class C> SAGE2_DEV void finish(const Params &p, const Tile &tile, const RowSums<C> &sums, uint32_t s0) {
  const int lane = threadIdx.x & 31, c = lane & 3, first = threadIdx.x / 32 * C::warp_rows + lane / 4;
  const int64_t vector = (int64_t)tile.kv_head * C::dim + (C::dim > 128 ? p.v_channel : 0);
  const float *v_scale = p.images.v_scale + vector + 2 * c, *v_mean = p.images.v_mean + vector + 2 * c;
  #pragma unroll
  for (int m = 0; m < C::fragments; m++)
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = tile.row0 + first + 16 * m + 8 * h;
      float l = quad_sum(sums.l[m][h]), reference = sums.m[m][h], kept = 1.f, shrink = 1.f, dot = 0.f;
      if (row >= tile.q_len) continue;
      // The logits have it already after a softcap.
      if (!C::dense && p.need_dot && !(C::family == kAdjusted && p.softcap != 0.f))
        dot = load_shared(s0 + C::at_dot + 4 * (first + 16 * m + 8 * h));
      if (!C::dense && p.sinks) add_sink(__ldg(p.sinks + tile.h) * kLog2e - dot * kLog2e, reference, l, shrink, kept);
      const float inverse = l == 0.f ? 0.f : __fdividef(shrink, l);  // no keys: zero
      uint16_t *out = const_cast<uint16_t *>(p.out.data) + tile.b * p.out.batch + tile.h * p.out.head +
                      (int64_t)(tile.q_token + row) * p.out.token + 2 * c;
      #pragma unroll
      for (int n = 0; n < C::dv / 8; n++) {
        const float2 s = __ldg((const float2 *)(v_scale + 8 * n)), mean = __ldg((const float2 *)(v_mean + 8 * n));
        const float x = fmaf(sums.O[m][n][2 * h] * inverse, s.x, l == 0.f ? 0.f : mean.x * kept);
        const float y = fmaf(sums.O[m][n][2 * h + 1] * inverse, s.y, l == 0.f ? 0.f : mean.y * kept);
        const uint32_t pair = p.bf16 ? pack_bf16(x, y) : pack_f16(x, y);
        const int channel = 8 * n + 2 * c;
        if (p.out.vector) {
          if (channel < p.v_head_dim) *(uint32_t *)(out + 8 * n) = pair;
        } else {
          if (channel < p.v_head_dim) out[8 * n] = pair;
          if (channel + 1 < p.v_head_dim) out[8 * n + 1] = pair >> 16;
        }
      }
      if (C::dense && p.lse && c == 0) {
        float *const place = log_sum_exp_of(p, tile, row - tile.row0);
        *place = log_sum_exp(reference, l, *place);  // load_rows has left the dot there
      } else if (p.lse && c == 0)
        p.lse[((int64_t)(p.cu_q ? 0 : tile.b) * p.heads + tile.h) * p.q_len + tile.q_token + row] =
            log_sum_exp(reference, l, dot);
    }
}

// ------------------------------------------------------------------ the kernel
// What a warp sees of half `half`; without a mask tensor its limits say.
template<class C> SAGE2_DEV TileClass class_of(const Params &p, uint32_t scratch, uint32_t entry, int half) {
  if (p.mask.data) return (TileClass)(entry >> (24 + 2 * (threadIdx.x / 32 * C::warp_rows / 64)) & 3);
  const int newest = load_shared_int(scratch + WarpScratch::newest);
  const int last_row = load_shared_int(scratch + WarpScratch::last_row);
  const Limits l = {load_shared_int(scratch + WarpScratch::keys), newest, p.left,
                    p.right};  // rows from the warp's first
  const int begin = half * kHalfTokens, end = begin + kHalfTokens;
  if (last_row < 0 || begin >= end_key(last_row, l) || end <= first_key(0, l)) return kUnseen;
  return begin >= first_key(last_row, l) && end <= end_key(0, l) ? kWhole : kPartial;
}

template<class CONFIG>
__global__ void __launch_bounds__(CONFIG::Here::threads, CONFIG::Here::ctas)
    attention_mma(const __grid_constant__ Params p) {
  typedef typename CONFIG::Here C;
  if constexpr (compiled_here<C>()) {
    extern __shared__ __align__(1024) uint8_t smem[];
    const uint32_t s0 = smem_address(smem);
    const uint32_t scratch = s0 + C::at_scratch + threadIdx.x / 32 * WarpScratch::bytes;
    int images;  // the head's first
    auto fetch = [&](int half, int stage) {
      const int64_t image = images + half / 2;
      load_stage<C>(s0, stage, p.images.k + image * C::k_image, p.images.v + image * C::v_image, half % 2);
    };
    int count, last, full;  // halves (Halves); dense: below `full` every row sees all of them
    {
      const Tile tile = decode<C::rows, C::dense>(p, blockIdx.x);
      const Halves<C> halves(p, tile);
      count = halves.count;
      last = halves.last;
      images = tile.image;
      full = max(visible_keys(tile.row0, tile.keys, tile.offset), 0) / kHalfTokens;
      if (count > 0) fetch(halves.entry(p, 0) & kTileOfEntry, 0);
      const int first = threadIdx.x / 32 * C::warp_rows;
      store_shared2(scratch + WarpScratch::keys, tile.keys, tile.row0 + first + tile.offset);
      store_shared2(scratch + WarpScratch::last_row, min(tile.q_len - tile.row0 - first, C::warp_rows) - 1, last);
      load_rows<C>(p, tile, s0);
    }

    RowSums<C> sums;
    #pragma unroll
    for (int m = 0; m < C::fragments; m++) {
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        sums.m[m][h] = kNoKeys;
        sums.l[m][h] = 0.f;
      }
      #pragma unroll
      for (int n = 0; n < C::dv / 8; n++)
        #pragma unroll
        for (int e = 0; e < 4; e++) sums.O[m][n][e] = 0.f;
    }
    int stage = 0;
    auto arrive = [&](bool more, int next) {  // the half is here, and everybody is done with the one before
      copy_wait_all();
      __syncthreads();
      if (more) fetch(next, stage ^ 1);
    };
    auto consume_as = [&](auto kind, int half, bool partial) {
      consume<C, decltype(kind)::value>(p, sums, s0, scratch, stage, images + half / 2, half, partial);
    };
    typedef std::integral_constant<Scores, kAllSeen> AllSeen;
    typedef std::integral_constant<Scores, kSomeHidden> SomeHidden;
    typedef std::integral_constant<Scores, kLogits> Logits;
    if constexpr (C::dense) {
      int half = count - 1;
      #pragma unroll 1
      for (; half >= max(full, 0); half--, stage ^= 1) {
        arrive(half > 0, half - 1);
        consume_as(SomeHidden(), half, true);
      }
      #pragma unroll 1
      for (; half >= 0; half--, stage ^= 1) {
        arrive(half > 0, half - 1);
        consume_as(AllSeen(), half, false);
      }
    } else {
      Halves<C> halves(count, last);
      uint32_t next = count > 0 ? halves.entry(p, 0) : 0;
      #pragma unroll 1
      for (int i = 0; i < count; i++, stage ^= 1) {
        const uint32_t entry = next;
        const int half = entry & kTileOfEntry;
        if (i + 1 < count) next = halves.entry(p, i + 1);
        arrive(i + 1 < count, next & kTileOfEntry);
        const TileClass seen = class_of<C>(p, scratch, entry, half);
        if (seen == kUnseen) continue;
        if constexpr (C::family == kAdjusted) {
          if (p.all_logits || seen == kPartial) consume_as(Logits(), half, seen == kPartial);
          else consume_as(AllSeen(), half, false);
        } else if (seen == kPartial) consume_as(SomeHidden(), half, true);
        else consume_as(AllSeen(), half, false);
      }
    }
    finish<C>(p, decode<C::rows, C::dense>(p, blockIdx.x), sums, s0);
  }
}

}  // namespace
}  // namespace sage2
