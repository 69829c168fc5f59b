// Hopper's instructions in common/ptx, on both back ends: wgmma in all shapes, operands written by
// TMA, and a two-stage pipeline between a producer warp and a warpgroup that multiplies. In the
// emulator, leaving out a wait, a fence or a barrier must make the kernel fail.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "device/device.h"
#include "attn/tensor.h"
#include "emulator/simt.h"
#include "tests/catch.h"
#include "tests/kernels.h"

namespace {

using namespace attn;
using namespace attn::tests;

constexpr int kRows = 64;

// Runs the product of small integers, exact in any order; "" or the fault.
std::string product(Backend backend, DType dtype, int columns, bool registers, bool transposed_b,
                    int tiles, HopperFault fault = kNoFault) {
  const int k = 64 * tiles;
  std::mt19937 random(static_cast<unsigned>(columns + tiles));
  const auto draw = [&](int count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& x : values) x = static_cast<float>(static_cast<int>(random() % 5) - 2);
    return values;
  };
  const std::vector<float> a = draw(kRows * k), b = draw(k * columns);  // [row, k], [k, column]
  std::vector<float> b_stored = b;
  if (!transposed_b)
    for (int i = 0; i < k; ++i)
      for (int j = 0; j < columns; ++j)
        b_stored[static_cast<std::size_t>(j * k + i)] =
            b[static_cast<std::size_t>(i * columns + j)];
  const auto upload = [&](const std::vector<float>& values) {
    std::vector<uint16_t> bits(values.size());
    encode(dtype, values.data(), values.size(), bits.data());
    DeviceBuffer buffer(backend, "input", static_cast<int64_t>(2 * bits.size()));
    buffer.upload(bits.data());
    return buffer;
  };
  const DeviceBuffer gA = upload(a), gB = upload(b_stored);
  const auto size = static_cast<std::size_t>(kHopperRows * columns);
  DeviceBuffer out = upload(std::vector<float>(size, 12345.0f));
  KernelArguments args;
  args.a = gA.data(), args.b = gB.data(), args.out = out.data(), args.dtype = dtype;
  args.mode = hopper_mode(columns, registers, transposed_b, tiles, fault);
#if ATTN_HAVE_CUDA
  const Status status = backend == Backend::gpu ? gpu::tests::hopper_product(args)
                                                : emulated::tests::hopper_product(args);
#else
  const Status status = emulated::tests::hopper_product(args);
#endif
  if (!status.ok()) return status.message;
  synchronize(backend);
  if (const auto damage = out.broken_guard()) return *damage;
  std::vector<uint16_t> bits(size);
  out.download(bits.data());
  std::vector<float> d(size);
  decode(dtype, bits.data(), size, d.data());
  for (int i = 0; i < kHopperRows; ++i)
    for (int j = 0; j < columns; ++j) {
      float sum = 0;
      for (int n = 0; n < k; ++n)
        sum +=
            a[static_cast<std::size_t>(i * k + n)] * b[static_cast<std::size_t>(n * columns + j)];
      const float got = d[static_cast<std::size_t>(i * columns + j)];
      if (got != round_to(dtype, sum))
        return fmt::format("row {}, column {}: expected {}, got {}", i, j, sum, got);
    }
  return "";
}

// Enables or disables race detection, including global memory.
struct FindRaces {
  explicit FindRaces(bool find) { emulator::find_races = emulator::find_global_races = find; }
  ~FindRaces() { emulator::find_races = emulator::find_global_races = false; }
};

constexpr int kShapes[] = {64, 80, 96, 112, 128, 144, 160, 176, 192, 256};

TEST_CASE("wgmma multiplies what TMA brings (emulated)", "[hopper]") {
  for (const int columns : {64, 176})
    for (const bool registers : {false, true})
      for (const bool transposed_b : {false, true}) {
        INFO(columns << " columns, A in " << (registers ? "registers" : "shared memory") << ", B "
                     << (transposed_b ? "[k, n]" : "[n, k]"));
        emulator::schedule_seed = static_cast<uint64_t>(columns);
        const FindRaces find(true);
        const DType dtype = registers ? DType::fp16 : DType::bf16;
        CHECK(product(Backend::emulated, dtype, columns, registers, transposed_b, 2) == "");
      }
}

