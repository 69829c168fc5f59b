// Bulk copies and reductions, clusters, multicast and dependent launches of common/ptx, on both
// back ends. In the emulator, what is left out has to be reported with its reason.
#include <string>
#include <vector>

#include "attn/tensor.h"
#include "device/device.h"
#include "emulator/simt.h"
#include "tests/catch.h"
#include "tests/kernels.h"

namespace {

using namespace attn;
using namespace attn::tests;

#if ATTN_HAVE_CUDA
#define ATTN_TEST_KERNEL(name) \
  (backend == Backend::gpu ? gpu::tests::name(args) : emulated::tests::name(args))
#else
#define ATTN_TEST_KERNEL(name) emulated::tests::name(args)
#endif

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

// "" or what is wrong: the refusal, or the first wrong element.
template <class T, class Expected>
std::string first_wrong(const Status& status, Backend backend, DeviceBuffer& out, std::size_t n,
                        Expected expected) {
  if (!status.ok()) return status.message;
  synchronize(backend);
  if (const auto damage = out.broken_guard()) return *damage;
  std::vector<T> got(n);
  out.download(got.data());
  for (std::size_t i = 0; i < n; ++i)
    if (got[i] != expected(i)) return "element " + std::to_string(i);
  return "";
}

std::string bulk_sum(Backend backend, unsigned blocks, int fault = kNoClusterFault) {
  std::vector<float> a(blocks * kBulkRow);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i % 97);
  DeviceBuffer in(backend, "a", static_cast<int64_t>(4 * a.size()));
  in.upload(a.data());
  DeviceBuffer out(backend, "out", 2 * 4 * kBulkRow), counter(backend, "counter", 4);
  out.poison(0), counter.poison(0);
  KernelArguments args;
  args.a = in.data(), args.b = counter.data(), args.out = out.data(), args.mode = fault;
  args.grid[0] = blocks;
  const Status status = ATTN_TEST_KERNEL(bulk_sum);
  return first_wrong<float>(status, backend, out, 2 * kBulkRow, [&](std::size_t i) {
    float sum = 0;
    for (std::size_t b = 0; b < blocks; ++b) sum += 2 * a[b * kBulkRow + i % kBulkRow];
    return sum;
  });
}

std::string ring(Backend backend, unsigned blocks, int fault = kNoClusterFault) {
  DeviceBuffer out(backend, "out", static_cast<int64_t>(4 * kBulkRow * blocks));
  out.poison();
  KernelArguments args;
  args.out = out.data(), args.mode = fault, args.grid[0] = blocks;
  const Status status = ATTN_TEST_KERNEL(cluster_ring);
  return first_wrong<float>(status, backend, out, kBulkRow * blocks, [&](std::size_t i) {
    const std::size_t rank = i / kBulkRow;
    const std::size_t ranks = rank + (rank + 1) % blocks + (rank + blocks - 1) % blocks;
    return static_cast<float>(100 * ranks + 3 * (i % kBulkRow));
  });
}

std::string multicast(Backend backend, unsigned blocks, int fault = kNoClusterFault) {
  constexpr std::size_t kTile = 64 * 64;
  std::vector<float> a(kTile);
  for (std::size_t i = 0; i < kTile; ++i) a[i] = static_cast<float>(i % 512);
  std::vector<uint16_t> bits(kTile);
  encode(DType::fp16, a.data(), kTile, bits.data());
  DeviceBuffer in(backend, "a", 2 * kTile);
  in.upload(bits.data());
  DeviceBuffer out(backend, "out", static_cast<int64_t>(2 * kTile * blocks));
  out.poison();
  KernelArguments args;
  args.a = in.data(), args.out = out.data(), args.mode = fault, args.grid[0] = blocks;
  const Status status = ATTN_TEST_KERNEL(multicast);
  return first_wrong<uint16_t>(status, backend, out, kTile * blocks, [&](std::size_t i) {
    // Chunk p of row r is stored at p ^ (r % 8).
    const std::size_t row = i % kTile / 64, chunk = i % 64 / 8 ^ row % 8;
    const float x = a[row * 64 + chunk * 8 + i % 8] + static_cast<float>(i / kTile);
    uint16_t expected;
    encode(DType::fp16, &x, 1, &expected);
    return expected;
  });
}

std::string two_launches(Backend backend, int fault = kNoClusterFault) {
  DeviceBuffer out(backend, "out", 4 * 64 * 8);
  out.poison();
  KernelArguments args;
  args.out = out.data(), args.mode = fault, args.grid[0] = 8;
  const Status status = ATTN_TEST_KERNEL(two_launches);
  return first_wrong<float>(status, backend, out, 64 * 8,
                            [](std::size_t i) { return 2 * static_cast<float>(i) + 1; });
}

// Under a few schedules, with copies as late as possible and at once. `races`: they are looked for,
// too. How many of the eight runs say `text`, "" for a right result.
template <class Run>
int says(bool races, const std::string& text, Run run) {
  int count = 0;
  emulator::find_races = emulator::find_global_races = races;
  for (const bool early : {false, true})
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      emulator::early_copies = early;
      emulator::schedule_seed = seed;
      const std::string said = run();
      INFO("seed " << seed << (early ? " early: " : " late: ") << said);
      CHECK_FALSE(has(said, "\n"));
      count += text.empty() ? said.empty() : has(said, text);
      if (text.empty()) CHECK(said == "");
    }
  emulator::find_races = emulator::find_global_races = emulator::early_copies = false;
  return count;
}

