// The functions of common/ptx and the parts of CUDA C++ used by kernels, on both back ends: each
// case requires the same result from the emulator and the hardware.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "attn/tensor.h"
#include "tests/catch.h"
#include "tests/kernels.h"

namespace {

using namespace attn;
using namespace attn::tests;

struct Kernel {
  KernelFunction gpu, emulated;
};
#if ATTN_HAVE_CUDA
#define KERNEL(name) (Kernel{gpu::tests::name, emulated::tests::name})
#else
#define KERNEL(name) (Kernel{nullptr, emulated::tests::name})
#endif

// Declares a case twice: for the emulator, and for the GPU if there is one.
#define ON_BOTH_BACK_ENDS(title, body)                                     \
  TEST_CASE(title " (emulated)", "[kernels]") { body(Backend::emulated); } \
  TEST_CASE(title " (GPU)", "[kernels][gpu]") {                            \
    if (gpu_info().available)                                              \
      body(Backend::gpu);                                                  \
    else                                                                   \
      skipped("no GPU: " + gpu_info().error);                              \
  }                                                                        \
  static_assert(true)

// Device memory that starts with the bytes of `values`.
template <class T>
DeviceBuffer on_device(Backend backend, const std::vector<T>& values) {
  DeviceBuffer buffer(backend, "input", static_cast<int64_t>(values.size() * sizeof(T)));
  buffer.upload(values.data());
  return buffer;
}

// Runs a kernel whose result is `count` values of T, initialised to `initial`.
template <class T>
std::vector<T> run(Backend backend, Kernel kernel, KernelArguments args, std::size_t count,
                   T initial = T{}) {
  std::vector<T> result(count, initial);
  DeviceBuffer out = on_device(backend, result);
  args.out = out.data();
  const Status status = (backend == Backend::gpu ? kernel.gpu : kernel.emulated)(args);
  INFO(status.message);
  REQUIRE(status.ok());
  synchronize(backend);
  CHECK(out.broken_guard().value_or("") == "");
  out.download(result.data());
  return result;
}

int below(std::mt19937& random, int n) {
  return static_cast<int>(random() % static_cast<unsigned>(n));
}

std::vector<uint16_t> encoded(DType dtype, const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  encode(dtype, values.data(), values.size(), bits.data());
  return bits;
}

// ---- common/ptx/mma.h and ldmatrix.h --------------------------------------------------------

// Small integers: every product and every sum is exact in any order, so a single wrong element of a
// fragment is detected.
void mma_is_exact(Backend backend) {
  std::mt19937 random(1);
  for (const DType dtype : {DType::fp16, DType::bf16})
    for (int mode = 0; mode < 2 * kNumBLoads; ++mode)
      for (int round = 0; round < 4; ++round) {
        INFO(name(dtype) << ", operands loaded in way " << mode << ", round " << round);
        std::vector<float> a(256), b(256), c(256);
        for (int i = 0; i < 256; ++i) {
          const auto at = static_cast<std::size_t>(i);
          a[at] = static_cast<float>(below(random, 17) - 8);
          b[at] = static_cast<float>(below(random, 17) - 8);
          c[at] = static_cast<float>(below(random, 2001) - 1000);
        }
        const DeviceBuffer gA = on_device(backend, encoded(dtype, a));
        const DeviceBuffer gB = on_device(backend, encoded(dtype, b));
        const DeviceBuffer gC = on_device(backend, c);
        KernelArguments args;
        args.a = gA.data(), args.b = gB.data(), args.c = gC.data();
        args.dtype = dtype;
        args.mode = mode;
        std::vector<float> expected(256);
        for (std::size_t i = 0; i < 256; ++i) {
          expected[i] = c[i];
          for (std::size_t k = 0; k < 16; ++k)
            expected[i] += a[i / 16 * 16 + k] * b[k * 16 + i % 16];
        }
        CHECK(run<float>(backend, KERNEL(mma_product), args, 256, NAN) == expected);
      }
}
ON_BOTH_BACK_ENDS("mma_m16n8k16 is A B + C with fragments by hand and by ldmatrix", mma_is_exact);

// Codes of all magnitudes, many of them extreme, and arbitrary initial sums: exact to the last bit.
void mma_s8_is_exact(Backend backend) {
  std::mt19937 random(3);
  for (const int mode : {kByHand, kLdmatrix})
    for (int round = 0; round < 4; ++round) {
      INFO((mode == kByHand ? "operands by hand" : "operands by ldmatrix") << ", round " << round);
      std::vector<int8_t> a(16 * 32), b(8 * 32);
      std::vector<int> c(16 * 8);
      for (auto* all : {&a, &b})
        for (int8_t& x : *all) {
          const int way = below(random, 5), any = below(random, 256) - 128;
          x = static_cast<int8_t>(way == 0 ? 127 : way == 1 ? -128 : any);
        }
      for (int& x : c) x = below(random, 1 << 30) - (1 << 29);
      const DeviceBuffer gA = on_device(backend, a), gB = on_device(backend, b);
      const DeviceBuffer gC = on_device(backend, c);
      KernelArguments args;
      args.a = gA.data(), args.b = gB.data(), args.c = gC.data(), args.mode = mode;
      std::vector<int> expected = c, expected_s4 = c;
      const auto low = [](int8_t x) { return (x & 15 ^ 8) - 8; };  // of two int4, the first
      for (std::size_t i = 0; i < expected.size(); ++i)
        for (std::size_t k = 0; k < 32; ++k) {
          const int8_t x = a[i / 8 * 32 + k], y = b[i % 8 * 32 + k];
          expected[i] += int{x} * int{y};
          expected_s4[i] += low(x) * low(y) + (x >> 4) * (y >> 4);
        }
      CHECK(run<int>(backend, KERNEL(mma_s8_product), args, 16 * 8, -1) == expected);
      args.dtype = DType::int4;
      CHECK(run<int>(backend, KERNEL(mma_s8_product), args, 16 * 8, -1) == expected_s4);
    }
}
ON_BOTH_BACK_ENDS("mma of int8 and of int4 is A B + C, exact, by hand and by ldmatrix",
                  mma_s8_is_exact);

TEST_CASE("mma_product has a mode for each pair of loads", "[kernels]") {
  CHECK(mma_mode(kByHand, kByHand) == 0);
  CHECK(mma_mode(kLdmatrix, kLdmatrixPairTrans) == 2 * kNumBLoads - 1);
}

// Element j of row i of matrix m is 100 m + 10 i + j, so the registers identify their source.
void ldmatrix_places(Backend backend) {
  const auto element = [](int m, int i, int j) {
    return static_cast<uint16_t>(100 * m + 10 * i + j);
  };
  std::vector<uint16_t> rows(256);
  for (int n = 0; n < 256; ++n)
    rows[static_cast<std::size_t>(n)] = element(n / 64, n / 8 % 8, n % 8);
  const DeviceBuffer in = on_device(backend, rows);
  KernelArguments args;
  args.a = in.data();
  const auto got = run<uint32_t>(backend, KERNEL(ldmatrix_dump), args, 4 * 32 * 4, ~0u);
  for (int version = 0; version < 4; ++version)  // x4, x2, x4_trans, x2_trans
    for (int lane = 0; lane < 32; ++lane)
      for (int m = 0; m < 4; ++m) {
        INFO("version " << version << ", lane " << lane << ", register " << m);
        const int g = lane / 4, t = lane % 4;
        uint32_t expected = version < 2
                                ? element(m, g, 2 * t) | uint32_t{element(m, g, 2 * t + 1)} << 16
                                : element(m, 2 * t, g) | uint32_t{element(m, 2 * t + 1, g)} << 16;
        if (version % 2 == 1 && m >= 2) expected = ~0u;  // x2 has two registers
        REQUIRE(got[static_cast<std::size_t>((version * 32 + lane) * 4 + m)] == expected);
      }
}
ON_BOTH_BACK_ENDS("ldmatrix puts every element where the PTX ISA says", ldmatrix_places);

// The value of a 16-bit pattern, from the definition of the format.
double value_of(DType dtype, uint32_t bits) {
  const int mantissa_bits = dtype == DType::fp16 ? 10 : 7, bias = dtype == DType::fp16 ? 15 : 127;
  const int exponent = static_cast<int>(bits & 0x7FFF) >> mantissa_bits;
  const int mantissa = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 2 * bias + 1) return mantissa ? NAN : sign * INFINITY;
  const double significand = mantissa + (exponent > 0 ? 1 << mantissa_bits : 0);
  return sign * std::ldexp(significand, std::max(exponent, 1) - bias - mantissa_bits);
}

