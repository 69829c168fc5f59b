/// \file
/// Bugs of public reports, one kernel each: the emulator names the cause, and says nothing of the
/// same kernel without its bug. docs/debugging.md has the table.
#include <cmath>
#include <string>
#include <vector>

#include "attn/kernel.h"
#include "emulator/simt.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "run/schedule.h"
#include "tests/catch.h"

namespace {

using namespace attn;
using emulator::GlobalBuffer;

struct Storage {
  alignas(1024) __half a[64 * 64];
  alignas(1024) __half b[64 * 64];
  alignas(128) float row[128];
  uint64_t full, empty;
  unsigned ready;
  ATTN_MEMBERS(Storage, a, b, row, full, empty, ready)
};

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

// Whether schedules 1 to 3 (with races: those are looked for) all say `expected`, or, where it is
// empty, nothing.
template <class Run>
void expect(bool races, const std::string& expected, Run run) {
  for (std::uint64_t n = 1; n <= 3; ++n) {
    choose_schedule(n);
    emulator::find_races = emulator::find_global_races = races;
    const std::string said = run();
    emulator::find_races = emulator::find_global_races = false;
    INFO("schedule " << n << (races ? ", races: " : ": ") << said);
    CHECK_FALSE(has(said, "\n"));
    if (expected.empty())
      CHECK(said == "");
    else
      CHECK(has(said, expected));
  }
  emulator::early_copies = emulator::mixed_copies = false;
  emulator::late_warps = emulator::LateWarps::half;
}

template <class... Parameters, class... Values>
std::string message(unsigned grid, unsigned block, void (*kernel)(Parameters...),
                    Values... values) {
  const Status status =
      launch_kernel(kernel, dim3(grid), dim3(block), sizeof(Storage), nullptr, values...);
  CHECK((status.ok() || status.code == Status::Code::kKernelError));
  return status.message;
}
// The right twin says nothing, with or without the search for races; the other one says `expected`,
// where races are looked for or (`always`) anyhow.
template <class Kernel, class... Values>
void twins(bool always, const std::string& expected, unsigned block, Kernel kernel,
           Values... values) {
  for (const bool races : {false, true}) {
    expect(races, "", [&] { return message(1, block, kernel, false, values...); });
    if (races || always)
      expect(races, expected, [&] { return message(1, block, kernel, true, values...); });
  }
}

// ---- barriers -----------------------------------------------------------------------------------

// 4 rounds in which warp 0 fills a stage and warp 1 reads it; one lane arrives twice.
__global__ void arrive_twice(bool bug, float* out) {
  auto& smem = dynamic_shared<Storage>();
  const unsigned lane = threadIdx.x % 32;
  if (threadIdx.x == 0)
    mbarrier_init(&smem.full, 32), mbarrier_init(&smem.empty, 32), mbarrier_init_fence();
  __syncthreads();
  for (int t = 0; t < 4; ++t)
    if (threadIdx.x < 32) {
      mbarrier_wait(&smem.empty, t % 2 ^ 1);
      smem.row[lane] = static_cast<float>(t);
      __syncwarp();
      mbarrier_arrive(&smem.full);
      if (bug && lane == 0 && t == 3) mbarrier_arrive(&smem.full);
    } else {
      mbarrier_wait(&smem.full, t % 2);
      out[lane] = smem.row[lane];
      mbarrier_arrive(&smem.empty);
    }
}
TEST_CASE("an arrival too many leaves a barrier in the middle of a phase", "[emulator][bugs]") {
  float out[32];
  twins(true, "block (0,0,0) ends in the middle of a phase: mbarrier full is in phase 4: 1 of 32",
        64, arrive_twice, out);
}

__global__ void write_over(bool bug, float* out) {
  auto& smem = dynamic_shared<Storage>();
  if (threadIdx.x == 0) mbarrier_init(&smem.full, 64), mbarrier_init_fence();
  __syncthreads();
  auto* const to = bug ? reinterpret_cast<float*>(&smem.full) : smem.row;
  if (threadIdx.x < 32) to[threadIdx.x % 2] = 1;
  __syncthreads();
  out[threadIdx.x] = 1;
}
TEST_CASE("an ordinary store over a barrier", "[emulator][bugs]") {
  float out[64];
  twins(true, "over mbarrier full is in phase 0", 64, write_over, out);
}

// The emulator notes reads 2^18 at a time: the last one comes right after those.
__global__ void read_often(bool bug, float* out) {
  auto& smem = dynamic_shared<Storage>();
  for (unsigned i = threadIdx.x; i < 128; i += 64) smem.row[i] = 1;
  auto* const rest = reinterpret_cast<float*>(smem.b);
  for (unsigned i = threadIdx.x; i < 2048; i += 64) rest[i] = 1;
  if (threadIdx.x == 0) smem.ready = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int i = 0; i < 1 << 18; ++i) sum += smem.row[2 * (i % 32)];
    sum += rest[1000];
    out[0] = sum;
    atomicExch(&smem.ready, 1u);
  }
  if (!bug) __syncthreads();
  if (threadIdx.x == 32) {
    while (atomicAdd(&smem.ready, 0u) == 0) {
    }
    rest[1000] = 2;
  }
}
TEST_CASE("a read that follows 2^18 others is remembered", "[emulator][bugs]") {
  float out[64];
  twins(false, "(b[2000]) was read by", 64, read_often, out);
}

