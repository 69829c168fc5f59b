/// \file
/// Copies and MMAs in flight: their accesses to global memory take part in race detection; copied
/// data must be fenced before another unit reads it; and their accesses stay inside shared memory.
#include <string>
#include <vector>

#include "attn/kernel.h"
#include "emulator/simt.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "tests/catch.h"

namespace {

using namespace attn;
using emulator::GlobalBuffer;

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }
std::string place(int line) { return "tests/test_copies_in_flight.cpp:" + std::to_string(line); }

struct alignas(1024) Storage {
  unsigned char bytes[16384];
  uint64_t barrier, empty;
  ATTN_MEMBERS(Storage, bytes, barrier, empty)
};

template <class... Parameters, class... Values>
std::string message(std::uint64_t seed, unsigned grid, unsigned block,
                    void (*kernel)(Parameters...), Values... values) {
  emulator::schedule_seed = seed;
  emulator::find_races = emulator::find_global_races = true;
  const Status status =
      launch_kernel(kernel, dim3(grid), dim3(block), sizeof(Storage), nullptr, values...);
  emulator::find_global_races = false;
  CHECK((status.ok() || status.code == Status::Code::kKernelError));
  CHECK_FALSE(has(status.message, "\n"));
  return status.message;
}

// ---- global memory ------------------------------------------------------------------------------

// Block 0 writes 16 bytes that block 1 copies: after a flag, or without one.
constexpr int kWrites = __LINE__ + 3, kCopies = __LINE__ + 7;
__global__ void copy_what_is_written(bool flag, float* data, unsigned* ready) {
  if (blockIdx.x == 0) {
    data[0] = 1;
    flag_store(ready, 1);
  } else {
    if (flag) flag_wait(ready, 1);
    cp_async_16(dynamic_shared<Storage>().bytes, data);
    cp_async_commit();
    cp_async_wait<0>();
  }
}
// A thread writes to the source of its copy: after the wait, or before it.
constexpr int kCopiesAway = __LINE__ + 2, kWritesAgain = __LINE__ + 5;
__global__ void write_what_is_copied(bool wait, float* data) {
  cp_async_16(dynamic_shared<Storage>().bytes, data);
  cp_async_commit();
  if (wait) cp_async_wait<0>();
  data[1] = 2;
  if (!wait) cp_async_wait<0>();
}
// A box of 64 x 64: block 0 writes its last element, block 1 loads it by TMA.
constexpr int kLoads = __LINE__ + 12;
__global__ void load_what_is_written(bool flag, bool fence, const TensorMap map, __half* data,
                                     unsigned* ready) {
  auto& smem = dynamic_shared<Storage>();
  if (blockIdx.x == 0) {
    data[64 * 64 - 1] = __float2half_rn(1);
    return flag_store(ready, 1);
  }
  mbarrier_init(&smem.barrier, 1), mbarrier_init_fence();
  if (flag) flag_wait(ready, 1);
  if (fence) fence_proxy_async_global();
  mbarrier_arrive_expect_tx(&smem.barrier, 64 * 64 * 2);
  tma_load(smem.bytes, map, &smem.barrier, {0, 0, 0});
  mbarrier_wait(&smem.barrier, 0);
}
// Each block stores a box, the same one or its own.
constexpr int kStores = __LINE__ + 6;
__global__ void store_boxes(bool same, const TensorMap map) {
  auto& smem = dynamic_shared<Storage>();
  for (unsigned i = threadIdx.x; i < 64 * 64 * 2; i += blockDim.x) smem.bytes[i] = 0;
  fence_proxy_async(), __syncthreads();
  if (threadIdx.x != 0) return;
  tma_store(map, smem.bytes, {0, 0, same ? 0 : static_cast<int>(blockIdx.x)});
  tma_store_commit();
  tma_store_wait<0>();
}
// A thread reads what it has stored by TMA, after a wait for the reads of shared memory. It fills
// the tile again, after a wait or before it.
__global__ void fill_what_is_stored(bool wait, const TensorMap map) {
  auto& smem = dynamic_shared<Storage>();
  for (int i = 0; i < 8192; ++i) smem.bytes[i] = 1;
  fence_proxy_async();
  tma_store(map, smem.bytes, {0, 0, 0});
  tma_store_commit();
  if (wait) tma_store_wait<0>();
  smem.bytes[100] = 2;
  if (!wait) tma_store_wait<0>();
}
constexpr int kReadsTile = __LINE__ - 6, kFillsAgain = __LINE__ - 3;
__global__ void read_what_is_stored(const TensorMap map, const unsigned char* data, int* out) {
  auto& smem = dynamic_shared<Storage>();
  for (int i = 0; i < 64 * 64 * 2; ++i) smem.bytes[i] = 0;
  fence_proxy_async();
  tma_store(map, smem.bytes, {0, 0, 0});
  tma_store_commit();
  tma_store_wait<0>();
  *out = data[4];
}

