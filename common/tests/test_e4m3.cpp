// wgmma on e4m3 (ptx/wgmma_e4m3.h), on both back ends: operands and accumulation. The emulator's
// model is one function, add_up_e4m3; on a GPU it is compared with the hardware.
#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#define ATTN_EMULATED  // makes e4m3_column a host function
#include "attn/small_types.h"
#include "device/device.h"
#include "emulator/products.h"
#include "emulator/simt.h"
#include "ptx/wgmma_e4m3.h"
#include "tests/catch.h"
#include "tests/kernels.h"

ATTN_DECLARE_TEST_KERNEL(e4m3_product);

namespace {

using namespace attn;
using namespace attn::tests;

constexpr std::size_t kSide = 64;

// D [64, 64] of A [64, 32 groups] and B^T [64, 32 groups].
std::vector<float> product(Backend backend, const std::vector<float>& a,
                           const std::vector<float>& b, int way, std::string& wrong) {
  const auto upload = [&](const std::vector<float>& values) {
    std::vector<uint8_t> codes(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      codes[i] = E4M3::encode(values[i]);
      REQUIRE(E4M3::decode(codes[i]) == values[i]);
    }
    DeviceBuffer buffer(backend, "input", static_cast<int64_t>(codes.size()));
    buffer.upload(codes.data());
    return buffer;
  };
  const DeviceBuffer gA = upload(a), gB = upload(b);
  DeviceBuffer out(backend, "out", 4 * kSide * kSide);
  out.poison();
  KernelArguments args;
  args.a = gA.data(), args.b = gB.data(), args.out = out.data();
  args.mode = static_cast<int>(a.size() / kSide / 32) * 4 + way;
#if ATTN_HAVE_CUDA
  const Status status = backend == Backend::gpu ? ::gpu::tests::e4m3_product(args)
                                                : ::emulated::tests::e4m3_product(args);
#else
  const Status status = ::emulated::tests::e4m3_product(args);
#endif
  wrong = status.message;
  std::vector<float> d(kSide * kSide);
  if (!status.ok()) return d;
  synchronize(backend);
  if (const auto damage = out.broken_guard()) wrong = *damage;
  out.download(d.data());
  return d;
}

// Small integers, exact in any order; "" or the fault.
std::string exact(Backend backend, int groups, int way) {
  std::mt19937 random(static_cast<unsigned>(groups * 4 + way));
  const auto k = static_cast<std::size_t>(32 * groups);
  std::vector<float> a(kSide * k), b(kSide * k);
  for (auto* all : {&a, &b})
    for (float& x : *all) x = static_cast<float>(static_cast<int>(random() % 5) - 2);
  std::string wrong;
  const std::vector<float> d = product(backend, a, b, way, wrong);
  for (std::size_t i = 0; i < kSide && wrong.empty(); ++i)
    for (std::size_t j = 0; j < kSide && wrong.empty(); ++j) {
      float sum = 0;
      for (std::size_t n = 0; n < k; ++n) sum += a[i * k + n] * b[j * k + n];
      if (d[i * kSide + j] != sum)
        wrong = fmt::format("row {}, column {}: expected {}, got {}", i, j, sum, d[i * kSide + j]);
    }
  return wrong;
}

// Sums that distinguish accumulation orders: pairs of factors, the rest are zeros. Each has 64 of
// k.
struct Sum {
  const char* what;
  std::vector<std::pair<float, float>> first, second;  // of k 0 to 31, and of k 32 to 63
};
std::vector<Sum> sums() {
  const auto times = [](int n, float x, float y) {
    return std::vector<std::pair<float, float>>(static_cast<std::size_t>(n), {x, y});
  };
  const auto after = [](std::vector<std::pair<float, float>> v, float x, float y) {
    v.emplace_back(x, y);
    return v;
  };
  const float s = 0x1p-6f;
  std::vector<Sum> all{
      {"1 + 2^-12 in a group", {{1, 1}, {s, s}}, {}},
      {"1 + 2^-13 in a group", {{1, 1}, {s, s / 2}}, {}},
      {"1 + 2^-14 in a group", {{1, 1}, {s / 2, s / 2}}, {}},
      {"1 - 2^-13 in a group", {{1, 1}, {-s, s / 2}}, {}},
      {"1 - 2^-14 in a group", {{1, 1}, {-s / 2, s / 2}}, {}},
      {"-1 + 2^-14 in a group", {{-1, 1}, {s / 2, s / 2}}, {}},
      {"-1 - 2^-14 in a group", {{-1, 1}, {-s / 2, s / 2}}, {}},
      {"2^-13 then 1", {{s, s / 2}}, {{1, 1}}},
      {"2^-14 then 1", {{s / 2, s / 2}}, {{1, 1}}},
      {"1 then 2^-13", {{1, 1}}, {{s, s / 2}}},
      {"1 then 2^-14", {{1, 1}}, {{s / 2, s / 2}}},
      {"1 then -2^-14", {{1, 1}}, {{-s / 2, s / 2}}},
      {"1 and 31 of 2^-14", after(times(31, s / 2, s / 2), 1, 1), {}},
      {"1 then 32 of 2^-14", {{1, 1}}, times(32, s / 2, s / 2)},
      {"32 of 2^-14 then 1", times(32, s / 2, s / 2), {{1, 1}}},
      {"a product of two mantissas: 1.875^2 = 3.515625 and 2^-13",
       {{1.875f, 1.875f}, {s, s / 2}},
       {}},
      {"3.515625 and 2^-12", {{1.875f, 1.875f}, {s, s}}, {}},
      {"3.515625 then 2^-13", {{1.875f, 1.875f}}, {{s, s / 2}}},
      {"1.5^2 = 2.25 and 2^-13: the exponent of the product, or of its factors",
       {{1.5f, 1.5f}, {s, s / 2}},
       {}},
      {"1.5^2 and 2^-12 + 2^-13", {{1.5f, 1.5f}, {s, 1.5f * s}}, {}},
      {"1.5^2 and 2 of 2^-13, which remain by the exponents of the factors",
       {{1.5f, 1.5f}, {s, s / 2}, {s, s / 2}},
       {}},
      {"32 of 448^2", times(32, 448, 448), {}},
      {"32 of 448^2 less 31 of them and a half", times(32, 448, 448), times(32, -448, 416)},
      {"1 - 1 and 2^-14: what is cancelled cuts too", {{1, 1}, {-1, 1}, {s / 2, s / 2}}, {}},
      {"1 - 1 then 2^-14", {{1, 1}, {-1, 1}}, {{s / 2, s / 2}}},
      {"a sum that grows by a bit: 1.5 + 1 + 2^-13", {{1.5f, 1}, {1, 1}, {s, s / 2}}, {}},
      {"1.5 + 1 + 2^-13 then 2^-13", {{1.5f, 1}, {1, 1}, {s, s / 2}}, {{s, s / 2}}},
      {"subnormal factors: 2^-9 2^-9", {{s / 8, s / 8}}, {}},
      {"32 of 2^-18 then 32 of -2^-18", times(32, s / 8, s / 8), times(32, -s / 8, s / 8)},
  };
  // Random numbers of different magnitudes.
  std::mt19937 random(7);
  while (all.size() < kSide) {
    Sum sum{"random", {}, {}};
    for (auto* half : {&sum.first, &sum.second})
      for (int i = 0; i < 32; ++i)
        half->emplace_back(E4M3::decode(static_cast<uint8_t>(random() % 127 | (random() & 128))),
                           E4M3::decode(static_cast<uint8_t>(random() % 127 | (random() & 128))));
    all.push_back(sum);
  }
  return all;
}

// Compares each sum in the model and in the kernel; returns the number of differences.
int compare(Backend backend, int way) {
  const std::vector<Sum> all = sums();
  std::vector<float> a(kSide * 64), b(kSide * 64);
  std::vector<float> expected;
  for (std::size_t row = 0; row < kSide; ++row) {
    float c = 0;
    for (const auto* half : {&all[row].first, &all[row].second}) {
      float x[32] = {}, y[32] = {};
      for (std::size_t i = 0; i < half->size(); ++i) {
        const std::size_t k = half == &all[row].second ? 32 + i : i;
        a[row * 64 + k] = x[i] = (*half)[i].first, b[row * 64 + k] = y[i] = (*half)[i].second;
      }
      c = emulator::add_up_e4m3(c, x, y);
    }
    expected.push_back(c);
  }
  std::string wrong;
  const std::vector<float> d = product(backend, a, b, way, wrong);
  REQUIRE(wrong == "");
  int different = 0;
  for (std::size_t row = 0; row < kSide; ++row) {
    double true_sum = 0;
    for (std::size_t k = 0; k < 64; ++k)
      true_sum += double(a[row * 64 + k]) * double(b[row * 64 + k]);
    if (d[row * kSide + row] == expected[row]) continue;
    ++different;
    WARN(all[row].what << ": exact " << fmt::format("{:.9g} ({:a})", true_sum, true_sum)
                       << ", the model " << fmt::format("{:a}", expected[row]) << ", the kernel "
                       << fmt::format("{:a}", d[row * kSide + row]));
  }
  return different;
}

TEST_CASE("wgmma takes every number of bf16 and fp16, A from registers and B from shared memory",
          "[emulator]") {
  const auto bits_of = [](float x) { return std::bit_cast<uint32_t>(x); };
  for (const bool bf16 : {false, true})
    for (const bool mn_major : {false, true}) {
      const auto one = static_cast<uint16_t>(bf16 ? 0x3F80 : 0x3C00);
      uint32_t registers[4][4] = {};
      const uint32_t* const quad[4] = {registers[0], registers[1], registers[2], registers[3]};
      std::vector<std::byte> shared(4096);
      float d[1][4];
      emulator::WgmmaPart part{};
      part.d = d, part.columns = 8, part.bf16 = bf16, part.mn_major = mn_major;
      part.shared = shared.data(), part.registers = quad;
      part.b = uint64_t{1024 >> 4} << 32;  // eight rows of 128 bytes
      // A and B are 0 but for `a` in row 0 and `b` in column 1, at k = 0.
      const auto product = [&](uint16_t a, uint16_t b) {
        registers[0][0] = a;
        std::memcpy(shared.data() + emulator::operand_offset(part.b, mn_major, 1, 0), &b, 2);
        emulator::wgmma(part);
        return d[0][1];
      };
      int wrong = 0;
      for (uint32_t code = 0; code < 65536; ++code) {
        const auto x = static_cast<uint16_t>(code);
        const float expected = bf16 ? static_cast<float>(std::bit_cast<emulator::BFloat16>(x))
                                    : static_cast<float>(std::bit_cast<emulator::Float16>(x));
        for (const float y : {product(x, one), product(one, x)})
          wrong += std::isnan(expected) ? !std::isnan(y) : bits_of(y) != bits_of(expected + 0.0F);
      }
      CHECK(wrong == 0);
    }
}

TEST_CASE("the model of e4m3 sums keeps 13 bits behind the point and cuts off the rest",
          "[hopper]") {
  const auto sum = [](float c, std::vector<float> x) {
    float a[32] = {}, b[32] = {};
    for (std::size_t i = 0; i < x.size(); ++i) a[i] = x[i], b[i] = 1;
    return emulator::add_up_e4m3(c, a, b);
  };
  CHECK(sum(0, {1, 0x1p-6f}) == 1 + 0x1p-6f);
  CHECK(sum(1, {0x1p-9f}) == 1 + 0x1p-9f);
  CHECK(sum(1 + 0x1p-13f, {}) == 1 + 0x1p-13f);
  CHECK(sum(1 + 0x1p-14f, {0x1p-9f}) == 1 + 0x1p-9f);
  CHECK(sum(-1 - 0x1p-14f, {0x1p-9f}) == -1 + 0x1p-9f);  // toward zero
  CHECK(sum(64, {0x1p-9f}) == 64);                       // 2^-15 of it
  CHECK(sum(0, std::vector<float>(32, 448)) == 32 * 448);
  CHECK(sum(0, {0x1p-9f}) == 0x1p-9f);
  CHECK(sum(0, {}) == 0);
  CHECK(std::isnan(sum(0, {NAN})));
  // 1.5 x 1.5 = 2.25 counts by the exponents of its factors, so two products of 2^-13 are not
  // truncated.
  const float a[32] = {1.5f, 0x1p-6f, 0x1p-6f}, b[32] = {1.5f, 0x1p-7f, 0x1p-7f};
  CHECK(emulator::add_up_e4m3(0, a, b) == 2.25f + 0x1p-12f);
}

TEST_CASE("wgmma of e4m3 multiplies (emulated)", "[hopper]") {
  for (int way = 0; way < 4; ++way)
    for (const int groups : {1, 2, 5}) {
      INFO("rows of " << (way < 2 ? 64 : 128) << " bytes, A in registers " << way % 2 << ", "
                      << groups << " groups");
      CHECK(exact(Backend::emulated, groups, way) == "");
    }
  CHECK(compare(Backend::emulated, 3) == 0);
}

TEST_CASE("accumulators of e4m3 are operands of the next product", "[hopper]") {
  // Lane t of a quad has columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of 16, and slots 4 t to 4 t + 3.
  for (int t = 0; t < 4; ++t)
    for (int i = 0; i < 4; ++i) CHECK(attn::e4m3_column(4 * t + i) == 2 * t + i % 2 + i / 2 * 8);
}

TEST_CASE("wgmma of e4m3 (GPU)", "[hopper][gpu]") {
  if (!gpu_info().available || gpu_info().cc_major != 9) {
    skipped("no GPU of compute capability 9.0: " + gpu_info().error);
    return;
  }
  for (int way = 0; way < 4; ++way) {
    for (const int groups : {1, 2, 5}) {
      INFO("rows of " << (way < 2 ? 64 : 128) << " bytes, A in registers " << way % 2 << ", "
                      << groups << " groups");
      CHECK(exact(Backend::gpu, groups, way) == "");
    }
    CHECK(compare(Backend::gpu, way) == 0);
  }
}

}  // namespace