constexpr auto kEmulated = Backend::emulated;

TEST_CASE("bulk copies and reductions, and what is missing around them", "[hopper][clusters]") {
  for (const bool races : {false, true})
    for (const unsigned blocks : {1u, 3u, 8u})
      CHECK(says(races, "", [=] { return bulk_sum(kEmulated, blocks); }) == 8);
  const auto fault = [](ClusterFault f) { return [f] { return bulk_sum(kEmulated, 3, f); }; };
  CHECK(says(false, "ends before a thread has waited for copies to shared memory",
             fault(kNoWaitForBulk)) +
            says(false, "element ", fault(kNoWaitForBulk)) >=
        8);
  CHECK(says(true, "written by bulk_load of ", fault(kNoWaitForBulk)) == 8);
  CHECK(says(true, "read by bulk_reduce_add of ", fault(kNoFenceBeforeBulk)) == 8);
  CHECK(says(true, "with no fence_proxy_async between", fault(kNoFenceBeforeBulk)) == 8);
  // The counter says that the sums are there, but the wait was for the slab alone.
  CHECK(says(false, "element ", fault(kReadAlone)) == 4);  // where results come late
  CHECK(says(true, "bulk_wait_group until the result has been written", fault(kReadAlone)) == 8);
  CHECK(says(false, "ends with a TMA store or bulk reduction without tma_store_wait",
             fault(kNoWaitForReduction)) == 8);
  CHECK(says(true, "", [] { return bulk_sum(kEmulated, 3, kRefillEarly); }) == 8);  // in order
}

TEST_CASE("blocks of a cluster use each other's shared memory", "[hopper][clusters]") {
  for (const bool races : {false, true})
    for (const unsigned blocks : {2u, 4u})
      CHECK(says(races, "", [=] { return ring(kEmulated, blocks); }) == 8);
  const auto fault = [](ClusterFault f) { return [f] { return ring(kEmulated, 2, f); }; };
  CHECK(says(true, "race: ", fault(kNoWaitForBulk)) == 8);
  CHECK(says(true, " by bulk_copy_to_cluster of ", fault(kNoWaitForBulk)) >= 6);
  CHECK(says(true, "with no fence_proxy_async between", fault(kNoFenceBeforeBulk)) == 8);
  CHECK(says(true, "race: ", fault(kNoWaitForPeer)) == 8);
  // Peers that do not run yet, or have ended.
  CHECK(says(true, "on a barrier that no thread has initialised", fault(kBlockBarrierAlone)) +
            says(true, "race: ", fault(kBlockBarrierAlone)) ==
        8);
  const int ends_early = says(false, "ends in the middle of a phase", fault(kNoClusterSyncAtEnd)) +
                         says(false, "of the cluster that has ended", fault(kNoClusterSyncAtEnd)) +
                         says(false, "element ", fault(kNoClusterSyncAtEnd));
  CHECK(ends_early == 8);
  CHECK(says(false, "twice without cluster_wait between", fault(kArriveTwice)) == 8);
  CHECK(says(true, "its block may have ended before: cluster_sync keeps it",
             fault(kNoClusterSyncAtEnd)) == 8);
}

TEST_CASE("a cluster's multicast loads a tile to every block", "[hopper][clusters]") {
  for (const bool races : {false, true})
    for (const unsigned blocks : {1u, 2u, 4u})
      CHECK(says(races, "", [=] { return multicast(kEmulated, blocks); }) == 8);
  CHECK(says(true, "written by tma_load_multicast of ",
             [] { return multicast(kEmulated, 2, kNoWaitForBulk); }) == 8);
}

TEST_CASE("a dependent launch waits before it reads what the launch before wrote",
          "[hopper][clusters]") {
  for (const bool races : {false, true})
    CHECK(says(races, "", [] { return two_launches(kEmulated); }) == 8);
  const auto fault = [] { return two_launches(kEmulated, kNoDependencyWait); };
  CHECK(says(true, "of the launch before at tests/cluster_kernels.cu:", fault) == 8);
  CHECK(says(true, "with no wait_for_launch_before between", fault) == 8);
}

TEST_CASE("a dependent launch knows of a launch two before if the one between has waited",
          "[hopper][clusters]") {
  CHECK(says(true, "", [] { return two_launches(kEmulated, kThirdLaunch); }) == 8);
  // The third one waits for the second alone, which has written nothing.
  CHECK(says(true, "with no wait_for_launch_before between",
             [] { return two_launches(kEmulated, kNoWaitBetween); }) == 8);
}

TEST_CASE("bulk copies, clusters and dependent launches (GPU)", "[hopper][clusters][gpu]") {
  if (!gpu_info().available || gpu_info().cc_major != 9) {
    skipped("no GPU of compute capability 9.0: " + gpu_info().error);
    return;
  }
  for (const unsigned blocks : {1u, 3u, 100u}) CHECK(bulk_sum(Backend::gpu, blocks) == "");
  for (const unsigned blocks : {2u, 4u, 8u}) CHECK(ring(Backend::gpu, blocks) == "");
  for (const unsigned blocks : {1u, 2u, 4u, 8u}) CHECK(multicast(Backend::gpu, blocks) == "");
  CHECK(two_launches(Backend::gpu) == "");
}

}  // namespace