__global__ void half_a_warp(bool bug, float* out) {
  if (!bug)
    named_barrier_sync(1, 64);
  else if (threadIdx.x % 32 < 16)
    named_barrier_sync(1, 32);
  out[threadIdx.x] = 1;
}
TEST_CASE("a named barrier takes whole warps", "[emulator][bugs]") {
  float out[64];
  twins(true, "lanes have arrived: the barrier takes whole warps, and counts 32 for each", 64,
        half_a_warp, out);
}

__global__ void one_number(bool bug, float* out) {
  named_barrier_sync(bug ? 1 : 1 + threadIdx.x / 64, 64);
  out[threadIdx.x] = 1;
}
TEST_CASE("two pairs of warps at one named barrier", "[emulator][bugs]") {
  float out[128];
  twins(true, "; or more than 2 warps use this number", 128, one_number, out);
}

__global__ void wait_for_bytes(int bytes, const TensorMap map, float* out) {
  auto& smem = dynamic_shared<Storage>();
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.full, 1), mbarrier_init_fence();
    mbarrier_arrive_expect_tx(&smem.full, bytes);
    tma_load(smem.a, map, &smem.full, {0, 0, 0});
  }
  __syncthreads();
  mbarrier_wait(&smem.full, 0);
  out[threadIdx.x] = __half2float(smem.a[threadIdx.x]);
}
TensorMap box_map(__half* data) {
  TensorMap map;
  CHECK(
      make_tensor_map<3>(map, data, {64, 64, 1}, {128, 64 * 128}, {64, 64, 1}, Swizzle::k128).ok());
  return map;
}
TEST_CASE("a deadlock says how far its barrier is", "[emulator][bugs]") {
  alignas(128) static __half data[64 * 64];
  float out[32];
  const TensorMap map = box_map(data);
  for (const int bytes : {8192 - 16, 8192 + 16})
    for (const bool early : {false, true})  // the copy is in flight, or is there
      expect(false,
             "mbarrier full is in phase 0: 1 of 1 threads have arrived, " + std::to_string(bytes) +
                 " bytes are announced, " + (early ? "0 in flight, 8192 there" : "8192 in flight"),
             [&] {
               emulator::early_copies = early, emulator::mixed_copies = false;
               return message(1, 32, wait_for_bytes, bytes, map, out);
             });
  expect(true, "", [&] { return message(1, 32, wait_for_bytes, 8192, map, out); });
}

// A flag in shared memory by atomics: ordinary code is in order with it by fences on both sides.
__global__ void flag_by_atomics(bool bug, float* out) {
  auto& smem = dynamic_shared<Storage>();
  if (threadIdx.x == 0) smem.ready = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    smem.row[0] = 5;
    if (!bug) __threadfence_block();
    atomicExch(&smem.ready, 1u);
  }
  if (threadIdx.x == 32) {
    while (atomicAdd(&smem.ready, 0u) == 0) {
    }
    if (!bug) __threadfence_block();
    out[0] = smem.row[0];
  }
}
TEST_CASE("atomics and fences put accesses to shared memory in order", "[emulator][races][bugs]") {
  float out[1];
  twins(false, "(row[0]) was written by thread (0,0,0)", 64, flag_by_atomics, out);
}

