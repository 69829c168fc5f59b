// Shared by the backward steps: tile sizes, the query tiles of a key tile, tensor maps, masks, the
// stores of dK, dV and dQ, and the preprocess and postprocess kernels. The step files have the
// products, the arithmetic between them and the pipeline.
#pragma once

#include "attn/kernel.h"
#include "kernels/hopper/fragments.h"
#include "kernels/hopper/tensor_maps.h"
#include "kernels/hopper/tile_order.h"
#include "ptx/grid_dependency.h"
#include "ptx/mma.h"
#include "ptx/tma.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// A query tile and a key tile. Each of two consumer warpgroups owns 64 keys of S^T, dP^T, dV and
// dK, and 64 rows x 64 columns of dQ: at d=64 half of the rows, at d=128 half of the columns.
//! [tile]
template <int kHeadDim_, int kBlockM_>
struct BackwardTile {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = 128;  // d, B_r, B_c
  static constexpr int kNumConsumers = 2, kConsumerThreads = kNumConsumers * kWarpgroup;
  static constexpr int kDqRowGroups = kBlockM / 64;  // warpgroups along the rows of dQ
  static constexpr int kFragments = 64 / 8;          // float4 of dQ per thread
  static constexpr int kTileBytes = kBlockM * kHeadDim * 2, kKeyTileBytes = kBlockN * kHeadDim * 2;
  static_assert(kBlockN == 64 * kNumConsumers, "a warpgroup owns 64 keys");
  static_assert(kBlockM * kHeadDim == 64 * 64 * kNumConsumers, "and 64 x 64 elements of dQ");
};
// First row and column of a warpgroup's part of dQ.
template <class Config>
__device__ __forceinline__ int dq_row(int warpgroup) {
  return warpgroup % Config::kDqRowGroups * 64;
}
template <class Config>
__device__ __forceinline__ int dq_col(int warpgroup) {
  return warpgroup / Config::kDqRowGroups * 64;
}
//! [tile]

// Query tiles: in [begin, end) at least one key of [key0, key0 + keys) is visible to some row; in
// [unmasked_begin, unmasked_end) all of these keys are visible to every row.
//! [ranges]
__device__ __forceinline__ KvBlockRange q_block_range(const Shape& shape, int key0, int keys,
                                                      int block_m) {
  const int seqlen_q = shape.seqlen_q, seqlen_k = shape.seqlen_k;
  const int last = min(key0 + keys, seqlen_k) - 1, causal_offset = seqlen_k - seqlen_q;
  // From the first row with the first key visible to the last row with the last key visible.
  const int begin = max(0, key0 - causal_offset - shape.window_right);
  const int end = min(seqlen_q, last - causal_offset + shape.window_left + 1);
  if (end <= begin) return {0, 0, 0, 0};  // visible to no row: dK = dV = 0
  // From the first row with the last key visible to the last row with the first key visible.
  const int all_begin = max(0, last - causal_offset - shape.window_right);
  const int all_end = min(seqlen_q, key0 - causal_offset + shape.window_left + 1);
  KvBlockRange range{begin / block_m, ceil_div(all_begin, block_m), 0, ceil_div(end, block_m)};
  // Rows past the end have P = 0 and need no mask; keys past the end do.
  range.unmasked_end = all_end == seqlen_q ? range.end : max(0, all_end) / block_m;
  if (key0 + keys > seqlen_k) range.unmasked_end = 0;
  range.unmasked_begin = min(range.unmasked_begin, range.end);
  range.unmasked_end = max(range.unmasked_begin, range.unmasked_end);
  return range;
}
// Query tile at row0: its first visible key, if any key is visible to a row of it; and whether one
// is.
__device__ __forceinline__ int first_visible_key(const Shape& shape, int row0) {
  return max(0, row0 + shape.seqlen_k - shape.seqlen_q - shape.window_left);
}
__device__ __forceinline__ bool is_visited(const Shape& shape, int row0, int block_m) {
  const int last = min(row0 + block_m, shape.seqlen_q) - 1;
  return first_visible_key(shape, row0) <=
         min(shape.seqlen_k - 1, last + shape.seqlen_k - shape.seqlen_q + shape.window_right);
}
//! [ranges]

