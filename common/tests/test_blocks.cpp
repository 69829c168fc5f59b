/// \file
/// Several resident blocks: they exchange flags, wait for each other, lose updates, and have their
/// own shared memory.
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "attn/kernel.h"
#include "emulator/simt.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "tests/catch.h"

namespace {

using namespace attn;
using emulator::GlobalBuffer;

constexpr std::uint64_t kSeeds = 40;

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }
std::string place(int line) { return "tests/test_blocks.cpp:" + std::to_string(line); }

// Sets the number of resident blocks and race detection in global memory, for a scope.
struct Setting {
  explicit Setting(std::size_t blocks, bool global = false) {
    emulator::resident_blocks = emulator::most_resident_blocks = blocks;
    emulator::find_global_races = global;
  }
  ~Setting() {
    emulator::resident_blocks = before_;
    emulator::most_resident_blocks = 0;
    emulator::find_global_races = false;
  }
  std::size_t before_ = emulator::resident_blocks;
};

template <class... Parameters, class... Values>
std::string message(std::uint64_t seed, unsigned grid, unsigned block,
                    void (*kernel)(Parameters...), Values... values) {
  emulator::schedule_seed = seed;
  emulator::find_races = true;
  const Status status = launch_kernel(kernel, dim3(grid), dim3(block), 0, nullptr, values...);
  CHECK((status.ok() || status.code == Status::Code::kKernelError));
  CHECK_FALSE(has(status.message, "\n"));
  return status.message;
}

__global__ void add_plainly(int* sum) { *sum += 1; }
__global__ void add_atomically(int* sum) { atomicAdd(sum, 1); }

// Block b waits for block b - 1, and adds its index to that block's number.
constexpr int kWaits = __LINE__ + 3;
__global__ void pass_on(unsigned* flags, unsigned* found) {
  if (threadIdx.x == 0) {
    if (blockIdx.x > 0) flag_wait(&flags[blockIdx.x - 1], 1);
    found[blockIdx.x] = blockIdx.x + (blockIdx.x > 0 ? found[blockIdx.x - 1] : 0);
    flag_store(&flags[blockIdx.x], 1);
  }
}

// Two blocks exchange numbers.
__global__ void exchange(unsigned* flags, unsigned* numbers, unsigned* out) {
  const unsigned other = 1 - blockIdx.x;
  if (threadIdx.x == 0) {
    numbers[blockIdx.x] = 100 + blockIdx.x;
    flag_store(&flags[blockIdx.x], 1);
    flag_wait(&flags[other], 1);
  }
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = numbers[other];
}

// The last block to arrive sums the results of all. The fault omits a fence before the counter, or
// the block's barrier.
enum Fault { kNone, kNoFence, kNoBarrier, kNoFenceAfter };
constexpr int kLeaves = __LINE__ + 5, kSums = __LINE__ + 16;
template <Fault kFault>
__global__ void last_sums(float* partial, unsigned* arrived, float* sum) {
  __shared__ bool last;
  const unsigned place = blockIdx.x * blockDim.x + threadIdx.x;
  partial[place] = 1 + static_cast<float>(place % 7);
  if (kFault != kNoBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    if (kFault != kNoFence) __threadfence();
    last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    if (kFault != kNoFenceAfter) __threadfence();
  }
  __syncthreads();
  if (!last) return;
  if (threadIdx.x == 0) {
    float total = 0;
    for (unsigned i = 0; i < gridDim.x * blockDim.x; ++i) total += partial[i];
    *sum = total;
  }
}

// Each block reverses its own numbers, in its own variables, with four barriers.
__global__ void reverse_often(const int* in, int* out) {
  __shared__ int tile[64];
  int mine = in[blockIdx.x * 64 + threadIdx.x];
  for (int i = 0; i < 3; ++i) {
    tile[threadIdx.x] = mine;
    __syncthreads();
    mine = tile[63 - threadIdx.x];
    __syncthreads();
  }
  out[blockIdx.x * 64 + threadIdx.x] = mine;
}

// test_races.cpp has a kernel of the same name.
__global__ void own_variable(void** at) {
  __shared__ int variable[40];
  variable[threadIdx.x] = 1;
  *at = variable;
}

}  // namespace