// All lanes of a warp store to one word: one value, or each its own.
__global__ void store_to_one_word(bool bug, float* out) {
  auto& smem = dynamic_shared<Storage>();
  smem.row[threadIdx.x / 32] = bug ? static_cast<float>(threadIdx.x) : 1.0f;
  __syncthreads();
  out[threadIdx.x] = smem.row[threadIdx.x / 32];
}
TEST_CASE("lanes of a warp may store one value to one word", "[emulator][races][bugs]") {
  float out[64];
  twins(false, ": two lanes store different values", 64, store_to_one_word, out);
}

__global__ void store_to_one_variable(float* out) {
  __shared__ float row[2];
  row[threadIdx.x / 32] = static_cast<float>(5 + blockIdx.x);
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = row[threadIdx.x / 32];
}
TEST_CASE("lanes of many blocks store one value to a variable of their block",
          "[emulator][races][bugs]") {
  std::vector<float> out(64 * 64);
  const GlobalBuffer buffer("out", out.data(), 4 * out.size());
  expect(true, "", [&] { return message(64, 64, store_to_one_variable, out.data()); });
}

// ---- proxies ------------------------------------------------------------------------------------

// Ordinary reads or writes of a tile, then a TMA load over it.
__global__ void load_over(bool bug, bool writes, const TensorMap map, float* out) {
  auto& smem = dynamic_shared<Storage>();
  if (threadIdx.x == 0) mbarrier_init(&smem.full, 1), mbarrier_init_fence();
  if (writes) smem.a[threadIdx.x] = __float2half_rn(0);
  if (writes && !bug) fence_proxy_async();
  __syncthreads();
  for (int t = 0; t < 2; ++t) {
    if (threadIdx.x == 0) {
      if (t > 0 && !bug) fence_proxy_async();  // by the issuer, after the barrier: that does, too
      mbarrier_arrive_expect_tx(&smem.full, 8192);
      tma_load(smem.a, map, &smem.full, {0, 0, 0});
    }
    mbarrier_wait(&smem.full, t);
    out[threadIdx.x] = __half2float(smem.a[threadIdx.x]);
    __syncthreads();
  }
}
TEST_CASE("between ordinary accesses and a TMA load over them is a proxy fence",
          "[emulator][races][bugs]") {
  alignas(128) static __half data[64 * 64];
  float out[32];
  const TensorMap map = box_map(data);
  for (const bool writes : {false, true})
    twins(false, "written by tma_load of thread (0,0,0) of block (0,0,0)", 32, load_over, writes,
          map, out);
  expect(true, "with no fence_proxy_async between",
         [&] { return message(1, 32, load_over, true, false, map, out); });
}

// One fence, then two groups of stores; or stores of what TMA has loaded.
__global__ void store_twice(bool loaded, const TensorMap map) {
  auto& smem = dynamic_shared<Storage>();
  if (threadIdx.x == 0) mbarrier_init(&smem.full, 1), mbarrier_init_fence();
  for (unsigned i = threadIdx.x; i < 64 * 64 && !loaded; i += 32) smem.a[i] = __float2half_rn(0);
  if (!loaded) fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (loaded) {
      mbarrier_arrive_expect_tx(&smem.full, 8192);
      tma_load(smem.a, map, &smem.full, {0, 0, 0});
      mbarrier_wait(&smem.full, 0);
    }
    for (int i = 0; i < 2; ++i) {
      tma_store(map, smem.a, {0, 0, 0});
      tma_store_commit();
      bulk_wait_group<0>();
    }
  }
}
TEST_CASE("one fence does for several groups of TMA stores", "[emulator][bugs]") {
  alignas(128) static __half data[64 * 64];
  const TensorMap map = box_map(data);
  for (const bool races : {false, true})
    for (const bool loaded : {false, true})
      expect(races, "", [&] { return message(1, 32, store_twice, loaded, map); });
}