// Round to nearest even, from the definition: a multiple of the spacing at |x|, and infinity from
// half a spacing above the largest number.
double rounded(DType dtype, double x) {
  const int digits = dtype == DType::fp16 ? 10 : 7, least = dtype == DType::fp16 ? -14 : -126;
  if (x == 0 || std::isinf(x)) return x;
  const int exponent = std::max(std::ilogb(x), least);
  const double spacing = std::ldexp(1.0, exponent - digits);
  const double result = std::nearbyint(x / spacing) * spacing;  // nearbyint rounds to even
  const double limit = dtype == DType::fp16 ? 65536.0 : 0x1p128;
  return std::abs(result) >= limit ? std::copysign(INFINITY, x) : result;
}

void pack2_rounds_to_even(Backend backend) {
  for (const DType dtype : {DType::fp16, DType::bf16}) {
    std::vector<float> in;
    // Between neighbours: below, at and above the midpoint.
    for (uint32_t bits = 0; bits < 0x7F80; bits += bits < 8 || bits > 0x7B00 ? 1 : 97) {
      const double low = value_of(dtype, bits), high = value_of(dtype, bits + 1);
      if (!std::isfinite(low)) break;
      const double spacing = std::isfinite(high) ? high - low : low - value_of(dtype, bits - 1);
      const auto middle = static_cast<float>(low + spacing / 2);
      for (const float x : {static_cast<float>(low), std::nextafter(middle, 0.0f), middle,
                            std::nextafter(middle, INFINITY)})
        in.push_back(x), in.push_back(-x);
    }
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    for (int i = 0; i < 1000; ++i) in.push_back(normal(random));
    for (const float x : {INFINITY, -INFINITY, 1e30f, -1e-30f, 0.0f, -0.0f}) in.push_back(x);
    const DeviceBuffer values = on_device(backend, in);
    KernelArguments args;
    args.a = values.data();
    args.dtype = dtype;
    args.mode = static_cast<int>(in.size() / 2);
    const auto got = run<uint32_t>(backend, KERNEL(pack_pairs), args, in.size() / 2, ~0u);
    for (std::size_t i = 0; i < in.size(); ++i) {
      const double value = value_of(dtype, (got[i / 2] >> (16 * (i % 2))) & 0xFFFF);
      const double expected = rounded(dtype, double{in[i]});
      INFO(name(dtype) << ", number " << i << ": " << in[i] << " became " << value);
      REQUIRE(value == expected);
      REQUIRE(std::signbit(value) == std::signbit(in[i]));
    }
  }
}
ON_BOTH_BACK_ENDS("pack2 rounds to nearest even, the first number in the lower half",
                  pack2_rounds_to_even);

