/// \file
/// The arithmetic of tensor cores on int8: whole numbers of 32 bits, exact.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace attn::emulator {

/// A thread's part of `wgmma` of int8, as WgmmaPart has it (products.h): two rows of A, and of B
/// the columns 2t and 2t + 1 of every eight, t = lane % 4; 32 of k, both operands K-major in shared
/// memory.
struct WgmmaS8Part {
  int (*d)[4];
  int columns, lane;
  bool accumulate;
  const std::byte* shared;
  std::uint64_t a, b;  // matrix descriptors
  int row;             // of A, the first of this thread's two; the other is 8 on
};
void wgmma_s8(const WgmmaS8Part& part);

/// What a lane brings to `mma.m16n8k32` of int8, and gets (ptx/mma_s8.h draws the fragments).
struct MmaS8Lane {
  const std::uint32_t *a, *b;  // 4 and 2 registers
  const int* c;                // 4
  int d[4];
};
void mma_m16n8k32_s8(const std::array<MmaS8Lane*, 32>& lanes);
/// The same of `mma.m16n8k64` of int4: two codes in place of one (ptx/mma_s4.h).
void mma_m16n8k64_s4(const std::array<MmaS8Lane*, 32>& lanes);

}  // namespace attn::emulator