// Stores to global memory, then a TMA load of them in the same launch.
__global__ void load_what_was_stored(bool bug, __half* data, const TensorMap map, float* out) {
  auto& smem = dynamic_shared<Storage>();
  if (threadIdx.x == 0) mbarrier_init(&smem.full, 1), mbarrier_init_fence();
  data[threadIdx.x] = __float2half_rn(2);
  if (!bug) fence_proxy_async_global();
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&smem.full, 8192);
    tma_load(smem.a, map, &smem.full, {0, 0, 0});
  }
  mbarrier_wait(&smem.full, 0);
  out[threadIdx.x] = __half2float(smem.a[threadIdx.x]);
}
TEST_CASE("between stores to global memory and a TMA load of them is a proxy fence",
          "[emulator][races][bugs]") {
  alignas(128) static __half data[64 * 64];
  float out[32];
  const GlobalBuffer buffer("data", data, sizeof data);
  twins(false, "with no fence_proxy_async_global between", 32, load_what_was_stored, data,
        box_map(data), out);
}

// A TMA store, a wait for its result or for its source alone, then a flag for another block.
__global__ void publish(bool bug, const TensorMap map, const __half* data, unsigned* flag,
                        float* out) {
  auto& smem = dynamic_shared<Storage>();
  if (blockIdx.x == 0) {
    for (unsigned i = threadIdx.x; i < 64 * 64; i += 32) smem.a[i] = __float2half_rn(3);
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      tma_store(map, smem.a, {0, 0, 0});
      tma_store_commit();
      if (bug)
        tma_store_wait<0>();
      else
        bulk_wait_group<0>();
      flag_store(flag, 1);
    }
  } else {
    if (threadIdx.x == 0) flag_wait(flag, 1);
    __syncthreads();
    out[threadIdx.x] = __half2float(data[threadIdx.x]);
  }
}
TEST_CASE("what a TMA store has written is there after bulk_wait_group alone",
          "[emulator][races][bugs]") {
  alignas(128) static __half data[64 * 64];
  const GlobalBuffer buffer("data", data, sizeof data);
  const TensorMap map = box_map(data);
  int old = 0;
  for (const bool bug : {false, true})
    for (const bool races : {false, true}) {
      if (bug && !races) continue;
      expect(races, bug ? "bulk_wait_group until the result has been written" : "", [&] {
        unsigned flag = 0;
        float out[32];
        return message(2, 32, publish, bug, map, data, &flag, out);
      });
    }
  for (std::uint64_t n = 1; n <= 10; ++n) {  // and so it shows without the search for races
    choose_schedule(n);
    for (__half& x : data) x = __float2half_rn(1);
    unsigned flag = 0;
    float out[32];
    CHECK(message(2, 32, publish, true, map, data, &flag, out) == "");
    old += out[0] == 1;
  }
  emulator::early_copies = emulator::mixed_copies = false;
  CHECK(old > 0);
}

// ---- wgmma, registers ---------------------------------------------------------------------------

enum Multiplied {
  kRight, kWrittenAfterFence, kOtherOrder, kOtherOperands, kOtherScale, kNeverAwaited
};
__global__ void multiply(Multiplied how, float* out) {
  auto& smem = dynamic_shared<Storage>();
  for (unsigned i = threadIdx.x; i < 64 * 64; i += 128) smem.b[i] = __float2half_rn(1);
  fence_proxy_async();
  __syncthreads();
  const SmemDescriptor b =
      smem_descriptor(smem.b + (how == kOtherOperands && threadIdx.x >= 96 ? 8 * 64 : 0));
  const uint32_t a[4] = {0x3C003C00, 0x3C003C00, 0x3C003C00, 0x3C003C00};
  float d[8][4] = {}, e[8][4];
  wgmma_fence();
  if (how == kWrittenAfterFence) d[0][0] = 1;
  if (how == kOtherOrder && threadIdx.x >= 96) {
    wgmma<__half, false>(e, a, b, false);
    wgmma<__half, false>(d, a, b, true);
  } else {
    wgmma<__half, false>(d, a, b, how != kOtherScale || threadIdx.x != 97);
    wgmma<__half, false>(e, a, b, false);
  }
  wgmma_commit();
  if (how == kNeverAwaited) return;
  wgmma_wait<0>(d, e);
  out[threadIdx.x] = d[0][0] + e[0][0];
}
TEST_CASE("wgmma: registers after the fence, one order of all warps, a wait", "[emulator][bugs]") {
  float out[128];
  const auto run = [&](Multiplied how) {
    return [&, how] { return message(1, 128, multiply, how, out); };
  };
  for (const bool races : {false, true}) {
    expect(races, "", run(kRight));
    for (const float x : out) CHECK(x == 32);
    expect(races, "another warp of its warpgroup runs the one at", run(kOtherOrder));
    expect(races, "with other operands in shared memory than another warp of its warpgroup",
           run(kOtherOperands));
    expect(races, "all have the same scale-d", run(kOtherScale));
    expect(races, "ends with wgmma without wgmma_wait", run(kNeverAwaited));
  }
  expect(true, "after wgmma_fence: the fence is for what was written before it",
         run(kWrittenAfterFence));
}

