/// \file
/// `wgmma` for int8: D [64, N] = A [64, 32] * B [32, N] + D with exact int32 accumulation. PTX ISA,
/// "Asynchronous warpgroup level matrix instructions" (sm_90a). Operands in shared memory as in
/// wgmma_e4m3.h, both K-major; D in the layout of wgmma.h, with int32 instead of floats.
#pragma once

#include "ptx/wgmma_e4m3.h"
#ifdef ATTN_EMULATED
#include "emulator/products_s8.h"
#endif

namespace attn {
inline namespace ATTN_BACKEND {

/// Four floats to int8, rounded to nearest even, the first in the lowest byte. Saturates at -128
/// and 127; NaN becomes 0.
__device__ __forceinline__ uint32_t pack4_s8(float a, float b, float c, float d) {
  const auto code = [](float x) {
#ifdef ATTN_EMULATED
    return static_cast<uint32_t>(to_int8(x)) & 0xFF;
#else
    int32_t whole;
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(whole) : "f"(x));
    return static_cast<uint32_t>(whole) & 0xFF;
#endif
  };
  return code(a) | code(b) << 8 | code(c) << 16 | code(d) << 24;
}

// As accumulator_fence of wgmma.h, for int32.
template <int kTiles>
__device__ __forceinline__ void accumulator_fence([[maybe_unused]] int (&d)[kTiles][4]) {
#ifndef ATTN_EMULATED
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    asm volatile("" : "+r"(d[n][0]), "+r"(d[n][1]), "+r"(d[n][2]), "+r"(d[n][3])::"memory");
#endif
}

/// wgmma_wait() for int32 accumulators.
template <int kPending, int kTiles>
__device__ __forceinline__ void wgmma_wait(int (&d)[kTiles][4] ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().product_wait(kPending, caller);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
  accumulator_fence(d);
}

#ifndef ATTN_EMULATED
#define ATTN_WGMMA_I(n) "+r"(d[n][0]), "+r"(d[n][1]), "+r"(d[n][2]), "+r"(d[n][3])
#define ATTN_WGMMA_I4(n) \
  ATTN_WGMMA_I(n), ATTN_WGMMA_I(n + 1), ATTN_WGMMA_I(n + 2), ATTN_WGMMA_I(n + 3)
#define ATTN_WGMMA_INTS_4 ATTN_WGMMA_I4(0), ATTN_WGMMA_I4(4)
#define ATTN_WGMMA_INTS_8 ATTN_WGMMA_INTS_4, ATTN_WGMMA_I4(8), ATTN_WGMMA_I4(12)
#define ATTN_WGMMA_INTS_10 ATTN_WGMMA_INTS_8, ATTN_WGMMA_I4(16)
#define ATTN_WGMMA_INTS_12 ATTN_WGMMA_INTS_10, ATTN_WGMMA_I4(20)
// One shape: N = 16 * COLUMNS. Integer wgmma has no operand negation.
#define ATTN_WGMMA_S8(COLUMNS, N, FLAG, LEFT, RIGHT)                                         \
  if constexpr (kTiles == 2 * COLUMNS)                                                      \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " FLAG ", 0;\n"         \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {"                     \
               ATTN_WGMMA_NAMES_##COLUMNS "}, " LEFT ", " RIGHT ", accumulate;\n}"          \
               : ATTN_WGMMA_INTS_##COLUMNS                                                  \
               : "l"(a.bits), "l"(b.bits), "r"(int{accumulate}))
#endif

/// D = A B, or D += A B if `accumulate`, both operands in shared memory. All threads of a warpgroup
/// call it. N is 64, 128, 160 or 192; the hardware supports 8, 24 and all multiples of 16.
template <int kTiles>
__device__ __forceinline__ void wgmma_s8(int (&d)[kTiles][4], SmemDescriptor a, SmemDescriptor b,
                                         bool accumulate ATTN_CALLER) {
  static_assert(kTiles == 8 || kTiles == 16 || kTiles == 20 || kTiles == 24);
#ifdef ATTN_EMULATED
  emulator::tensor_flop += 2 * 64 * 8 * kTiles * 32 / 128;  // this thread's part
  emulator::Block& block = emulator::Block::current();
  const int thread = static_cast<int>(emulator::threadIdx.x) % 128;
  const auto multiply = [=, &d, shared = static_cast<const std::byte*>(block.shared())] {
    emulator::wgmma_s8({.d = d, .columns = 8 * kTiles, .lane = thread % 32,
                        .accumulate = accumulate, .shared = shared, .a = a.bits, .b = b.bits,
                        .row = thread / 32 * 16 + thread % 32 / 4});
  };
  const auto operands = [&](const emulator::Block::Visit& read) {
    each_chunk(a, false, 64, caller, read);
    each_chunk(b, false, 8 * kTiles, caller, read);
  };
  block.product_async(caller, {d, sizeof d}, accumulate, {nullptr, 0}, multiply, operands);
#else
  ATTN_WGMMA_S8(4, 64, "%34", "%32", "%33");
  ATTN_WGMMA_S8(8, 128, "%66", "%64", "%65");
  ATTN_WGMMA_S8(10, 160, "%82", "%80", "%81");
  ATTN_WGMMA_S8(12, 192, "%98", "%96", "%97");
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
