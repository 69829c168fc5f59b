/// \file
/// Kernels that the emulator once judged wrongly: a bug that it missed, or a right kernel that it
/// refused.
#include <string>
#include <vector>

#include "attn/kernel.h"
#include "emulator/simt.h"
#include "ptx/cluster.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "ptx/launch.h"
#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "ptx/stmatrix.h"
#include "ptx/system_flag.h"
#include "ptx/tma.h"
#include "run/schedule.h"
#include "tests/catch.h"

namespace {

using namespace attn;
using emulator::GlobalBuffer;

struct Storage {
  alignas(1024) __half a[64 * 64];
  alignas(128) float row[128];
  uint64_t full, empty, done;
  ATTN_MEMBERS(Storage, a, row, full, empty, done)
};

// The messages of so many schedules, without those that say nothing.
template <class Launch>
std::vector<std::string> messages_of(bool races, int schedules, Launch launch) {
  std::vector<std::string> said;
  for (int n = 1; n <= schedules; ++n) {
    choose_schedule(static_cast<std::uint64_t>(n));
    emulator::find_races = emulator::find_global_races = races;
    const Status status = launch();
    emulator::find_races = emulator::find_global_races = false;
    if (!status.ok()) said.push_back(status.message);
  }
  emulator::early_copies = emulator::mixed_copies = false;
  emulator::late_warps = emulator::LateWarps::half;
  return said;
}
template <class Kernel, class... Values>
std::vector<std::string> messages(bool races, int schedules, unsigned grid, unsigned block,
                                  Kernel kernel, Values... values) {
  return messages_of(races, schedules, [&] {
    return launch_kernel(kernel, dim3(grid), dim3(block), sizeof(Storage), nullptr, values...);
  });
}
void all_say(const std::vector<std::string>& said, std::size_t count, const std::string& expected) {
  REQUIRE(said.size() == count);
  for (const std::string& text : said) {
    INFO(text);
    CHECK(text.find(expected) != text.npos);
  }
}

__global__ void store_to_one_word(bool bug, float* out) {
  out[8 * blockIdx.x + threadIdx.x / 4] = static_cast<float>(bug ? threadIdx.x : threadIdx.x / 4);
}
TEST_CASE("lanes store one value to a word of global memory", "[emulator][races][bugs]") {
  std::vector<float> out(64);
  const GlobalBuffer buffer("out", out.data(), 256);
  CHECK(messages(true, 100, 8, 32, store_to_one_word, false, out.data()).empty());
  all_say(messages(true, 3, 8, 32, store_to_one_word, true, out.data()), 3,
          "two lanes store different values");
}

// Blocks one after the other in one slot are no lanes of a warp.
__global__ void blocks_to_one_word(float* out) { out[0] = 1; }
TEST_CASE("blocks that store to one word are a race", "[emulator][races][bugs]") {
  std::vector<float> out(8);
  const GlobalBuffer buffer("out", out.data(), 32);
  const auto resident = emulator::resident_blocks;
  emulator::resident_blocks = 1;
  const std::vector<std::string> said = messages(true, 3, 12, 1, blocks_to_one_word, out.data());
  emulator::resident_blocks = resident;
  all_say(said, 3, "was written by thread");
  for (const std::string& text : said) CHECK(text.find("two lanes") == text.npos);
}

__global__ void partial_warp(float* out) {
  named_barrier_sync(1, 64);
  out[threadIdx.x] = 1;
}
TEST_CASE("a named barrier counts 32 for a last warp of fewer threads", "[emulator][bugs]") {
  float out[48];
  for (const bool races : {false, true})
    CHECK(messages(races, 3, 1, 48, partial_warp, static_cast<float*>(out)).empty());
}

// All blocks of a grid meet at a counter.
__global__ void meet(unsigned* count, unsigned* out) {
  if (threadIdx.x == 0) {
    flag_add(count, 1u);
    while (flag_load(count) % gridDim.x != 0) {
    }
    out[blockIdx.x] = 1;
  }
}
TEST_CASE("132 blocks may spin until all have come", "[emulator][bugs]") {
  unsigned count = 0;
  std::vector<unsigned> out(132);
  const GlobalBuffer buffer("count", &count, 4), results("out", out.data(), 4 * out.size());
  CHECK(messages(false, 3, 132, 32, meet, &count, out.data()).empty());
}

__global__ void copy_past(bool bug, const float* in, float* out) {
  auto& smem = dynamic_shared<Storage>();
  cp_async_16(smem.row + 4 * threadIdx.x, in + 4 * threadIdx.x + (bug ? 4 : 0));
  cp_async_commit();
  cp_async_wait<0>();
  out[threadIdx.x] = smem.row[4 * threadIdx.x];
}
TEST_CASE("an asynchronous copy from past the end of a buffer is named",
          "[emulator][races][bugs]") {
  alignas(128) static float in[160];
  float out[32];
  const GlobalBuffer buffer("in", in, 512, 128);
  const float* const from = in;
  CHECK(messages(true, 3, 1, 32, copy_past, false, from, static_cast<float*>(out)).empty());
  all_say(messages(true, 3, 1, 32, copy_past, true, from, static_cast<float*>(out)), 3,
          "reads 0 bytes past the end of in (512 bytes) by cp_async_16, at ");
}

__global__ void read_across_the_end(bool bug, const unsigned char* in, uint4* out) {
  *out = *reinterpret_cast<const uint4*>(in + (bug ? 256 : 240));
}
TEST_CASE("a wide read that begins inside a buffer and ends outside is named",
          "[emulator][races][bugs]") {
  alignas(128) static unsigned char in[512];
  uint4 out;
  const GlobalBuffer buffer("in", in, 264, 128);
  const unsigned char* const from = in;
  CHECK(messages(true, 3, 1, 1, read_across_the_end, false, from, &out).empty());
  all_say(messages(true, 3, 1, 1, read_across_the_end, true, from, &out), 3,
          "reads to 8 bytes past the end of in (264 bytes), at ");
}

__global__ void expect_bytes(bool bug) {
  auto& smem = dynamic_shared<Storage>();
  if (threadIdx.x == 0) mbarrier_init(&smem.full, 1), mbarrier_init_fence();
  __syncthreads();
  if (threadIdx.x == 0 && bug) mbarrier_arrive_expect_tx(&smem.full, 128);
}
TEST_CASE("a block does not end before all expected bytes have arrived", "[emulator][bugs]") {
  CHECK(messages(false, 3, 1, 32, expect_bytes, false).empty());
  all_say(messages(false, 3, 1, 32, expect_bytes, true), 3,
          "ends before all expected bytes have arrived");
}

__global__ void store_matrix(bool bug, const TensorMap map) {
  auto& smem = dynamic_shared<Storage>();
  const uint32_t r[4] = {};
  for (unsigned i = 0; i < 16; ++i) stmatrix_x4(smem.a + 256 * i + 8 * threadIdx.x, r);
  if (!bug) fence_proxy_async();
  __syncthreads();
  if (threadIdx.x != 0) return;
  tma_store(map, smem.a, {0, 0, 0});
  tma_store_commit();
  tma_store_wait<0>();
}
TEST_CASE("stmatrix, then a TMA store without a fence", "[emulator][bugs]") {
  alignas(128) static __half data[64 * 64];
  TensorMap map;
  REQUIRE(
      make_tensor_map<3>(map, data, {64, 64, 1}, {128, 8192}, {64, 64, 1}, Swizzle::k128).ok());
  CHECK(messages(false, 3, 1, 32, store_matrix, false, map).empty());
  all_say(messages(false, 3, 1, 32, store_matrix, true, map), 3,
          "without fence_proxy_async since the last group of stores");
}

// Block 0 tells block 1 at system scope that its data are there. Block 1 resets the flag.
enum class Message { right, before_the_data, ordinary_store };
__global__ void send_message(Message message, float* data, unsigned* flag, float* out) {
  if (blockIdx.x == 0) {
    if (message == Message::before_the_data && threadIdx.x == 0) system_flag_store(flag, 1);
    data[threadIdx.x] = 1;
    __syncthreads();
    if (message == Message::right && threadIdx.x == 0) system_flag_store(flag, 1);
    if (message == Message::ordinary_store && threadIdx.x == 0) *flag = 1;
  } else {
    if (threadIdx.x == 0) system_flag_wait(flag, 1);
    __syncthreads();
    out[threadIdx.x] = data[threadIdx.x];
    if (threadIdx.x == 0) *flag = 0;
  }
}
TEST_CASE("a message at system scope is sent after its data", "[emulator][races][bugs]") {
  float data[32] = {}, out[32];
  unsigned flag = 0;
  const GlobalBuffer buffer("data", data, sizeof data), flags("flag", &flag, 4);
  const auto said = [&](Message message) {
    return messages(true, 3, 2, 32, send_message, message, static_cast<float*>(data), &flag,
                    static_cast<float*>(out));
  };
  CHECK(said(Message::right).empty());
  all_say(said(Message::before_the_data), 3, "of data");
  all_say(said(Message::ordinary_store), 3, "with no release and acquire between");
}

// Each block of a cluster reads the other's row, then releases it.
__global__ void read_other_block(bool bug, float* out) {
  auto& smem = dynamic_shared<Storage>();
  const int other = 1 - cluster_rank();
  const ClusterAddress released = cluster_address(&smem.full, other);
  if (threadIdx.x == 0) mbarrier_init(&smem.full, 32), mbarrier_init_fence();
  smem.row[threadIdx.x] = static_cast<float>(threadIdx.x);
  cluster_sync();
  if (bug) mbarrier_release_cluster(released);
  out[32 * blockIdx.x + threadIdx.x] =
      cluster_load<float>(cluster_address(&smem.row[threadIdx.x], other));
  if (!bug) mbarrier_release_cluster(released);
  mbarrier_wait(&smem.full, 0);
  smem.row[threadIdx.x] = -1;
  cluster_sync();
}
TEST_CASE("another block's shared memory is released after it has been read",
          "[emulator][races][bugs]") {
  float out[64];
  const auto said = [&](bool bug) {
    return messages_of(true, 3, [&] {
      return launch_kernel(LaunchAttributes{.cluster = 2}, read_other_block, dim3(2), dim3(32),
                           sizeof(Storage), nullptr, bug, static_cast<float*>(out));
    });
  };
  CHECK(said(false).empty());
  for (unsigned i = 0; i < 64; ++i) CHECK(out[i] == static_cast<float>(i % 32));
  all_say(said(true), 3, "(row[");
}

// Three blocks of each of two tiles go through one buffer: the parity is that of all blocks before.
// With a parity that starts again the consumer reads block 3 too early and is then one phase ahead.
__global__ void parity_of_tiles(bool bug, float* out) {
  auto& smem = dynamic_shared<Storage>();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0)
    mbarrier_init(&smem.full, 32), mbarrier_init(&smem.empty, 32), mbarrier_init_fence();
  __syncthreads();
  float sum = 0;
  for (int n = 0; n < 6; ++n) {
    if (threadIdx.x < 32) {
      if (n > 0) mbarrier_wait(&smem.empty, (n - 1) % 2);
      smem.row[lane] = static_cast<float>(n);
      mbarrier_arrive(&smem.full);
    } else {
      mbarrier_wait(&smem.full, (bug ? n % 3 : n) % 2);
      sum += smem.row[lane];
      mbarrier_arrive(&smem.empty);
    }
  }
  if (threadIdx.x >= 32) out[lane] = sum;
}
TEST_CASE("a parity that starts again with each tile", "[emulator][races][bugs]") {
  float out[32];
  const auto said = [&](bool bug) {
    return messages(true, 3, 1, 64, parity_of_tiles, bug, static_cast<float*>(out));
  };
  CHECK(said(false).empty());
  for (const float sum : out) CHECK(sum == 15);
  all_say(said(true), 3,
          "mbarrier empty is in phase 4: 0 of 32 threads have arrived, thread (32,0,0) waits in "
          "mbarrier_wait at tests/test_bug_twins.cpp:");
}

