// The instructions of the mma.sync kernels, one thin wrapper each, for every architecture from sm_80 on. Nothing here
// knows about attention. tests/zoo/lane_simulator holds the same names for a host compiler.
#pragma once
#include "ptx.cuh"

namespace sage2 {

// ------------------------------------------------------------------ shared memory
// Four 8 x 16-byte matrices; lane i holds the address of row i % 8 of matrix i / 8.
SAGE2_DEV void load_matrices(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
SAGE2_DEV void load_matrices_transposed(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
SAGE2_DEV void copy_async16(uint32_t to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
}
SAGE2_DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template<int N> SAGE2_DEV void copy_wait() {  // until at most the last N groups are on their way
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
SAGE2_DEV void copy_wait_all() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// ------------------------------------------------------------------ m16n8 products: d += a b
// A lane holds rows g and g + 8, columns 2 c and 2 c + 1 of d (g = lane / 4, c = lane % 4): the layout of a wgmma warp.
// Sum and result are operands of their own: the first product of a sum reads constants, which then cost no moves.
#define SAGE2_MMA_4(NAME, T, MODE, SHAPE, TYPES)                                                                       \
  SAGE2_DEV void NAME(T(&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {                                    \
    asm volatile("mma.sync.aligned." SHAPE ".row.col." TYPES " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};" \
                 : "=" MODE(d[0]), "=" MODE(d[1]), "=" MODE(d[2]), "=" MODE(d[3])                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), MODE(d[0]), MODE(d[1]), MODE(d[2]),   \
                   MODE(d[3]));                                                                                        \
  }
SAGE2_MMA_4(mma_s8, int, "r", "m16n8k32", "s32.s8.s8.s32")
SAGE2_MMA_4(mma_s4, int, "r", "m16n8k64", "s32.s4.s4.s32")  // tensor cores of sm_80 to sm_89 only; emulated elsewhere
SAGE2_MMA_4(mma_bf16, float, "f", "m16n8k16", "f32.bf16.bf16.f32")
SAGE2_MMA_4(mma_f16, float, "f", "m16n8k16", "f32.f16.f16.f32")
SAGE2_MMA_4(mma_e4m3, float, "f", "m16n8k32", "f32.e4m3.e4m3.f32")
// Summed in fp16: twice the rate on GeForce. d: two packed pairs.
#define SAGE2_MMA_2(NAME, SHAPE, TYPES)                                                                 \
  SAGE2_DEV void NAME(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {             \
    asm volatile("mma.sync.aligned." SHAPE ".row.col." TYPES " {%0,%1},{%2,%3,%4,%5},{%6,%7},{%8,%9};"  \
                 : "=r"(d[0]), "=r"(d[1])                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(d[0]), "r"(d[1])); \
  }
SAGE2_MMA_2(mma_f16_split, "m16n8k16", "f16.f16.f16.f16")
SAGE2_MMA_2(mma_e4m3_split, "m16n8k32", "f16.e4m3.e4m3.f16")

// ------------------------------------------------------------------ order of work
// o = o a + t, in its place in the program: else the compiler delays it to the end of a tile and keeps all operands.
SAGE2_DEV void fold(float &o, float a, float t) { asm volatile("fma.rn.f32 %0,%0,%1,%2;" : "+f"(o) : "f"(a), "f"(t)); }
// ptxas moves nothing past this: a branch that is never taken (never >= 0). Two issue slots. Every place needs an N of
// its own: equal conditions would be merged.
template<int N> SAGE2_DEV void schedule_fence(int never) {
  asm volatile("{.reg .pred P; setp.eq.s32 P,%0,%1; @P bra.uni F_%=; bra.uni E_%=; F_%=: trap; E_%=: }" ::"r"(never),
               "n"(-2 - N)
               : "memory");
}

}  // namespace sage2
