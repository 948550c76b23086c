// The Hopper instructions the kernels are made of, one thin wrapper each. Nothing here knows about attention.
#pragma once
#include <stdint.h>

#define SAGE2_DEV __device__ __forceinline__

namespace sage2 {

// ------------------------------------------------------------------ shared memory, barriers, bulk copies
SAGE2_DEV uint32_t smem_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
SAGE2_DEV void barrier_init(uint32_t bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(bar), "r"(count)); }
SAGE2_DEV void barrier_arrive(uint32_t bar, int count = 1) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _,[%0],%1;" ::"r"(bar), "r"(count) : "memory");
}
SAGE2_DEV void barrier_arrive_warp(uint32_t bar, int count = 1) {      // one lane arrives for a converged warp
  asm volatile("{.reg .pred P; elect.sync _|P,0xffffffff; @P mbarrier.arrive.release.cta.shared::cta.b64 _,[%0],%1;}" ::"r"(bar), "r"(count) : "memory");
}
SAGE2_DEV void barrier_expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(bar), "r"(bytes) : "memory");
}
SAGE2_DEV void barrier_wait(uint32_t bar, int parity) {
  asm volatile("{.reg .pred P; W_%=: mbarrier.try_wait.parity.shared::cta.b64 P,[%0],%1; @P bra.uni E_%=; bra.uni W_%=; E_%=: }"
               ::"r"(bar), "r"(parity) : "memory");
}
SAGE2_DEV void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
SAGE2_DEV void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
SAGE2_DEV void bulk_load(uint32_t dst, const void *src, int bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
               ::"r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}
SAGE2_DEV void bulk_store(void *dst, uint32_t src, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}
SAGE2_DEV void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
SAGE2_DEV void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
SAGE2_DEV void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
SAGE2_DEV void named_sync(int id, int threads) { asm volatile("bar.sync %0,%1;" ::"r"(id), "r"(threads) : "memory"); }
SAGE2_DEV void named_arrive(int id, int threads) { asm volatile("bar.arrive %0,%1;" ::"r"(id), "r"(threads) : "memory"); }
SAGE2_DEV float load_shared(uint32_t a) { float x; asm volatile("ld.shared.f32 %0,[%1];" : "=f"(x) : "r"(a) : "memory"); return x; }
SAGE2_DEV float2 load_shared2(uint32_t a) { float2 x; asm volatile("ld.shared.v2.f32 {%0,%1},[%2];" : "=f"(x.x), "=f"(x.y) : "r"(a) : "memory"); return x; }
SAGE2_DEV int load_shared_int(uint32_t a) { int x; asm volatile("ld.shared.s32 %0,[%1];" : "=r"(x) : "r"(a) : "memory"); return x; }
SAGE2_DEV uint4 load_shared4(uint32_t a) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(a) : "memory");
  return x;
}
SAGE2_DEV void store_shared(uint32_t a, uint32_t x) { asm volatile("st.shared.b32 [%0],%1;" ::"r"(a), "r"(x) : "memory"); }
SAGE2_DEV void store_shared16(uint32_t a, uint16_t x) { asm volatile("st.shared.b16 [%0],%1;" ::"r"(a), "h"(x) : "memory"); }
SAGE2_DEV void store_shared2(uint32_t a, uint32_t x, uint32_t y) { asm volatile("st.shared.v2.b32 [%0],{%1,%2};" ::"r"(a), "r"(x), "r"(y) : "memory"); }

template<int N> SAGE2_DEV void registers_grow() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template<int N> SAGE2_DEV void registers_shrink() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// A launch may start while the kernel before it drains; nothing that kernel wrote may be read before this.
SAGE2_DEV void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
SAGE2_DEV void grid_dependency_trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ------------------------------------------------------------------ clusters
SAGE2_DEV uint32_t cluster_rank() { uint32_t r; asm("mov.u32 %0,%%cluster_ctarank;" : "=r"(r)); return r; }
SAGE2_DEV uint32_t cluster_size() { uint32_t r; asm("mov.u32 %0,%%cluster_nctarank;" : "=r"(r)); return r; }
SAGE2_DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
SAGE2_DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
SAGE2_DEV uint32_t cluster_load(uint32_t a, uint32_t rank) {
  uint32_t x;
  asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r,%1,%2; ld.shared::cluster.u32 %0,[r];}" : "=r"(x) : "r"(a), "r"(rank) : "memory");
  return x;
}

