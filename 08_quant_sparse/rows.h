// Which rows a block has, and which keys they see. The same for all decode steps of this chapter.
//
// The queries of all heads that share a K/V head lie one after the other in Q, O [B, Hq, seqlen_q,
// d] and lse: they are the rows of a matrix [group * seqlen_q, d]. A block takes some rows of one.
#pragma once

#include "attn/kernel.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::flash_decoding {
using namespace attn;

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;
// Stands for -inf where nothing was seen. It is finite, so that differences are numbers.
constexpr float kLowest = -3.4028234e38f;

struct Rows {
  int bh_kv;        // the K/V head, counted through the batch
  int64_t first;    // of all rows of Q, O and lse
  int row0, count;  // among the rows of the K/V head
};
__device__ __forceinline__ Rows rows_of(const Shape& shape, int block, int block_rows) {
  const int all = shape.heads / shape.kv_heads * shape.seqlen_q, tiles = ceil_div(all, block_rows);
  const int bh_kv = block / tiles, row0 = block % tiles * block_rows;
  return {bh_kv, int64_t{bh_kv} * all + row0, row0, min(block_rows, all - row0)};
}

// Keys [begin, end). A query sees those up to the diagonal, which ends at the last key in use.
//! [keys]
struct Keys {
  int begin, end;
};
__device__ __forceinline__ Keys keys_of_query(const Shape& shape, int used, int i) {
  const int diagonal = i + used - shape.seqlen_q;
  return {max(0, diagonal - shape.window_left), min(used, diagonal + shape.window_right + 1)};
}
//! [keys]

// Over the 4 lanes that share a row of an accumulator of mma.m16n8k16.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// o += weight x of four columns; and a row's four columns of O, times `factor`, in 16 bits.
__device__ __forceinline__ void add_scaled(float (&o)[4], float weight, const float4& x) {
  o[0] = fmaf(weight, x.x, o[0]), o[1] = fmaf(weight, x.y, o[1]);
  o[2] = fmaf(weight, x.z, o[2]), o[3] = fmaf(weight, x.w, o[3]);
}
template <class Element>
__device__ __forceinline__ void store_row_part(Element* to, const float (&o)[4], float factor) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack2<Element>(o[0] * factor, o[1] * factor),
                                             pack2<Element>(o[2] * factor, o[3] * factor));
}

}  // namespace ATTN_BACKEND::flash_decoding
