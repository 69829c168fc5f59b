/// \file
/// `mma.sync`: warp-level matrix multiply-accumulate. Source of the layouts: PTX ISA, "Matrix
/// fragments for mma.m16n8k16" (sm_80 and later).
#pragma once

#include <cstdint>
#include <type_traits>

#include "attn/kernel.h"
#ifdef ATTN_EMULATED
#include "emulator/products.h"
#endif

namespace attn {
inline namespace ATTN_BACKEND {

/// D [16, 8] = A [16, 16] * B [16, 8] + C [16, 8]: fp16 or bf16 operands, fp32 accumulation.
///
/// Fragments of a lane, with g = lane / 4 ("group") and t = lane % 4:
///
///       A, row-major: 4 registers of 2 elements         B, column-major: 2 registers of 2
///             k: 2t 2t+1 | 2t+8 2t+9                            n: g
///     row g      a[0]    |   a[2]                        k 2t, 2t+1    b[0]
///     row g+8    a[1]    |   a[3]                        k 2t+8, 2t+9  b[1]
///
///       C and D: 4 floats              A D fragment, rounded in pairs, is an A fragment:
///             n: 2t  2t+1              a[0] = {d[0], d[1]} and a[1] = {d[2], d[3]} of one MMA,
///     row g     d[0]  d[1]             a[2] and a[3] likewise of the MMA 8 columns to the right
///     row g+8   d[2]  d[3]
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2],
                                             const float (&c)[4] ATTN_CALLER) {
  static_assert(std::is_same_v<Element, __half> || std::is_same_v<Element, __nv_bfloat16>,
                "mma.m16n8k16 with float32 sums takes fp16 or bf16");
#ifdef ATTN_EMULATED
  emulator::MmaLane mine{a, b, c, {}};
  emulator::Block::current().wait_warp("mma_m16n8k16", caller, ~0u, mine, [](auto& lanes) {
    emulator::tensor_flop += 2 * 16 * 8 * 16;
    emulator::mma_m16n8k16(emulator::kIsBFloat16<Element>, lanes);
  });
  for (int i = 0; i < 4; ++i) d[i] = mine.d[i];
#else
  if constexpr (std::is_same_v<Element, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  }
#endif
}

/// Packs two floats into one 32-bit register of a fragment, `low` in the lower half.
template <class Element>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
#ifdef ATTN_EMULATED
  return std::bit_cast<uint16_t>(from_float<Element>(low)) |
         uint32_t{std::bit_cast<uint16_t>(from_float<Element>(high))} << 16;
#else
  if constexpr (std::is_same_v<Element, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
#endif
}

/// Unpacks element `i` (0: the lower half) of such a register to float.
template <class Element>
__device__ __forceinline__ float unpack(uint32_t pair, int i) {
  return to_float(__builtin_bit_cast(Element, static_cast<uint16_t>(pair >> (16 * i))));
}

}  // namespace ATTN_BACKEND
}  // namespace attn
