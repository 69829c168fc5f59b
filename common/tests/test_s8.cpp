// wgmma on int8 (ptx/wgmma_s8.h), on both back ends: integer sums, exact to the last bit; and the
// conversion of floats to int8.
#include <fmt/format.h>

#include <cmath>
#include <random>
#include <vector>

#include "device/device.h"
#include "tests/catch.h"
#include "tests/kernels.h"

ATTN_DECLARE_TEST_KERNEL(s8_product);
ATTN_DECLARE_TEST_KERNEL(s8_pack);

namespace {

using namespace attn;
using namespace attn::tests;

#if ATTN_HAVE_CUDA
#define ATTN_OF(kernel) (backend == Backend::gpu ? ::gpu::tests::kernel : ::emulated::tests::kernel)
#else
#define ATTN_OF(kernel) (::emulated::tests::kernel)
#endif

template <class In>
DeviceBuffer upload(Backend backend, const std::vector<In>& values) {
  DeviceBuffer buffer(backend, "input", static_cast<int64_t>(values.size() * sizeof(In)));
  buffer.upload(values.data());
  return buffer;
}

// Random codes, many of them extreme, and a whole row of the largest times the smallest. "" or the
// fault.
std::string exact(Backend backend, int columns) {
  std::mt19937 random(static_cast<unsigned>(columns));
  const auto side = static_cast<std::size_t>(columns);
  std::vector<int8_t> a(64 * 128), b(side * 128);
  for (auto* all : {&a, &b})
    for (int8_t& x : *all) {
      const unsigned n = random();
      const int any = static_cast<int>(n >> 8 & 255) - 128;
      x = static_cast<int8_t>(n % 5 == 0 ? 127 : n % 5 == 1 ? -128 : any);
    }
  for (std::size_t k = 0; k < 128; ++k) a[k] = -128, b[k] = -128, b[128 + k] = 127;
  const DeviceBuffer gA = upload(backend, a), gB = upload(backend, b);
  DeviceBuffer out(backend, "out", static_cast<int64_t>(4 * 64 * side));
  out.poison();
  KernelArguments args;
  args.a = gA.data(), args.b = gB.data(), args.out = out.data(), args.mode = columns;
  if (const Status status = ATTN_OF(s8_product)(args); !status.ok()) return status.message;
  synchronize(backend);
  if (const auto damage = out.broken_guard()) return *damage;
  std::vector<int> d(64 * side);
  out.download(d.data());
  for (std::size_t i = 0; i < 64; ++i)
    for (std::size_t j = 0; j < side; ++j) {
      int sum = 0;
      for (std::size_t k = 0; k < 128; ++k) sum += int{a[i * 128 + k]} * int{b[j * 128 + k]};
      if (d[i * side + j] != sum)
        return fmt::format("row {}, column {}: expected {}, got {}", i, j, sum, d[i * side + j]);
    }
  return "";
}

void check_packing(Backend backend) {
  std::vector<float> x(128, 0);
  const std::vector<std::pair<float, int>> cases{
      {0.5f, 0}, {1.5f, 2}, {2.5f, 2}, {-0.5f, 0}, {-1.5f, -2}, {-2.5f, -2},  // to even
      {126.5f, 126}, {127.4f, 127}, {127.5f, 127}, {300, 127}, {-128.4f, -128}, {-129, -128},
      {-1e30f, -128}, {INFINITY, 127}, {-INFINITY, -128}, {NAN, 0}, {0.49999997f, 0},
      {-127.5f, -128}};
  for (std::size_t i = 0; i < cases.size(); ++i) x[i] = cases[i].first;
  const DeviceBuffer gX = upload(backend, x);
  DeviceBuffer out(backend, "out", 128);
  out.poison();
  KernelArguments args;
  args.a = gX.data(), args.out = out.data();
  REQUIRE(ATTN_OF(s8_pack)(args).ok());
  synchronize(backend);
  std::vector<int8_t> codes(128);
  out.download(codes.data());
  for (std::size_t i = 0; i < cases.size(); ++i) {
    INFO(cases[i].first);
    CHECK(int{codes[i]} == cases[i].second);
  }
}

TEST_CASE("wgmma of int8 is exact (emulated)", "[hopper]") {
  for (const int columns : {64, 128, 160, 192}) {
    INFO(columns << " columns");
    CHECK(exact(Backend::emulated, columns) == "");
  }
}
TEST_CASE("floats become int8 to nearest even, and saturate (emulated)", "[hopper]") {
  check_packing(Backend::emulated);
}

TEST_CASE("wgmma of int8, and int8 of floats (GPU)", "[hopper][gpu]") {
  if (!gpu_info().available || gpu_info().cc_major != 9) {
    skipped("no GPU of compute capability 9.0: " + gpu_info().error);
    return;
  }
  for (const int columns : {64, 128, 160, 192}) {
    INFO(columns << " columns");
    CHECK(exact(Backend::gpu, columns) == "");
  }
  check_packing(Backend::gpu);
}

}  // namespace
