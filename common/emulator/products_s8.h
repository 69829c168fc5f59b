/// \file
/// The arithmetic of tensor cores on int8: whole numbers of 32 bits, exact.
#pragma once

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

}  // namespace attn::emulator
