/// \file
/// The two 16-bit floating-point types for the host compiler: storage and conversion to and from
/// float, to nearest even as the GPU converts. Arithmetic is done in float, as the kernels do it.
///
/// Eigen has both types as well, but its header costs every emulated step more than two seconds of
/// compilation. test_emulator compares every value and every rounding with Eigen's.
#pragma once

#include <bit>
#include <cstdint>

namespace attn::emulator {

/// 1 bit of sign, 5 of exponent, 10 of fraction (IEEE 754 binary16).
struct Float16 {
  std::uint16_t bits = 0;
  Float16() = default;
  explicit Float16(float x) {
    const std::uint32_t all = std::bit_cast<std::uint32_t>(x), sign = all & 0x80000000u;
    const std::uint32_t magnitude = all ^ sign;
    std::uint32_t half;
    if (magnitude >= 0x47800000u) {  // 65536 and above, infinity, NaN
      half = magnitude > 0x7F800000u ? 0x7E00u | (magnitude >> 13 & 0x1FFu) : 0x7C00u;
    } else if (magnitude <
               0x38800000u) {  // below 2^-14: adding 0.5 rounds at the last subnormal place
      half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
    } else {  // the exponent's bias falls by 112; half a place, less one where the last bit is even
      half = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    }
    bits = static_cast<std::uint16_t>(half | sign >> 16);
  }
  explicit operator float() const {
    const std::uint32_t sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7FFFu) << 13;
    if (magnitude >= 0x0F800000u)  // infinity, NaN
      return std::bit_cast<float>(sign | (magnitude + 0x70000000u));
    if (magnitude >= 0x00800000u)  // the exponent's bias grows by 112
      return std::bit_cast<float>(sign | (magnitude + 0x38000000u));
    // Subnormal: 2^-14 and as many places of 2^-24, less 2^-14. A product with a subnormal float
    // would be a hundred times slower.
    const float x = std::bit_cast<float>(magnitude + 0x38800000u) - 0x1p-14f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(x));
  }
};

/// 1 bit of sign, 8 of exponent, 7 of fraction: the upper half of a float.
struct BFloat16 {
  std::uint16_t bits = 0;
  BFloat16() = default;
  explicit BFloat16(float x) {
    const std::uint32_t all = std::bit_cast<std::uint32_t>(x);
    bits = static_cast<std::uint16_t>(x != x ? all >> 16 | 0x40u
                                             : (all + 0x7FFFu + ((all >> 16) & 1u)) >> 16);
  }
  explicit operator float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};

}  // namespace attn::emulator