TEST_CASE("plain additions of two blocks, or of two threads, are lost, atomic ones are not",
          "[emulator][blocks]") {
  int sum = 0;
  const GlobalBuffer buffer("sum", &sum, sizeof sum);
  const auto count = [&](std::uint64_t seed, unsigned grid, unsigned block, auto kernel) {
    sum = 0;
    CHECK(message(seed, grid, block, kernel, &sum) == "");
    return sum;
  };
  int lost_by_blocks = 0, lost_by_threads = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    lost_by_blocks += count(seed, 2, 1, add_plainly) < 2;
    lost_by_threads += count(seed, 1, 2, add_plainly) < 2;
    CHECK(count(seed, 64, 128, add_plainly) < 64 * 128);
    CHECK(count(seed, 64, 128, add_atomically) == 64 * 128);
    CHECK(count(seed, 1, 1, add_plainly) == 1);
  }
  CHECK((0 < lost_by_blocks && lost_by_blocks < static_cast<int>(kSeeds)));
  CHECK((0 < lost_by_threads && lost_by_threads < static_cast<int>(kSeeds)));
}

TEST_CASE("two resident blocks exchange a flag and what it tells of", "[emulator][blocks]") {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const Setting two(2, true);
    std::vector<unsigned> flags(2, 0), numbers(2, 0), out(64, 0);
    const GlobalBuffer f("flags", flags.data(), 8), n("numbers", numbers.data(), 8),
        o("out", out.data(), 256);
    REQUIRE(message(seed, 2, 32, exchange, flags.data(), numbers.data(), out.data()) == "");
    for (unsigned i = 0; i < 64; ++i) CHECK(out[i] == 100 + (1 - i / 32));
  }
}

TEST_CASE("a block that waits for one that is not resident is a deadlock", "[emulator][blocks]") {
  int deadlocks = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    std::vector<unsigned> flags(4, 0), found(4, 0);
    const Setting one(1);
    const std::string said = message(seed, 4, 32, pass_on, flags.data(), found.data());
    if (said.empty()) continue;  // the blocks happened to run in order
    ++deadlocks;
    CHECK(has(said, "deadlock: thread (0,0,0) of block ("));
    CHECK(has(said, "waits in flag_wait at " + place(kWaits)));
    CHECK(has(said, "all 1 resident blocks wait, "));
    CHECK(has(said, " have not started"));
  }
  CHECK(deadlocks > static_cast<int>(kSeeds) / 2);
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    std::vector<unsigned> flags(4, 0), found(4, 0);
    const Setting four(4);
    REQUIRE(message(seed, 4, 32, pass_on, flags.data(), found.data()) == "");
    CHECK(found == std::vector<unsigned>{0, 1, 3, 6});
  }
}

TEST_CASE("as many blocks are resident as a GPU holds, where the others wait for them",
          "[emulator][blocks]") {
  for (std::uint64_t seed = 1; seed <= 5; ++seed)
    for (const bool global : {false, true}) {
      std::vector<unsigned> flags(64, 0), found(64, 0);
      const Setting four(4, global);
      emulator::most_resident_blocks = 0;
      const GlobalBuffer f("flags", flags.data(), 256), o("found", found.data(), 256);
      REQUIRE(message(seed, 64, 32, pass_on, flags.data(), found.data()) == "");
      for (unsigned i = 0; i < 64; ++i) REQUIRE(found[i] == i * (i + 1) / 2);
    }
}

__global__ void wait_for_another(unsigned* flags) {
  flag_wait(&flags[1 - blockIdx.x], 1);
  flag_store(&flags[blockIdx.x], 1);
}

TEST_CASE("two resident blocks that wait for each other, or for those behind them, are a deadlock",
          "[emulator][blocks]") {
  const Setting two(2);
  int behind = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    std::vector<unsigned> flags(4, 0), found(4, 0);
    const std::string both = message(seed, 2, 1, wait_for_another, flags.data());
    INFO(both);
    CHECK(has(both, "waits in flag_wait at "));
    CHECK(has(both, "; all 2 resident blocks wait, 0 have not started"));
    const std::string said = message(seed, 4, 32, pass_on, flags.data(), found.data());
    if (said.empty()) continue;
    INFO(said);
    CHECK(has(said, "; all 2 resident blocks wait, "));
    behind += has(said, "wait, 2 have not started") || has(said, "wait, 1 have not started");
  }
  CHECK(behind > static_cast<int>(kSeeds) / 4);
}

