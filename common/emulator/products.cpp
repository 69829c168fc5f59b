#include "emulator/products.h"

#include <cstddef>
#include <cstring>

namespace attn::emulator {
namespace {

float half_to_float(bool bf16, std::uint16_t bits) {
  if (bf16) return static_cast<float>(std::bit_cast<BFloat16>(bits));
  return static_cast<float>(std::bit_cast<Float16>(bits));
}

// The hardware adds up in an order of its own, too: here four sums, which a vector unit does at
// once.
float dot(const float* a, const float* b) {
  float part[4] = {};
  for (int k = 0; k < 16; k += 4)
    for (int i = 0; i < 4; ++i) part[i] += a[k + i] * b[k + i];
  return (part[0] + part[1]) + (part[2] + part[3]);
}

// Column n of B, or row n of A: 16 floats along k.
void along_k(const WgmmaPart& p, std::uint64_t descriptor, bool mn_major, int n, float (&out)[16]) {
  std::uint16_t bits[16];
  if (mn_major) {
    for (int k = 0; k < 16; ++k)
      std::memcpy(&bits[k], p.shared + operand_offset(descriptor, true, n, k), 2);
  } else {
    for (int k = 0; k < 16; k += 8)
      std::memcpy(&bits[k], p.shared + operand_offset(descriptor, false, n, k), 16);
  }
  to_floats(p.bf16, bits, out);
}

}  // namespace

void to_floats(bool bf16, const std::uint16_t* elements, float (&out)[16]) {
  if (bf16)
    for (int i = 0; i < 16; ++i)
      out[i] = std::bit_cast<float>(static_cast<std::uint32_t>(elements[i]) << 16);
  else
    for (int i = 0; i < 16; ++i) out[i] = half_to_float(false, elements[i]);
}

void mma_m16n8k16(bool bf16, const std::array<MmaLane*, 32>& lanes) {
  float A[16][16], B[8][16];
  const auto half_of = [bf16](std::uint32_t pair, int i) {
    return half_to_float(bf16, static_cast<std::uint16_t>(pair >> (16 * i)));
  };
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const MmaLane& mine = *lanes[static_cast<std::size_t>(lane)];
    for (int i = 0; i < 2; ++i) {
      for (int r = 0; r < 4; ++r)
        A[g + 8 * (r % 2)][2 * t + i + 8 * (r / 2)] = half_of(mine.a[r], i);
      for (int r = 0; r < 2; ++r) B[g][2 * t + i + 8 * r] = half_of(mine.b[r], i);
    }
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const float *const a = A[lane / 4 + 8 * (i / 2)], *const b = B[2 * (lane % 4) + i % 2];
      MmaLane& mine = *lanes[static_cast<std::size_t>(lane)];
      mine.d[i] = mine.c[i] + dot(a, b);
    }
}

void wgmma(const WgmmaPart& p) {
  float a[2][16];
  for (int half = 0; half < 2; ++half) {
    if (!p.registers) {
      along_k(p, p.a, false, p.row + 8 * half, a[half]);
      continue;
    }
    std::uint16_t bits[16];
    for (int k = 0; k < 16; k += 2) {  // {row g, row g + 8} of k 0..7, then of k 8..15
      const std::uint32_t pair = p.registers[k % 8 / 2][half + k / 8 * 2];
      std::memcpy(&bits[k], &pair, 4);
    }
    to_floats(p.bf16, bits, a[half]);
  }
  for (int n = 0; n < p.columns / 8; ++n)
    for (int j = 0; j < 2; ++j) {
      float b[16];
      along_k(p, p.b, p.mn_major, 8 * n + 2 * (p.lane % 4) + j, b);
      for (int row = 0; row < 2; ++row) {
        float& sum = p.d[n][2 * row + j];
        sum = (p.accumulate ? sum : 0) + dot(a[row], b);
      }
    }
}

}  // namespace attn::emulator