// A unit of work: a key tile of one KV head. It visits the query tiles in `q_range` of all query
// heads that share the KV head, so dK and dV are summed over the group in registers.
//! [work]
struct KeyTile {
  int kv_head, key0;    // head index through the batch; first key
  int first_head, end;  // query heads of the group, through the batch: [first_head, end)
  KvBlockRange q_range;
};
template <class Config>
__device__ __forceinline__ KeyTile key_tile_of(const Shape& shape, int kv_head, int n_block) {
  const int group = shape.heads / shape.kv_heads, key0 = n_block * Config::kBlockN;
  return {kv_head, key0, kv_head * group, (kv_head + 1) * group,
          q_block_range(shape, key0, Config::kBlockN, Config::kBlockM)};
}
//! [work]

// Maps of Q, dO, K and V, and of lse and D per row. TMA copies bits: a box of the last one is
// kBlockM floats, described as twice as many 16-bit elements.
//! [maps]
struct BackwardMaps {
  TensorMap q, dout, k, v, rows;
  template <class Element, class Config>
  Status make(const Arguments& args) {
    const BackwardParams<Element> params(args);
    const Problem& p = args.problem;
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
    const int64_t tiles = p.batch * p.heads * ceil_div(p.seqlen_q, kBlockM);
    for (const Status& status :
         {map_of(q, params.q, p, p.heads, p.seqlen_q, kBlockM),
          map_of(dout, params.dout, p, p.heads, p.seqlen_q, kBlockM),
          map_of(k, params.k, p, p.kv_heads, p.seqlen_k, kBlockN),
          map_of(v, params.v, p, p.kv_heads, p.seqlen_k, kBlockN),
          make_tensor_map<3>(rows, args.in<__half>("rows"), {2 * kBlockM, 2, tiles},
                             {4 * kBlockM, 8 * kBlockM}, {2 * kBlockM, 1, 1}, Swizzle::kNone)})
      if (!status.ok()) return status;
    return Status::success();
  }
};
//! [maps]

// Sets masked scores to -inf. S^T: rows are keys, columns are query rows. `row0`: key on the
// diagonal of the tile's first row; `key0`: first key of the tile.
//! [mask]
template <class Config>
__device__ __forceinline__ void apply_mask(float (&s)[Config::kBlockM / 8][4], const Shape& shape,
                                           int row0, int key0) {
  // Relative to this lane's first key and row.
  const int row_minus_col = row0 + quad_col() - (key0 + first_row());
  const int keys = shape.seqlen_k - (key0 + first_row());
#pragma unroll
  for (int n = 0; n < Config::kBlockM / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 8 * (i / 2), row = 8 * n + i % 2;
      if (key - row < row_minus_col - shape.window_left ||
          key - row > row_minus_col + shape.window_right || key >= keys)
        s[n][i] = -INFINITY;
    }
}
//! [mask]

// Stores an accumulator, times `factor`. `g`: this lane's first row, 8 rows above its second;
// `rows`: number of rows from it on that exist. As in store_o, pairs of lanes exchange halves, so
// that a quad stores 32 contiguous bytes.
//! [store]
template <class Element, int kTiles>
__device__ __forceinline__ void store_gradient(Element* g, int64_t row_stride, int rows,
                                               const float (&x)[kTiles][4], float factor) {
  const bool upper = thread_index() % 2 != 0;
  g += (upper ? 8 : 0) + thread_index() / 2 % 2 * 4;
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      const uint32_t even = pack2<Element>(x[n][2 * r] * factor, x[n][2 * r + 1] * factor);
      const uint32_t odd = pack2<Element>(x[n + 1][2 * r] * factor, x[n + 1][2 * r + 1] * factor);
      const uint32_t got = __shfl_xor_sync(~0u, upper ? even : odd, 1);
      if (8 * r < rows)
        *reinterpret_cast<uint2*>(g + 8 * r * row_stride + 8 * n) =
            upper ? make_uint2(got, odd) : make_uint2(even, got);
    }
}
//! [store]

// Of a query tile: lse in log2 units and D = rowsum(dO . O) per row, from the rounded O. Rows past
// the end and fully masked rows get lse = +inf, so that P = 0. All 256 threads of a block; tensors
// as of dot_kernel.
template <class Element, class Config>
__device__ __forceinline__ void preprocess_rows(const Element* gO, const Element* gdO,
                                                const float* gLse, float* gRows,
                                                const Shape& shape, int64_t tile,
                                                int num_m_blocks) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM;
  constexpr int kLanes = kHeadDim / 8;  // per row, 16 bytes each
  const int64_t bh = tile / num_m_blocks;
  const int row0 = static_cast<int>(tile % num_m_blocks) * kBlockM;
