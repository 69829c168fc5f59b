/// \file
/// `wgmma`: asynchronous matrix multiply-accumulate by the 128 threads of a warpgroup. PTX ISA,
/// "Asynchronous warpgroup level matrix instructions" (sm_90a).
///
///     wgmma_fence()                orders earlier register accesses before wgmma
///     wgmma(...)  wgmma(...)  wgmma_commit()     <- group 0
///     wgmma(...)  wgmma(...)  wgmma_commit()     <- group 1
///     wgmma_wait<1>(d)             group 0 is complete: accumulators readable, operands reusable
///
/// D [64, N] = A [64, 16] * B [16, N] + D: fp16 or bf16 operands, fp32 accumulation. Warp w of the
/// warpgroup holds rows 16 w to 16 w + 15 of D, a row of mma_m16n8k16 accumulators (mma.h) side by
/// side: d[n] is columns 8 n to 8 n + 7. With g = lane / 4 and t = lane % 4:
///
///     d[n][0], d[n][1]: row 16 w + g,     columns 8 n + 2 t, 8 n + 2 t + 1
///     d[n][2], d[n][3]: row 16 w + g + 8, the same columns
///
/// So 4 lanes share a row. A comes from shared memory, or from registers as the A fragment of
/// mma_m16n8k16: two adjacent d of one product, rounded in pairs, are an A fragment of the next.
///
/// Operands in shared memory are panels of 128 bytes (64 elements) per row, as TMA stores them with
/// 128-byte swizzle:
///
///     K-major    [rows, 64 of k]: panels along k                     A = Q, B = K^T of K [keys, d]
///                8 rows are 1024 bytes; the next 16 of k are 32 bytes further
///     MN-major   [k, 64 of n]: panels along n                        B = V of V [keys, d]
///                8 of k are 1024 bytes; the next 16 of k are 2048 bytes further
#pragma once

#include <cstdint>
#include <type_traits>

#include "attn/kernel.h"
#include "ptx/ldmatrix.h"  // shared_address
#ifdef ATTN_EMULATED
#include "emulator/products.h"
#endif

