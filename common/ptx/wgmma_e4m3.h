/// \file
/// `wgmma` for e4m3: D [64, N] = A [64, 32] * B [32, N] + D. PTX ISA, "Asynchronous warpgroup level
/// matrix instructions" (sm_90a). Differences to wgmma.h:
///
///  - Both operands are K-major: 8-bit types have no transposed operand. A panel has 128 columns
///    (128 bytes), or 64 if the tile has only 64. The next 32 of k are 32 bytes further.
///  - A in registers: lane (g, t) holds in `a` columns 4 t to 4 t + 3 of rows g and g + 8, then the
///    columns 16 further. An accumulator has 2 adjacent columns per lane, where A has 4. With the
///    order
///
///        slot of k    0 1 2 3    4 5 6 7     8  9 10 11    12 13 14 15
///        column       0 1 8 9    2 3 10 11   4  5 12 13     6  7 14 15
///
///    accumulators of one product are the A operand of the next, if the rows of B have the same
///    order: p_of_e4m3().
///  - Accumulation has fewer bits than fp32: emulator/products.h, add_up_e4m3.
#pragma once

#include "attn/small_types.h"
#include "ptx/wgmma.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// The column, of 16, in slot `slot` of k.
__host__ __device__ constexpr int e4m3_column(int slot) { return slot % 2 + slot / 4 * 2 + slot % 4 / 2 * 8; }

/// Four floats to e4m3, rounded to nearest even, the first in the lowest byte. Saturates at 448.
__device__ __forceinline__ uint32_t pack4_e4m3(float a, float b, float c, float d) {
#ifdef ATTN_EMULATED
  uint32_t four = 0;
  for (const float x : {d, c, b, a}) four = four << 8 | E4M3::encode(x);
  return four;
#else
  uint32_t four;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
#endif
}

/// Descriptor of an operand at `tile` with rows of kRowBytes.
template <int kRowBytes>
__device__ __forceinline__ SmemDescriptor smem_descriptor_e4m3(const void* tile) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2, kGroupOf8 = 8 * kRowBytes / 16;
  return {(smem_descriptor(tile).bits & 0x3FFF) | uint64_t{1} << 16 | kGroupOf8 << 32 |
          kSwizzle << 62};
}

#ifdef ATTN_EMULATED
template <int kTiles>
void wgmma_e4m3_later(float (&d)[kTiles][4], SmemDescriptor a, Quad quad, SmemDescriptor b,
                      bool accumulate, emulator::Place caller) {
  emulator::tensor_flop += 2 * 64 * 8 * kTiles * 32 / 128;  // this thread's part
  emulator::Block& block = emulator::Block::current();
  const int thread = static_cast<int>(emulator::threadIdx.x) % 128;
  const auto multiply = [=, &d, shared = static_cast<const std::byte*>(block.shared())] {
    emulator::wgmma_e4m3({.d = d, .columns = 8 * kTiles, .lane = thread % 32, .bf16 = false, .accumulate = accumulate,
                          .mn_major = false, .shared = shared, .a = a.bits, .b = b.bits,
                          .registers = quad.own ? quad.lanes : nullptr,
                          .row = thread / 32 * 16 + thread % 32 / 4});
  };
  const auto operands = [&](const emulator::Block::Visit& read) {
    if (!quad.own) each_chunk(a, false, 64, caller, read);
    each_chunk(b, false, 8 * kTiles, caller, read);
  };
  block.product_async(caller, {d, sizeof d}, accumulate,
                      {const_cast<uint32_t*>(quad.own), quad.own ? 4 * sizeof(uint32_t) : 0}, multiply, operands);
}
#else
// One shape: N = 16 * COLUMNS. See wgmma.h.
#define ATTN_WGMMA_E4M3(COLUMNS, N, FLAG, LEFT, RIGHT, ...)                                                 \
  if constexpr (kTiles == 2 * COLUMNS)                                                                     \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " FLAG ", 0;\n"                        \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" ATTN_WGMMA_NAMES_##COLUMNS     \
               "}, " LEFT ", " RIGHT ", accumulate, 1, 1;\n}"                                              \
               : ATTN_WGMMA_REGISTERS_##COLUMNS                                                            \
               : __VA_ARGS__)
template <int kTiles>
inline constexpr bool kIsWgmmaE4M3Shape = kTiles == 8 || kTiles == 16 || kTiles == 20 || kTiles == 24 ||
                                          kTiles == 28 || kTiles == 32;
#endif

/// D = A B, or D += A B if `accumulate`, both operands in shared memory. All threads of a warpgroup
/// call it.
template <int kTiles>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[kTiles][4], SmemDescriptor a,
                                           SmemDescriptor b, bool accumulate ATTN_CALLER) {
#ifdef ATTN_EMULATED
  wgmma_e4m3_later(d, a, {}, b, accumulate, caller);
#else
  static_assert(kIsWgmmaE4M3Shape<kTiles>);
#define ATTN_WGMMA_INPUTS "l"(a.bits), "l"(b.bits), "r"(int{accumulate})
  ATTN_WGMMA_E4M3(4, 64, "%34", "%32", "%33", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA_E4M3(8, 128, "%66", "%64", "%65", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA_E4M3(10, 160, "%82", "%80", "%81", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA_E4M3(12, 192, "%98", "%96", "%97", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA_E4M3(14, 224, "%114", "%112", "%113", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA_E4M3(16, 256, "%130", "%128", "%129", ATTN_WGMMA_INPUTS);
#undef ATTN_WGMMA_INPUTS
#endif
}

/// The same with A in registers.
template <int kTiles>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[kTiles][4], const uint32_t (&a)[4],
                                           SmemDescriptor b, bool accumulate ATTN_CALLER) {
#ifdef ATTN_EMULATED
  Quad quad{a, {}};
  emulator::Block::current().wait_warp("wgmma_e4m3", caller, ~0u, quad, [](auto& lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int t = 0; t < 4; ++t) lanes[lane]->lanes[t] = lanes[lane / 4 * 4 + t]->own;
  });
  wgmma_e4m3_later(d, {}, quad, b, accumulate, caller);
#else
  static_assert(kIsWgmmaE4M3Shape<kTiles>);
#define ATTN_WGMMA_INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int{accumulate})
  ATTN_WGMMA_E4M3(4, 64, "%37", "{%32, %33, %34, %35}", "%36", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA_E4M3(8, 128, "%69", "{%64, %65, %66, %67}", "%68", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA_E4M3(10, 160, "%85", "{%80, %81, %82, %83}", "%84", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA_E4M3(12, 192, "%101", "{%96, %97, %98, %99}", "%100", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA_E4M3(14, 224, "%117", "{%112, %113, %114, %115}", "%116", ATTN_WGMMA_INPUTS);
  ATTN_WGMMA_E4M3(16, 256, "%133", "{%128, %129, %130, %131}", "%132", ATTN_WGMMA_INPUTS);
#undef ATTN_WGMMA_INPUTS
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