#pragma unroll
  for (int r = static_cast<int>(threadIdx.x) / kLanes; r < kBlockM; r += 256 / kLanes) {
    const bool inside = row0 + r < shape.seqlen_q;
    const int64_t row = bh * shape.seqlen_q + row0 + r;
    float sum = 0;
    if (inside) {
      const int64_t i = row * kHeadDim + threadIdx.x % kLanes * 8;
      const uint4 o = *reinterpret_cast<const uint4*>(gO + i);
      const uint4 d_o = *reinterpret_cast<const uint4*>(gdO + i);
      const uint32_t a[4] = {o.x, o.y, o.z, o.w}, b[4] = {d_o.x, d_o.y, d_o.z, d_o.w};
#pragma unroll
      for (int c = 0; c < 8; ++c)
        sum += unpack<Element>(a[c / 2], c % 2) * unpack<Element>(b[c / 2], c % 2);
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (threadIdx.x % kLanes == 0) {
      const float lse = inside ? gLse[row] : -INFINITY;
      gRows[tile * (2 * kBlockM) + r] = lse == -INFINITY ? INFINITY : lse * kLog2e;
      gRows[tile * (2 * kBlockM) + kBlockM + r] = sum;
    }
  }
}

// (1) Preprocess; clears the dQ accumulator and the tile counter. `kDependents`: the next launch
// may begin as soon as all blocks have begun.
//! [dot]
template <class Element, class Config, bool kDependents = false>
__global__ void __launch_bounds__(256)
    dot_kernel(const Element* gO,   // [B, Hq, seqlen_q, d]
               const Element* gdO,  // [B, Hq, seqlen_q, d]
               const float* gLse,   // [B, Hq, seqlen_q]
               float* gRows,        // [tiles, 2, kBlockM]: lse / log(2), D
               float4* gAccum,      // [tiles, kFragments, 256]; null: not cleared
               unsigned* gCounter,  // of a dynamic tile scheduler, or null
               Shape shape, int num_m_blocks) {
  if constexpr (kDependents) launch_dependents();
  const int64_t tile = blockIdx.x;
  if (gCounter != nullptr && tile == 0 && threadIdx.x == 0) *gCounter = 0;
  if (gAccum != nullptr)
#pragma unroll
    for (int f = 0; f < Config::kFragments; ++f)
      gAccum[(tile * Config::kFragments + f) * 256 + threadIdx.x] = float4{};
  preprocess_rows<Element, Config>(gO, gdO, gLse, gRows, shape, tile, num_m_blocks);
}
//! [dot]

// (8) Postprocess of a query tile: dQ = scale * accumulator, rounded. Threads hold what they hold
// of a wgmma accumulator. `tile`: head * num_m_blocks + m_block; no accumulator: dQ = 0.
//! [convert]
template <class Element, class Config>
__device__ __forceinline__ void convert_tile(const float4* gAccum, Element* gdQ, const Shape& shape,
                                             int64_t tile, int num_m_blocks) {
  const int thread = thread_index(), warpgroup = thread / kWarpgroup;
  const int64_t bh = tile / num_m_blocks;
  const int row = static_cast<int>(tile % num_m_blocks) * Config::kBlockM +
                  dq_row<Config>(warpgroup) + first_row() % 64;
  float x[Config::kFragments][4];
#pragma unroll
  for (int f = 0; f < Config::kFragments; ++f) {
    float4 sum{};
    if (gAccum != nullptr)
      sum = gAccum[(tile * Config::kFragments + f) * Config::kConsumerThreads + thread];
    x[f][0] = sum.x, x[f][1] = sum.y, x[f][2] = sum.z, x[f][3] = sum.w;
  }
  Element* const g =
      gdQ + (bh * shape.seqlen_q + row) * Config::kHeadDim + dq_col<Config>(warpgroup);
  store_gradient(g, Config::kHeadDim, shape.seqlen_q - row, x, shape.softmax_scale);
}
// `kDependent`: launched as a dependent of the kernel that adds to gAccum.
template <class Element, class Config, bool kDependent = false>
__global__ void __launch_bounds__(Config::kConsumerThreads)
    convert_kernel(const float4* gAccum,  // [tiles, kFragments, threads]
                   Element* gdQ,          // [B, Hq, seqlen_q, d]
                   Shape shape, int num_m_blocks) {
  if constexpr (kDependent) wait_for_launch_before();
  convert_tile<Element, Config>(gAccum, gdQ, shape, blockIdx.x, num_m_blocks);
}
//! [convert]

}  // namespace ATTN_BACKEND::hopper
