// Launches and memory in the emulator: poison, guard bands, refusals.
#include <cmath>
#include <string>
#include <vector>

#include "tests/catch.h"

#define ATTN_EMULATED
#include "device/device.h"
#include "attn/kernel.h"
#include "attn/tensor.h"
#include "attn/two_streams.h"

namespace {

using namespace attn;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

// Records whether dynamic shared memory is all NaN, then fills it.
__global__ void find_nan(int* all_nan, int floats) {
  float* shared = &dynamic_shared<float>();
  if (threadIdx.x == 0) {
    int nans = 0;
    for (int i = 0; i < floats; ++i) nans += std::isnan(shared[i]);
    all_nan[blockIdx.x] = nans == floats;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < floats; i += 32) shared[i] = 1;
}

TEST_CASE("dynamic shared memory starts as NaN in every block", "[launch]") {
  std::vector<int> all_nan(10, 0);
  for (int launch = 0; launch < 3; ++launch) {
    REQUIRE(launch_kernel(find_nan, dim3(10), dim3(32), 1000 * sizeof(float), nullptr,
                          all_nan.data(), 1000).ok());
    CHECK(all_nan == std::vector<int>(10, 1));
  }
}

__global__ void write_shared_at(int index) {
  (&dynamic_shared<float>())[index] = 1;
}

TEST_CASE("a write past dynamic shared memory is reported", "[launch]") {
  CHECK(launch_kernel(write_shared_at, dim3(1), dim3(1), 256, nullptr, 63).ok());
#ifndef ATTN_ASAN  // ASan would stop the program at the write itself
  for (const int index : {64, 65, 127, 250}) {
    const Status status = launch_kernel(write_shared_at, dim3(1), dim3(1), 256, nullptr, index);
    CHECK(status.code == Status::Code::kKernelError);
    INFO(status.message);
    CHECK(contains(status.message, "at offset "));
    CHECK(contains(status.message, " of its 256 bytes of dynamic shared memory"));
  }
#endif
}

__global__ void do_nothing() {}

TEST_CASE("a launch that no GPU would take is refused with its reason", "[launch]") {
  const auto refusal = [](dim3 grid, dim3 block, std::size_t shared_bytes) {
    const Status status = launch_kernel(do_nothing, grid, block, shared_bytes, nullptr);
    CHECK(status.code == Status::Code::kUnsupported);
    CHECK_FALSE(contains(status.message, "\n"));
    return status.message;
  };
  CHECK(contains(refusal(dim3(7, 65536, 1), dim3(1), 0), "a grid of 7 x 65536 x 1 blocks"));
  CHECK(contains(refusal(dim3(1, 1, 65536), dim3(1), 0), "y and z end at 65535"));
  CHECK(contains(refusal(dim3(1), dim3(1), 232449), "232449 bytes of shared memory"));
  CHECK(contains(refusal(dim3(1), dim3(1025), 0), "1025 x 1 x 1 threads"));
  CHECK(contains(refusal(dim3(1), dim3(32, 33), 0), "32 x 33 x 1 threads"));
  CHECK(contains(refusal(dim3(1), dim3(1, 1, 65), 0), "z ends at 64"));
  CHECK(contains(refusal(dim3(0), dim3(1), 0), "empty"));
  CHECK(contains(refusal(dim3(1), dim3(0), 0), "empty"));
  CHECK(launch_kernel(do_nothing, dim3(1, 65535), dim3(1), 0, nullptr).ok());
  CHECK(launch_kernel(do_nothing, dim3(1), dim3(1024), 232448, nullptr).ok());
}

__global__ void mark(int* marks, int mark) {
  atomicAdd(&marks[blockIdx.x], mark * static_cast<int>(gridDim.x));
}

TEST_CASE("of two launches in two streams each has its own blocks and arguments", "[launch]") {
  std::vector<int> here(5), beside(5), both(5);
  const auto launch = [&](dim3 grid, int* a, int* b) {
    return launch_in_two_streams(mark, grid, dim3(1), 0, nullptr, std::tuple(a, 1),
                                 std::tuple(b, 10));
  };
  CHECK(launch(dim3(5), here.data(), beside.data()).ok());
  CHECK(launch(dim3(5), both.data(), both.data()).ok());
  CHECK(here == std::vector<int>(5, 5));
  CHECK(beside == std::vector<int>(5, 50));
  CHECK(both == std::vector<int>(5, 55));
  const Status refused = launch(dim3(5, 2), here.data(), beside.data());
  CHECK(refused.code == Status::Code::kUnsupported);
  CHECK(contains(refused.message, "one dimension"));
}

// ---- device memory ----------------------------------------------------------------------------

TEST_CASE("poison is NaN in every element type", "[launch]") {
  constexpr std::size_t kCount = 1000;
  DeviceBuffer buffer(Backend::emulated, "o", kCount * 4);
  std::memset(buffer.data(), 0, kCount * 4);
  buffer.poison();
  for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16}) {
    std::vector<float> values(kCount * 4 / static_cast<std::size_t>(size_of(dtype)), 0.0f);
    decode(dtype, buffer.data(), values.size(), values.data());
    for (const float x : values) REQUIRE(std::isnan(x));
  }
}

