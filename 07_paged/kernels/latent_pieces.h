// Everything v16_mla_seesaw needs besides its loop: the work tiles of a block, the tensor maps of Q
// and of the pool, and the reduction of partial results: of few parts as in v12_mla and
// v13_mla_wgmma, of many by combine_kernel.
#pragma once

#include "attn/kernel.h"
#include "ptx/grid_dependency.h"
#include "ptx/mma.h"
#include "ptx/tma.h"
#include "kernels/boxes.h"
#include "kernels/hopper/fragments.h"
#include "kernels/hopper_tiles.h"
#include "kernels/work.h"
#include "kernels/splits.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::latent {
using namespace attn;
using namespace paged;
using namespace plans;
using namespace splits;

// Work tile of a block: a range of a sequence's keys, and one row tile.
struct PlannedTile {
  WorkTile work;
  int row_block, seqlen_k;
  Rows rows;
  int begin, end;  // keys
};
template <class Config>
struct Pieces {
  const WorkTile* gWork;  // [work tiles] of all teams
  const int* gWorkBegin;  // [teams + 1]: the first work tile of each team
  const int* gSeqused;    // [B]: valid keys per sequence
  Shape shape;
  int row_tiles;
  int most_own_parts;  // a sequence of more parts is left to combine_kernel
  // A team is the row_tiles blocks of one sequence: the same keys, one row tile per block.
  __device__ int team() const { return static_cast<int>(blockIdx.x) / row_tiles; }
  __device__ int row_tile() const { return static_cast<int>(blockIdx.x) % row_tiles; }
  __device__ int begin() const { return gWorkBegin[team()]; }
  __device__ int end() const { return gWorkBegin[team() + 1]; }
  __device__ PlannedTile at(int piece) const {
    const WorkTile w = gWork[piece];
    const int seqlen_k = gSeqused[w.row_block], block = w.row_block * row_tiles + row_tile();
    const int first = w.tile * Config::kTile, keys = keys_of_sequence(shape, seqlen_k).end;
    return {w,        block,
            seqlen_k, rows_of(shape, block, Config::kRows),
            first,    min(keys, first + w.count * Config::kTile)};
  }
};

// Slot of a key: its index in the pool, counted in tokens, below 2^31.
struct Pages {
  const int* gTable;  // [B, max_pages]: page table
  int max_pages, page_size, box_rows;
};
__device__ __forceinline__ int slot_of(const Pages& pages, int sequence, int key, int end) {
  if (key >= end) return hopper::kNowhere;  // the page table is not read there
  const int page = pages.gTable[int64_t{sequence} * pages.max_pages + key / pages.page_size];
  return page * pages.page_size + key % pages.page_size;
}

// Tensor maps. Q as [9, rows, 64]: one box loads all rows of a block. The pool
// [num_pages, page_size, 576] as [tokens / 8, 9, 8, 64], boxes of a page's rows and the panels of
// one half; and as [tokens, 9, 64], boxes of one row.
//! [map]
struct Maps {
  TensorMap q, half[2], row;
  template <class Element, class Config>
  Status make(const Arguments& args, int box_rows) {
    const ForwardParams<Element> params(args);
    const Problem& p = args.problem;
    const auto* const gK = params.k;
    const int64_t rows = p.batch * p.heads * p.seqlen_q;
    const int64_t tokens = num_pages_of(p) * page_size_of(p), token_bytes = 2 * kLatentDim;
    constexpr int kPanels = kLatentDim / 64;
    const auto make_half = [&](int n) {
      return make_tensor_map<4>(half[n], gK, {64, 8, kPanels, tokens / 8},
                                {token_bytes, 128, 8 * token_bytes},
                                {64, 8, Config::panels(n), box_rows / 8}, Swizzle::k128);
    };
    for (const Status& status :
         {make_tensor_map<3>(q, params.q, {64, rows, kPanels}, {token_bytes, 128},
                             {64, Config::kRows, kPanels}, Swizzle::k128),
          make_half(0), make_half(1), hopper::map_of_rows(row, gK, p)})
      if (!status.ok()) return status;
    return Status::success();
  }
};
//! [map]

