/// \file
/// Conversions of float to 8-bit and 4-bit types and back. To nearest even, saturating, as
/// cvt.satfinite.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace attn {

/// Eight bits: sign, exponent, mantissa. e4m3 has no infinity and one NaN per sign (OCP 8-bit
/// Floating Point, section 5). e5m2 has both, as the upper byte of a half.
template <int kExponent, int kMantissa>
struct Float8 {
  static_assert(1 + kExponent + kMantissa == 8);
  static constexpr bool kInfinity = kMantissa == 2;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr uint8_t kNaN = 0x7F;
  static constexpr uint8_t kLargest = kInfinity ? 0x7B : 0x7E;  // 57344, 448

  static float decode(uint8_t bits) {
    const int exponent = bits >> kMantissa & ((1 << kExponent) - 1),
              mantissa = bits & ((1 << kMantissa) - 1);
    const float sign = bits & 0x80 ? -1.0f : 1.0f;
    if ((bits & 0x7F) > kLargest)
      return kInfinity && mantissa == 0 ? sign * INFINITY : std::copysign(NAN, sign);
    const int hidden = exponent > 0 ? 1 << kMantissa : 0;
    return sign * std::ldexp(static_cast<float>(hidden + mantissa),
                             std::max(exponent, 1) - kBias - kMantissa);
  }

  static uint8_t encode(float x) {
    const auto sign = static_cast<uint8_t>(std::signbit(x) ? 0x80 : 0);
    if (std::isnan(x)) return sign | kNaN;
    const float size = std::abs(x);
    if (size >= decode(kLargest)) return sign | kLargest;
    // In units in the last place of its binade, or of the subnormals; the lower bits of a code
    // count these units.
    const int exponent = size > 0 ? std::max(std::ilogb(size), 1 - kBias) : 1 - kBias;
    const auto units = static_cast<int>(
        std::nearbyint(std::ldexp(size, kMantissa - exponent)));  // to nearest even
    const int code = (exponent - (1 - kBias)) * (1 << kMantissa) + units;
    return static_cast<uint8_t>(sign | (code > kLargest ? kLargest : code));
  }
};
using E4M3 = Float8<4, 3>;
using E5M2 = Float8<5, 2>;

/// An integer from `least` to `most`, saturating; NaN becomes 0.
template <int kLeast, int kMost>
int to_small_int(float x) {
  if (std::isnan(x)) return 0;
  return static_cast<int>(std::nearbyint(x < kLeast  ? float{kLeast}
                                         : x > kMost ? float{kMost}
                                                     : x));
}
inline int to_int8(float x) { return to_small_int<-128, 127>(x); }
inline int to_int4(float x) { return to_small_int<-8, 7>(x); }

}  // namespace attn
