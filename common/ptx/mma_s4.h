/// \file
/// `mma.sync` for int4 with int32 accumulation. Source: PTX ISA, "Matrix fragments for
/// mma.m16n8k64" (sm_80 and later; tensor cores have int4 up to sm_89, Hopper computes it
/// otherwise, and slower than int8).
#pragma once

#include <cstdint>

#include "attn/kernel.h"
#ifdef ATTN_EMULATED
#include "emulator/products_s8.h"
#endif

namespace attn {
inline namespace ATTN_BACKEND {

/// D [16, 8] = A [16, 64] * B [64, 8] + C [16, 8]: int4 operands of two's complement, exact int32
/// accumulation. Eight int4 take the place of four int8 of mma_s8.h, the first one in the lowest
/// bits: a register of row g of A holds k 8t .. 8t+7, the next one k 32+8t .. 32+8t+7.
__device__ __forceinline__ void mma_m16n8k64_s4(int (&d)[4], const uint32_t (&a)[4],
                                                const uint32_t (&b)[2],
                                                const int (&c)[4] ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::MmaS8Lane mine{a, b, c, {}};
  emulator::Block::current().wait_warp("mma_m16n8k64_s4", caller, ~0u, mine, [](auto& lanes) {
    emulator::tensor_flop += 2 * 16 * 8 * 64;
    emulator::mma_m16n8k64_s4(lanes);
  });
  for (int i = 0; i < 4; ++i) d[i] = mine.d[i];
#else
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