__global__ void write_one_place(float* at) { *at = static_cast<float>(blockIdx.x); }
// Blocks in the order in which they start: each adds to the result of the previous one.
__global__ void pass_in_order(unsigned* started, unsigned* flags, unsigned* found) {
  __shared__ unsigned mine;
  if (threadIdx.x == 0) {
    mine = atomicAdd(started, 1u);
    if (mine > 0) flag_wait(&flags[mine - 1], 1);
    found[mine] = mine + (mine > 0 ? found[mine - 1] : 0);
    flag_store(&flags[mine], 1);
  }
}

TEST_CASE("a block knows nothing of the one that ended in its place", "[emulator][blocks]") {
  float value = 0;
  unsigned started = 0;
  std::vector<unsigned> flags(6), found(6);
  const GlobalBuffer v("value", &value, 4), c("started", &started, 4), f("flags", flags.data(), 24),
      o("found", found.data(), 24);
  for (const std::size_t resident : {1, 2, 3})
    for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
      const Setting some(resident, true);
      const std::string said = message(seed, 6, 1, write_one_place, &value);
      INFO(resident << " resident: " << said);
      CHECK(has(said, "race: byte 0 of value was written by thread (0,0,0) of block ("));
      CHECK(has(said, " with no release and acquire between"));
      started = 0;
      flags.assign(6, 0);
      CHECK(message(seed, 6, 32, pass_in_order, &started, flags.data(), found.data()) == "");
      CHECK(found == std::vector<unsigned>{0, 1, 3, 6, 10, 15});
    }
}

__device__ int last_of(const int* in) {
  __shared__ int tile[32];
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  return tile[31];
}
constexpr int kWritesInFunction = __LINE__ - 4;
__global__ void calls_with_shared(const int* in, int* out) { out[threadIdx.x] = last_of(in); }
inline int copied(const int* in) {
  alignas(16) __shared__ int tile[32];
  cp_async_16(tile, in);
  cp_async_commit();
  cp_async_wait<0>();
  return tile[0];
}
constexpr int kCopiesInFunction = __LINE__ - 5;
__global__ void calls_with_copies(const int* in, int* out) { out[threadIdx.x] = copied(in); }

TEST_CASE("__shared__ variables of a function that a kernel calls are refused",
          "[emulator][blocks]") {
  int in[32] = {}, out[32];
  const std::string said = message(1, 1, 32, calls_with_shared, in, out);
  INFO(said);
  CHECK(has(said, " writes to tile at " + place(kWritesInFunction)));
  CHECK(has(said, ", a __shared__ variable of a function that the kernel calls"));
  alignas(16) int source[32] = {};
  const std::string copy = message(1, 1, 1, calls_with_copies, source, out);
  INFO(copy);
  CHECK(has(copy, "cp_async_16 at " + place(kCopiesInFunction)));
  CHECK(has(copy, "tile, a __shared__ variable of a function that the kernel calls"));
}

TEST_CASE("a race between blocks is found: a fence or a barrier before the counter is missing",
          "[emulator][blocks]") {
  std::vector<float> partial(3 * 64);
  float sum = 0;
  unsigned arrived = 0;
  const GlobalBuffer p("partial", partial.data(), partial.size() * 4), a("arrived", &arrived, 4),
      s("sum", &sum, 4);
  const Setting all(3, true);
  const auto run = [&](std::uint64_t seed, auto kernel) {
    arrived = 0;
    return message(seed, 3, 64, kernel, partial.data(), &arrived, &sum);
  };
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    CHECK(run(seed, last_sums<kNone>) == "");
    CHECK(sum == 762);
    for (const std::string& said :
         {run(seed, last_sums<kNoFence>), run(seed, last_sums<kNoBarrier>),
          run(seed, last_sums<kNoFenceAfter>)}) {
      INFO(said);
      CHECK(has(said, "race: byte "));
      CHECK(has(said, " of partial was written by thread ("));
      CHECK(has(said, place(kLeaves)));
      CHECK(has(said, place(kSums)));
    }
  }
}