// ---- shared memory ------------------------------------------------------------------------------

// An MMA on data copied by cp.async: all threads wait and meet at a barrier. They fence before the
// barrier, not at all, or before the wait.
enum Fence { kFenced, kNoFence, kFencedTooEarly };
constexpr int kBrings = __LINE__ + 5, kMultiplies = __LINE__ + 13;
__global__ void multiply_copies(Fence fence, const unsigned char* data, float* out) {
  auto& smem = dynamic_shared<Storage>();
  float d[8][4] = {};
  for (unsigned i = threadIdx.x; i < 1024; i += 128)
    cp_async_16(smem.bytes + 16 * i, data + 16 * i);
  cp_async_commit();
  if (fence == kFencedTooEarly) fence_proxy_async();
  cp_async_wait<0>();
  if (fence == kFenced) fence_proxy_async();
  __syncthreads();
  const SmemDescriptor tile = smem_descriptor(smem.bytes);
  wgmma_fence();
  wgmma<__half, false>(d, tile, tile, false);
  wgmma_commit();
  wgmma_wait<0>(d);
  out[threadIdx.x] = d[0][0];
}

// A box of 8 KiB to `offset` of 16 KiB of shared memory, or 16 bytes by cp.async; or a box from
// there.
enum Way { kByTma, kByCpAsync, kStore };
__global__ void reach(Way way, int offset, const TensorMap map, const unsigned char* data) {
  auto& smem = dynamic_shared<Storage>();
  auto* const at = reinterpret_cast<unsigned char*>(&smem) + offset;
  if (way == kByCpAsync) {
    cp_async_16(at, data);
    cp_async_commit();
    return cp_async_wait<0>();
  }
  if (way == kStore) {
    for (unsigned char& byte : smem.bytes) byte = 0;
    fence_proxy_async();
    tma_store(map, at, {0, 0, 0});
    tma_store_commit();
    return tma_store_wait<0>();
  }
  mbarrier_init(&smem.barrier, 1), mbarrier_init_fence();
  mbarrier_arrive_expect_tx(&smem.barrier, 64 * 64 * 2);
  tma_load(at, map, &smem.barrier, {0, 0, 0});
  mbarrier_wait(&smem.barrier, 0);
}

// A warpgroup multiplies data that warp 4 overwrites as soon as it is released: by each warp that
// has waited, or by warp 0 for all.
constexpr int kInFlight = __LINE__ + 11, kOverwrites = __LINE__ + 18;
__global__ void overwrite_operand(bool each, float* out) {
  auto& smem = dynamic_shared<Storage>();
  for (unsigned i = threadIdx.x; i < sizeof smem.bytes; i += blockDim.x) smem.bytes[i] = 0;
  if (threadIdx.x == 0) mbarrier_init(&smem.empty, each ? 128 : 32), mbarrier_init_fence();
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x < 128) {
    float d[8][4] = {};
    const SmemDescriptor tile = smem_descriptor(smem.bytes);
    wgmma_fence();
    wgmma<__half, false>(d, tile, tile, false);
    wgmma_commit();
    wgmma_wait<0>(d);
    if (each || threadIdx.x < 32) mbarrier_arrive(&smem.empty);
    out[threadIdx.x] = d[0][0];
  } else {
    mbarrier_wait(&smem.empty, 0);
    if (threadIdx.x == 128) smem.bytes[0] = 1;
  }
}

TensorMap box_map(const __half* tensor) {
  TensorMap map;
  REQUIRE(
      make_tensor_map<3>(map, tensor, {64, 64, 2}, {128, 8192}, {64, 64, 1}, Swizzle::kNone).ok());
  return map;
}

}  // namespace

TEST_CASE("what cp.async reads of global memory is an access", "[emulator][races]") {
  alignas(16) float data[4] = {};
  unsigned ready = 0;
  const GlobalBuffer d("data", data, sizeof data), r("ready", &ready, 4);
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    ready = 0;
    CHECK(message(seed, 2, 1, copy_what_is_written, true, data, &ready) == "");
    const std::string said = message(seed, 2, 1, copy_what_is_written, false, data, &ready);
    INFO(said);
    CHECK(has(said, "race: byte 0 of data was "));
    CHECK(has(said, "written by thread (0,0,0) of block (0,0,0) at " + place(kWrites)));
    CHECK(has(said, "read by cp_async_16 of thread (0,0,0) of block (1,0,0) at " + place(kCopies)));
    CHECK(message(seed, 1, 1, write_what_is_copied, true, data) == "");
    const std::string early = message(seed, 1, 1, write_what_is_copied, false, data);
    CHECK(early ==
          "race: byte 4 of data was read by cp_async_16 of thread (0,0,0) of block (0,0,0) at " +
              place(kCopiesAway) + " and then written by thread (0,0,0) of block (0,0,0) at " +
              place(kWritesAgain) + " before a wait for it");
  }
}

