// The scheduler and epilogue of v17_prefix_tma: a list of prefix work tiles instead of v15's query
// tiles, rows of Q from several sequences, and partial O.
#pragma once

#include <numeric>

#include "kernels/hopper/fragments.h"
#include "kernels/hopper_tiles.h"
#include "kernels/work.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Static persistent scheduler: a block takes every gridDim.x-th entry of the list. Work tiles have
// equal cost, and usually there are no more than SMs; the entries after them are empty.
//! [prefix_list]
struct PrefixList {
  const plans::PrefixWork* gWork;  // [size]; empty where begin == end
  unsigned size;
  __device__ unsigned first() const { return blockIdx.x; }
  __device__ unsigned count() const { return size; }
  __device__ unsigned next(unsigned index) const { return index + gridDim.x; }
};
// A prefix work tile in the form of v15's query tiles: the rows of all members are the queries of
// one sequence, and the output is a partial result. q_head and q_token are not used.
template <class Config>
__device__ __forceinline__ WorkTile work_of(const plans::PrefixWork& piece) {
  constexpr int kBlockN = Config::kBlockN;
  WorkTile w{
      piece.row0, piece.rows, piece.keys, piece.sequence, piece.first_member, piece.kv_head, 0,
      {},         0,          0};
  w.kv_range = {piece.begin, piece.begin, min(piece.keys / kBlockN, piece.end), piece.end};
  w.lse = int64_t{piece.place} + piece.row0;
  w.o = w.lse * Config::kHeadDim;
  return w;
}
//! [prefix_list]

// Rows per box of Q: rows of one member, contiguous in memory and in a tile, for any tile start.
inline int64_t q_box_rows(const Problem& p, int block_m) {
  return std::gcd(p.group() * p.seqlen_q, int64_t{block_m});
}
// Tensor map of Q [B, Hq, seqlen_q, d] as [d / 64, rows, 64]: a box is that many rows of a panel.
//! [prefix_map]
template <class Element>
Status map_of_q_rows(TensorMap& map, const Element* g, const Problem& p, int box_rows) {
  const int64_t d = p.head_dim, rows = p.batch * p.heads * p.seqlen_q;
  return make_tensor_map<3>(map, g, {64, rows, d / 64}, {2 * d, 128}, {64, box_rows, 1},
                            Swizzle::k128);
}
//! [prefix_map]

// (7) O = O / l of these keys; (8) store O and lse, in log2 units, in fp32. The four lanes of a row
// write one sector.
//! [prefix_epilogue]
template <int kHeadDim>
__device__ __forceinline__ void store_part(float* gOPartial, float* gLsePartial,
                                           const WorkTile& work, const float (&o)[kHeadDim / 8][4],
                                           const float (&row_max)[2], float (&row_sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] = quad_sum(row_sum[r]);
    const float factor = __fdividef(1, row_sum[r]);  // every row attends to all keys of a prefix
    const int row = first_row() + 8 * r;
    if (work.row0 + row >= work.seqlen_q) continue;
    float* const gRow = gOPartial + work.o + int64_t{row} * kHeadDim + quad_col();
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
      *reinterpret_cast<float2*>(gRow + 8 * n) =
          make_float2(o[n][2 * r] * factor, o[n][2 * r + 1] * factor);
    if (quad_col() == 0) gLsePartial[work.lse + row] = row_max[r] + __log2f(row_sum[r]);
  }
}
//! [prefix_epilogue]

}  // namespace ATTN_BACKEND::hopper