namespace attn {
inline namespace ATTN_BACKEND {

/// Matrix descriptor of an operand in shared memory. PTX ISA, "Matrix descriptor": bits 0 to 13 are
/// address / 16, bits 16 to 29 the leading-dimension byte offset / 16, bits 32 to 45 the stride
/// byte offset / 16, bits 62 and 63 the swizzle mode.
struct SmemDescriptor {
  uint64_t bits;
  /// Descriptor of the operand `bytes` further.
  __device__ __forceinline__ SmemDescriptor operator+(int bytes) const {
    return {bits + static_cast<uint64_t>(bytes >> 4)};
  }
};

/// Descriptor of an operand at `tile` with 128-byte swizzle. `panel_bytes`: distance between
/// panels, for an MN-major operand.
__device__ __forceinline__ SmemDescriptor smem_descriptor(const void* tile, int panel_bytes = 16) {
#ifdef ATTN_EMULATED
  const auto address = static_cast<uint64_t>(static_cast<const std::byte*>(tile) -
                                             static_cast<const std::byte*>(emulator::Block::current().shared()));
#else
  const uint64_t address = shared_address(tile);
#endif
  constexpr uint64_t k128ByteSwizzle = 1, kGroupOf8 = 1024 / 16;
  return {(address >> 4 & 0x3FFF) | static_cast<uint64_t>(panel_bytes >> 4) << 16 | kGroupOf8 << 32 |
          k128ByteSwizzle << 62};
}

/// Orders register accesses of ordinary code before wgmma instructions that use the same registers.
__device__ __forceinline__ void wgmma_fence() {
#ifdef ATTN_EMULATED
  emulator::Block::current().product_fence();
#else
  ATTN_STAMP_FENCE
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

/// Commits all wgmma since the last commit as one group.
__device__ __forceinline__ void wgmma_commit() {
#ifdef ATTN_EMULATED
  emulator::Block::current().product_commit();
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  ATTN_STAMP_GROUP
#endif
}

// Prevents the compiler from moving reads of the accumulators above the wait. To the compiler, a
// wgmma in flight has written its accumulators at issue, so it could read or copy them too early.
template <int kTiles>
__device__ __forceinline__ void accumulator_fence([[maybe_unused]] float (&d)[kTiles][4]) {
#ifndef ATTN_EMULATED
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
#endif
}

/// Waits until at most the newest kPending groups are in flight. `d`: the accumulators that are
/// valid afterwards. All lanes of a warp must call it together.
template <int kPending, int kTiles>
__device__ __forceinline__ void wgmma_wait(float (&d)[kTiles][4] ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().product_wait(kPending, caller);
#else
  ATTN_STAMP_BEGIN
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  ATTN_STAMP_PENDING(wgmma_wait, caller, kPending)
#endif
  accumulator_fence(d);
}
/// The same for the accumulators of two products.
template <int kPending, int kTiles, int kMoreTiles>
__device__ __forceinline__ void wgmma_wait(float (&d)[kTiles][4], float (&e)[kMoreTiles][4] ATTN_CALLER) {
#ifdef ATTN_EMULATED
  wgmma_wait<kPending>(d, caller);
#else
  wgmma_wait<kPending>(d ATTN_PASS_CALLER);
#endif
  accumulator_fence(e);
}

#ifdef ATTN_EMULATED
// Calls read(address, 16) for each 16-byte chunk of an operand of `rows` x 16.
inline void each_chunk(SmemDescriptor operand, bool mn_major, int rows, emulator::Place caller,
                       const emulator::Block::Visit& read) {
  emulator::Block& block = emulator::Block::current();
  for (int row = 0; row < rows; row += mn_major ? 8 : 1)
    for (int k = 0; k < 16; k += mn_major ? 1 : 8) {
      const uint64_t offset = emulator::operand_offset(operand.bits, mn_major, row, k);
      if (offset + 16 > block.shared_bytes())
        block.fail("wgmma", caller, "on an operand that reaches behind the block's shared memory");
      read(static_cast<const std::byte*>(block.shared()) + offset, 16);
    }
}

// Emulation of this thread's part of a product, deferred until its wait. A is in shared memory, or
// in the registers of the `quad`, which are read when the product is computed.
struct Quad {
  const uint32_t *own = nullptr, *lanes[4] = {};
};
template <bool kTransposedB, class Element, int kTiles>
void wgmma_later(float (&d)[kTiles][4], SmemDescriptor a, Quad quad, SmemDescriptor b,
                 bool accumulate, emulator::Place caller) {
  emulator::tensor_flop += 2 * 64 * 8 * kTiles * 16 / 128;  // this thread's part
  emulator::Block& block = emulator::Block::current();
  const int thread = static_cast<int>(emulator::threadIdx.x) % 128;
  const auto multiply = [=, &d, shared = static_cast<const std::byte*>(block.shared())] {
    emulator::wgmma({.d = d, .columns = 8 * kTiles, .lane = thread % 32, .bf16 = emulator::kIsBFloat16<Element>,
                     .accumulate = accumulate, .mn_major = kTransposedB, .shared = shared, .a = a.bits, .b = b.bits,
                     .registers = quad.own ? quad.lanes : nullptr, .row = thread / 32 * 16 + thread % 32 / 4});
  };
  const auto operands = [&](const emulator::Block::Visit& read) {
    if (!quad.own) each_chunk(a, false, 64, caller, read);
    each_chunk(b, kTransposedB, 8 * kTiles, caller, read);
  };
  block.product_async(caller, {d, sizeof d}, accumulate,
                      {const_cast<uint32_t*>(quad.own), quad.own ? 4 * sizeof(uint32_t) : 0}, multiply, operands);
}
#else
// D in an asm statement, 16 more columns per line: names %0, %1, ... and registers d[0][0], ...
#define ATTN_WGMMA_NAMES_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define ATTN_WGMMA_NAMES_2 ATTN_WGMMA_NAMES_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define ATTN_WGMMA_NAMES_3 ATTN_WGMMA_NAMES_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define ATTN_WGMMA_NAMES_4 ATTN_WGMMA_NAMES_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTN_WGMMA_NAMES_5 ATTN_WGMMA_NAMES_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define ATTN_WGMMA_NAMES_6 ATTN_WGMMA_NAMES_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define ATTN_WGMMA_NAMES_7 ATTN_WGMMA_NAMES_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define ATTN_WGMMA_NAMES_8 ATTN_WGMMA_NAMES_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define ATTN_WGMMA_NAMES_9 ATTN_WGMMA_NAMES_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define ATTN_WGMMA_NAMES_10 ATTN_WGMMA_NAMES_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define ATTN_WGMMA_NAMES_11 ATTN_WGMMA_NAMES_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define ATTN_WGMMA_NAMES_12 ATTN_WGMMA_NAMES_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define ATTN_WGMMA_NAMES_13 ATTN_WGMMA_NAMES_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define ATTN_WGMMA_NAMES_14 ATTN_WGMMA_NAMES_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define ATTN_WGMMA_NAMES_15 ATTN_WGMMA_NAMES_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define ATTN_WGMMA_NAMES_16 ATTN_WGMMA_NAMES_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define ATTN_WGMMA_D(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define ATTN_WGMMA_REGISTERS_1 ATTN_WGMMA_D(0), ATTN_WGMMA_D(1)
#define ATTN_WGMMA_REGISTERS_2 ATTN_WGMMA_REGISTERS_1, ATTN_WGMMA_D(2), ATTN_WGMMA_D(3)
#define ATTN_WGMMA_REGISTERS_3 ATTN_WGMMA_REGISTERS_2, ATTN_WGMMA_D(4), ATTN_WGMMA_D(5)
#define ATTN_WGMMA_REGISTERS_4 ATTN_WGMMA_REGISTERS_3, ATTN_WGMMA_D(6), ATTN_WGMMA_D(7)
#define ATTN_WGMMA_REGISTERS_5 ATTN_WGMMA_REGISTERS_4, ATTN_WGMMA_D(8), ATTN_WGMMA_D(9)
#define ATTN_WGMMA_REGISTERS_6 ATTN_WGMMA_REGISTERS_5, ATTN_WGMMA_D(10), ATTN_WGMMA_D(11)
#define ATTN_WGMMA_REGISTERS_7 ATTN_WGMMA_REGISTERS_6, ATTN_WGMMA_D(12), ATTN_WGMMA_D(13)
#define ATTN_WGMMA_REGISTERS_8 ATTN_WGMMA_REGISTERS_7, ATTN_WGMMA_D(14), ATTN_WGMMA_D(15)
#define ATTN_WGMMA_REGISTERS_9 ATTN_WGMMA_REGISTERS_8, ATTN_WGMMA_D(16), ATTN_WGMMA_D(17)
#define ATTN_WGMMA_REGISTERS_10 ATTN_WGMMA_REGISTERS_9, ATTN_WGMMA_D(18), ATTN_WGMMA_D(19)
#define ATTN_WGMMA_REGISTERS_11 ATTN_WGMMA_REGISTERS_10, ATTN_WGMMA_D(20), ATTN_WGMMA_D(21)
#define ATTN_WGMMA_REGISTERS_12 ATTN_WGMMA_REGISTERS_11, ATTN_WGMMA_D(22), ATTN_WGMMA_D(23)
#define ATTN_WGMMA_REGISTERS_13 ATTN_WGMMA_REGISTERS_12, ATTN_WGMMA_D(24), ATTN_WGMMA_D(25)
#define ATTN_WGMMA_REGISTERS_14 ATTN_WGMMA_REGISTERS_13, ATTN_WGMMA_D(26), ATTN_WGMMA_D(27)
#define ATTN_WGMMA_REGISTERS_15 ATTN_WGMMA_REGISTERS_14, ATTN_WGMMA_D(28), ATTN_WGMMA_D(29)
#define ATTN_WGMMA_REGISTERS_16 ATTN_WGMMA_REGISTERS_15, ATTN_WGMMA_D(30), ATTN_WGMMA_D(31)

// One shape: N = 16 * COLUMNS. The names of the other operands follow those of D. FLAG: whether to
// accumulate; LEFT and RIGHT surround the predicate made from it.
#define ATTN_WGMMA_TYPE(COLUMNS, N, TYPE, FLAG, LEFT, RIGHT, ...)                                             \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " FLAG ", 0;\n"                           \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" ATTN_WGMMA_NAMES_##COLUMNS \
               "}, " LEFT ", accumulate, 1, 1, " RIGHT ";\n}"                                                 \
               : ATTN_WGMMA_REGISTERS_##COLUMNS                                                               \
               : __VA_ARGS__)
#define ATTN_WGMMA(COLUMNS, N, FLAG, LEFT, RIGHT, ...)                                   \
  if constexpr (kTiles == 2 * COLUMNS && std::is_same_v<Element, __half>)                \
    ATTN_WGMMA_TYPE(COLUMNS, N, "f16", FLAG, LEFT, RIGHT, __VA_ARGS__);                  \
  else if constexpr (kTiles == 2 * COLUMNS)                                              \
    ATTN_WGMMA_TYPE(COLUMNS, N, "bf16", FLAG, LEFT, RIGHT, __VA_ARGS__)
// Shapes in use.
template <int kTiles>
inline constexpr bool kIsWgmmaShape = kTiles == 8 || kTiles == 10 || kTiles == 12 || kTiles == 14 || kTiles == 16 ||
                                      kTiles == 18 || kTiles == 20 || kTiles == 22 || kTiles == 24 || kTiles == 32;
#endif

/// D = A B, or D += A B if `accumulate`. A [64, 16] is K-major in shared memory. B is K-major
/// (kTransposedB false: B^T is [N, k]) or MN-major ([k, N]). All threads of a warpgroup call it.
template <class Element, bool kTransposedB, int kTiles>
__device__ __forceinline__ void wgmma(float (&d)[kTiles][4], SmemDescriptor a, SmemDescriptor b,
                                      bool accumulate ATTN_CALLER) {
#ifdef ATTN_EMULATED
  wgmma_later<kTransposedB, Element>(d, a, {}, b, accumulate, caller);
#else
#define ATTN_WGMMA_INPUTS "l"(a.bits), "l"(b.bits), "r"(int{accumulate}), "n"(int{kTransposedB})
  static_assert(kIsWgmmaShape<kTiles>);
  ATTN_WGMMA(4, 64, "%34", "%32, %33", "0, %35", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(5, 80, "%42", "%40, %41", "0, %43", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(6, 96, "%50", "%48, %49", "0, %51", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(7, 112, "%58", "%56, %57", "0, %59", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(8, 128, "%66", "%64, %65", "0, %67", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(9, 144, "%74", "%72, %73", "0, %75", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(10, 160, "%82", "%80, %81", "0, %83", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(11, 176, "%90", "%88, %89", "0, %91", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(12, 192, "%98", "%96, %97", "0, %99", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(16, 256, "%130", "%128, %129", "0, %131", ATTN_WGMMA_INPUTS);
#undef ATTN_WGMMA_INPUTS
#endif
}

/// The same with A in registers, as an A fragment of mma_m16n8k16.
template <class Element, bool kTransposedB, int kTiles>
__device__ __forceinline__ void wgmma(float (&d)[kTiles][4], const uint32_t (&a)[4],
                                      SmemDescriptor b, bool accumulate ATTN_CALLER) {
#ifdef ATTN_EMULATED
  Quad quad{a, {}};
  emulator::Block::current().wait_warp("wgmma", caller, ~0u, quad, [](auto& lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int t = 0; t < 4; ++t) lanes[lane]->lanes[t] = lanes[lane / 4 * 4 + t]->own;
  });
  wgmma_later<kTransposedB, Element>(d, {}, quad, b, accumulate, caller);
#else
#define ATTN_WGMMA_INPUTS \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int{accumulate}), "n"(int{kTransposedB})
  static_assert(kIsWgmmaShape<kTiles>);
  ATTN_WGMMA(4, 64, "%37", "{%32, %33, %34, %35}, %36", "%38", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(5, 80, "%45", "{%40, %41, %42, %43}, %44", "%46", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(6, 96, "%53", "{%48, %49, %50, %51}, %52", "%54", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(7, 112, "%61", "{%56, %57, %58, %59}, %60", "%62", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(8, 128, "%69", "{%64, %65, %66, %67}, %68", "%70", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(9, 144, "%77", "{%72, %73, %74, %75}, %76", "%78", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(10, 160, "%85", "{%80, %81, %82, %83}, %84", "%86", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(11, 176, "%93", "{%88, %89, %90, %91}, %92", "%94", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(12, 192, "%101", "{%96, %97, %98, %99}, %100", "%102", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA(16, 256, "%133", "{%128, %129, %130, %131}, %132", "%134", ATTN_WGMMA_INPUTS);
#undef ATTN_WGMMA_INPUTS
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
