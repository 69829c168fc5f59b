// Rows of a thread block, and per-lane operations on their columns. Of chapter 05_flash_decoding.
//
// The queries of all heads that share a K/V head are contiguous in Q, O [B, Hq, seqlen_q, d] and in
// lse. They are the rows of a matrix [group * seqlen_q, d]; a block processes a row block of it.
#pragma once

#include "attn/kernel.h"
#include "kernels/decode/keys.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::flash_decoding {
using namespace attn;

// Finite initial row maximum: avoids (-inf) - (-inf) = NaN.
constexpr float kLowest = -3.4028234e38f;

struct Rows {
  int bh_kv;        // batch index * Hkv + K/V head
  int64_t first;    // first row, among all rows of Q, O and lse
  int row0, count;  // row0: the first row, among the rows of the K/V head
};
__device__ __forceinline__ Rows rows_of(const Shape& shape, int block, int block_rows) {
  const int all = shape.heads / shape.kv_heads * shape.seqlen_q, tiles = ceil_div(all, block_rows);
  const int bh_kv = block / tiles, row0 = block % tiles * block_rows;
  return {bh_kv, int64_t{bh_kv} * all + row0, row0, min(block_rows, all - row0)};
}

// Keys visible to any of these rows. Rows of one head have consecutive queries; rows of several
// heads may have all queries of the sequence.
__device__ __forceinline__ KvRange visible_keys(const Shape& shape, int seqlen_k,
                                                const Rows& rows) {
  const int last_row = rows.row0 + rows.count - 1;
  const bool one_head = rows.row0 / shape.seqlen_q == last_row / shape.seqlen_q;
  const int first = one_head ? rows.row0 % shape.seqlen_q : 0;
  const int last = one_head ? last_row % shape.seqlen_q : shape.seqlen_q - 1;
  return {keys_of_query(shape, seqlen_k, first).begin, keys_of_query(shape, seqlen_k, last).end};
}

// Over the 4 lanes that share a row of an mma.m16n8k16 accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// q . k over 8 columns.
template <class Element>
__device__ __forceinline__ float dot(const float (&q)[8], const uint4& k) {
  const uint32_t pairs[4] = {k.x, k.y, k.z, k.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(q[i], unpack<Element>(pairs[i / 2], i % 2), sum);
  return sum;
}
// o += p v for 8 columns.
template <class Element>
__device__ __forceinline__ void add(float (&o)[8], float p, const uint4& v) {
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) o[i] = fmaf(p, unpack<Element>(pairs[i / 2], i % 2), o[i]);
}

// o += weight * x for four columns; and store of four columns of O, times `factor`, in 16 bits.
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
