/// \file
/// Errors that break a kernel on a GPU, which the emulator refuses with one line: what, where, why.
#include <atomic>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/named_barrier.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "tests/catch.h"

namespace {

using namespace attn;

struct alignas(1024) Storage {
  unsigned char bytes[16384];
  uint64_t barrier;
};

// A variable that all threads have written, visible to all.
__device__ Storage& filled_storage() {
  auto& smem = dynamic_shared<Storage>();
  for (unsigned i = threadIdx.x; i < sizeof smem.bytes; i += blockDim.x) smem.bytes[i] = 0;
  fence_proxy_async();
  __syncthreads();
  return smem;
}

__global__ void copy_to(int to, int from, const unsigned char* global) {
  cp_async_16(dynamic_shared<Storage>().bytes + to, global + from);
  cp_async_commit();
  cp_async_wait<0>();
}
__global__ void load_matrix(int offset, int lane, uint32_t* out) {
  uint32_t r[4];
  const int own = static_cast<int>(threadIdx.x);
  ldmatrix_x4(r, filled_storage().bytes + 16 * own + (own == lane ? offset : 0));
  out[0] = r[0];
}
__global__ void load_two(int lane, uint32_t* out) {
  uint32_t r[2];
  const int own = static_cast<int>(threadIdx.x);
  ldmatrix_x2(r, filled_storage().bytes + 16 * own + (own == lane ? 2 : 0));
  out[0] = r[0];
}
__global__ void bring_box(int offset, const TensorMap map) {
  auto& smem = dynamic_shared<Storage>();
  mbarrier_init(&smem.barrier, 1);
  mbarrier_init_fence();
  mbarrier_arrive_expect_tx(&smem.barrier, 64 * 64 * 2);
  tma_load(smem.bytes + offset, map, &smem.barrier, {0, 0});
  mbarrier_wait(&smem.barrier, 0);
}
__global__ void multiply(unsigned warps, float* out) {
  float d[8][4] = {};
  const SmemDescriptor tile = smem_descriptor(filled_storage().bytes);
  if (threadIdx.x / 32 < warps) {
    wgmma_fence();
    wgmma<__half, false>(d, tile, tile, false);
    wgmma_commit();
    wgmma_wait<0>(d);
  }
  out[0] = d[0][0];
}

__global__ void initialise(int times) {
  if (threadIdx.x != 0) return;
  for (int i = 0; i < times; ++i) mbarrier_init(&dynamic_shared<Storage>().barrier, 1);
}
// 1: begins, and ends when 2 has begun. 2: begins, and reads from `at` when it is told to.
__global__ void meet_host(std::atomic<int>* step, int which, const int* at) {
  if (threadIdx.x != 0) return;
  *step = which;
  while (*step < which + 1) std::this_thread::yield();
  if (at) *step = *at;
}
// An MMA whose shared-memory operand is written by ordinary code. fault 1: no fence; 2: its
// accumulators are read, 3: its register operand is written, while it is in flight; 4: no commit.
__global__ void multiply_in_flight(int fault, float* out) {
  auto& smem = dynamic_shared<Storage>();
  float d[8][4] = {};
  for (int i = 0; i < 128; ++i) smem.bytes[128 * i + threadIdx.x] = 0;
  if (fault != 1) fence_proxy_async();
  __syncthreads();
  const SmemDescriptor tile = smem_descriptor(smem.bytes);
  uint32_t a[4] = {};
  wgmma_fence();
  wgmma<__half, false>(d, a, tile, false);
  if (fault != 4) wgmma_commit();
  if (fault == 2) out[threadIdx.x] = d[1][2];
  if (fault == 3) a[threadIdx.x % 4] = 7;
  wgmma_wait<0>(d);
  out[threadIdx.x] = d[1][2] + static_cast<float>(a[threadIdx.x % 4]);
}
// The same, where only warp 0 or every warp waits for the writes of all.
__global__ void multiply_what_others_wrote(bool all_wait, float* out) {
  auto& smem = dynamic_shared<Storage>();
  float d[8][4] = {};
  for (int i = 0; i < 128; ++i) smem.bytes[128 * i + threadIdx.x] = 0;
  fence_proxy_async();
  if (all_wait || threadIdx.x < 32)
    named_barrier_sync(1, 128);
  else
    named_barrier_arrive(1, 128);
  const SmemDescriptor tile = smem_descriptor(smem.bytes);
  wgmma_fence();
  wgmma<__half, false>(d, tile, tile, false);
  wgmma_commit();
  wgmma_wait<0>(d);
  out[threadIdx.x] = d[1][2];
}
// Warp 0 writes a box, warp 1 stores it. The fence is executed by the writers, by the storing warp
// before the barrier (in vain), or by the storing warp after it.
enum Fences { kWriters, kStorerBefore, kStorerAfter };
__global__ void store_what_others_wrote(Fences fences, const TensorMap map) {
  auto& smem = dynamic_shared<Storage>();
  if (threadIdx.x < 32)
    for (int i = 0; i < 256; ++i) smem.bytes[32 * i + threadIdx.x] = 0;
  const unsigned first = fences == kWriters ? 0 : 32;
  if (fences != kStorerAfter && threadIdx.x / 32 == first / 32) fence_proxy_async();
  __syncthreads();
  if (threadIdx.x != 32) return;
  if (fences == kStorerAfter) fence_proxy_async();
  tma_store(map, smem.bytes, {0, 0, 0});
  tma_store_commit();
  tma_store_wait<0>();
}
__global__ void load_vector(int offset, const float* global, float* out) {
  auto* const shared = reinterpret_cast<float*>(dynamic_shared<Storage>().bytes);
  for (unsigned i = threadIdx.x; i < 64; i += blockDim.x) shared[i] = 0;
  __syncthreads();
  const float4 a = *reinterpret_cast<const float4*>(shared + offset / 8);
  const float4 b = *reinterpret_cast<const float4*>(global + offset % 8);
  out[threadIdx.x] = a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w;
}
__global__ void store_vector(int offset, float* out) {
  *reinterpret_cast<float2*>(out + offset) = make_float2(1, 2);
}
__global__ void __launch_bounds__(64) at_most_64(int* out) { out[threadIdx.x] = 1; }
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 2) at_most(int* out) {
  out[threadIdx.x] = 1;
}
struct Of96 {
  static constexpr int kThreads = 96;
};
template <int kBytes>
__global__ void in_variables(int* first, float* fresh) {
  __shared__ float numbers[4];
  __shared__ unsigned char bytes[kBytes];
  if (threadIdx.x == 0) {
    *fresh = numbers[2];
    *first = bytes[kBytes - 1];
  }
  __syncthreads();
  bytes[kBytes - 1 - threadIdx.x] = 0;
  numbers[threadIdx.x % 4] = 1;
}