TEST_CASE("an output begins as elements that nobody wrote, whatever its size", "[launch]") {
  for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16, DType::int32})
    for (const int64_t count : {1, 2, 3, 1000, 65536, 65537, 300001}) {
      DeviceBuffer buffer(Backend::emulated, "o", count * size_of(dtype));
      buffer.poison(unwritten_bits(dtype));
      std::vector<std::byte> bytes(static_cast<std::size_t>(buffer.bytes()));
      buffer.download(bytes.data());
      const HostTensor tensor = from_bytes({"o", {1, 1, 1, count}, dtype}, bytes);
      CHECK(tensor.data.size() + tensor.numbers.size() == static_cast<std::size_t>(count));
      for (const float x : tensor.data) REQUIRE((unwritten(x) && std::isnan(x)));
      for (const int64_t x : tensor.numbers) REQUIRE(unwritten(dtype, x));
      CHECK_FALSE(buffer.broken_guard());
    }
}

TEST_CASE("no arithmetic of a 16-bit type gives an element that nobody wrote", "[launch]") {
  const emulator::BFloat16 from_bf16(std::bit_cast<float>(kUnwritten));
  const emulator::Float16 from_fp16(std::bit_cast<float>(kUnwritten));
  CHECK(from_bf16.bits != (unwritten_bits(DType::bf16) & 0xFFFF));
  CHECK(from_fp16.bits != (unwritten_bits(DType::fp16) & 0xFFFF));
  for (unsigned bits = 0; bits < 65536; ++bits) {  // round trip
    emulator::BFloat16 b;
    emulator::Float16 f;
    b.bits = f.bits = static_cast<std::uint16_t>(bits);
    REQUIRE(emulator::BFloat16(static_cast<float>(b)).bits !=
            (unwritten_bits(DType::bf16) & 0xFFFF));
    REQUIRE(emulator::Float16(static_cast<float>(f)).bits !=
            (unwritten_bits(DType::fp16) & 0xFFFF));
  }
}

TEST_CASE("a write outside a buffer is found", "[launch]") {
  const auto guard_after = [](int64_t bytes, int64_t at) {
    DeviceBuffer buffer(Backend::emulated, "dq", bytes);
    CHECK_FALSE(buffer.broken_guard());
    static_cast<unsigned char*>(buffer.data())[at] = 1;
    return buffer.broken_guard().value_or("");
  };
  CHECK(guard_after(64, 0).empty());
  CHECK(guard_after(64, 63).empty());
#ifndef ATTN_ASAN  // ASan would stop the program at the write itself
  CHECK(guard_after(64, 64) == "wrote outside dq: at byte 64 of 64");
  CHECK(guard_after(64, -1) == "wrote outside dq: at byte -1 of 64");
  CHECK(guard_after(6, 6) == "wrote outside dq: at byte 6 of 6");
  const int64_t band = DeviceBuffer::kGuardBytes;
  CHECK(guard_after(64, 64 + band - 1) == "wrote outside dq: at byte 4159 of 64");
  CHECK(guard_after(64, -band) == "wrote outside dq: at byte -4096 of 64");
#endif
}

}  // namespace