enum Resized { kGiven, kNobodyGives, kOneWarpGives };
__global__ void __launch_bounds__(384, 1) resize(Resized how, float* out) {
  if (threadIdx.x >= 128)
    setmaxnreg_inc<240>();
  else if (how == kGiven || (how == kOneWarpGives && threadIdx.x < 32))
    setmaxnreg_dec<24>();
  out[threadIdx.x] = 1;
}
TEST_CASE("setmaxnreg: somebody gives, and whole warpgroups call it", "[emulator][bugs]") {
  float out[384];
  const auto run = [&](Resized how) {
    return [&, how] { return message(1, 384, resize, how, out); };
  };
  expect(false, "", run(kGiven));
  expect(false, "a GPU would wait for a setmaxnreg_dec that does not come", run(kNobodyGives));
  expect(false, "all four warps of a warpgroup call it", run(kOneWarpGives));
}

// ---- warps --------------------------------------------------------------------------------------

__global__ void shuffle_from_outside(bool bug, float* out) {
  float x = 1;
  if (threadIdx.x < 16) x += __shfl_xor_sync(0xFFFFu, x, bug ? 16 : 8);
  out[threadIdx.x] = x;
}
TEST_CASE("a shuffle reads no lane that its mask does not name", "[emulator][bugs]") {
  float out[32];
  twins(true, "with a mask that does not name lane", 32, shuffle_from_outside, out);
}

// ---- memory -------------------------------------------------------------------------------------

__global__ void copy_unawaited(bool bug, const float* in, float* out) {
  auto& smem = dynamic_shared<Storage>();
  cp_async_16(smem.row + 4 * threadIdx.x, in);
  cp_async_commit();
  if (!bug) cp_async_wait<0>();
  out[threadIdx.x] = 1;
}
TEST_CASE("a thread does not end with copies in flight", "[emulator][bugs]") {
  alignas(16) static float in[4];
  float out[32];
  twins(true, "ends with cp_async copies without cp_async_wait", 32, copy_unawaited, in, out);
}

// An offset of 32 bits that overflows: 2^31 elements before the buffer.
constexpr int kOverflows = __LINE__ + 3;
__global__ void overflow(bool bug, float* data) {
  const int64_t row = bug ? static_cast<int>(2147483648u * 1u) : 0;
  data[row * 4096] = 1;
}
__global__ void read_past_shared(bool bug, float* out) {
  auto& row = dynamic_shared<float[sizeof(Storage) / 4]>();
  row[sizeof(Storage) / 4 - 1 - threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = (&row[0])[sizeof(Storage) / 4 - (bug ? 0 : 1)];
}
TEST_CASE("a read past the end of shared memory is named", "[emulator][races][bugs]") {
  float out[32];
  twins(false, "reads 0 bytes past the end of its ", 32, read_past_shared, out);
}
__global__ void read_past(bool bug, const float* data, float* out) {
  out[threadIdx.x] = data[threadIdx.x + (bug ? 1 : 0)];
}
#ifdef __x86_64__
TEST_CASE("an address that is no buffer's is named, with its line", "[emulator][bugs]") {
  std::vector<float> data(64);
  const GlobalBuffer buffer("data", data.data(), 256);
  twins(true, "accesses memory that is no buffer's, 35184372088832 bytes before data, at ", 1,
        overflow, data.data());
  expect(false, "tests/test_public_bugs.cpp:" + std::to_string(kOverflows),
         [&] { return message(1, 1, overflow, true, data.data()); });
}
#endif
TEST_CASE("a read past the end of a buffer is named", "[emulator][races][bugs]") {
  std::vector<float> data(96);
  float out[64];
  const GlobalBuffer buffer("data", data.data(), 256, 128);
  twins(false, "reads 0 bytes past the end of data (256 bytes), at ", 64, read_past,
        static_cast<const float*>(data.data()), out);
}

}  // namespace