// ------------------------------------------------------------------ arithmetic
SAGE2_DEV float exp2_fast(float x) { float r; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
SAGE2_DEV float min_keep_nan(float x, float y) { float r; asm("min.NaN.f32 %0,%1,%2;" : "=f"(r) : "f"(x), "f"(y)); return r; }
SAGE2_DEV float max_keep_nan(float x, float y) { float r; asm("max.NaN.f32 %0,%1,%2;" : "=f"(r) : "f"(x), "f"(y)); return r; }
// four floats -> four E4M3 bytes, a in the lowest; round to nearest even, saturating
SAGE2_DEV uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t r;
  asm("{.reg .b16 l,h; cvt.rn.satfinite.e4m3x2.f32 l,%2,%1; cvt.rn.satfinite.e4m3x2.f32 h,%4,%3; mov.b32 %0,{l,h};}"
      : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
SAGE2_DEV uint32_t pack_f16(float a, float b) { uint32_t r; asm("cvt.rn.satfinite.f16x2.f32 %0,%2,%1;" : "=r"(r) : "f"(a), "f"(b)); return r; }
SAGE2_DEV uint32_t pack_bf16(float a, float b) { uint32_t r; asm("cvt.rn.satfinite.bf16x2.f32 %0,%2,%1;" : "=r"(r) : "f"(a), "f"(b)); return r; }

// ------------------------------------------------------------------ wgmma
SAGE2_DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
SAGE2_DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
SAGE2_DEV void wgmma_wait_all() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// A shared-memory matrix descriptor is 64 bits: the low word holds address / 16 (steps of 16 bytes are added to it)
// and the leading offset, the high word the stride between groups of eight rows and the swizzle (1 = 128 B, 2 = 64 B).
SAGE2_DEV uint32_t desc_low(uint32_t address, int leading = 16) { return (address & 0x3FFFF) >> 4 | (uint32_t)(leading / 16) << 16; }
template<int PITCH> SAGE2_DEV uint64_t desc(uint32_t low) {
  uint64_t d;
  asm("mov.b64 %0,{%1,%2};" : "=l"(d) : "r"(low), "n"(8 * PITCH / 16 | (PITCH == 128 ? 1 : 2) << 30));
  return d;
}

// Accumulators are arrays; inline assembly wants them one by one. LIST_n spells %0..%n-1, OUT_n the operands.
#define SAGE2_LIST_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SAGE2_LIST_36 SAGE2_LIST_32 ",%32,%33,%34,%35"
#define SAGE2_LIST_64 SAGE2_LIST_36 ",%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SAGE2_LIST_68 SAGE2_LIST_64 ",%64,%65,%66,%67"
#define SAGE2_OUT_4(m, d, i) m(d[i]), m(d[i + 1]), m(d[i + 2]), m(d[i + 3])
#define SAGE2_OUT_16(m, d, i) SAGE2_OUT_4(m, d, i), SAGE2_OUT_4(m, d, i + 4), SAGE2_OUT_4(m, d, i + 8), SAGE2_OUT_4(m, d, i + 12)
#define SAGE2_OUT_32(m, d) SAGE2_OUT_16(m, d, 0), SAGE2_OUT_16(m, d, 16)
#define SAGE2_OUT_36(m, d) SAGE2_OUT_32(m, d), SAGE2_OUT_4(m, d, 32)
#define SAGE2_OUT_64(m, d) SAGE2_OUT_32(m, d), SAGE2_OUT_16(m, d, 32), SAGE2_OUT_16(m, d, 48)
#define SAGE2_OUT_68(m, d) SAGE2_OUT_64(m, d), SAGE2_OUT_4(m, d, 64)

// *_first starts a new sum (the accumulator is write-only for the compiler), *_next adds to it.
// A and B from shared memory: operands %n, %n+1
#define SAGE2_WGMMA_SS(NAME, N, T, MODE, ZERO, SHAPE, A, B)                                                              \
  SAGE2_DEV void NAME(T (&d)[N], uint64_t a, uint64_t b) {                                                               \
    asm volatile("{.reg .pred p; setp.ne.b32 p," ZERO ",0; wgmma.mma_async.sync.aligned." SHAPE " {" SAGE2_LIST_##N "}," \
                 A "," B ",p;}" : SAGE2_OUT_##N(MODE, d) : "l"(a), "l"(b));                                              \
  }
// A (four registers) from registers, B from shared memory: operands %n .. %n+4; SCALES closes the instruction
#define SAGE2_WGMMA_RS(NAME, N, MODE, ZERO, SHAPE, A, B, SCALES)                                                         \
  SAGE2_DEV void NAME(float (&d)[N], const uint32_t *a, uint64_t b) {                                                    \
    asm volatile("{.reg .pred p; setp.ne.b32 p," ZERO ",0; wgmma.mma_async.sync.aligned." SHAPE " {" SAGE2_LIST_##N "}," \
                 "{" A "}," B ",p," SCALES ";}"                                                                          \
                 : SAGE2_OUT_##N(MODE, d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                         \
  }
SAGE2_WGMMA_SS(mma_s8_first, 64, int, "=r", "0", "m64n128k32.s32.s8.s8", "%64", "%65")
SAGE2_WGMMA_SS(mma_s8_next, 64, int, "+r", "1", "m64n128k32.s32.s8.s8", "%64", "%65")
SAGE2_WGMMA_RS(mma_e4m3_first, 68, "=f", "0", "m64n136k32.f32.e4m3.e4m3", "%68,%69,%70,%71", "%72", "1,1")
SAGE2_WGMMA_RS(mma_e4m3_next, 68, "+f", "1", "m64n136k32.f32.e4m3.e4m3", "%68,%69,%70,%71", "%72", "1,1")
SAGE2_WGMMA_RS(mma_e4m3_first, 36, "=f", "0", "m64n72k32.f32.e4m3.e4m3", "%36,%37,%38,%39", "%40", "1,1")
SAGE2_WGMMA_RS(mma_e4m3_next, 36, "+f", "1", "m64n72k32.f32.e4m3.e4m3", "%36,%37,%38,%39", "%40", "1,1")
SAGE2_WGMMA_RS(mma_f16_next, 64, "+f", "1", "m64n128k16.f32.f16.f16", "%64,%65,%66,%67", "%68", "1,1,1")
SAGE2_WGMMA_RS(mma_f16_next, 32, "+f", "1", "m64n64k16.f32.f16.f16", "%32,%33,%34,%35", "%36", "1,1,1")

}  // namespace sage2