__global__ void in_blocks(float* fresh) {
  __shared__ float numbers[32];
  if (threadIdx.x == 0) fresh[blockIdx.x] = numbers[31];
  __syncthreads();
  numbers[threadIdx.x] = 1;
}

bool looks_for_races = true;
template <class... Parameters, class... Values>
std::string message(void (*kernel)(Parameters...), unsigned threads, Values... values) {
  emulator::find_races = looks_for_races;
  const Status status =
      launch_kernel(kernel, dim3(1), dim3(threads), sizeof(Storage), nullptr, values...);
  CHECK((status.ok() || status.code == Status::Code::kKernelError));
  CHECK(status.message.find('\n') == std::string::npos);
  return status.message;
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

}  // namespace

TEST_CASE("cp.async of addresses that are no whole 16 bytes is refused", "[emulator][refusals]") {
  alignas(16) static const unsigned char global[64] = {};
  CHECK(message(copy_to, 1, 32, 16, global) == "");
  const std::string to = message(copy_to, 1, 34, 0, global),
                    from = message(copy_to, 1, 0, 8, global);
  CHECK(has(to, "cp_async_16"));
  CHECK(has(to, "test_refusals.cpp:"));
  CHECK(has(to, "a destination 2 bytes past a multiple of 16"));
  CHECK(has(from, "a source 8 bytes past a multiple of 16"));
}

TEST_CASE(
    "ldmatrix of a row that is not aligned is refused, of a lane that does not count it is not",
    "[emulator][refusals]") {
  uint32_t out = 0;
  CHECK(message(load_matrix, 32, 0, 5, &out) == "");
  CHECK(has(message(load_matrix, 32, 2, 5, &out), "a row 2 bytes past a multiple of 16"));
  CHECK(has(message(load_matrix, 32, 2, 5, &out), "thread (5,0,0)"));
  CHECK(has(message(load_two, 32, 15, &out), "a row 2 bytes past a multiple of 16"));
  CHECK(message(load_two, 32, 16, &out) == "");
}

