#include <cmath>
#include "emulator/products.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "attn/small_types.h"

namespace attn::emulator {
namespace {

// Every code of e4m3 as a float.
const std::array<float, 256> kE4M3 = [] {
  std::array<float, 256> all{};
  for (std::size_t code = 0; code < all.size(); ++code)
    all[code] = E4M3::decode(static_cast<std::uint8_t>(code));
  return all;
}();

// One and two registers of any x86-64. What the loops below would become if the compiler saw that
// the sums can stay in registers.
using Four = float __attribute__((vector_size(16)));
using FourBits = std::uint32_t __attribute__((vector_size(16)));
using Eight = float __attribute__((vector_size(32)));

// 16 numbers along k.
using Sixteen = std::array<Four, 4>;

// The hardware adds up in an order of its own, too: here four sums at once.
float dot(const Sixteen& a, const Sixteen& b) {
  Four part = {};
  for (std::size_t i = 0; i < 4; ++i) part += a[i] * b[i];
  return (part[0] + part[1]) + (part[2] + part[3]);
}

// Exact: infinities, NaNs and subnormal numbers, too.
Four floats_of(bool bf16, FourBits bits) {
  if (bf16) return std::bit_cast<Four>(bits << 16);
  constexpr std::uint32_t kBias = (127 - 15) << 23, kInfinity = 0x7C00 << 13, kOne = 1 << 23;
  const FourBits size = (bits & 0x7FFF) << 13;  // the exponent of fp16 in the place of that of fp32
  const FourBits special = std::bit_cast<FourBits>(size >= kInfinity) & kBias;
  // A subnormal number as one with an exponent, less 2^-14: no subnormal float, which may count as
  // 0 and takes long.
  const FourBits small = std::bit_cast<FourBits>(size < kOne);
  const auto less = std::bit_cast<FourBits>(std::bit_cast<Four>(size + kBias + kOne) - 0x1p-14F);
  return std::bit_cast<Four>((less & small) | ((size + kBias + special) & ~small) |
                             (bits & 0x8000) << 16);
}
Sixteen floats_of(bool bf16, const std::uint16_t (&bits)[16]) {
  Sixteen all;
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint16_t* const b = bits + 4 * i;
    all[i] = floats_of(bf16, FourBits{b[0], b[1], b[2], b[3]});
  }
  return all;
}

// The products of a row of A and all eight columns of B: eight times what dot() gives.
void dots(const float (&a)[16], const Eight (&b)[16], Eight& out) {
  Eight part[4] = {};
  for (int k = 0; k < 16; k += 4)
    for (int i = 0; i < 4; ++i) part[i] += a[k + i] * b[k + i];
  out = (part[0] + part[1]) + (part[2] + part[3]);
}

// Column n of B, or row n of A, K-major: along k.
Sixteen along_k(const WgmmaPart& p, std::uint64_t descriptor, int n) {
  std::uint16_t bits[16];
  for (int k = 0; k < 16; k += 8)
    std::memcpy(&bits[k], p.shared + operand_offset(descriptor, false, n, k), 16);
  return floats_of(p.bf16, bits);
}

// Columns n and n + 1 of B, n even: along k.
std::array<Sixteen, 2> two_columns(const WgmmaPart& p, int n) {
  if (!p.mn_major) return {along_k(p, p.b, n), along_k(p, p.b, n + 1)};
  std::uint16_t bits[2][16];
  for (int k = 0; k < 16; ++k) {  // the two are neighbours
    std::uint16_t both[2];
    std::memcpy(both, p.shared + operand_offset(p.b, true, n, k), 4);
    bits[0][k] = both[0], bits[1][k] = both[1];
  }
  return {floats_of(p.bf16, bits[0]), floats_of(p.bf16, bits[1])};
}

// Column n of B, or row n of A, of e4m3: 32 floats along k.
void along_k_e4m3(const WgmmaPart& p, std::uint64_t descriptor, int n, float (&out)[32]) {
  for (int chunk = 0; chunk < 2; ++chunk) {
    std::uint8_t codes[16];
    std::memcpy(codes, p.shared + operand_offset(descriptor, false, n, 8 * chunk), 16);
    for (int i = 0; i < 16; ++i) out[16 * chunk + i] = kE4M3[codes[i]];
  }
}

}  // namespace

