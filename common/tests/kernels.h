/// \file
/// Kernels for tests on both back ends: ptx_kernels.cu and simt_kernels.cu.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/device.h"
#include "attn/status.h"
#include "attn/step.h"

namespace attn::tests {

/// Arguments of a launch function: device memory, and numbers that select the kernel's behaviour.
struct KernelArguments {
  const void *a = nullptr, *b = nullptr, *c = nullptr;
  void* out = nullptr;
  DType dtype = DType::fp16;
  int mode = 0;
  unsigned grid[3] = {1, 1, 1}, block[3] = {32, 1, 1};
};
using KernelFunction = Status (*)(const KernelArguments&);

/// How mma_product loads its operands.
enum OperandLoad { kByHand, kLdmatrix, kLdmatrixPair, kLdmatrixTrans, kLdmatrixPairTrans };
inline constexpr int kNumBLoads = 5;
/// The mode of mma_product: A is loaded by hand or by ldmatrix_x4, B in any way.
constexpr int mma_mode(OperandLoad a, OperandLoad b) { return (a == kByHand ? 0 : kNumBLoads) + b; }

/// The shuffles of the kernel `shuffles`, in the order of its results. Each lane contributes
/// shuffled_value(thread).
enum ShuffleKind { kXor, kUp, kDown, kIndex };
struct Shuffle {
  ShuffleKind kind;
  int argument, width;
};
inline constexpr Shuffle kShuffles[] = {
    {kXor, 1, 32},  {kXor, 5, 32},   {kXor, 16, 32}, {kXor, 31, 32},  {kXor, 3, 8},
    {kXor, 8, 8},   {kXor, 12, 8},   {kXor, 16, 16}, {kUp, 1, 32},    {kUp, 7, 32},
    {kUp, 3, 8},    {kUp, 8, 8},     {kDown, 1, 32}, {kDown, 19, 32}, {kDown, 3, 4},
    {kDown, 5, 16}, {kIndex, 0, 32}, {kIndex, 9, 32}, {kIndex, 37, 32}, {kIndex, 5, 8},
    {kIndex, 11, 8}, {kIndex, 1, 2}};
inline constexpr int kNumShuffles = sizeof(kShuffles) / sizeof(kShuffles[0]);
constexpr int shuffled_value(int thread) { return thread * 7 + 3; }

/// Results per thread of the kernel `votes`.
inline constexpr int kNumVotes = 8;

/// The mode of hopper_product: columns / 8 of the result, whether A is in registers, whether B is
/// [k, n], the number of 64-wide k tiles; and the synchronisation to leave out, which the emulator
/// must detect.
enum HopperFault {
  kNoFault,
  kNoWaitForCopy,
  kNoWaitForReader,
  kWrongPhase,
  kReleasedTooEarly,
  kNoRegisterFence,
  kNoSharedFence,
  kTooFewBytes,
  kNoBarrierBeforeStore,
  kNoWaitForStore,
  kRegistersTooEarly,
  kNoInitFence,
  kNumHopperFaults
};
constexpr int hopper_mode(int columns, bool registers, bool transposed_b, int tiles,
                          HopperFault fault = kNoFault) {
  return ((((columns / 8 * 2 + registers) * 2 + transposed_b) * 16 + fault) * 16) + tiles;
}
// rows of the result: the last 4 of 64 are outside the tensor
inline constexpr int kHopperRows = 60;

/// What a kernel of cluster_kernels.cu leaves out.
enum ClusterFault {
  kNoClusterFault,
  kNoWaitForBulk,
  kNoFenceBeforeBulk,
  kReadAlone,
  kNoWaitForReduction,
  kRefillEarly,
  kBlockBarrierAlone,
  kNoWaitForPeer,
  kNoClusterSyncAtEnd, kArriveTwice,
  kNoDependencyWait,
  // No faults of their own: a launch between the two waits for the first one, or does not.
  kThirdLaunch,
  kNoWaitBetween
};
/// Floats of a row of them.
inline constexpr unsigned kBulkRow = 256;

/// Largest block of the kernels that reverse it through static shared memory.
inline constexpr int kMaxThreads = 128;

}  // namespace attn::tests

/// Declares a launch function for both back ends.
#define ATTN_DECLARE_TEST_KERNEL(kernel)                        \
  namespace gpu::tests {                                        \
  attn::Status kernel(const attn::tests::KernelArguments&);     \
  }                                                             \
  namespace emulated::tests {                                   \
  attn::Status kernel(const attn::tests::KernelArguments&);     \
  }                                                             \
  static_assert(true)

ATTN_DECLARE_TEST_KERNEL(mma_product);       // ptx_kernels.cu
ATTN_DECLARE_TEST_KERNEL(mma_s8_product);    // mma_s8_kernels.cu
ATTN_DECLARE_TEST_KERNEL(ldmatrix_dump);     // ptx_kernels.cu
ATTN_DECLARE_TEST_KERNEL(pack_pairs);
ATTN_DECLARE_TEST_KERNEL(copy_partial);
ATTN_DECLARE_TEST_KERNEL(copy_two_groups);
ATTN_DECLARE_TEST_KERNEL(add_quads);
ATTN_DECLARE_TEST_KERNEL(hopper_product);    // hopper_kernels.cu
ATTN_DECLARE_TEST_KERNEL(bulk_sum);          // cluster_kernels.cu
ATTN_DECLARE_TEST_KERNEL(cluster_ring);
ATTN_DECLARE_TEST_KERNEL(multicast);
ATTN_DECLARE_TEST_KERNEL(two_launches);
ATTN_DECLARE_TEST_KERNEL(stmatrix_dump);
ATTN_DECLARE_TEST_KERNEL(shuffles);          // simt_kernels.cu
ATTN_DECLARE_TEST_KERNEL(votes);
ATTN_DECLARE_TEST_KERNEL(count_threads);
ATTN_DECLARE_TEST_KERNEL(reverse_static);
ATTN_DECLARE_TEST_KERNEL(reverse_dynamic);
ATTN_DECLARE_TEST_KERNEL(record_indices);