// Two warps wait on one line, the others on lines of their own.
__global__ void four_waits() {
  auto& smem = dynamic_shared<Storage>();
  uint64_t* const barriers[3] = {&smem.full, &smem.empty, &smem.done};
  if (threadIdx.x == 0) {
    for (uint64_t* barrier : barriers) mbarrier_init(barrier, 32);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 64)
    mbarrier_wait(barriers[threadIdx.x / 32], 0);
  else if (threadIdx.x < 96)
    mbarrier_wait(&smem.done, 0);
  else
    named_barrier_sync(3, 128);
}
TEST_CASE("a deadlock names every barrier that a thread waits for", "[emulator][bugs]") {
  for (const char* name : {"mbarrier full is", "mbarrier empty is", "mbarrier done is",
                           "named barrier 3: 32 of 128 threads have arrived"})
    all_say(messages(false, 3, 1, 128, four_waits), 3, name);
}

__global__ void wait_in_cluster(bool bug) {
  auto& smem = dynamic_shared<Storage>();
  if (threadIdx.x == 0) mbarrier_init(&smem.full, 32), mbarrier_init_fence();
  __syncthreads();
  if (bug && blockIdx.x == 1) mbarrier_wait(&smem.full, 0);
  cluster_sync();
}
TEST_CASE("a deadlock of a cluster names what each of its blocks waits for", "[emulator][bugs]") {
  const auto said = [](bool bug) {
    return messages_of(false, 3, [&] {
      return launch_kernel(LaunchAttributes{.cluster = 2}, wait_in_cluster, dim3(2), dim3(32),
                           sizeof(Storage), nullptr, bug);
    });
  };
  CHECK(said(false).empty());
  all_say(said(true), 3, "of block (0,0,0) waits in cluster_wait at ");
  all_say(said(true), 3, "of block (1,0,0) waits in mbarrier_wait at ");
}

