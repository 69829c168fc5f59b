// Kernels that use bulk copies and reductions, clusters and dependent launches of common/ptx. Each
// synchronisation can be left out in the emulator, which has to report it.
#include "attn/kernel.h"
#include "ptx/bulk.h"
#include "ptx/cluster.h"
#include "ptx/global_flag.h"
#include "ptx/grid_dependency.h"
#include "ptx/launch.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "tests/kernels.h"

namespace ATTN_BACKEND::tests {
using namespace attn;
using namespace attn::tests;

#ifdef ATTN_EMULATED
#define FAULT const int fault = planted
#else
#define FAULT constexpr int fault = kNoClusterFault
#endif

struct Row {
  alignas(128) float row[kBulkRow];
  alignas(128) float other[kBulkRow];
  uint64_t full, ready;
  ATTN_MEMBERS(Row, row, other, full, ready)
};

// Each block brings its row of a by bulk_load, doubles it, and adds it to out. The last block to
// arrive writes the sums, as whoever reads them after the counter, behind them.
__global__ void bulk_sum_kernel(const float* gA, float* gOut, unsigned* gCounter,
                                [[maybe_unused]] int planted) {
  FAULT;
  auto& smem = dynamic_shared<Row>();
  __shared__ unsigned arrived;
  if (threadIdx.x == 0) mbarrier_init(&smem.full, 1), mbarrier_init_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&smem.full, kBulkRow * 4);
    bulk_load(smem.row, gA + blockIdx.x * kBulkRow, kBulkRow * 4, &smem.full);
  }
  if (fault != kNoWaitForBulk) mbarrier_wait(&smem.full, 0);
  for (unsigned i = threadIdx.x; i < kBulkRow; i += blockDim.x) smem.row[i] *= 2;
  if (fault != kNoFenceBeforeBulk) fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_reduce_add(gOut, smem.row, kBulkRow);
    tma_store_commit();
    if (fault == kReadAlone)
      tma_store_wait<0>();
    else if (fault != kNoWaitForReduction)
      bulk_wait_group<0>();
    arrived = flag_add(gCounter, 1);
  }
  __syncthreads();
  if (arrived + 1 == gridDim.x)
    for (unsigned i = threadIdx.x; i < kBulkRow; i += blockDim.x) gOut[kBulkRow + i] = gOut[i];
  if (fault == kRefillEarly && threadIdx.x == 0) smem.row[0] = 0;
}

Status bulk_sum(const KernelArguments& args) {
  return launch_kernel(bulk_sum_kernel, dim3(args.grid[0]), dim3(64), sizeof(Row), nullptr,
                       static_cast<const float*>(args.a), static_cast<float*>(args.out),
                       static_cast<unsigned*>(const_cast<void*>(args.b)), args.mode);
}

// Each block of a cluster writes its rank plus the column to its row; adds the next block's row by
// ld.shared::cluster, then what the previous block has copied to `other`.
__global__ void cluster_ring_kernel(float* gOut, [[maybe_unused]] int planted) {
  FAULT;
  auto& smem = dynamic_shared<Row>();
  const int rank = cluster_rank(), size = static_cast<int>(gridDim.x);
  const int next = (rank + 1) % size, before = (rank + size - 1) % size;
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.full, 1), mbarrier_init(&smem.ready, 2 * static_cast<int>(blockDim.x));
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(&smem.full, kBulkRow * 4);
  }
  for (unsigned i = threadIdx.x; i < kBulkRow; i += blockDim.x)
    smem.row[i] = static_cast<float>(100 * rank) + static_cast<float>(i);
  if (fault != kNoFenceBeforeBulk) fence_proxy_async();
  if (fault == kBlockBarrierAlone)
    __syncthreads();
  else
    cluster_sync();  // all rows are written, all barriers are initialised
  if (threadIdx.x == 0) bulk_copy_to_cluster(smem.other, smem.row, kBulkRow * 4, &smem.full, next);
  if (fault != kNoWaitForBulk) mbarrier_wait(&smem.full, 0);
  for (unsigned i = threadIdx.x; i < kBulkRow; i += blockDim.x) {
    const float of_next = cluster_load<float>(cluster_address(&smem.row[i], next));
    gOut[rank * kBulkRow + static_cast<int>(i)] = smem.row[i] + of_next + smem.other[i];
  }
  if (fault == kArriveTwice) cluster_arrive();
  // The block before has read this row, the next one has got its copy: both say so.
  mbarrier_arrive_cluster(cluster_address(&smem.ready, next));
  mbarrier_arrive_cluster(cluster_address(&smem.ready, before));
  if (fault == kNoClusterSyncAtEnd) return;
  if (fault != kNoWaitForPeer) mbarrier_wait_cluster(&smem.ready, 0);
  for (unsigned i = threadIdx.x; i < kBulkRow; i += blockDim.x) smem.row[i] = -1;
  if (fault == kArriveTwice) __syncthreads();  // all threads of both blocks have arrived
  cluster_sync();  // no block ends while its shared memory is used
}

