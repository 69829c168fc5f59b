// Asynchronous copies in the emulator: cp.async completes as late as its wait allows, or at once.
#include <string>
#include <vector>

#include "tests/catch.h"

#define ATTN_EMULATED
#include "attn/kernel.h"
#include "ptx/cp_async.h"

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

// out: the tile before the wait, after waiting for the older of two groups, and after waiting for
// both; each [2 groups][32 lanes][4 words].
__global__ void copy_early(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t tile[2][32][4];
  const unsigned lane_id = threadIdx.x;
  const auto record = [&](unsigned when) {
    for (unsigned g = 0; g < 2; ++g)
      std::memcpy(out + ((when * 2 + g) * 32 + lane_id) * 4, tile[g][lane_id], 16);
  };
  for (auto& group : tile) std::memset(group[lane_id], 0xEE, 16);
  for (unsigned g = 0; g < 2; ++g) {
    cp_async_16(tile[g][lane_id], in + (g * 32 + lane_id) * 4);
    cp_async_commit();
  }
  record(0);
  cp_async_wait<1>();
  record(1);
  cp_async_wait<0>();
  record(2);
}

TEST_CASE("cp_async is as late as its wait allows", "[emulator]") {
  std::vector<uint32_t> in(2 * 32 * 4), out(3 * in.size());
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint32_t>(i);
  for (int seed = 1; seed <= kSeeds; ++seed) {
    REQUIRE(launch_with_seed(static_cast<std::uint64_t>(seed), copy_early, dim3(1), dim3(32),
                             in.data(), out.data())
                .ok());
    for (std::size_t i = 0; i < in.size(); ++i) {
      const bool newer = i >= 32 * 4;
      REQUIRE(out[i] == 0xEEEEEEEE);                                // no wait
      REQUIRE(out[in.size() + i] == (newer ? 0xEEEEEEEE : in[i]));  // waits for one group too few
      REQUIRE(out[2 * in.size() + i] == in[i]);
    }
  }
}

TEST_CASE("early copies land at once", "[emulator]") {
  std::vector<uint32_t> in(2 * 32 * 4, 7), out(3 * in.size());
  early_copies = true;
  const bool ok = launch_with_seed(1, copy_early, dim3(1), dim3(32), in.data(), out.data()).ok();
  early_copies = false;
  REQUIRE(ok);
  CHECK(out == std::vector<uint32_t>(out.size(), 7));
}

// Copies without a commit belong to no group: waiting for all groups does not wait for them.
__global__ void copy_uncommitted(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t tile[4];
  std::memset(tile, 0xEE, 16);
  cp_async_16(tile, in);
  cp_async_wait<0>();
  std::memcpy(out, tile, 16);
}
TEST_CASE("cp_async without a commit never lands", "[emulator]") {
  const std::vector<uint32_t> in = {1, 2, 3, 4};
  std::vector<uint32_t> out(4);
  const Status status =
      launch_with_seed(1, copy_uncommitted, dim3(1), dim3(1), in.data(), out.data());
  CHECK(out == std::vector<uint32_t>(4, 0xEEEEEEEE));
  CHECK(status.message ==
        "thread (0,0,0) of block (0,0,0) ends with cp_async copies without cp_async_commit");
}

}  // namespace