TEST_CASE("TMA to an address that is no whole 128 bytes is refused", "[emulator][refusals]") {
  alignas(16) static const __half tensor[64 * 64] = {};
  TensorMap map;
  REQUIRE(make_tensor_map<2>(map, tensor, {64, 64}, {128}, {64, 64}, Swizzle::kNone).ok());
  CHECK(message(bring_box, 1, 128, map) == "");
  CHECK(has(message(bring_box, 1, 16, map), "tma_load"));
  CHECK(has(message(bring_box, 1, 16, map), "a destination 16 bytes past a multiple of 128"));
}

TEST_CASE("wgmma by part of a warpgroup is refused", "[emulator][refusals]") {
  float out = 0;
  CHECK(message(multiply, 128, 4u, &out) == "");
  for (const unsigned warps : {1u, 2u, 3u})
    CHECK(has(message(multiply, 128, warps, &out),
              "all four warps of a warpgroup multiply together"));
  CHECK(has(message(multiply, 32, 4u, &out), "all four warps"));  // a block of one warp
}

TEST_CASE("what a product in flight has is not touched before its wait", "[emulator][refusals]") {
  std::vector<float> out(128);
  CHECK(message(multiply_in_flight, 128, 0, out.data()) == "");
  const std::string unfenced = message(multiply_in_flight, 128, 1, out.data());
  CHECK(has(unfenced, "and then read by wgmma of thread ("));
  CHECK(has(unfenced, "with no fence_proxy_async between"));
  const std::string read = message(multiply_in_flight, 128, 2, out.data());
  CHECK(has(read, " reads a register of the accumulators at tests/test_refusals.cpp:"));
  CHECK(has(read, "before its wgmma_wait"));
  CHECK(
      has(message(multiply_in_flight, 128, 3, out.data()), " writes a register of an operand at "));
  const std::string uncommitted = message(multiply_in_flight, 128, 4, out.data());
  CHECK(has(uncommitted, " has: it has no wgmma_commit, so that no wgmma_wait is for it"));
  looks_for_races = false;
  CHECK(
      has(message(multiply_in_flight, 128, 4, out.data()), "ends with wgmma without wgmma_commit"));
  looks_for_races = true;
}

TEST_CASE("an mbarrier is initialised once", "[emulator][refusals]") {
  CHECK(message(initialise, 32, 1) == "");
  const std::string said = message(initialise, 32, 2);
  CHECK(has(said, "calls mbarrier_init at tests/test_refusals.cpp:"));
  CHECK(has(said, "again: PTX leaves undefined what happens to a barrier that is in use"));
}

#ifndef ATTN_ASAN  // AddressSanitizer has a handler of its own
TEST_CASE("an address that is not mapped is named in whichever thread of the host",
          "[emulator][refusals]") {
  // The first thread sets the handler, and ends while the kernel of the second one runs.
  std::atomic<int> step = 0;
  std::string said;
  std::thread first([&] { message(meet_host, 32, &step, 1, nullptr); });
  while (step != 1) std::this_thread::yield();
  std::thread second(
      [&] { said = message(meet_host, 32, &step, 2, reinterpret_cast<int*>(0x7000'0000'0000)); });
  first.join();
  step = 3;
  second.join();
  CHECK(has(said, "accesses memory that is no buffer's"));
}
#endif

TEST_CASE("each warp of a wgmma has to know of what it reads", "[emulator][refusals]") {
  std::vector<float> out(128);
  CHECK(message(multiply_what_others_wrote, 128, true, out.data()) == "");
  const std::string said = message(multiply_what_others_wrote, 128, false, out.data());
  INFO(said);
  CHECK(has(said, "and then read by wgmma of thread ("));
  CHECK_FALSE(has(said, "and then read by wgmma of thread (0,0,0)"));
  CHECK(has(said, "with no barrier between"));
}

TEST_CASE("a TMA store needs a fence between what was written and its reads, by whomever",
          "[emulator][refusals]") {
  alignas(16) static __half tensor[64 * 64] = {};
  TensorMap map;
  REQUIRE(
      make_tensor_map<3>(map, tensor, {64, 64, 1}, {128, 8192}, {64, 64, 1}, Swizzle::kNone).ok());
  for (int seed = 1; seed <= 20; ++seed) {
    emulator::schedule_seed = static_cast<std::uint64_t>(seed);
    CHECK(message(store_what_others_wrote, 64, kWriters, map) == "");
    CHECK(message(store_what_others_wrote, 64, kStorerAfter, map) == "");
    const std::string said = message(store_what_others_wrote, 64, kStorerBefore, map);
    INFO(said);
    CHECK(has(said, "and then read by tma_store of thread (32,0,0) "));
    CHECK(has(said, "with no fence_proxy_async between"));
  }
}

