// The emulator itself: it finds the faults it should, reports where, and continues afterwards.
// Emulator only, so the kernels are defined here; those for both back ends are in test_kernels.cpp.
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "tests/catch.h"

#define ATTN_EMULATED
#include "device/device.h"
#include "attn/kernel.h"
#include "attn/tensor.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"

namespace {

using namespace attn;

constexpr int kSeeds = 20;

// Launches with its own schedule.
template <class... Parameters, class... Values>
Status launch_with_seed(std::uint64_t seed, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                        Values... arguments) {
  schedule_seed = seed;
  return launch_kernel(kernel, grid, block, 0, nullptr, arguments...);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}
std::string place(int line) { return "tests/test_emulator.cpp:" + std::to_string(line); }

// ---- missing barriers -------------------------------------------------------------------------

constexpr int kTile = 64, kTiles = 3;
template <bool kFirst, bool kSecond>
__global__ void reverse_tiles(const float* in, float* out) {
  __shared__ float tile[kTile];
  for (int t = 0; t < kTiles; ++t) {
    tile[threadIdx.x] = in[t * kTile + static_cast<int>(threadIdx.x)];
    if (kFirst) __syncthreads();  // the tile is complete before it is read
    out[t * kTile + static_cast<int>(threadIdx.x)] = tile[kTile - 1 - threadIdx.x];
    if (kSecond) __syncthreads();  // and has been read before it is overwritten
  }
}

// C = A B of 32 x 32 matrices in tiles of 8: each thread sums one element.
constexpr int kN = 32, kT = 8;
template <bool kFirst, bool kSecond>
__global__ void multiply_tiles(const float* a, const float* b, float* c) {
  __shared__ float sA[kT][kT], sB[kT][kT];
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const int row = static_cast<int>(blockIdx.y) * kT + y;
  const int col = static_cast<int>(blockIdx.x) * kT + x;
  float sum = 0;
  for (int k0 = 0; k0 < kN; k0 += kT) {
    sA[y][x] = a[row * kN + k0 + x];
    sB[y][x] = b[(k0 + y) * kN + col];
    if (kFirst) __syncthreads();
    for (int k = 0; k < kT; ++k) sum += sA[y][k] * sB[k][x];
    if (kSecond) __syncthreads();
  }
  c[row * kN + col] = sum;
}

// Every lane reads its neighbour's value, twice.
template <bool kFirst, bool kSecond>
__global__ void exchange(const float* in, float* out) {
  __shared__ float values[32];
  for (int t = 0; t < kTiles; ++t) {
    values[threadIdx.x] = in[t * 32 + static_cast<int>(threadIdx.x)];
    if (kFirst) __syncwarp();
    out[t * 32 + static_cast<int>(threadIdx.x)] = values[threadIdx.x ^ 1];
    if (kSecond) __syncwarp();
  }
}

std::vector<float> numbers(int count, float first) {
  std::vector<float> v(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = first + static_cast<float>(i % 91);
  return v;
}

// The number of schedules with the result `expected`.
template <class Launch>
int schedules_passed(const std::vector<float>& expected, Launch launch) {
  int passed = 0;
  for (int seed = 1; seed <= kSeeds; ++seed) {
    std::vector<float> out(expected.size(), NAN);
    const Status status = launch(static_cast<std::uint64_t>(seed), out.data());
    INFO(status.message);
    REQUIRE(status.ok());
    passed += out == expected;
  }
  return passed;
}

TEST_CASE("a missing __syncthreads fails in every schedule: reversal", "[emulator]") {
  const std::vector<float> in = numbers(kTile * kTiles, 1);
  std::vector<float> expected(in.size());
  for (std::size_t i = 0; i < in.size(); ++i)
    expected[i] = in[i / kTile * kTile + kTile - 1 - i % kTile];
  const auto passed = [&](auto kernel) {
    return schedules_passed(expected, [&](std::uint64_t seed, float* out) {
      return launch_with_seed(seed, kernel, dim3(1), dim3(kTile), in.data(), out);
    });
  };
  CHECK(passed(reverse_tiles<true, true>) == kSeeds);
  CHECK(passed(reverse_tiles<false, true>) == 0);
  CHECK(passed(reverse_tiles<true, false>) == 0);
  CHECK(passed(reverse_tiles<false, false>) == 0);
}

TEST_CASE("a missing __syncthreads fails in every schedule: tiled product", "[emulator]") {
  const std::vector<float> a = numbers(kN * kN, 1), b = numbers(kN * kN, 3);
  std::vector<float> expected(a.size(), 0.0f);
  for (std::size_t i = 0; i < kN * kN; ++i)
    for (std::size_t k = 0; k < kN; ++k) expected[i] += a[i / kN * kN + k] * b[k * kN + i % kN];
  const auto passed = [&](auto kernel) {
    return schedules_passed(expected, [&](std::uint64_t seed, float* out) {
      return launch_with_seed(seed, kernel, dim3(kN / kT, kN / kT), dim3(kT, kT), a.data(),
                              b.data(), out);
    });
  };
  CHECK(passed(multiply_tiles<true, true>) == kSeeds);
  CHECK(passed(multiply_tiles<false, true>) == 0);
  CHECK(passed(multiply_tiles<true, false>) == 0);
}

TEST_CASE("a missing __syncwarp fails in every schedule", "[emulator]") {
  const std::vector<float> in = numbers(32 * kTiles, 1);
  std::vector<float> expected(in.size());
  for (std::size_t i = 0; i < in.size(); ++i) expected[i] = in[i ^ 1];
  const auto passed = [&](auto kernel) {
    return schedules_passed(expected, [&](std::uint64_t seed, float* out) {
      return launch_with_seed(seed, kernel, dim3(1), dim3(32), in.data(), out);
    });
  };
  CHECK(passed(exchange<true, true>) == kSeeds);
  CHECK(passed(exchange<false, true>) == 0);
  CHECK(passed(exchange<true, false>) == 0);
}

// ---- a late warp --------------------------------------------------------------------------------

// Thread 0 of the other warp overwrites a number that this warp reads after `kVotes` votes. If all
// warps advanced at the same pace, the read would come long after the write or long before it.
constexpr int kWarps = 2, kVotes = 40;
template <bool kBarrier>
__global__ void overtake(const float* in, float* out) {
  __shared__ float tile[32 * kWarps];
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();  // the tile is complete
  const float mine = tile[threadIdx.x];
  for (int i = 0; i < kVotes / 2; ++i) __shfl_xor_sync(~0u, mine, 1);
  const float theirs = tile[(threadIdx.x + 32) % (32 * kWarps)];
  if (kBarrier) __syncthreads();  // the tile has been read
  for (int i = 0; i < kVotes; ++i) __shfl_xor_sync(~0u, mine, 1);
  tile[threadIdx.x] = -1;
  out[blockIdx.x * 32 * kWarps + threadIdx.x] = theirs;
}

// Warp 0 spins on a counter in shared memory that every other warp adds to.
__global__ void spin(unsigned* sum) {
  __shared__ unsigned there;
  if (threadIdx.x == 0) there = 0;
  __syncthreads();
  if (threadIdx.x >= 32) atomicAdd(&there, 1u);
  if (threadIdx.x < 32)
    while (atomicAdd(&there, 0u) != blockDim.x - 32) {
    }
  if (threadIdx.x == 0) *sum = there;
}

TEST_CASE("who spins on an atomic is not kept from a late warp", "[emulator]") {
  for (int seed = 1; seed <= kSeeds; ++seed) {
    unsigned sum = 0;
    REQUIRE(
        launch_with_seed(static_cast<std::uint64_t>(seed), spin, dim3(2), dim3(128), &sum).ok());
    CHECK(sum == 96);
  }
}

TEST_CASE("a missing barrier far before the write fails too: a warp is late", "[emulator]") {
  constexpr int kBlocks = 16, kThreads = 32 * kWarps;
  const std::vector<float> in = numbers(kThreads, 1);
  std::vector<float> expected(kBlocks * kThreads);
  for (int i = 0; i < kBlocks * kThreads; ++i)
    expected[static_cast<std::size_t>(i)] = in[static_cast<std::size_t>((i + 32) % kThreads)];
  const auto passed = [&](auto kernel) {
    return schedules_passed(expected, [&](std::uint64_t seed, float* out) {
      return launch_with_seed(seed, kernel, dim3(kBlocks), dim3(kThreads), in.data(), out);
    });
  };
  CHECK(passed(overtake<true>) == kSeeds);
  CHECK(passed(overtake<false>) == 0);
}

// ---- kernels that no order can make right -----------------------------------------------------

constexpr int kLineA = __LINE__ + 2;
__global__ void barrier_for_some(unsigned threads) {
  if (threadIdx.x < threads) __syncthreads();
  if (threadIdx.x >= threads) named_barrier_sync(1, 64);
}
__global__ void barrier_after_some_left(unsigned threads, int* out) {
  __shared__ int row[64];
  if (threadIdx.x >= threads) return;
  row[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = row[threads - 1 - threadIdx.x];
}
constexpr int kLineB = __LINE__ + 3;
__global__ void two_barriers() {
  if (threadIdx.x < 32)
    __syncthreads();  // kLineB
  else
    __syncthreads();  // kLineB + 2
}
constexpr int kLineC = __LINE__ + 3;
__global__ void shuffle_with_the_dead(int* out) {
  if (threadIdx.x == 3) return;
  out[threadIdx.x] = __shfl_sync(~0u, 1, 3);
}
// Lanes from `lanes` on of each warp have exited, before the others arrive or after.
__global__ void go_on_without_the_dead(unsigned lanes, int* out) {
  const unsigned lane = threadIdx.x % 32;
  if (lane >= lanes) return;
  __syncwarp();
  const int value = __shfl_sync(~0u, static_cast<int>(lane), 0) + __popc(__ballot_sync(~0u, 1));
  out[threadIdx.x] = value;
}
constexpr int kLineD = __LINE__ + 2;
__global__ void mask_without_the_caller(int* out) {
  out[threadIdx.x] = static_cast<int>(__ballot_sync(0x0000FFFFu, 1));
}
constexpr int kLineE = __LINE__ + 3;
__global__ void divergent_shuffles(int* out) {
  if (threadIdx.x % 2 == 0)
    out[threadIdx.x] = __shfl_xor_sync(~0u, 1, 2);  // kLineE
  else
    out[threadIdx.x] = __shfl_xor_sync(~0u, 2, 2);  // kLineE + 2
}

constexpr int kLineF = __LINE__ + 5;
__global__ void divergent_products(float* out) {
  const uint32_t a[4] = {}, b[2] = {};
  float d[4] = {};
  if (threadIdx.x < 16)
    mma_m16n8k16<__half>(d, a, b, d);  // kLineF
  else
    mma_m16n8k16<__half>(d, a, b, d);  // kLineF + 2
  out[threadIdx.x] = d[0];
}
constexpr int kLineG = __LINE__ + 6;
__global__ void divergent_loads(uint32_t* out) {
  __shared__ __align__(16) uint16_t tile[32 * 8];
  for (int i = 0; i < 8; ++i) tile[threadIdx.x * 8 + static_cast<unsigned>(i)] = 1;
  uint32_t r[4] = {};
  __syncwarp();
  if (threadIdx.x < 31) ldmatrix_x4(r, tile + 8 * threadIdx.x);  // kLineG
  out[threadIdx.x] = r[0];
}

constexpr int kLineH = __LINE__ + 2;
__global__ void trap_of_one(unsigned thread) {
  if (threadIdx.x == thread) __trap();  // kLineH
  __syncthreads();
}

// Launches under every seed; all messages are one line of a kernel error and contain all of
// `parts`.
template <class Launch>
std::set<std::string> messages_of(Launch launch, const std::vector<std::string>& parts) {
  std::set<std::string> messages;
  for (int seed = 1; seed <= kSeeds; ++seed) {
    const Status status = launch(static_cast<std::uint64_t>(seed));
    REQUIRE(status.code == Status::Code::kKernelError);
    INFO(status.message);
    CHECK_FALSE(contains(status.message, "\n"));
    for (const std::string& part : parts) CHECK(contains(status.message, part));
    messages.insert(status.message);
  }
  return messages;
}

TEST_CASE("a trap ends the kernel, whoever waits", "[emulator]") {
  messages_of(
      [](std::uint64_t seed) {
        return launch_with_seed(seed, trap_of_one, dim3(1), dim3(64), 40u);
      },
      {"thread (40,0,0)", "__trap", place(kLineH)});
  CHECK(launch_with_seed(1, trap_of_one, dim3(1), dim3(64), 64u).ok());
}

TEST_CASE("a barrier that some threads never reach is reported", "[emulator]") {
  const auto messages = messages_of(
      [](std::uint64_t seed) {
        return launch_with_seed(seed, barrier_for_some, dim3(2, 1, 3), dim3(64), 32u);
      },
      {"deadlock", "__syncthreads", place(kLineA), "0 of 64 threads have exited",
       "thread (32,0,0) waits in named_barrier_sync", "of block ("});
  CHECK(messages.count("deadlock: thread (0,0,0) of block (0,0,0) waits in __syncthreads at " +
                       place(kLineA) +
                       "; 0 of 64 threads have exited, thread (32,0,0) waits in "
                       "named_barrier_sync at " +
                       place(kLineA + 1) +
                       "; named barrier 1: 32 of 64 threads have arrived") == 1);
  CHECK(messages.size() > 1);  // blocks run in any order, so different ones fail first
  // All of them, or none: nothing to report.
  for (const unsigned threads : {0u, 64u})
    CHECK(launch_with_seed(1, barrier_for_some, dim3(1), dim3(64), threads).ok());
}

#ifndef ATTN_ASAN  // which lays out stacks in its own way
// An accumulator that is not cleared.
[[gnu::noinline]] __device__ void keep_in_memory(float* p) { asm volatile("" ::"r"(p) : "memory"); }
__global__ void add_to_nothing(float* out) {
  float sum[4];
  keep_in_memory(sum);
  for (float& x : sum) x += 1;
  out[threadIdx.x] = sum[threadIdx.x % 4];
}
TEST_CASE("a variable that no thread has set is NaN", "[emulator]") {
  for (const bool races : {false, true})
    for (int round = 0; round < 3; ++round) {
      std::vector<float> out(64, 0);
      emulator::find_races = races;
      REQUIRE(launch_with_seed(1, add_to_nothing, dim3(1), dim3(64), out.data()).ok());
      emulator::find_races = false;
      for (const float x : out) REQUIRE(std::isnan(x));
    }
}
#endif

TEST_CASE("threads that have left do not count at a barrier", "[emulator]") {
  for (int seed = 1; seed <= kSeeds; ++seed)
    for (const unsigned threads : {1u, 40u, 63u}) {
      int out[64];
      REQUIRE(launch_with_seed(static_cast<std::uint64_t>(seed), barrier_after_some_left, dim3(1),
                               dim3(64), threads, out)
                  .ok());
      for (unsigned i = 0; i < threads; ++i) REQUIRE(out[i] == static_cast<int>(threads - 1 - i));
    }
}

TEST_CASE("two barriers reached by different threads are reported", "[emulator]") {
  const auto messages = messages_of(
      [](std::uint64_t seed) { return launch_with_seed(seed, two_barriers, dim3(1), dim3(64)); },
      {"calls __syncthreads at ", "a divergent barrier", "of block (0,0,0)", place(kLineB),
       place(kLineB + 2)});
  CHECK(messages.size() > 1);
}

TEST_CASE("lanes that have exited do not count in shuffles, votes and at __syncwarp",
          "[emulator]") {
  for (int seed = 1; seed <= kSeeds; ++seed)
    for (const unsigned lanes : {32u, 31u, 8u, 1u}) {
      std::vector<int> out(64, -1);
      const Status status =
          launch_with_seed(static_cast<std::uint64_t>(seed), go_on_without_the_dead, dim3(1),
                           dim3(64), lanes, out.data());
      INFO(status.message);
      REQUIRE(status.ok());
      for (unsigned i = 0; i < 64; ++i)
        REQUIRE(out[i] == (i % 32 < lanes ? static_cast<int>(lanes) : -1));
    }
}

TEST_CASE("a shuffle that reads a lane which has exited is reported", "[emulator]") {
  int out[32];
  messages_of(
      [&](std::uint64_t seed) {
        return launch_with_seed(seed, shuffle_with_the_dead, dim3(1), dim3(32), out);
      },
      {"__shfl_sync", place(kLineC), "and reads the value of lane 3, which has exited"});
}

TEST_CASE("a mask that does not name the caller is reported", "[emulator]") {
  int out[32];
  const auto messages = messages_of(
      [&](std::uint64_t seed) {
        return launch_with_seed(seed, mask_without_the_caller, dim3(1), dim3(32), out);
      },
      {"__ballot_sync", place(kLineD), "of block (0,0,0)", "a mask that does not name its lane"});
  for (const std::string& message : messages) {  // "thread (17,0,0) ...": one of lanes 16 to 31
    const int lane = std::stoi(message.substr(message.find('(') + 1));
    CHECK((16 <= lane && lane < 32));
  }
}

TEST_CASE("a warp whose lanes wait for each other in two places is reported", "[emulator]") {
  int out[32];
  messages_of(
      [&](std::uint64_t seed) {
        return launch_with_seed(seed, divergent_shuffles, dim3(1), dim3(32), out);
      },
      {"__shfl_xor_sync", place(kLineE), place(kLineE + 2), "a divergent warp"});
}

TEST_CASE("a product or a load that not all lanes run is reported where it stands", "[emulator]") {
  float products[32];
  messages_of(
      [&](std::uint64_t seed) {
        return launch_with_seed(seed, divergent_products, dim3(1), dim3(32), products);
      },
      {"mma_m16n8k16", place(kLineF), place(kLineF + 2), "a divergent warp"});
  uint32_t loads[32] = {};
  messages_of(
      [&](std::uint64_t seed) {
        return launch_with_seed(seed, divergent_loads, dim3(1), dim3(32), loads);
      },
      {"deadlock", "ldmatrix_x4", place(kLineG), "1 of 32 threads have exited"});
}

// ---- afterwards --------------------------------------------------------------------------------

TEST_CASE("after a failed launch the next one works", "[emulator]") {
  const std::vector<float> in = numbers(kTile * kTiles, 1);
  std::vector<float> good(in.size()), out(in.size());
  REQUIRE(
      launch_with_seed(1, reverse_tiles<true, true>, dim3(1), dim3(kTile), in.data(), good.data())
          .ok());
  int lanes[64];
  for (int round = 0; round < 100; ++round) {
    const auto seed = static_cast<std::uint64_t>(round);
    Status failed;
    switch (round % 3) {
      case 0: failed = launch_with_seed(seed, two_barriers, dim3(2), dim3(64)); break;
      case 1: failed = launch_with_seed(seed, barrier_for_some, dim3(2), dim3(64), 32u); break;
      default: failed = launch_with_seed(seed, shuffle_with_the_dead, dim3(1), dim3(64), lanes);
    }
    CHECK_FALSE(failed.ok());
    out.assign(out.size(), NAN);
    REQUIRE(launch_with_seed(seed, reverse_tiles<true, true>, dim3(1), dim3(kTile), in.data(),
                             out.data())
                .ok());
    REQUIRE(out == good);
  }
}

// ---- schedules --------------------------------------------------------------------------------

// order[n] is the n-th thread of the grid to arrive; then a barrier, and again.
__global__ void arrive(unsigned* counter, unsigned* order, float* sum) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (int round = 0; round < 2; ++round) {
    order[atomicAdd(counter, 1u)] = thread;
    atomicAdd(sum, 1.0f / static_cast<float>(thread + 1));  // rounding depends on the order
    __syncthreads();
  }
}

struct Arrival {
  std::vector<unsigned> order;
  float sum;
};
Arrival arrival(std::uint64_t seed) {
  Arrival a{std::vector<unsigned>(2 * 3 * 64), 0};
  unsigned counter = 0;
  REQUIRE(launch_with_seed(seed, arrive, dim3(3), dim3(64), &counter, a.order.data(), &a.sum).ok());
  CHECK(counter == a.order.size());
  return a;
}

TEST_CASE("the same seed gives the same schedule and another seed another one", "[emulator]") {
  std::set<std::vector<unsigned>> orders;
  std::set<unsigned> first_blocks;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Arrival once = arrival(seed), again = arrival(seed);
    CHECK(once.order == again.order);
    CHECK(std::memcmp(&once.sum, &again.sum, sizeof(float)) == 0);
    orders.insert(once.order);
    first_blocks.insert(once.order[0] / 64);
    CHECK(std::set<unsigned>(once.order.begin(), once.order.end()).size() == 3 * 64);
  }
  CHECK(orders.size() == kSeeds);
  CHECK(first_blocks.size() == 3);
}

}  // namespace