// One warp reduces the partial results of a row. A lane owns four of each 128 columns and the
// weight of every 32nd partial result. `partial_index(n)`: index of partial result n.
//! [merge_row]
template <class Element, class Config, class PlaceOf>
__device__ __forceinline__ void merge_row(const float* gOPartial, const float* gLsePartial,
                                          Element* gO, float* gLse, int64_t row, int num_parts,
                                          PlaceOf partial_index) {
  constexpr int kHeadDim = Config::kOutDim, kAtOnce = 4;  // partial results in flight
  constexpr int kOwn = ceil_div(kHeadDim, 128);           // groups of four columns per lane
  const int lane_id = threadIdx.x % 32;
  float4 parts[kAtOnce][kOwn] = {};
  const auto load = [&](int n0) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int c = 0; c < kOwn; ++c)
        if (n0 + i < num_parts)
          parts[i][c] = *reinterpret_cast<const float4*>(
              gOPartial + partial_index(n0 + i) * kHeadDim + 128 * c + 4 * lane_id);
  };
  load(0);
  float max = kLowest, sum = 0, weight = 0, out[kOwn][4] = {};
  for (int n = lane_id; n < num_parts; n += 32) max = fmaxf(max, gLsePartial[partial_index(n)]);
  for (int distance = 16; distance > 0; distance /= 2)
    max = fmaxf(max, __shfl_xor_sync(~0u, max, distance));
  for (int n0 = 0; n0 < num_parts; n0 += kAtOnce) {
    if (n0 > 0) load(n0);
    if (n0 % 32 == 0) {
      const int n = n0 + lane_id;
      weight = n < num_parts ? exp2f(gLsePartial[partial_index(n)] - max) : 0;
      sum += weight;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float of_part = __shfl_sync(~0u, weight, n0 % 32 + i);
      if (n0 + i >= num_parts) continue;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) add_scaled(out[c], of_part, parts[i][c]);
    }
  }
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
#pragma unroll
  for (int c = 0; c < kOwn; ++c)
    store_row_part(gO + row * kHeadDim + 128 * c + 4 * lane_id, out[c], sum != 0 ? 1 / sum : 0);
  if (lane_id == 0) gLse[row] = sum != 0 ? kLn2 * (max + log2f(sum)) : -INFINITY;
}
//! [merge_row]

// Reduces sequences of many parts, in a launch that depends on the attention kernel. A block
// reduces 128 columns of a row: a lane owns four of them; warp w reads parts w, w + 8, ..., eight
// at once.
constexpr int kCombineWarps = 8;
//! [combine]
template <class Element, class Config>
__global__ void __launch_bounds__(32 * kCombineWarps)
    combine_kernel(const SplitSequence* gSplits,  // [most_splits]: the list ends before 0 parts
                   const float* gOPartial, const float* gLsePartial, Element* gO, float* gLse,
                   Shape shape, int row_tiles, int most_splits) {
  constexpr int kOutDim = Config::kOutDim, kGroups = kOutDim / 128, kAtOnce = 8;
  __shared__ float4 sO[kCombineWarps][32];
  __shared__ float sSum[kCombineWarps];
  const int warp_id = static_cast<int>(threadIdx.x) / 32;
  const int lane_id = static_cast<int>(threadIdx.x) % 32;
  const int rows = shape.heads * shape.seqlen_q;  // of a sequence
  const auto split_of = [&](int task) {           // no kernel writes the list
    const int n = task / (rows * kGroups);
    SplitSequence split{};
    if (n < most_splits) split = gSplits[n];
    return split;
  };
  SplitSequence split = split_of(static_cast<int>(blockIdx.x));
  wait_for_launch_before();  // partial results are stored
  for (int task = blockIdx.x; split.num_parts > 0; split = split_of(task += gridDim.x)) {
    const int num_parts = split.num_parts;
    const int row = task / kGroups % rows, col = task % kGroups * 128 + 4 * lane_id;
    const auto partial_index = [&](int part) {
      return (int64_t{split.first_part + part} * row_tiles + row / Config::kRows) * Config::kRows +
             row % Config::kRows;
    };
    float max = kLowest;
    for (int n = lane_id; n < num_parts; n += 32) max = fmaxf(max, gLsePartial[partial_index(n)]);
    for (int distance = 16; distance > 0; distance /= 2)
      max = fmaxf(max, __shfl_xor_sync(~0u, max, distance));
    float out[4] = {}, sum = 0;
    for (int n0 = warp_id; n0 < num_parts; n0 += kAtOnce * kCombineWarps) {
      float4 parts[kAtOnce];
      float lse[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int n = n0 + i * kCombineWarps;
        parts[i] = {}, lse[i] = -INFINITY;
        if (n >= num_parts) continue;
        parts[i] = *reinterpret_cast<const float4*>(gOPartial + partial_index(n) * kOutDim + col);
        lse[i] = gLsePartial[partial_index(n)];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = exp2f(lse[i] - max);
        sum += weight;
        add_scaled(out, weight, parts[i]);
      }
    }
    sO[warp_id][lane_id] = make_float4(out[0], out[1], out[2], out[3]);
    if (lane_id == 0) sSum[warp_id] = sum;
    __syncthreads();  // sums of all warps are visible
    if (warp_id == 0) {
      float all[4] = {}, l = 0;
#pragma unroll
      for (int w = 0; w < kCombineWarps; ++w) add_scaled(all, 1, sO[w][lane_id]), l += sSum[w];
      const int64_t to = int64_t{split.sequence} * rows + row;
      store_row_part(gO + to * kOutDim + col, all, l != 0 ? 1 / l : 0);
      if (col == 0) gLse[to] = l != 0 ? kLn2 * (max + log2f(l)) : -INFINITY;
    }
    __syncthreads();  // the sums have been read
  }
}
//! [combine]

}  // namespace ATTN_BACKEND::latent