__global__ void only_read(const unsigned* flag, unsigned* out) {
  out[blockIdx.x] = blockIdx.x == 0 ? *flag : flag_load(flag);
}
__global__ void both_load(float* value, const unsigned* flag, float* out) {
  if (blockIdx.x == 0) {
    *value = 1;
    __threadfence();
    flag_load(flag);
  } else {
    flag_load(flag);
    __threadfence();
    *out = *value;
  }
}
constexpr int kPlainStore = __LINE__ + 2;
__global__ void plain_store(unsigned* flag) {
  if (blockIdx.x == 0) *flag = 1;
  if (blockIdx.x == 1) flag_wait(flag, 1);
}

__global__ void second_store(float* value, unsigned* flag, float* out) {
  if (blockIdx.x == 0) *value = 1, flag_store(flag, 1);
  if (blockIdx.x == 1) flag_wait(flag, 1), flag_store(flag, 2);
  if (blockIdx.x == 2) flag_wait(flag, 3), *out = *value;
  if (blockIdx.x == 3) flag_store(flag + 1, 1);
  if (blockIdx.x == 4) flag_wait(flag + 1, 1), flag_wait(flag, 2), flag_store(flag, 3);
}
__global__ void forgetful_store(float* value, unsigned* flag, float* out) {
  if (blockIdx.x == 0) *value = 1, flag_store(flag, 1);
  if (blockIdx.x == 1) {
    while (atomicAdd(flag, 0u) != 1) {  // reads the flag without acquiring what precedes it
    }
    flag_store(flag, 2);
  }
  if (blockIdx.x == 2) flag_wait(flag, 2), *out = *value;
}

TEST_CASE("a store to a flag takes the place of what was released there", "[emulator][blocks]") {
  unsigned flag[2] = {0, 0};
  float value = 0, out = 0;
  const GlobalBuffer f("flag", flag, 8), v("value", &value, 4), o("out", &out, 4);
  const Setting all(5, true);
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    flag[0] = flag[1] = 0;
    CHECK(message(seed, 5, 1, second_store, &value, flag, &out) == "");
    flag[0] = flag[1] = 0;
    const std::string said = message(seed, 3, 1, forgetful_store, &value, flag, &out);
    INFO(said);
    CHECK(has(said, "race: byte 0 of value was "));
  }
}

TEST_CASE("a load of a flag is a read: no race with another one, and it tells nobody anything",
          "[emulator][blocks]") {
  unsigned flag = 0, loaded[2] = {7, 7};
  float value = 0, out = 0;
  const GlobalBuffer f("flag", &flag, 4), l("loaded", loaded, 8), v("value", &value, 4),
      o("out", &out, 4);
  const Setting both(2, true);
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    flag = 0;
    CHECK(message(seed, 2, 1, only_read, &flag, loaded) == "");
    CHECK((loaded[0] == 0 && loaded[1] == 0));
    const std::string untold = message(seed, 2, 1, both_load, &value, &flag, &out);
    INFO(untold);
    CHECK(has(untold, "race: byte 0 of value was "));
    CHECK(has(untold, " with no release and acquire between"));
    const std::string plain = message(seed, 2, 1, plain_store, &flag);
    INFO(plain);
    CHECK(has(plain, " of flag was written by thread (0,0,0) of block (0,0,0) at " +
                         place(kPlainStore) + " and then read by flag_wait of thread (0,0,0) of "));
  }
}

TEST_CASE("interleaved blocks keep their own __shared__ variables", "[emulator][blocks]") {
  std::vector<int> in(7 * 64), out(in.size());
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<int>(i);
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    std::fill(out.begin(), out.end(), -1);
    REQUIRE(message(seed, 7, 64, reverse_often, in.data(), out.data()) == "");
    for (std::size_t i = 0; i < in.size(); ++i)
      REQUIRE(out[i] == static_cast<int>(i / 64 * 64 + 63 - i % 64));
  }
}

TEST_CASE("kernels of one name in two files have their own variables", "[emulator][blocks]") {
  void* at = nullptr;
  CHECK(message(1, 1, 40, own_variable, &at) == "");
  const auto found = emulator::static_shared(reinterpret_cast<const void*>(own_variable));
  REQUIRE(found.size() == 1);
  CHECK((found[0].data == at && found[0].bytes == 40 * sizeof(int)));
}
