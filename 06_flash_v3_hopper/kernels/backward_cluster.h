// How the two blocks of a cluster agree on the next key tile, in the steps for head dim 256 from b9
// on. Includes the wrappers of PTX that all of these steps use.
#pragma once

#include "attn/kernel.h"
#include "ptx/cluster.h"
#include "ptx/grid_dependency.h"
#include "ptx/launch.h"
#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "ptx/reduce_add.h"
#include "ptx/setmaxnreg.h"
#include "ptx/stmatrix.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// The first block of the cluster has taken `next` from the counter and sends it to the other.
// Returns it in both. One thread of each.
//! [take]
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
//! [take]

}  // namespace ATTN_BACKEND::hopper