#ifndef ATTN_ASAN  // UBSan reports it there
TEST_CASE("a vector is loaded and stored at whole multiples of its size", "[emulator][refusals]") {
  alignas(16) float global[32] = {}, out[64] = {};
  const emulator::GlobalBuffer in("in", global, sizeof global), to("out", out, sizeof out);
  CHECK(message(load_vector, 32, 0, global, out) == "");
  CHECK(message(load_vector, 32, 32 + 4, global, out) == "");
  for (const int offset : {8, 24, 1, 2})
    CHECK(has(message(load_vector, 32, offset, global, out), " loads at tests/test_refusals.cpp:"));
  CHECK(has(message(load_vector, 32, 8, global, out),
            "4 bytes past a multiple of 16: a misaligned access"));
  CHECK(message(store_vector, 32, 2, out) == "");
  const std::string stored = message(store_vector, 32, 1, out);
  CHECK(has(stored, " stores at tests/test_refusals.cpp:"));
  CHECK(has(stored, " to an address "));
}
#endif

#ifdef __clang__
// This compiler's attribute does not accept a template-dependent value: bounds are unknown.
#else
TEST_CASE("more threads than __launch_bounds__ says are refused", "[emulator][refusals]") {
  int out[128];
  CHECK(message(at_most_64, 64, out) == "");
  CHECK(message(at_most<Of96>, 96, out) == "");
  CHECK(message(at_most_64, 65, out) ==
        "a launch of 65 threads a block: __launch_bounds__ of the kernel says 64");
  CHECK(has(message(at_most<Of96>, 128, out), "says 96"));
}
#endif

TEST_CASE("__shared__ variables begin as NaN bytes, in every block, and end at 48 KiB",
          "[emulator][refusals]") {
  int first = 0;
  float fresh = 0;
  looks_for_races = false;  // unwritten elements are tested elsewhere
  for (int launch = 0; launch < 2; ++launch) {
    first = 0, fresh = 0;
    CHECK(message(in_variables<1000>, 32, &first, &fresh) == "");
    CHECK(first == 0xFF);
    CHECK(std::isnan(fresh));
  }
  CHECK(message(in_variables<48 * 1024 - 16>, 32, &first, &fresh) == "");
  CHECK(
      has(message(in_variables<48 * 1024 - 15>, 32, &first, &fresh), "49153 bytes of __shared__"));
  // Elements at block boundaries, and their neighbours.
  std::vector<float> of_blocks(9);
  const Status status = launch_kernel(in_blocks, dim3(9), dim3(32), 0, nullptr, of_blocks.data());
  CHECK(status.message == "");
  for (const float of_block : of_blocks) CHECK(std::isnan(of_block));
  looks_for_races = true;
  const std::string large = message(in_variables<100000>, 32, &first, &fresh);
  CHECK(has(large, "100016 bytes of __shared__ variables ("));
  CHECK(has(large, "bytes 100000"));
  CHECK(has(large, "a block has at most 49152"));
}

TEST_CASE("more shared memory than an SM has is refused", "[emulator][refusals]") {
  int out[32];
  const Status status = launch_kernel(at_most_64, dim3(1), dim3(32), 228 * 1024, nullptr, out);
  CHECK(status.code == Status::Code::kUnsupported);
  CHECK(has(status.message, "233472 bytes of shared memory a block: the limit is 232448"));
  // The same for a kernel without a launch, and for variables and dynamic memory together.
  const auto said = [](std::size_t bytes) -> std::string {
    try {
      emulator::run_grid(1, 32, bytes, {[] {}});
    } catch (const emulator::KernelError& error) {
      return error.what();
    }
    return "";
  };
  CHECK(said(227 * 1024) == "");
  CHECK(has(said(227 * 1024 + 1),
            "232449 of dynamic shared memory: a block has at most 49152 of "
            "the first, 232448 in all"));
  int first = 0;
  float fresh = 0;
  const Status both = launch_kernel(in_variables<1024>, dim3(1), dim3(32), 227 * 1024 - 1024,
                                    nullptr, &first, &fresh);
  CHECK(has(both.message, "1040 bytes of __shared__ variables ("));
  CHECK(has(both.message, "232448 in all"));
}
