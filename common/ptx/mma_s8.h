/// \file
/// `mma.sync` for int8 with int32 accumulation. Source: PTX ISA, "Matrix fragments for
/// mma.m16n8k32" (sm_80 and later).
#pragma once

#include <cstdint>

#include "attn/kernel.h"
#ifdef ATTN_EMULATED
#include "emulator/products_s8.h"
#endif

namespace attn {
inline namespace ATTN_BACKEND {

/// D [16, 8] = A [16, 32] * B [32, 8] + C [16, 8]: int8 operands, exact int32 accumulation.
///
/// Four int8 take the place of two 16-bit elements of mma.h: a row of 32 int8 has the layout of a
/// row of 16 elements, so `ldmatrix` loads it. Fragments of a lane, with g = lane / 4 and t = lane
/// % 4:
///
///       A, row-major: 4 registers of 4 int8              B, column-major: 2 registers of 4
///             k: 4t .. 4t+3 | 16+4t .. 16+4t+3                  n: g
///     row g      a[0]       |   a[2]                     k 4t .. 4t+3        b[0]
///     row g+8    a[1]       |   a[3]                     k 16+4t .. 16+4t+3  b[1]
///
///       C and D: 4 int32 in the layout of mma.h's floats: columns 2t, 2t + 1 of rows g and g + 8
__device__ __forceinline__ void mma_m16n8k32_s8(int (&d)[4], const uint32_t (&a)[4],
                                                const uint32_t (&b)[2],
                                                const int (&c)[4] ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::MmaS8Lane mine{a, b, c, {}};
  emulator::Block::current().wait_warp("mma_m16n8k32_s8", caller, ~0u, mine, [](auto& lanes) {
    emulator::tensor_flop += 2 * 16 * 8 * 32;
    emulator::mma_m16n8k32_s8(lanes);
  });
  for (int i = 0; i < 4; ++i) d[i] = mine.d[i];
#else
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
