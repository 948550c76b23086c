// The names of cuda_kernels/mma_ptx.cuh for a host compiler: the operand layouts of ldmatrix and mma.sync as the PTX
// manual draws them, copies that arrive when they are waited for, and a check of banks.
#pragma once
#include "ptx.cuh"

namespace sage2 {

inline void matrices(uint32_t (&r)[4], uint32_t a, bool transposed) {
  if (a % 16) simulator::fail("ldmatrix address");
  simulator::box()[0] = a;
  simulator::sync_warp();
  const auto &box = simulator::warp().box;
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  for (int i = 0; i < 4; i++) {
    uint32_t banks = 0;
    for (int j = 0; j < 8; j++) banks |= 1u << (box[8 * i + j][0] / 16 % 8);
    if (banks != 0xFF) simulator::fail("bank conflict in ldmatrix");
    if (!transposed) r[i] = simulator::load<uint32_t>(box[8 * i + g][0] + 4 * c);
    else
      r[i] = simulator::load<uint16_t>(box[8 * i + 2 * c][0] + 2 * g) |
             (uint32_t)simulator::load<uint16_t>(box[8 * i + 2 * c + 1][0] + 2 * g) << 16;
  }
  simulator::sync_warp();
}
inline void load_matrices(uint32_t (&r)[4], uint32_t a) { matrices(r, a, false); }
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t a) { matrices(r, a, true); }
inline void copy_async16(uint32_t to, const void *from) {
  if ((uintptr_t)from % 16) simulator::fail("misaligned copy");
  simulator::copies[threadIdx.x].push_back({to, from});
}
inline void copy_commit() { simulator::copies[threadIdx.x].push_back({0, nullptr}); }
template<int N> void copy_wait() {
  auto &mine = simulator::copies[threadIdx.x];
  auto groups = std::count_if(mine.begin(), mine.end(), [](const simulator::Copy &c) { return !c.from; });
  while (!mine.empty() && groups > N) {
    if (mine[0].from) memcpy(simulator::at(mine[0].to, 16), mine[0].from, 16);
    else groups--;
    mine.erase(mine.begin());
  }
}
inline void copy_wait_all() { copy_wait<0>(); }

// ------------------------------------------------------------------ products
// A register holds EACH neighbouring elements along k. Of a, registers 0..3: (row g, first half of k), (row g + 8, the
// same), (row g, second half), (row g + 8); of b two halves of k of column g; lane c of a quad has the c-th register.
template<int EACH, class F> void product(double (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, F value) {
  uint32_t *mine = simulator::box();
  for (int i = 0; i < 4; i++) mine[i] = a[i];
  mine[4] = b0;
  mine[5] = b1;
  simulator::sync_warp();
  const auto &box = simulator::warp().box;
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  for (int i = 0; i < 4; i++) {
    const int row = g + (i & 2) * 4, column = 2 * c + (i & 1);
    d[i] = 0;
    for (int half = 0; half < 2; half++)
      for (int k = 0; k < 4; k++)
        for (int e = 0; e < EACH; e++)
          d[i] += value(box[row % 8 * 4 + k][2 * half + row / 8], e) * value(box[column * 4 + k][4 + half], e);
  }
  simulator::sync_warp();
}
inline double s8_at(uint32_t r, int e) { return (int8_t)(r >> 8 * e); }
inline double s4_at(uint32_t r, int e) { return (int)(r << (28 - 4 * e)) >> 28; }
inline double f16_at(uint32_t r, int e) { return f16_value(r >> 16 * e); }
inline double e4m3_at(uint32_t r, int e) { return e4m3_value(r >> 8 * e); }
template<int EACH, class T, class F>
void add_product(T (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, F value) {
  double x[4];
  product<EACH>(x, a, b0, b1, value);
  for (int i = 0; i < 4; i++) d[i] = (T)(x[i] + d[i]);
}
inline void mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  add_product<4>(d, a, b0, b1, s8_at);
}
inline void mma_s4(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  add_product<8>(d, a, b0, b1, s4_at);
}
// As sage_patch/reference/emulator/accumulator.py has them: cut at 25 bits below the largest exponent, then at 23 bits
// of the sum. A factor's exponent is `least` at least.
template<class F> void add_halves(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int least, F value) {
  uint32_t *mine = simulator::box();
  for (int i = 0; i < 4; i++) mine[i] = a[i];
  mine[4] = b0;
  mine[5] = b1;
  simulator::sync_warp();
  const auto &box = simulator::warp().box;
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  for (int i = 0; i < 4; i++) {
    const int row = g + (i & 2) * 4, column = 2 * c + (i & 1);
    double x[17] = {d[i]}, sum = 0;
    int largest = d[i] ? ilogb(x[0]) : -1000;
    for (int k = 0; k < 16; k++) {
      const double y = value(box[row % 8 * 4 + k % 8 / 2][2 * (k / 8) + row / 8], k % 2);
      const double z = value(box[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
      x[k + 1] = y * z;
      if (x[k + 1] != 0 && std::isfinite(x[k + 1])) largest = max(largest, max(ilogb(y), least) + max(ilogb(z), least));
    }
    for (double y : x) sum += std::isfinite(y) ? ldexp(trunc(ldexp(y, 25 - largest)), largest - 25) : y;
    d[i] = sum == 0 || !std::isfinite(sum) ? (float)sum
                                      : (float)ldexp(trunc(ldexp(sum, 23 - ilogb(sum))), ilogb(sum) - 23);
  }
  simulator::sync_warp();
}
inline double bf16_at(uint32_t r, int e) { return __uint_as_float(r >> 16 * e << 16); }
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  add_halves(d, a, b0, b1, -14, f16_at);
}
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  add_halves(d, a, b0, b1, -126, bf16_at);
}
inline void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  add_product<4>(d, a, b0, b1, e4m3_at);
}
template<int EACH, class F>
void add_split(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, F value) {
  double x[4];
  product<EACH>(x, a, b0, b1, value);
  for (int i = 0; i < 2; i++) d[i] = pack_f16(x[2 * i] + f16_value(d[i]), x[2 * i + 1] + f16_value(d[i] >> 16));
}

inline void mma_f16_split(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  add_split<2>(d, a, b0, b1, f16_at);
}
inline void mma_e4m3_split(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  add_split<4>(d, a, b0, b1, e4m3_at);
}

inline void fold(float &o, float a, float t) { o = fmaf(o, a, t); }
template<int N> void schedule_fence(int) {}

}  // namespace sage2
