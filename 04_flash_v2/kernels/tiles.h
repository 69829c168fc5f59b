// Memory layout of a query tile, and its KV blocks; shared by the forward steps of this chapter.
#pragma once

#include <algorithm>

#include "attn/kernel.h"

namespace ATTN_BACKEND::flash2 {
using namespace attn;

// KV blocks: each in [begin, end) has a key visible to some row of [row0, row0 + rows); every key
// of [unmasked_begin, unmasked_end) is visible to every row.
//! [ranges]
struct KvBlockRange {
  int begin, unmasked_begin, unmasked_end, end;
};
__device__ __forceinline__ KvBlockRange kv_block_range(const Shape& shape, int seqlen_q,
                                                       int seqlen_k, int row0, int rows,
                                                       int block_n) {
  const int last = min(row0 + rows, seqlen_q) - 1, causal_offset = seqlen_k - seqlen_q;
  const int begin = max(0, row0 + causal_offset - shape.window_left);
  const int end = min(seqlen_k, last + causal_offset + shape.window_right + 1);
  if (end <= begin) return {0, 0, 0, 0};  // all rows are fully masked: O = 0, lse = -inf
  // Range visible to every row: first key of the last row to last key of the first row.
  const int all_begin = max(0, last + causal_offset - shape.window_left);
  const int all_end = min(seqlen_k, row0 + causal_offset + shape.window_right + 1);
  KvBlockRange kv_range{begin / block_n, ceil_div(all_begin, block_n), all_end / block_n,
                        ceil_div(end, block_n)};
  kv_range.unmasked_begin = min(kv_range.unmasked_begin, kv_range.end);
  kv_range.unmasked_end = max(kv_range.unmasked_begin, kv_range.unmasked_end);
  return kv_range;
}
//! [ranges]

// Heads per section: as many as have K and V of 16 MB (an H200's L2 has 60 MB), at least one KV
// head's group. Balance the sections: a short last section would start its longest tiles late and
// leave most SMs idle.
//! [section]
inline int64_t heads_of_section(const Problem& p) {
  const int64_t heads = p.heads * p.batch, kv_bytes = 2 * p.seqlen_k * p.head_dim * 2;
  const int64_t most = std::max<int64_t>(1, (16 << 20) / kv_bytes) * p.group();
  return ceil_div(heads, ceil_div(heads, most));
}
//! [section]

// One query head of a sequence: offsets of its first row, and lengths.
struct Sequence {
  int64_t q, kv, lse;  // in Q and O, in K and V, in lse
  int seqlen_q, seqlen_k;
};
__device__ __forceinline__ Sequence sequence_of(const Shape& shape, int bh, int head_dim) {
  const int b = bh / shape.heads, hkv = bh % shape.heads / (shape.heads / shape.kv_heads);
  return {int64_t{bh} * shape.seqlen_q * head_dim,
          (int64_t{b} * shape.kv_heads + hkv) * shape.seqlen_k * head_dim,
          int64_t{bh} * shape.seqlen_q, shape.seqlen_q, shape.seqlen_k};
}

// Row strides, a template argument of the kernel. [B, H, seqlen, d]: compile-time strides.
template <int kHeadDim>
struct Contiguous {
  static constexpr int q_stride = kHeadDim,
                       kv_stride = kHeadDim;  // elements from one row to the next
  explicit Contiguous(const Arguments&) {}
};
// Packed sequences: [tokens, H, d]; cu_seqlens[b] is the first token of sequence b. Without packed
// sequences the pointers are null.
struct Packed {
  const int *cu_seqlens_q, *cu_seqlens_k;  // [B + 1]
  int q_stride, kv_stride;                 // elements from one row to the next
  explicit Packed(const Arguments& args)
      : cu_seqlens_q(args.in_or_null<int>("cu_seqlens_q")),
        cu_seqlens_k(args.in_or_null<int>("cu_seqlens_k")) {
    const Problem& p = args.problem;
    q_stride = static_cast<int>(p.head_dim * (p.varlen() ? p.heads : 1));
    kv_stride = static_cast<int>(p.head_dim * (p.varlen() ? p.kv_heads : 1));
  }
};
//! [sequence]
template <int kHeadDim>
__device__ __forceinline__ Sequence sequence_of(const Shape& shape, Contiguous<kHeadDim>, int bh,
                                                int head_dim) {
  return sequence_of(shape, bh, head_dim);
}
__device__ __forceinline__ Sequence sequence_of(const Shape& shape, const Packed& rows, int bh,
                                                int head_dim) {
  if (rows.cu_seqlens_q == nullptr) return sequence_of(shape, bh, head_dim);
  const int b = bh / shape.heads, hq = bh % shape.heads, hkv = hq / (shape.heads / shape.kv_heads);
  const int64_t q = rows.cu_seqlens_q[b], k = rows.cu_seqlens_k[b];
  return {q * rows.q_stride + hq * head_dim, k * rows.kv_stride + hkv * head_dim,
          int64_t{hq} * shape.tokens_q + q, static_cast<int>(rows.cu_seqlens_q[b + 1] - q),
          static_cast<int>(rows.cu_seqlens_k[b + 1] - k)};
}
//! [sequence]

}  // namespace ATTN_BACKEND::flash2
