// Query tiles of a block of attention between two shards, and the merge of their result into the
// accumulators of the rank's rows. The kernel is that of chapter 06_flash_v3_hopper.
#pragma once

#include "attn/kernel.h"
#include "kernels/accumulation.h"
#include "kernels/hopper/fragments.h"
#include "kernels/hopper/tensor_maps.h"
#include "kernels/hopper/tile_order.h"
#include "kernels/merge.h"

namespace ATTN_BACKEND::ranks {
using namespace attn;
using namespace attn::ranks;
using namespace hopper;

//! [accumulators]
template <class Element>
struct Accumulators {
  Element* o;    // [rows, Hq, d]: after the last block
  float* o_acc;  // [rows, Hq, d]: before it, normalised
  float* lse;    // [Hq, rows], of what has been accumulated
  Accumulation rows;
};
//! [accumulators]

// A unit of work: some rows of one head of the block, and their range of key blocks.
struct WorkTile {
  int row0 = -1;           // first row in the block; -1: end of work
  int seqlen_q, seqlen_k;  // of the block
  int q_head, kv_head;
  KvBlockRange kv_range;
};
template <class Config>
__device__ __forceinline__ WorkTile work_of(const Shape& shape, TileOrder::Tile tile) {
  const auto [head, row0] = tile;
  return {row0,
          shape.seqlen_q,
          shape.seqlen_k,
          head,
          head / (shape.heads / shape.kv_heads),
          kv_block_range(shape, shape.seqlen_q, shape.seqlen_k, row0, Config::kBlockM,
                         Config::kBlockN)};
}

// Register epilogue: (7) O = O / l; (8) merge O and lse with the accumulators, which no other tile
// of this launch has; (9) store them, or, after the last block, O in its type. The four lanes of a
// row store 32 contiguous bytes of the accumulators, a whole sector.
//! [merge]
template <class Element, int kHeadDim>
__device__ __forceinline__ void accumulate_o(const Accumulators<Element>& g, const WorkTile& work,
                                             int heads, const float (&o)[kHeadDim / 8][4],
                                             const float (&row_max)[2], float (&row_sum)[2]) {
  Merge merge[2];
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] = quad_sum(row_sum[r]);
    const int row = work.row0 + first_row() + 8 * r;
    const bool exists = row < work.seqlen_q;
    // Not `> 0`: a NaN would get the lse of a fully masked row.
    const float lse = row_sum[r] != 0 ? kLn2 * (row_max[r] + __log2f(row_sum[r])) : -INFINITY;
    const bool fresh = !exists || (g.rows.first & g.rows.bit(row)) != 0;
    merge[r] = Merge(fresh ? -INFINITY : g.lse[work.q_head * g.rows.lse_stride + row], lse);
    factor[r] = row_sum[r] != 0 ? __fdividef(merge[r].weight_b, row_sum[r]) : 0;
  }
  __syncwarp();  // all lanes of a row have read its lse
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = work.row0 + first_row() + 8 * r;
    if (row >= work.seqlen_q) continue;
    const bool fresh = (g.rows.first & g.rows.bit(row)) != 0;
    const bool last = (g.rows.last & g.rows.bit(row)) != 0;
    const int64_t at = (int64_t{row} * heads + work.q_head) * kHeadDim + quad_col();
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      float2 out = make_float2(o[n][2 * r] * factor[r], o[n][2 * r + 1] * factor[r]);
      if (!fresh) {
        const float2 before = *reinterpret_cast<const float2*>(g.o_acc + at + 8 * n);
        out.x = fmaf(before.x, merge[r].weight_a, out.x);
        out.y = fmaf(before.y, merge[r].weight_a, out.y);
      }
      if (last)
        *reinterpret_cast<uint32_t*>(g.o + at + 8 * n) = pack2<Element>(out.x, out.y);
      else
        *reinterpret_cast<float2*>(g.o_acc + at + 8 * n) = out;
    }
    if (quad_col() == 0) g.lse[work.q_head * g.rows.lse_stride + row] = merge[r].lse;
  }
}
//! [merge]

}  // namespace ATTN_BACKEND::ranks
