// Consistency of the datasheet table: a peak is SMs x operations per clock x clock, which a sparse
// figure, an fp16-accumulate figure or the figure of another variant does not satisfy.
#include "device/gpus.h"

#include <cmath>
#include <set>
#include <string>

#include "tests/catch.h"

namespace {

using attn::GpuSpec;

int cc(const GpuSpec& gpu) { return gpu.cc_major * 10 + gpu.cc_minor; }

bool is_geforce(const GpuSpec& gpu) {
  return gpu.full_name.find("GeForce") != std::string_view::npos;
}

// FP32 multiply-adds per clock and SM.
double fp32_lanes(const GpuSpec& gpu) { return cc(gpu) == 70 || cc(gpu) == 80 ? 64 : 128; }

// Dense 16-bit tensor operations per clock and SM, accumulating in fp32.
double tensor_16bit_per_clock(const GpuSpec& gpu) {
  switch (cc(gpu)) {
    case 70: return 1024;
    case 80: return 2048;
    case 86:
    case 89: return is_geforce(gpu) ? 512 : 1024;  // GeForce: half rate with fp32 accumulation
    case 90: return 4096;
    case 100: return 8192;
    default: return 0;
  }
}

double relative_difference(double value, double expected) {
  return std::abs(value - expected) / expected;
}

}  // namespace

TEST_CASE("every GPU has a name, a source and the figures that make a roofline", "[gpus]") {
  REQUIRE_FALSE(attn::gpu_specs().empty());
  std::set<std::string_view> names;
  for (const GpuSpec& gpu : attn::gpu_specs()) {
    INFO(gpu.name);
    CHECK(names.insert(gpu.name).second);
    CHECK_FALSE(gpu.name.empty());
    CHECK(gpu.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") ==
          std::string_view::npos);
    CHECK_FALSE(gpu.full_name.empty());
    CHECK_FALSE(gpu.source.empty());
    CHECK(gpu.num_sms > 0);
    CHECK(gpu.hbm_bytes > 1e10);
    CHECK(gpu.hbm_bytes < 1e12);
    CHECK(gpu.hbm_bytes_per_s > 1e11);
    CHECK(gpu.hbm_bytes_per_s < 1e14);
    CHECK(gpu.l2_bytes > 1e6);
    CHECK(gpu.l2_bytes < 1e9);
    CHECK((gpu.boost_clock_hz == 0 || (gpu.boost_clock_hz > 1e9 && gpu.boost_clock_hz < 3e9)));
    CHECK(gpu.tensor_clock_hz <= gpu.boost_clock_hz);
  }
}

TEST_CASE("FP32 peaks are SMs x lanes x 2 x clock", "[gpus]") {
  for (const GpuSpec& gpu : attn::gpu_specs()) {
    INFO(gpu.name);
    const double per_clock = gpu.num_sms * fp32_lanes(gpu) * 2;
    if (gpu.boost_clock_hz > 0) {
      CHECK(relative_difference(gpu.fp32_flops, per_clock * gpu.boost_clock_hz) < 0.03);
    } else {
      // No clock is stated (b200), so the peak is only required to imply a plausible one.
      CHECK(gpu.fp32_flops / per_clock > 1.5e9);
      CHECK(gpu.fp32_flops / per_clock < 2.5e9);
    }
  }
}

TEST_CASE("tensor peaks are SMs x operations a clock x clock, dense", "[gpus]") {
  for (const GpuSpec& gpu : attn::gpu_specs()) {
    INFO(gpu.name);
    const double per_clock = gpu.num_sms * tensor_16bit_per_clock(gpu);
    REQUIRE(per_clock > 0);
    if (gpu.tensor_clock_hz > 0) {
      CHECK(relative_difference(gpu.tensor_16bit_flops, per_clock * gpu.tensor_clock_hz) < 0.05);
    } else {
      CHECK(gpu.tensor_16bit_flops / per_clock > 1.5e9);
      CHECK(gpu.tensor_16bit_flops / per_clock < 2.5e9);
    }
  }
}

// GeForce accumulates 16-bit products in fp32 at half the rate of other GPUs.
TEST_CASE("int8 runs at twice the 16-bit rate, from Ampere on, on GeForce at four times", "[gpus]") {
  for (const GpuSpec& gpu : attn::gpu_specs()) {
    INFO(gpu.name);
    if (gpu.tensor_int8_ops == 0)
      CHECK((gpu.cc_major < 8 || gpu.cc_major > 9));
    else
      CHECK(relative_difference(gpu.tensor_int8_ops,
                                (gpu.name.starts_with("rtx") ? 4 : 2) * gpu.tensor_16bit_flops) <
            0.05);
  }
}

TEST_CASE("fp8 runs at twice the 16-bit rate, from compute capability 8.9 on", "[gpus]") {
  for (const GpuSpec& gpu : attn::gpu_specs()) {
    INFO(gpu.name);
    if (cc(gpu) >= 89) {
      CHECK(relative_difference(gpu.tensor_fp8_flops, 2 * gpu.tensor_16bit_flops) < 0.05);
    } else {
      CHECK(gpu.tensor_fp8_flops == 0);
    }
  }
}

TEST_CASE("exp2 runs at 16 results a clock and SM", "[gpus]") {
  for (const GpuSpec& gpu : attn::gpu_specs()) {
    INFO(gpu.name);
    CHECK(gpu.exp2_per_s == Approx(16.0 * gpu.num_sms * gpu.boost_clock_hz));
  }
  // The ratio that shapes attention on Hopper: 4 T exponentials per second against 989 TFLOP/s.
  CHECK(attn::find_gpu("h200")->exp2_per_s == Approx(4.18e12).epsilon(0.01));
}

TEST_CASE("shared memory follows the compute capability", "[gpus]") {
  for (const GpuSpec& gpu : attn::gpu_specs()) {
    INFO(gpu.name);
    const int64_t reserved = cc(gpu) >= 80 ? 1024 : 0;
    CHECK(gpu.shared_bytes_per_sm - gpu.shared_bytes_per_block == reserved);
  }
  CHECK(attn::find_gpu("h200")->shared_bytes_per_block == 232448);
  CHECK(attn::find_gpu("a100")->shared_bytes_per_block == 166912);
  CHECK(attn::find_gpu("rtx4090")->shared_bytes_per_block == 101376);
  CHECK(attn::find_gpu("v100")->shared_bytes_per_block == 98304);
}

TEST_CASE("find_gpu knows every name, in any case, and nothing else", "[gpus]") {
  for (const GpuSpec& gpu : attn::gpu_specs()) {
    INFO(gpu.name);
    std::string upper(gpu.name);
    for (char& c : upper) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
    CHECK(attn::find_gpu(gpu.name) == &gpu);
    CHECK(attn::find_gpu(upper) == &gpu);
  }
  CHECK(attn::find_gpu("RtX4090") == attn::find_gpu("rtx4090"));
  for (const char* name : {"", "h", "h10", "h1000", "h100-", "h100 ", "gtx1080", "\xff"}) {
    INFO(name);
    CHECK(attn::find_gpu(name) == nullptr);
  }
}

TEST_CASE("gpu_names lists every name once, in order", "[gpus]") {
  const std::string names = attn::gpu_names();
  CHECK(names.rfind("h200, h100, h100-pcie, a100, ", 0) == 0);
  std::string joined;
  for (const GpuSpec& gpu : attn::gpu_specs()) {
    joined += (joined.empty() ? "" : ", ") + std::string(gpu.name);
  }
  CHECK(names == joined);
}
