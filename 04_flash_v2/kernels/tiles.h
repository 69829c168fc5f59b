// What a block of the grid works on: a tile of queries of one head, where it lies in memory, and
// the blocks of keys that it sees. The same for all forward steps of this chapter.
#pragma once

#include <algorithm>

#include "attn/kernel.h"

namespace ATTN_BACKEND::flash2 {
using namespace attn;

// Blocks of keys: some row of [row0, row0 + rows) sees something of [begin, end), and every row
// sees all of [unmasked_begin, unmasked_end).
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
  if (end <= begin) return {0, 0, 0, 0};  // O = 0 and lse = -inf for all
  // What the last row sees first, and the first row last.
  const int all_begin = max(0, last + causal_offset - shape.window_left);
  const int all_end = min(seqlen_k, row0 + causal_offset + shape.window_right + 1);
  KvBlockRange kv_range{begin / block_n, ceil_div(all_begin, block_n), all_end / block_n,
                   ceil_div(end, block_n)};
  kv_range.unmasked_begin = min(kv_range.unmasked_begin, kv_range.end);
  kv_range.unmasked_end = max(kv_range.unmasked_begin, kv_range.unmasked_end);
  return kv_range;
}
//! [ranges]

// Heads of a section: as many as have K and V of 16 MB, of an H200's L2 of 60 MB, or one group that
// shares them. Sections are of equal size: a last one of few heads would begin its longest tiles
// when the others are done, on few SMs.
//! [section]
inline int64_t heads_of_section(const Problem& p) {
  const int64_t heads = p.heads * p.batch, kv_bytes = 2 * p.seqlen_k * p.head_dim * 2;
  const int64_t most = std::max<int64_t>(1, (16 << 20) / kv_bytes) * p.group();
  return ceil_div(heads, ceil_div(heads, most));
}
//! [section]

// Where the rows of a head lie: elements before the first one, and how many there are.
struct Sequence {
  int64_t q, kv, lse;  // of Q and O, of K and V, of lse
  int seqlen_q, seqlen_k;
};
__device__ __forceinline__ Sequence sequence_of(const Shape& shape, int bh, int head_dim) {
  const int b = bh / shape.heads, hkv = bh % shape.heads / (shape.heads / shape.kv_heads);
  return {int64_t{bh} * shape.seqlen_q * head_dim,
          (int64_t{b} * shape.kv_heads + hkv) * shape.seqlen_k * head_dim,
          int64_t{bh} * shape.seqlen_q, shape.seqlen_q, shape.seqlen_k};
}

// How rows lie one after the other, a template argument of the kernel. [B, H, seqlen, d]: known to
// the compiler, as if there were no other way.
template <int kHeadDim>
struct Contiguous {
  static constexpr int q_stride = kHeadDim,
                       kv_stride = kHeadDim;  // elements from a row to the next
  explicit Contiguous(const Arguments&) {}
};
// Sequences of several lengths are packed, [tokens, H, d]; cu_seqlens[b] is the first token of
// sequence b. Else the pointers are null.
struct Packed {
  const int *cu_seqlens_q, *cu_seqlens_k;  // [B + 1]
  int q_stride, kv_stride;                 // elements from a row to the next
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
