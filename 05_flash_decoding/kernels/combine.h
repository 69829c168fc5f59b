// Split-KV: the key range of a split, and the reduction of the splits of some rows by one block.
#pragma once

#include "attn/kernel.h"
#include "ptx/mma.h"
#include "kernels/decode/rows.h"

namespace ATTN_BACKEND::flash_decoding {

//! [part]
// Keys of a split: equal numbers of whole tiles, the last ones may be smaller or empty.
__device__ __forceinline__ KvRange part_of(const KvRange& keys, int split, int num_splits,
                                           int block_n) {
  const int split_keys = ceil_div(max(0, keys.end - keys.begin), num_splits * block_n) * block_n;
  const int begin = min(keys.begin + split * split_keys, keys.end);
  return {begin, min(begin + split_keys, keys.end)};
}
//! [part]

// O of a row is the mean of the splits' O with weights 2^lse; its lse is log2 of the sum of the
// weights. An empty split has lse = -inf and weight 0. First one warp per row computes the weights,
// one lane per split. Then each thread adds four columns, in split order: the result does not
// depend on the order of arrival. `partial_index(r, n)`: index of split n of row r.
//! [combine]
template <class Element, int kHeadDim, int kThreads, class PlaceOf>
__device__ __forceinline__ void combine(float* sWeight,            // [rows, num_splits]
                                        const float* gOPartial,    // [num_partials, d]
                                        const float* gLsePartial,  // [num_partials], in log2 units
                                        Element* gO,               // [B, Hq, seqlen_q, d]
                                        float* gLse,               // [B, Hq, seqlen_q]
                                        const Rows& rows, int num_splits, PlaceOf partial_index) {
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  for (int r = warp_id; r < rows.count; r += kThreads / 32) {
    float* const weight = sWeight + r * num_splits;
    float max = kLowest, sum = 0;
    for (int n = lane_id; n < num_splits; n += 32) {
      weight[n] = gLsePartial[partial_index(r, n)];
      max = fmaxf(max, weight[n]);
    }
    for (int distance = 16; distance > 0; distance /= 2)
      max = fmaxf(max, __shfl_xor_sync(~0u, max, distance));
    for (int n = lane_id; n < num_splits; n += 32) sum += weight[n] = exp2f(weight[n] - max);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    for (int n = lane_id; n < num_splits; n += 32) weight[n] *= sum != 0 ? 1 / sum : 0;
    if (lane_id == 0) gLse[rows.first + r] = sum != 0 ? kLn2 * (max + log2f(sum)) : -INFINITY;
  }
  __syncthreads();  // the weights of all rows are visible
  constexpr int kChunks = kHeadDim / 4;
  for (int idx = threadIdx.x; idx < rows.count * kChunks; idx += kThreads) {
    const int r = idx / kChunks, col = idx % kChunks * 4;
    float out[4] = {};
#pragma unroll 8
    for (int n = 0; n < num_splits; ++n) {
      const float weight = sWeight[r * num_splits + n];
      const float4 o =
          *reinterpret_cast<const float4*>(gOPartial + partial_index(r, n) * kHeadDim + col);
      add_scaled(out, weight, o);
    }
    store_row_part(gO + (rows.first + r) * kHeadDim + col, out, 1);
  }
}
//! [combine]

}  // namespace ATTN_BACKEND::flash_decoding