// ---- common/ptx/cp_async.h ------------------------------------------------------------------

void copies_fill_with_zero(Backend backend) {
  std::vector<unsigned char> bytes(32 * 16);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i % 255 + 1);
  constexpr int kValid[] = {16, 0, 2, 6, 14, 8, 16, 0};
  std::vector<int> valid;
  for (std::size_t lane = 0; lane < 32; ++lane) valid.push_back(kValid[lane % 8]);
  const DeviceBuffer in = on_device(backend, bytes), counts = on_device(backend, valid);
  KernelArguments args;
  args.a = in.data(), args.b = counts.data();
  const auto got = run<unsigned char>(backend, KERNEL(copy_partial), args, bytes.size(), 0xDD);
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("lane " << i / 16 << ", byte " << i % 16 << " of " << valid[i / 16]);
    const bool read = static_cast<int>(i % 16) < valid[i / 16];
    REQUIRE(int{got[i]} == (read ? int{bytes[i]} : 0));
  }
}
ON_BOTH_BACK_ENDS("cp_async_16 reads the valid bytes and fills with zero", copies_fill_with_zero);

void two_groups_in_flight(Backend backend) {
  for (const int tiles : {1, 2, 3, 8}) {
    std::vector<uint32_t> words(static_cast<std::size_t>(tiles) * 32 * 4);
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(i + 1);
    const DeviceBuffer in = on_device(backend, words);
    KernelArguments args;
    args.a = in.data();
    args.mode = tiles;
    CHECK(run<uint32_t>(backend, KERNEL(copy_two_groups), args, words.size()) == words);
  }
}
ON_BOTH_BACK_ENDS("two groups of cp_async in flight land in their order", two_groups_in_flight);