__global__ void one_bar(int lines, float* out) {
  if (lines == 1)
    named_barrier_sync(1, 32);
  else if (threadIdx.x < 16)
    named_barrier_sync(1, 32);
  else
    named_barrier_sync(1, 32);
  out[threadIdx.x] = 1;
}
TEST_CASE("the lanes of a warp execute one bar instruction", "[emulator][bugs]") {
  float out[32];
  CHECK(messages(false, 3, 1, 32, one_bar, 1, static_cast<float*>(out)).empty());
  all_say(messages(false, 3, 1, 32, one_bar, 2, static_cast<float*>(out)), 3,
          ": a warp executes one bar instruction");
}

__global__ void two_values() {
  auto& smem = dynamic_shared<Storage>();
  if (threadIdx.x < 2) smem.row[0] = static_cast<float>(threadIdx.x);
  __syncthreads();
}
TEST_CASE("lanes that store different values are not told of a proxy", "[emulator][races][bugs]") {
  all_say(messages(true, 3, 1, 32, two_values), 3, "two lanes store different values");
  for (const std::string& text : messages(true, 3, 1, 32, two_values))
    CHECK(text.find("fence_proxy") == text.npos);
}

// Right: what is volatile is written at once, and fences order the rest.
__global__ void volatile_flag(volatile unsigned* flag, float* data, float* out) {
  if (blockIdx.x == 0) {
    *data = 1;
    __threadfence();
    *flag = 1;
  } else {
    while (*flag == 0) {
    }
    __threadfence();
    *out = *data;
    *flag = 0;
  }
}
TEST_CASE("a spin on a volatile word ends when the other block comes to run", "[emulator][bugs]") {
  float data = 0, out = 0;
  unsigned flag = 0;
  const GlobalBuffer a("data", &data, 4), b("flag", &flag, 4), c("out", &out, 4);
  volatile unsigned* const word = &flag;
  CHECK(messages(false, 200, 2, 1, volatile_flag, word, &data, &out).empty());
}

}  // namespace
