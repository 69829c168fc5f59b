// Top-k list of a warp for v6_softmax_topk: one (value, column) entry per lane.
#pragma once

#include "attn/kernel.h"

namespace ATTN_BACKEND::softmax_vectors {
using namespace attn;

// A value and its column.
struct Entry {
  float value = -INFINITY;
  int column = -1;
};
// Sort order: descending value, ties by ascending column. -inf precedes nothing.
__device__ __forceinline__ bool before(Entry a, Entry b) {
  return a.value > b.value || (a.value == b.value && a.value > -INFINITY && a.column < b.column);
}
__device__ __forceinline__ Entry entry_of_lane(Entry e, int lane) {
  return {__shfl_sync(~0u, e.value, lane), __shfl_sync(~0u, e.column, lane)};
}

//! [insert]
// Inserts the candidates of all lanes into the warp's sorted list, of which lane i holds entry i in
// `mine`. Candidates that entry k - 1 precedes are dropped. Entries from k on are undefined.
__device__ inline void insert(Entry& mine, Entry candidate, int k) {
  const int lane_id = threadIdx.x % 32;
  unsigned waiting = __ballot_sync(~0u, before(candidate, entry_of_lane(mine, k - 1)));
  while (waiting != 0) {  // warp-uniform
    const Entry next = entry_of_lane(candidate, __ffs(waiting) - 1);
    waiting &= waiting - 1;
    // Entries before `next` stay in the first lanes; the others move up by one lane.
    const int place = __popc(__ballot_sync(~0u, before(mine, next)));
    const Entry below{__shfl_up_sync(~0u, mine.value, 1), __shfl_up_sync(~0u, mine.column, 1)};
    if (lane_id > place) mine = below;
    if (lane_id == place) mine = next;
  }
}
//! [insert]

}  // namespace ATTN_BACKEND::softmax_vectors
