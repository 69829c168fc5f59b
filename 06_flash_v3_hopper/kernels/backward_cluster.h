// Parts of b11 that are as in b9: the exchange of fragments between its two warpgroups, and of the
// next key tile between the two blocks of a cluster.
#pragma once

#include "attn/kernel.h"
#include "kernels/hopper/fragments.h"
#include "ptx/cluster.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Passes fragments to the thread with the same index in the other warpgroup: both warpgroups have
// the same layout.
__device__ __forceinline__ void store_fragments(uint4 (&s)[4][kWarpgroup],
                                                const uint32_t (&x)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    s[i][thread_index() % kWarpgroup] = make_uint4(x[i][0], x[i][1], x[i][2], x[i][3]);
}
__device__ __forceinline__ void load_fragments(uint32_t (&x)[4][4],
                                               const uint4 (&s)[4][kWarpgroup]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 a = s[i][thread_index() % kWarpgroup];
    x[i][0] = a.x, x[i][1] = a.y, x[i][2] = a.z, x[i][3] = a.w;
  }
}

// The first block of the cluster has taken `next` from the counter and sends it to the other.
// Returns it in both. One thread of each.
template <class SharedStorage>
__device__ __forceinline__ unsigned share_next(SharedStorage& smem, unsigned next, int rank,
                                               int phase) {
  if (rank == 0) {
    mbarrier_wait(&smem.taken_empty, phase ^ 1);
    smem.sTaken[0] = make_uint4(next, 0, 0, 0);
    fence_proxy_async();
    bulk_copy_to_cluster(&smem.sTaken[1], &smem.sTaken[0], 16, &smem.taken_full, 1);
    return next;
  }
  mbarrier_arrive_expect_tx(&smem.taken_full, 16);
  mbarrier_wait(&smem.taken_full, phase);
  next = smem.sTaken[1].x;
  fence_proxy_async();  // before the next copy overwrites it
  mbarrier_release_cluster(cluster_address(&smem.taken_empty, 0));
  return next;
}

}  // namespace ATTN_BACKEND::hopper
