/// \file
/// Scheduling: a seed gives the same order with and without race detection, and blocks that spin on
/// an atomic that never changes are a deadlock.
#include <string>
#include <vector>

#include "attn/kernel.h"
#include "emulator/simt.h"
#include "tests/catch.h"

namespace {

using namespace attn;
using emulator::GlobalBuffer;

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

template <class... Parameters, class... Values>
std::string message(std::uint64_t seed, unsigned grid, unsigned block,
                    void (*kernel)(Parameters...), Values... values) {
  emulator::schedule_seed = seed;
  const Status status = launch_kernel(kernel, dim3(grid), dim3(block), 256, nullptr, values...);
  CHECK((status.ok() || status.code == Status::Code::kKernelError));
  return status.message;
}

[[gnu::noinline]] __device__ void fill(float* numbers, unsigned first) {
  for (unsigned i = 0; i < 8; ++i) numbers[(first + i) % 8] = static_cast<float>(i);
}
// Records the execution order with an atomic counter, between stores to global memory, to shared
// memory, and to a thread-local array in memory.
__global__ void take_numbers(unsigned* next, unsigned* order, float* out) {
  auto* const row = &dynamic_shared<float>();
  float own[8];
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  fill(own, thread);
  for (unsigned i = 0; i < 4; ++i) {
    order[atomicAdd(next, 1u)] = thread;
    row[threadIdx.x] = own[(thread * i) % 8];
    own[i] += row[threadIdx.x];
    out[thread] = own[(thread + i) % 8];
    __syncthreads();
  }
}

// Thread 32 waits for a plain word that thread 0 sets, or nobody.
constexpr int kReads = __LINE__ + 5;
__global__ void spin_on_a_word(bool set, unsigned* out) {
  auto* const word = &dynamic_shared<volatile unsigned>();
  if (threadIdx.x == 0 && set) *word = 0;
  if (threadIdx.x == 32)
    while (*word != 0) {
    }
  out[threadIdx.x] = 1;
}

// A warp, or a block, waits for all blocks: one lane looks, the others learn it from a shuffle or
// from shared memory.
__global__ void wait_for_all(bool by_shuffle, unsigned all, unsigned* arrived) {
  auto& seen = dynamic_shared<unsigned>();
  if (threadIdx.x == 0) atomicAdd(arrived, 1u);
  for (unsigned n = 0; n < all;) {
    if (by_shuffle) {
      n = threadIdx.x % 32 == 0 ? atomicAdd(arrived, 0u) : 0;
      n = __shfl_sync(~0u, n, 0);
    } else {
      if (threadIdx.x == 0) seen = atomicAdd(arrived, 0u);
      __syncthreads();
      n = seen;
      __syncthreads();
    }
  }
}

// Every block waits for the last one, and none continues.
constexpr int kSpins = __LINE__ + 4;
__global__ void spin_for_all(unsigned* arrived) {
  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1u);
    while (atomicAdd(arrived, 0u) < gridDim.x) {
    }
  }
  __syncthreads();
}

}  // namespace

TEST_CASE("a seed gives one order of threads, whether races are looked for or not",
          "[emulator][schedules]") {
  unsigned next = 0;
  std::vector<unsigned> order(3 * 32 * 4);
  std::vector<float> out(3 * 32);
  const GlobalBuffer n("next", &next, 4), o("order", order.data(), 4 * order.size()),
      f("out", out.data(), 4 * out.size());
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    std::vector<std::vector<unsigned>> orders;
    for (int races = 0; races < 3; ++races) {
      emulator::find_races = races > 0, emulator::find_global_races = races > 1;
      next = 0;
      CHECK(message(seed, 3, 32, take_numbers, &next, order.data(), out.data()) == "");
      orders.push_back(order);
    }
    CHECK(orders[0] == orders[1]);
    CHECK(orders[0] == orders[2]);
  }
  emulator::find_races = emulator::find_global_races = false;
}

TEST_CASE("a thread that spins on a plain word lets others run", "[emulator][schedules]") {
  for (std::uint64_t seed = 1; seed <= 2; ++seed)
    for (const bool races : {false, true}) {
      unsigned out[64];
      emulator::find_races = races;
      const std::string ended = message(seed, 1, 64, spin_on_a_word, true, out);
      // Millions of reads: once with races, once without.
      const bool spins = races == (seed == 2);
      const std::string never = spins ? message(seed, 1, 64, spin_on_a_word, false, out) : "";
      emulator::find_races = false;
      INFO(ended << "; " << never);
      // Its order is nobody's: a race, found where races are looked for.
      CHECK(has(ended, "race: ") == races);
      if (!races) CHECK(ended == "");
      if (!spins) continue;
      CHECK(has(never, "deadlock: thread (32,0,0) of block (0,0,0) reads at "));
      CHECK(has(never, "at tests/test_turns.cpp:" + std::to_string(kReads)));
    }
}

TEST_CASE("a warp or a block that spins lets more blocks start, and ends", "[emulator][blocks]") {
  for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      const bool by_shuffle = seed == 1;
      unsigned arrived = 0;
      CHECK(message(seed, 10, 64, wait_for_all, by_shuffle, 10u, &arrived) == "");
      arrived = 0;
      const std::string never = message(seed, 2, 64, wait_for_all, by_shuffle, 3u, &arrived);
      INFO(never);
      CHECK(has(never, "deadlock: "));
      CHECK(has(never, " spins on atomicAdd at tests/test_turns.cpp:"));
    }
}

TEST_CASE("blocks that spin on an atomic for one that is not resident are a deadlock",
          "[emulator][blocks]") {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    unsigned arrived = 0;
    CHECK(message(seed, 4, 32, spin_for_all, &arrived) == "");
    arrived = 0;
    CHECK(message(seed, 6, 32, spin_for_all, &arrived) == "");  // a GPU holds them all
    arrived = 0;
    emulator::most_resident_blocks = 4;
    const std::string said = message(seed, 6, 32, spin_for_all, &arrived);
    INFO(said);
    CHECK(has(said, "deadlock: thread (0,0,0) of block ("));
    CHECK(has(said, " spins on atomicAdd at tests/test_turns.cpp:" + std::to_string(kSpins)));
    CHECK(has(said, "; 2 blocks have not started"));
    emulator::most_resident_blocks = 0;
  }
}
