/// \file
/// The arithmetic of tensor cores: products of 16-bit elements, sums in float32; of e4m3, sums of
/// fewer bits. Compiled once and optimised, since it is most of what an emulated kernel does.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "emulator/float16.h"

namespace attn::emulator {

/// Which 16-bit type: true for bf16.
template <class Element>
inline constexpr bool kIsBFloat16 = false;
template <>
inline constexpr bool kIsBFloat16<BFloat16> = true;

/// What a lane brings to `mma.m16n8k16`, and gets (ptx/mma.h draws the fragments).
struct MmaLane {
  const std::uint32_t *a, *b;  // 4 and 2 registers
  const float* c;              // 4
  float d[4];
};
void mma_m16n8k16(bool bf16, const std::array<MmaLane*, 32>& lanes);

/// A thread's part of `wgmma`, as ptx/wgmma.h has it: two rows of A, and of B the columns 2t and 2t
/// + 1 of every eight, t = lane % 4.
struct WgmmaPart {
  float (*d)[4];
  int columns, lane;
  bool bf16, accumulate, mn_major;  // of B
  const std::byte* shared;
  std::uint64_t a, b;  // matrix descriptors
  // Those of the quad's four lanes, or null: A lies in shared memory.
  const std::uint32_t* const* registers;
  int row;  // of A, the first of this thread's two; the other is 8 on
};
void wgmma(const WgmmaPart& part);

/// The same for e4m3, 32 columns of A and both operands K-major (ptx/wgmma_e4m3.h). `bf16` and
/// `mn_major` are not looked at.
void wgmma_e4m3(const WgmmaPart& part);

/// What a tensor core makes of 32 products of e4m3 and the sum so far, c. All are aligned to the
/// largest exponent among them (that of a product is the sum of its factors'), truncated toward
/// zero to 13 fraction bits, and added as integers; the sum is truncated to 13 fraction bits. An
/// H200 gives the same bits for every sum of the
/// test "wgmma of e4m3 (GPU)".
float add_up_e4m3(float c, const float (&a)[32], const float (&b)[32]);

/// Where element (row, k) of a K-major operand, or (k, row) of an MN-major one, lies in shared
/// memory, as the hardware finds it: the address without the swizzle, then the swizzle, of rows of
/// 128 bytes or, K-major, of 64. `k` counts 2 bytes.
inline std::uint64_t operand_offset(std::uint64_t descriptor, bool mn_major, int row, int k) {
  const std::uint64_t start = (descriptor & 0x3FFF) << 4;
  const std::uint64_t panel = (descriptor >> 16 & 0x3FFF) << 4, group = (descriptor >> 32 & 0x3FFF)
                                                                        << 4;
  const auto r = static_cast<std::uint64_t>(row), c = static_cast<std::uint64_t>(k);
  constexpr std::uint64_t k64Bytes = 2;
  const bool of_64 = descriptor >> 62 == k64Bytes;
  const std::uint64_t address =
      start + (mn_major ? r / 64 * panel + c / 8 * group + c % 8 * 128 + r % 64 * 2
                        : r / 8 * group + r % 8 * (of_64 ? 64 : 128) + c * 2);
  return address ^ (address >> 7 & (of_64 ? 3 : 7)) << 4;
}

}  // namespace attn::emulator