Status cluster_ring(const KernelArguments& args) {
  return launch_kernel(LaunchAttributes{args.grid[0]}, cluster_ring_kernel, dim3(args.grid[0]),
                       dim3(64), sizeof(Row), nullptr, static_cast<float*>(args.out), args.mode);
}

struct Tile {
  alignas(1024) __half tile[64 * 64];
  uint64_t full;
  ATTN_MEMBERS(Tile, tile, full)
};

// Rank 0 loads a tile for all blocks of the cluster; each writes it, plus its rank.
__global__ void multicast_kernel(const __grid_constant__ TensorMap map, __half* gOut,
                                 [[maybe_unused]] int planted) {
  FAULT;
  auto& smem = dynamic_shared<Tile>();
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.full, 1), mbarrier_init_fence();
    mbarrier_arrive_expect_tx(&smem.full, 64 * 64 * 2);
  }
  if (fault == kBlockBarrierAlone)
    __syncthreads();
  else
    cluster_sync();
  if (rank == 0 && threadIdx.x == 0)
    tma_load_multicast(smem.tile, map, &smem.full, {0, 0, 0},
                       static_cast<uint16_t>((1u << gridDim.x) - 1));
  if (fault != kNoWaitForBulk) mbarrier_wait(&smem.full, 0);
  for (int i = static_cast<int>(threadIdx.x); i < 64 * 64; i += static_cast<int>(blockDim.x))
    gOut[rank * 64 * 64 + i] =
        __float2half_rn(__half2float(smem.tile[i]) + static_cast<float>(rank));
  cluster_sync();
}

Status multicast(const KernelArguments& args) {
  TensorMap map;
  if (const Status made = make_tensor_map<3>(map, static_cast<const __half*>(args.a), {64, 64, 1},
                                             {128, 64 * 64 * 2}, {64, 64, 1}, Swizzle::k128);
      !made.ok())
    return made;
  return launch_kernel(LaunchAttributes{args.grid[0]}, multicast_kernel, dim3(args.grid[0]),
                       dim3(64), sizeof(Tile), nullptr, map, static_cast<__half*>(args.out),
                       args.mode);
}

// out = index, by the first launch; out = 2 out + 1, by the second, which may begin early.
__global__ void fill_kernel(float* gOut) {
  launch_dependents();
  gOut[blockIdx.x * blockDim.x + threadIdx.x] =
      static_cast<float>(blockIdx.x * blockDim.x + threadIdx.x);
}
__global__ void continue_kernel(float* gOut, [[maybe_unused]] int planted) {
  FAULT;
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (fault != kNoDependencyWait) wait_for_launch_before();
  gOut[i] = 2 * gOut[i] + 1;
}
__global__ void wait_kernel(bool waits) {
  if (waits) wait_for_launch_before();
}
Status two_launches(const KernelArguments& args) {
  auto* const out = static_cast<float*>(args.out);
  if (const Status status =
          launch_kernel(fill_kernel, dim3(args.grid[0]), dim3(64), 0, nullptr, out);
      !status.ok())
    return status;
  if (args.mode == kThirdLaunch || args.mode == kNoWaitBetween)
    if (const Status status =
            launch_kernel(LaunchAttributes{1, true}, wait_kernel, dim3(args.grid[0]), dim3(64), 0,
                          nullptr, args.mode == kThirdLaunch);
        !status.ok())
      return status;
  return launch_kernel(LaunchAttributes{1, true}, continue_kernel, dim3(args.grid[0]), dim3(64), 0,
                       nullptr, out, args.mode);
}

}  // namespace ATTN_BACKEND::tests