TEST_CASE("two stages between a producer and a consumer hold in every schedule", "[hopper]") {
  for (const bool early : {false, true}) {
    emulator::early_copies = early;
    for (uint64_t seed = 1; seed <= 6; ++seed) {
      emulator::schedule_seed = seed;
      INFO("seed " << seed << (early ? ", copies at once" : ", copies as late as possible"));
      const FindRaces find(seed > 3);
      CHECK(product(Backend::emulated, DType::bf16, 64, seed % 2, seed % 3 == 0, 5) == "");
    }
  }
  emulator::early_copies = false;
}

TEST_CASE("what keeps copies and products apart is missed when it is left out", "[hopper]") {
  // The number of failures in eight runs; each must report one of these texts, "" for wrong
  // numbers.
  const auto found = [](HopperFault fault, std::vector<std::string> texts, bool registers = false) {
    int count = 0;
    for (const bool early : {false, true}) {
      emulator::early_copies = early;
      for (uint64_t seed = 1; seed <= 4; ++seed) {
        emulator::schedule_seed = seed;
        const std::string wrong =
            product(Backend::emulated, DType::bf16, 64, registers, false, 5, fault);
        INFO("fault " << fault << ", seed " << seed << (early ? " early: " : " late: ") << wrong);
        if (wrong == "") continue;
        ++count;
        CHECK(std::any_of(texts.begin(), texts.end(), [&](const std::string& text) {
          if (text.empty()) return wrong.rfind("row ", 0) == 0;
          return wrong.find(text) != wrong.npos;
        }));
      }
    }
    emulator::early_copies = false;
    return count;
  };
  const std::string unawaited = "ends before a thread has waited for copies to shared memory";
  CHECK(found(kNoWaitForCopy, {"", unawaited}) == 8);
  CHECK(found(kNoWaitForReader, {"", "waits in mbarrier_wait at tests/hopper_kernels.cu:"}) >= 4);
  CHECK(found(kWrongPhase,
              {"", unawaited, "waits in named_barrier_sync at tests/hopper_kernels.cu:"}) >= 4);
  CHECK(found(kReleasedTooEarly, {""}) >= 3);
  CHECK(found(kRegistersTooEarly, {""}, true) >= 4);
  CHECK(found(kNoRegisterFence, {"without wgmma_fence since the last wait"}) == 8);
  CHECK(found(kNoInitFence, {"without mbarrier_init_fence since its mbarrier_init"}) == 8);
  CHECK(found(kNoSharedFence, {"without fence_proxy_async since the last group of stores"}) == 8);
  CHECK(found(kTooFewBytes, {"deadlock: thread (0,0,0) of block (0,0,0) waits in mbarrier_wait"}) ==
        8);
  CHECK(found(kNoBarrierBeforeStore, {""}) >= 2);
  CHECK(found(kNoWaitForStore,
              {"ends with a TMA store or bulk reduction without tma_store_wait"}) == 8);
}

TEST_CASE("where races are looked for, what is left out is named as one", "[hopper]") {
  // The number of eight runs that report a race between `first` and `second`, in either order.
  const auto named = [](HopperFault fault, const std::string& first, const std::string& second,
                        bool registers = false) {
    int count = 0;
    const FindRaces find(true);
    for (const bool early : {false, true}) {
      emulator::early_copies = early;
      for (uint64_t seed = 1; seed <= 4; ++seed) {
        emulator::schedule_seed = seed;
        const std::string said =
            product(Backend::emulated, DType::bf16, 64, registers, false, 5, fault);
        INFO("fault " << fault << ", seed " << seed << (early ? " early: " : " late: ") << said);
        CHECK(said != "");
        count += said.find("race: ") == 0 && said.find(first) != said.npos &&
                 said.find(second) != said.npos;
      }
    }
    emulator::early_copies = false;
    return count;
  };
  CHECK(named(kNoWaitForCopy, "written by tma_load of ", "read by wgmma of ") == 8);
  CHECK(named(kNoWaitForReader, "was written by tma_load of ",
              "and then written by tma_load of ") == 8);
  CHECK(named(kWrongPhase, "written by tma_load of ", "read by wgmma of ") == 8);
  CHECK(named(kReleasedTooEarly, "written by tma_load of ", "read by wgmma of ") == 8);
  CHECK(named(kNoSharedFence, "read by tma_store of ", "with no fence_proxy_async between") == 8);
  CHECK(named(kNoBarrierBeforeStore, "written by thread (", "read by tma_store of ") == 8);
}

