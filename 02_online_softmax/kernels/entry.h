// A number and its column, and the list of a warp: for v6_softmax_topk.
#pragma once

#include "attn/kernel.h"

namespace ATTN_BACKEND::softmax_vectors {
using namespace attn;

// A number and its column.
struct Entry {
  float value = -INFINITY;
  int column = -1;
};
// Whether `a` comes before `b`: the larger number, of equals the smaller column. -inf comes before
// nothing.
__device__ __forceinline__ bool before(Entry a, Entry b) {
  return a.value > b.value || (a.value == b.value && a.value > -INFINITY && a.column < b.column);
}
__device__ __forceinline__ Entry entry_of_lane(Entry e, int lane) {
  return {__shfl_sync(~0u, e.value, lane), __shfl_sync(~0u, e.column, lane)};
}

//! [insert]
// `mine` of lane i is number i of a list in order. Inserts the candidates of all lanes that come
// before number k - 1; numbers from k on may be wrong, and are not used.
__device__ inline void insert(Entry& mine, Entry candidate, int k) {
  const int lane_id = threadIdx.x % 32;
  unsigned waiting = __ballot_sync(~0u, before(candidate, entry_of_lane(mine, k - 1)));
  while (waiting != 0) {  // all lanes agree on this
    const Entry next = entry_of_lane(candidate, __ffs(waiting) - 1);
    waiting &= waiting - 1;
    // Those that stay before it are the first lanes; the others move up one lane.
    const int place = __popc(__ballot_sync(~0u, before(mine, next)));
    const Entry below{__shfl_up_sync(~0u, mine.value, 1), __shfl_up_sync(~0u, mine.column, 1)};
    if (lane_id > place) mine = below;
    if (lane_id == place) mine = next;
  }
}
//! [insert]

}  // namespace ATTN_BACKEND::softmax_vectors
