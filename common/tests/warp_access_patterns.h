/// \file
/// Access patterns of one warp instruction and their costs: test_warp_access.cpp compares
/// emulator/warp_access.h with these figures, and warp_access_probe compares both with a GPU.
#pragma once

#include <cstdint>
#include <type_traits>

#include "emulator/warp_access.h"

namespace attn::tests {

enum class Instruction { kShared, kLdmatrix, kGlobal };

/// Lane l accesses kBytes at byte kOffset + l * kStride; only the first kActive lanes are active.
template <Instruction kIn, int kWidth, int kStride, int kOffset = 0, int kActive = 32>
struct Strided {
  static constexpr Instruction kInstruction = kIn;
  static constexpr int kBytes = kWidth;
  static constexpr int64_t address(int lane) {
    return lane < kActive ? int64_t{kOffset} + lane * kStride : -1;
  }
};
/// A tile of rows of kRowBytes; eight neighbouring lanes read 16 bytes of eight different rows, as
/// in ldmatrix. kSwizzle: the 16-byte column is XORed with the row.
template <Instruction kIn, int kRowBytes, bool kSwizzle = false>
struct Rows {
  static constexpr Instruction kInstruction = kIn;
  static constexpr int kBytes = 16;
  static constexpr int64_t address(int lane) {
    const int row = lane % 16, column = lane / 16;
    return row * kRowBytes + 16 * (kSwizzle ? column ^ (row % 8) : column);
  }
};
/// A column of 4-byte elements in a tile of 32 rows.
template <int kRowElements>
using Column = Strided<Instruction::kShared, 4, 4 * kRowElements>;

/// Wavefronts (shared memory) or sectors (global memory) according to warp_access.h.
template <class Pattern>
constexpr int predicted() {
  if constexpr (Pattern::kInstruction == Instruction::kShared)
    return shared_access(Pattern::address, Pattern::kBytes).wavefronts;
  else if constexpr (Pattern::kInstruction == Instruction::kLdmatrix)
    return ldmatrix_access(Pattern::address, 4).wavefronts;
  else
    return sectors(Pattern::address, Pattern::kBytes);
}

/// Calls `f(pattern, name, cost)` for every pattern; `cost` was computed by hand.
template <class F>
constexpr void for_each_pattern(F f) {
  constexpr auto kShared = Instruction::kShared, kGlobal = Instruction::kGlobal;
  constexpr auto kLdmatrix = Instruction::kLdmatrix;
  const auto cost = [](int n) { return n; };
  f(Strided<kShared, 4, 4>{}, "shared 4 B, unit stride", cost(1));
  f(Strided<kShared, 4, 4, 4>{}, "shared 4 B, unit stride from byte 4", cost(1));
  f(Strided<kShared, 4, 0>{}, "shared 4 B, one address", cost(1));
  f(Strided<kShared, 4, 8>{}, "shared 4 B, every 2nd float", cost(2));
  f(Strided<kShared, 4, 12>{}, "shared 4 B, every 3rd float", cost(1));
  f(Strided<kShared, 4, 16>{}, "shared 4 B, every 4th float", cost(4));
  f(Column<32>{}, "shared 4 B, column of rows of 32 floats", cost(32));
  f(Column<33>{}, "shared 4 B, column of rows of 33 floats", cost(1));
  f(Strided<kShared, 4, 128, 0, 5>{}, "shared 4 B, 5 lanes in one bank", cost(5));
  f(Strided<kShared, 8, 8>{}, "shared 8 B, unit stride", cost(2));
  f(Strided<kShared, 8, 16>{}, "shared 8 B, every 2nd pair", cost(4));
  f(Strided<kShared, 16, 16>{}, "shared 16 B, unit stride", cost(4));
  f(Strided<kShared, 16, 32>{}, "shared 16 B, every 2nd vector", cost(8));
  f(Strided<kShared, 16, 16, 0, 8>{}, "shared 16 B, 8 lanes", cost(1));
  f(Rows<kShared, 128>{}, "shared 16 B, rows of 128 B", cost(32));
  f(Rows<kShared, 144>{}, "shared 16 B, rows of 144 B", cost(4));
  f(Rows<kShared, 128, true>{}, "shared 16 B, rows of 128 B, swizzled", cost(4));
  f(Rows<kLdmatrix, 16>{}, "ldmatrix x4, rows of 16 B", cost(4));
  f(Rows<kLdmatrix, 64>{}, "ldmatrix x4, rows of 64 B", cost(16));
  f(Rows<kLdmatrix, 128>{}, "ldmatrix x4, rows of 128 B", cost(32));
  f(Rows<kLdmatrix, 144>{}, "ldmatrix x4, rows of 144 B", cost(4));
  f(Rows<kLdmatrix, 128, true>{}, "ldmatrix x4, rows of 128 B, swizzled", cost(4));
  f(Strided<kGlobal, 4, 4>{}, "global 4 B, unit stride", cost(4));
  f(Strided<kGlobal, 4, 4, 4>{}, "global 4 B, unit stride from byte 4", cost(5));
  f(Strided<kGlobal, 4, 0>{}, "global 4 B, one address", cost(1));
  f(Strided<kGlobal, 4, 8>{}, "global 4 B, every 2nd float", cost(8));
  f(Strided<kGlobal, 4, 32>{}, "global 4 B, every 8th float", cost(32));
  f(Strided<kGlobal, 4, 4, 0, 9>{}, "global 4 B, 9 lanes", cost(2));
  f(Strided<kGlobal, 8, 8>{}, "global 8 B, unit stride", cost(8));
  f(Strided<kGlobal, 8, 64>{}, "global 8 B, every 8th pair", cost(32));
  f(Strided<kGlobal, 16, 16>{}, "global 16 B, unit stride", cost(16));
  f(Strided<kGlobal, 16, 32>{}, "global 16 B, every 2nd vector", cost(32));
  f(Rows<kGlobal, 256>{}, "global 16 B, 2 vectors of each of 16 rows", cost(16));
}

}  // namespace attn::tests