TEST_CASE("a block whose warpgroups take more registers than it has is missed", "[hopper]") {
  // One warpgroup releases registers, the others request them: the emulator's message.
  const auto said = [](unsigned threads, unsigned given, unsigned taken) -> std::string {
    try {
      emulator::run_grid(1, threads, 0, {[=] {
                           const bool gives = emulator::threadIdx.x < 128;
                           emulator::Block::current().registers("setmaxnreg", {__FILE__, __LINE__},
                                                                gives ? given : taken, !gives);
                         }});
    } catch (const emulator::KernelError& error) {
      return error.what();
    }
    return "";
  };
  CHECK(said(384, 24, 240) == "");
  CHECK(said(384, 40, 232) == "");
  CHECK(said(384, 32, 240).find("3 warpgroups have 512 a lane then, and were launched with 504") !=
        std::string::npos);
  CHECK(said(384, 40, 240).find("520 a lane") != std::string::npos);
  CHECK(said(512, 32, 160) == "");
  CHECK(said(512, 40, 160).find("4 warpgroups have 520 a lane then, and were launched with 512") !=
        std::string::npos);
  // more than may be released
  CHECK(said(512, 136, 160).find("for 136 registers, and has 128") != std::string::npos);
  // less than may be requested
  CHECK(said(384, 24, 160).find("for 160 registers, and has 168") != std::string::npos);
}

// Register m of lane 4g + t holds elements 2t and 2t + 1 of row g of matrix m; the stored row n of
// 8 elements is row n % 8 of matrix n / 8, or column n % 8 if transposed.
void stmatrix_places(Backend backend) {
  const auto element = [](int m, int i, int j) {
    return static_cast<uint16_t>(100 * m + 10 * i + j);
  };
  std::vector<uint32_t> registers(4 * 32);
  for (int n = 0; n < 4 * 32; ++n) {
    const int m = n % 4, g = n / 4 / 4, t = n / 4 % 4;
    registers[static_cast<std::size_t>(n)] =
        element(m, g, 2 * t) | uint32_t{element(m, g, 2 * t + 1)} << 16;
  }
  DeviceBuffer in(backend, "input", static_cast<int64_t>(4 * registers.size()));
  in.upload(registers.data());
  std::vector<uint16_t> got(2 * 32 * 8, 0xFFFF);
  DeviceBuffer out(backend, "output", static_cast<int64_t>(2 * got.size()));
  out.upload(got.data());
  KernelArguments args;
  args.a = in.data(), args.out = out.data();
#if ATTN_HAVE_CUDA
  const Status status = backend == Backend::gpu ? gpu::tests::stmatrix_dump(args)
                                                : emulated::tests::stmatrix_dump(args);
#else
  const Status status = emulated::tests::stmatrix_dump(args);
#endif
  REQUIRE(status.message == "");
  synchronize(backend);
  CHECK(out.broken_guard().value_or("") == "");
  out.download(got.data());
  for (int n = 0; n < 2 * 32 * 8; ++n) {
    const int m = n / 64 % 4, i = n / 8 % 8, j = n % 8;
    INFO("version " << n / 256 << ", matrix " << m << ", row " << i << ", column " << j);
    REQUIRE(got[static_cast<std::size_t>(n)] == (n < 256 ? element(m, i, j) : element(m, j, i)));
  }
}
TEST_CASE("stmatrix puts every element where the PTX ISA says (emulated)", "[hopper]") {
  stmatrix_places(Backend::emulated);
}
TEST_CASE("stmatrix puts every element where the PTX ISA says (GPU)", "[hopper][gpu]") {
  if (!gpu_info().available || gpu_info().cc_major != 9) {
    skipped("no GPU of compute capability 9.0: " + gpu_info().error);
    return;
  }
  stmatrix_places(Backend::gpu);
}

TEST_CASE("wgmma in every shape (GPU)", "[hopper][gpu]") {
  if (!gpu_info().available || gpu_info().cc_major != 9) {
    skipped("no GPU of compute capability 9.0: " + gpu_info().error);
    return;
  }
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const int columns : kShapes)
      for (const bool registers : {false, true})
        for (const bool transposed_b : {false, true})
          for (const int tiles : {1, 2, 5}) {
            INFO(name(dtype) << ", " << columns << " columns, A in registers " << registers
                             << ", B [k, n] " << transposed_b << ", " << tiles << " tiles");
            CHECK(product(Backend::gpu, dtype, columns, registers, transposed_b, tiles) == "");
          }
}

}  // namespace