// ---- common/ptx/reduce_add.h ----------------------------------------------------------------

void additions_are_atomic(Backend backend) {
  // Integers: the order of additions does not matter. The output is initialised to zeros.
  KernelArguments args;
  args.grid[0] = backend == Backend::gpu ? 512 : 7, args.block[0] = 96;
  const std::vector<float> got = run<float>(backend, KERNEL(add_quads), args, 16, 0);
  const float lanes = 31 * 32 / 2, warps = 3.0f * static_cast<float>(args.grid[0]);
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("float " << i);
    CHECK(got[i] == lanes * warps * static_cast<float>(1 << i % 4));
  }
}
ON_BOTH_BACK_ENDS("reduce_add loses no addition", additions_are_atomic);

// ---- CUDA C++ -------------------------------------------------------------------------------

// The lane that `lane` reads, according to the pseudo-code of "shfl.sync" in the PTX ISA.
int source_lane(const Shuffle& s, int lane) {
  const int first = lane / s.width * s.width, last = first + s.width - 1;
  int source = lane;
  bool in_range = false;
  switch (s.kind) {
    case kUp: source = lane - s.argument, in_range = source >= first; break;
    case kDown: source = lane + s.argument, in_range = source <= last; break;
    case kXor: source = lane ^ s.argument, in_range = source <= last; break;
    case kIndex: source = first + s.argument % s.width, in_range = true; break;
  }
  return in_range ? source : lane;
}

void shuffles_agree(Backend backend) {
  for (const int threads : {32, 96}) {
    KernelArguments args;
    args.block[0] = static_cast<unsigned>(threads);
    const auto got = run<int>(backend, KERNEL(shuffles), args,
                              static_cast<std::size_t>((kNumShuffles + 3) * threads), -2);
    const auto check = [&](int n, int thread, int expected) {
      INFO("shuffle " << n << ", thread " << thread);
      REQUIRE(got[static_cast<std::size_t>(n * threads + thread)] == expected);
    };
    for (int thread = 0; thread < threads; ++thread) {
      const int warp = thread / 32 * 32, lane = thread % 32;
      for (int n = 0; n < kNumShuffles; ++n)
        check(n, thread, shuffled_value(warp + source_lane(kShuffles[n], lane)));
      check(kNumShuffles, thread, shuffled_value(thread ^ 2));
      check(kNumShuffles + 1, thread, lane < 8 ? shuffled_value(thread ^ 4) : -1);
      check(kNumShuffles + 2, thread, shuffled_value(warp + thread * 5 % 32));
    }
  }
}
ON_BOTH_BACK_ENDS("shuffles read the lane that the PTX ISA says", shuffles_agree);