float add_up_e4m3(float c, const float (&a)[32], const float (&b)[32]) {
  constexpr std::int32_t kBits = 13;  // behind the point
  constexpr std::int32_t kExponent = 0x7F800000, kOne = 127 << 23;
  constexpr std::int32_t kSmallest = (127 - 6) << 23;  // subnormal numbers have it, too
  float products[32];  // exact: 4 bits times 4 bits
  for (int i = 0; i < 32; ++i) products[i] = a[i] * b[i];
  const auto exponent_of = [](float x) { return std::bit_cast<std::int32_t>(x) & kExponent; };
  std::int32_t largest = exponent_of(c);
  for (int i = 0; i < 32; ++i) {
    // 1.5 x 1.5 is 2.25 of the exponent 0.
    const std::int32_t ea = std::max(exponent_of(a[i]), kSmallest);
    const std::int32_t eb = std::max(exponent_of(b[i]), kSmallest);
    const std::int32_t own = exponent_of(products[i]);  // 0, or NaN's: none of e4m3 is infinite
    largest = std::max(largest, own == 0 || own == kExponent ? own : ea + eb - kOne);
  }
  if (largest == kExponent) {  // NaN, or an infinity in c
    for (const float x : products) c += x;
    return c;
  }
  if (largest < (kBits + 1) << 23) return c;  // all are 0, or far too small for e4m3
  // Units of the last bit that is kept: 2^-13 of the largest power of 2.
  const float unit = std::bit_cast<float>(largest - (kBits << 23));
  const float units = 1 / unit;
  std::int32_t sum = static_cast<std::int32_t>(c * units);
  for (int i = 0; i < 32; ++i) sum += static_cast<std::int32_t>(products[i] * units);
  const float whole = static_cast<float>(sum) * unit;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(whole) & ~((1u << (23 - kBits)) - 1));
}

void wgmma_e4m3(const WgmmaPart& p) {
  float a[2][32];
  for (int half = 0; half < 2; ++half) {
    if (!p.registers) {
      along_k_e4m3(p, p.a, p.row + 8 * half, a[half]);
      continue;
    }
    for (int k = 0; k < 32; k += 4) {  // {row g, row g + 8} of k 0..15, then of k 16..31
      const std::uint32_t four = p.registers[k % 16 / 4][half + k / 16 * 2];
      for (int i = 0; i < 4; ++i) a[half][k + i] = kE4M3[four >> 8 * i & 0xFF];
    }
  }
  for (int n = 0; n < p.columns / 8; ++n)
    for (int j = 0; j < 2; ++j) {
      float b[32];
      along_k_e4m3(p, p.b, 8 * n + 2 * (p.lane % 4) + j, b);
      for (int row = 0; row < 2; ++row) {
        float& sum = p.d[n][2 * row + j];
        sum = add_up_e4m3(p.accumulate ? sum : 0, a[row], b);
      }
    }
}

namespace {
template <class Element>
void mma_m16n8k16_of(const std::array<MmaLane*, 32>& lanes) {
  float a[16][16];
  Eight b[16], d[16];
  const auto half_of = [](std::uint32_t pair, std::size_t i) {
    return static_cast<float>(std::bit_cast<Element>(static_cast<std::uint16_t>(pair >> 16 * i)));
  };
  for (std::size_t g = 0; g < 8; ++g)
    for (std::size_t t = 0; t < 4; ++t) {
      const MmaLane& mine = *lanes[4 * g + t];
      for (std::size_t i = 0; i < 2; ++i) {
        for (std::size_t r = 0; r < 4; ++r)
          a[g + 8 * (r % 2)][2 * t + i + 8 * (r / 2)] = half_of(mine.a[r], i);
        for (std::size_t r = 0; r < 2; ++r) b[2 * t + i + 8 * r][g] = half_of(mine.b[r], i);
      }
    }
  for (std::size_t row = 0; row < 16; ++row) dots(a[row], b, d[row]);
  for (std::size_t g = 0; g < 8; ++g)
    for (std::size_t t = 0; t < 4; ++t) {
      MmaLane& mine = *lanes[4 * g + t];
      for (std::size_t i = 0; i < 4; ++i) mine.d[i] = mine.c[i] + d[g + 8 * (i / 2)][2 * t + i % 2];
    }
}
}  // namespace

void mma_m16n8k16(bool bf16, const std::array<MmaLane*, 32>& lanes) {
  bf16 ? mma_m16n8k16_of<BFloat16>(lanes) : mma_m16n8k16_of<Float16>(lanes);
}

void wgmma(const WgmmaPart& p) {
  Sixteen a[2];
  for (int half = 0; half < 2; ++half) {
    if (!p.registers) {
      a[half] = along_k(p, p.a, p.row + 8 * half);
      continue;
    }
    std::uint16_t bits[16];
    for (int k = 0; k < 16; k += 2) {  // {row g, row g + 8} of k 0..7, then of k 8..15
      const std::uint32_t pair = p.registers[k % 8 / 2][half + k / 8 * 2];
      std::memcpy(&bits[k], &pair, 4);
    }
    a[half] = floats_of(p.bf16, bits);
  }
  for (int n = 0; n < p.columns / 8; ++n) {
    const std::array<Sixteen, 2> b = two_columns(p, 8 * n + 2 * (p.lane % 4));
    for (std::size_t j = 0; j < 2; ++j)
      for (std::size_t row = 0; row < 2; ++row) {
        float& sum = p.d[n][2 * row + j];
        sum = (p.accumulate ? sum : 0) + dot(a[row], b[j]);
      }
  }
}

}  // namespace attn::emulator
