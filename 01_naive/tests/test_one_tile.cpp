// The two kernels of kernels/one_tile.cu, on both back ends.
#include <cmath>
#include <random>
#include <vector>

#include "attn/tensor.h"
#include "device/device.h"
#include "tests/catch.h"

namespace emulated::one_tile {
attn::Status multiply(const void* a, const void* b, void* d, bool ldmatrix);
}
// Null in a build without CUDA.
namespace gpu::one_tile {
[[gnu::weak]] attn::Status multiply(const void* a, const void* b, void* d, bool ldmatrix);
}

using namespace attn;
using namespace attn::tests;

namespace {

constexpr int kM = 16, kN = 8, kK = 16;

// Small integers: products and sums are exact, so any wrong fragment element is detected.
std::vector<float> integers(int count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& v : values) v = static_cast<float>(static_cast<int>(random() % 17) - 8);
  return values;
}

DeviceBuffer on_device(Backend backend, const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  encode(DType::fp16, values.data(), values.size(), bits.data());
  DeviceBuffer buffer(backend, "input", static_cast<int64_t>(bits.size() * sizeof(uint16_t)));
  buffer.upload(bits.data());
  return buffer;
}

void check_tile(Backend backend) {
  const std::vector<float> hA = integers(kM * kK, 1), hB = integers(kK * kN, 2);
  const DeviceBuffer a = on_device(backend, hA), b = on_device(backend, hB);
  for (const bool ldmatrix : {false, true}) {
    std::vector<float> d(kM * kN, NAN);
    DeviceBuffer out(backend, "output", static_cast<int64_t>(d.size() * sizeof(float)));
    out.upload(d.data());
    const auto multiply =
        backend == Backend::gpu ? gpu::one_tile::multiply : emulated::one_tile::multiply;
    REQUIRE(multiply(a.data(), b.data(), out.data(), ldmatrix).ok());
    synchronize(backend);
    out.download(d.data());
    for (int m = 0; m < kM; ++m)
      for (int n = 0; n < kN; ++n) {
        float sum = 0;
        for (int k = 0; k < kK; ++k) sum += hA[m * kK + k] * hB[k * kN + n];
        INFO("ldmatrix " << ldmatrix << ", row " << m << ", column " << n);
        CHECK(d[m * kN + n] == sum);
      }
  }
}

}  // namespace

TEST_CASE("one warp multiplies one tile (emulated)", "[emulated]") {
  check_tile(Backend::emulated);
}

TEST_CASE("one warp multiplies one tile (GPU)", "[gpu]") {
  if (gpu_info().available && gpu::one_tile::multiply)
    check_tile(Backend::gpu);
  else
    skipped("no GPU: " + gpu_info().error);
}
