// A number and its column, and which of two comes first: for v6_softmax_topk.
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

}  // namespace ATTN_BACKEND::softmax_vectors
