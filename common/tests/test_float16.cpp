/// \file
/// The emulator's 16-bit types: every value and every rounding, compared with Eigen.
#include <Eigen/Core>
#include <bit>
#include <cmath>
#include <cstdint>

#include "emulator/float16.h"
#include "tests/catch.h"

namespace {

using attn::emulator::BFloat16;
using attn::emulator::Float16;

bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) ||
         std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

/// Counts differences from Eigen: among the 65536 values, and among the roundings of floats at,
/// halfway between, and one float next to the midpoints of neighbours.
template <class Ours, class Eigens>
int differences() {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    Ours ours;
    ours.bits = static_cast<std::uint16_t>(bits);
    const float value =
        static_cast<float>(Eigen::numext::bit_cast<Eigens>(static_cast<std::uint16_t>(bits)));
    wrong += !same(static_cast<float>(ours), value);
    Ours next;
    next.bits = static_cast<std::uint16_t>(bits + 1);
    const float half = value / 2 + static_cast<float>(next) / 2;
    for (const float x :
         {value, half, std::nextafter(half, INFINITY), std::nextafter(half, -INFINITY)})
      wrong += !same(static_cast<float>(Ours(x)), static_cast<float>(Eigens(x)));
  }
  for (const float x :
       {3e38f, 70000.0f, 65519.996f, 65520.0f, 1e-40f, -1e-40f, 2e-8f, 3e-8f, 1e-44f})
    wrong += !same(static_cast<float>(Ours(x)), static_cast<float>(Eigens(x)));
  return wrong;
}

TEST_CASE("fp16 of the emulator reads and rounds as Eigen's", "[float16]") {
  CHECK(differences<Float16, Eigen::half>() == 0);
}
TEST_CASE("bf16 of the emulator reads and rounds as Eigen's", "[float16]") {
  CHECK(differences<BFloat16, Eigen::bfloat16>() == 0);
}

}  // namespace