void votes_agree(Backend backend) {
  for (const unsigned threads : {32u, 40u, 96u}) {  // of 40 threads, the second warp has 8
    KernelArguments args;
    args.block[0] = threads;
    const auto got = run<unsigned>(backend, KERNEL(votes), args, kNumVotes * threads, ~0u);
    for (unsigned thread = 0; thread < threads; ++thread) {
      const unsigned first = thread / 32 * 32, last = std::min(first + 32, threads);
      unsigned thirds = 0;
      for (unsigned t = first; t < last; ++t) thirds |= unsigned{t % 3 == 0} << (t - first);
      const bool has_33 = first <= 33 && 33 < last;
      const std::array<unsigned, kNumVotes> expected = {
          thirds, 0, has_33, 0, !has_33, 1, thread % 32 < 4 ? 0xBu : 0u, last - first};
      for (unsigned n = 0; n < kNumVotes; ++n) {
        INFO(threads << " threads, vote " << n << ", thread " << thread);
        REQUIRE(got[n * threads + thread] == expected[n]);
      }
    }
  }
}
ON_BOTH_BACK_ENDS("ballot, any and all count the lanes of the mask", votes_agree);

void atomics_count(Backend backend) {
  constexpr int kBlocks = 5, kThreads = 100;  // not a multiple of 32
  KernelArguments args;
  args.grid[0] = kBlocks, args.block[0] = kThreads;
  const auto got = run<int>(backend, KERNEL(count_threads), args, 4 + kBlocks, 0);
  constexpr int kSum = kThreads * (kThreads - 1) / 2;
  CHECK(got[0] == kBlocks * kSum);
  CHECK(got[1] == kBlocks * kThreads);
  CHECK(got[2] == 1000 * (kBlocks - 1) + kThreads - 1);
  CHECK(got[3] == -1000 * (kBlocks - 1));
  // Old values 0, 1, 2 ... occur once each, so their sum is the same in any order.
  for (std::size_t b = 0; b < kBlocks; ++b) CHECK(got[4 + b] == kSum);
}
ON_BOTH_BACK_ENDS("atomics count every thread once", atomics_count);

void shared_memory_reverses(Backend backend) {
  for (const int threads : {1, 31, 40, 128}) {
    constexpr int kBlocks = 3;
    std::vector<int> in(static_cast<std::size_t>(kBlocks * threads)), expected(in.size());
    for (int i = 0; i < kBlocks * threads; ++i) {
      in[static_cast<std::size_t>(i)] = i;
      expected[static_cast<std::size_t>(i)] = i / threads * threads + threads - 1 - i % threads;
    }
    const DeviceBuffer a = on_device(backend, in);
    KernelArguments args;
    args.a = a.data();
    args.grid[0] = kBlocks, args.block[0] = static_cast<unsigned>(threads);
    INFO(threads << " threads");
    CHECK(run<int>(backend, KERNEL(reverse_static), args, in.size(), -1) == expected);
    for (const int padding : {0, 20000}) {  // 20000 ints are more than 48 KiB
      args.mode = padding;
      CHECK(run<int>(backend, KERNEL(reverse_dynamic), args, in.size(), -1) == expected);
    }
  }
}
ON_BOTH_BACK_ENDS("static and dynamic shared memory reverse blocks of any size",
                  shared_memory_reverses);

void indices_cover_the_grid(Backend backend) {
  KernelArguments args;
  args.grid[0] = 3, args.grid[1] = 2, args.grid[2] = 4;
  args.block[0] = 5, args.block[1] = 3, args.block[2] = 3;  // 45 threads
  std::vector<unsigned> expected;
  for (unsigned bz = 0; bz < 4; ++bz)
    for (unsigned by = 0; by < 2; ++by)
      for (unsigned bx = 0; bx < 3; ++bx)
        for (unsigned tz = 0; tz < 3; ++tz)
          for (unsigned ty = 0; ty < 3; ++ty)
            for (unsigned tx = 0; tx < 5; ++tx)
              expected.push_back(((((bz * 10 + by) * 10 + bx) * 10 + tz) * 10 + ty) * 10 + tx);
  CHECK(run<unsigned>(backend, KERNEL(record_indices), args, expected.size(), ~0u) == expected);
}
ON_BOTH_BACK_ENDS("three-dimensional blocks and grids have every index once",
                  indices_cover_the_grid);

}  // namespace
