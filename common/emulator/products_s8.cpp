#include "emulator/products_s8.h"

#include <cstring>

#include "emulator/products.h"

namespace attn::emulator {
namespace {

// Row n of A, or column n of B: 32 codes along k.
void along_k(const std::byte* shared, std::uint64_t descriptor, int n, std::int8_t (&out)[32]) {
  for (int chunk = 0; chunk < 2; ++chunk)
    std::memcpy(out + 16 * chunk, shared + operand_offset(descriptor, false, n, 8 * chunk), 16);
}

int dot(const std::int8_t (&a)[32], const std::int8_t (&b)[32]) {
  int sum = 0;
  for (int k = 0; k < 32; ++k) sum += int{a[k]} * int{b[k]};
  return sum;
}

}  // namespace

void wgmma_s8(const WgmmaS8Part& p) {
  std::int8_t a[2][32], b[32];
  for (int half = 0; half < 2; ++half) along_k(p.shared, p.a, p.row + 8 * half, a[half]);
  for (int n = 0; n < p.columns / 8; ++n)
    for (int j = 0; j < 2; ++j) {
      along_k(p.shared, p.b, 8 * n + 2 * (p.lane % 4) + j, b);
      for (int row = 0; row < 2; ++row) {
        int& sum = p.d[n][2 * row + j];
        sum = (p.accumulate ? sum : 0) + dot(a[row], b);
      }
    }
}

void mma_m16n8k32_s8(const std::array<MmaS8Lane*, 32>& lanes) {
  std::int8_t a[16][32], b[8][32];  // rows of A, columns of B
  for (std::size_t g = 0; g < 8; ++g)
    for (std::size_t t = 0; t < 4; ++t) {
      const MmaS8Lane& mine = *lanes[4 * g + t];
      for (std::size_t r = 0; r < 4; ++r)
        std::memcpy(&a[g + 8 * (r % 2)][4 * t + 16 * (r / 2)], &mine.a[r], 4);
      for (std::size_t r = 0; r < 2; ++r) std::memcpy(&b[g][4 * t + 16 * r], &mine.b[r], 4);
    }
  for (std::size_t g = 0; g < 8; ++g)
    for (std::size_t t = 0; t < 4; ++t) {
      MmaS8Lane& mine = *lanes[4 * g + t];
      for (std::size_t i = 0; i < 4; ++i)
        mine.d[i] = mine.c[i] + dot(a[g + 8 * (i / 2)], b[2 * t + i % 2]);
    }
}

void mma_m16n8k64_s4(const std::array<MmaS8Lane*, 32>& lanes) {
  std::int8_t a[16][64], b[8][64];
  const auto unpack = [](std::int8_t* out, std::uint32_t eight) {
    for (int i = 0; i < 8; ++i)
      out[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(eight << (28 - 4 * i)) >> 28);
  };
  for (std::size_t g = 0; g < 8; ++g)
    for (std::size_t t = 0; t < 4; ++t) {
      const MmaS8Lane& mine = *lanes[4 * g + t];
      for (std::size_t r = 0; r < 4; ++r)
        unpack(&a[g + 8 * (r % 2)][8 * t + 32 * (r / 2)], mine.a[r]);
      for (std::size_t r = 0; r < 2; ++r) unpack(&b[g][8 * t + 32 * r], mine.b[r]);
    }
  for (std::size_t g = 0; g < 8; ++g)
    for (std::size_t t = 0; t < 4; ++t) {
      MmaS8Lane& mine = *lanes[4 * g + t];
      for (std::size_t i = 0; i < 4; ++i) {
        int sum = mine.c[i];
        for (std::size_t k = 0; k < 64; ++k)
          sum += int{a[g + 8 * (i / 2)][k]} * int{b[2 * t + i % 2][k]};
        mine.d[i] = sum;
      }
    }
}

}  // namespace attn::emulator