TEST_CASE("what TMA reads and writes of global memory is an access", "[emulator][races]") {
  alignas(16) static __half data[2 * 64 * 64];
  unsigned ready = 0;
  int out = 0;
  const TensorMap map = box_map(data);
  const GlobalBuffer d("data", data, sizeof data), r("ready", &ready, 4);
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    ready = 0;
    CHECK(message(seed, 2, 1, load_what_is_written, true, true, map, data, &ready) == "");
    ready = 0;
    CHECK(has(message(seed, 2, 1, load_what_is_written, true, false, map, data, &ready),
              " with no fence_proxy_async_global between"));
    const std::string loaded =
        message(seed, 2, 1, load_what_is_written, false, true, map, data, &ready);
    INFO(loaded);
    CHECK(has(loaded, "race: byte 8190 of data was "));
    CHECK(has(loaded, "read by tma_load of thread (0,0,0) of block (1,0,0) at " + place(kLoads)));
    CHECK(message(seed, 1, 1, fill_what_is_stored, true, map) == "");
    const std::string filled = message(seed, 1, 1, fill_what_is_stored, false, map);
    INFO(filled);
    CHECK(has(filled,
              "read by tma_store of thread (0,0,0) of block (0,0,0) at " + place(kReadsTile)));
    CHECK(has(filled, "written by thread (0,0,0) of block (0,0,0) at " + place(kFillsAgain)));
    CHECK(has(filled, " before a wait for it"));
    CHECK(message(seed, 2, 32, store_boxes, false, map) == "");
    const std::string stored = message(seed, 2, 32, store_boxes, true, map);
    INFO(stored);
    CHECK(
        has(stored, "race: byte 0 of data was written by tma_store of thread (0,0,0) of block ("));
    CHECK(
        has(stored, ") at " + place(kStores) + " and then written by tma_store of thread (0,0,0)"));
    const std::string read = message(seed, 1, 1, read_what_is_stored, map,
                                     reinterpret_cast<const unsigned char*>(data), &out);
    INFO(read);
    CHECK(has(read, "race: byte 4 of data was written by tma_store of thread (0,0,0) of block "));
    CHECK(has(read,
              ": tma_store_wait waits until shared memory has been read, bulk_wait_group "
              "until the result has been written"));
  }
}

TEST_CASE("wgmma needs a fence after cp.async, too", "[emulator][races]") {
  alignas(16) static const unsigned char data[16384] = {};
  std::vector<float> out(128);
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    CHECK(message(seed, 1, 128, multiply_copies, kFenced, data, out.data()) == "");
    for (const Fence fence : {kNoFence, kFencedTooEarly}) {
      const std::string said = message(seed, 1, 128, multiply_copies, fence, data, out.data());
      INFO(said);
      CHECK(has(said, "was written by cp_async_16 of thread ("));
      CHECK(has(said, "at " + place(kBrings) + " and then read by wgmma of thread ("));
      CHECK(has(said, "at " + place(kMultiplies) + " with no fence_proxy_async between"));
    }
  }
}

TEST_CASE("copies stay inside of shared memory", "[emulator][refusals]") {
  alignas(16) static __half data[2 * 64 * 64];
  const auto* const bytes = reinterpret_cast<const unsigned char*>(data);
  const TensorMap map = box_map(data);
  const int all = static_cast<int>(sizeof(Storage));
  const auto says = [&](Way way, int offset) {
    return message(1, 1, 1, reach, way, offset, map, bytes);
  };
  CHECK(says(kByTma, 8192) == "");
  CHECK(says(kByCpAsync, all - 16) == "");
  CHECK(says(kStore, 8192) == "");
  CHECK(has(says(kByTma, all - 8192 + 128),
            " with a destination of 8192 bytes at byte 9344 of the block's 17408 bytes of shared "
            "memory"));
  CHECK(has(says(kByCpAsync, all),
            " with a destination of 16 bytes at byte 17408 of the block's 17408 "));
  CHECK(has(says(kStore, all - 128),
            " with a source of 8192 bytes at byte 17280 of the block's 17408 "));
}

TEST_CASE("each warp of a warpgroup has to wait for its part of a product", "[emulator][races]") {
  std::vector<float> out(160);
  int missed = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    CHECK(message(seed, 1, 160, overwrite_operand, true, out.data()) == "");
    const std::string said = message(seed, 1, 160, overwrite_operand, false, out.data());
    if (said.empty()) continue;
    INFO(said);
    missed += has(said, "read by wgmma of thread (") && has(said, place(kInFlight)) &&
              has(said, "written by thread (") && has(said, place(kOverwrites));
  }
  CHECK(missed == 20);
}
