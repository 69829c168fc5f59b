// Prefill only: query tiles, their visible key blocks, masks on fragments, and the swizzle of tiles
// in shared memory. As in chapter 04.
#pragma once

#include <algorithm>

#include "emulator/warp_access.h"
#include "kernels/splits.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::paged {

// Reads threadIdx.x each time: as one variable, it and all values derived from it would occupy
// registers in the loop.
__device__ __forceinline__ int thread_index() {
#ifdef ATTN_EMULATED
  return static_cast<int>(threadIdx.x);
#else
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
#endif
}

// A sequence of a ragged batch. Queries are packed: q [tokens, Hq, d], lse [Hq, tokens], and
// cu_seqlens_q[b] is the first query of sequence b. If that pointer is null, q is
// [B, Hq, seqlen_q, d].
//! [sequence]
struct Sequence {
  int64_t q, lse;  // elements before the first row, of Q and O and of lse
  int seqlen_q, seqlen_k;
};
__device__ __forceinline__ Sequence sequence_of(const Shape& shape, const int* cu_seqlens_q,
                                                const int* gSeqused, int b, int hq) {
  if (cu_seqlens_q == nullptr) {
    const int64_t rows = (int64_t{b} * shape.heads + hq) * shape.seqlen_q;
    return {rows * shape.head_dim, rows, shape.seqlen_q, gSeqused[b]};
  }
  const int64_t first = cu_seqlens_q[b];
  return {(first * shape.heads + hq) * shape.head_dim, int64_t{hq} * shape.tokens_q + first,
          static_cast<int>(cu_seqlens_q[b + 1] - first), gSeqused[b]};
}
//! [sequence]

// Range of key blocks with a visible key for some row of [row0, row0 + rows): [begin, end). Blocks
// [unmasked_begin, unmasked_end) are visible to every row.
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
  // Range visible to every row: first key of the last row to last key of the first row.
  const int all_begin = max(0, last + causal_offset - shape.window_left);
  const int all_end = min(seqlen_k, row0 + causal_offset + shape.window_right + 1);
  KvBlockRange kv_range{begin / block_n, ceil_div(all_begin, block_n), all_end / block_n,
                        ceil_div(end, block_n)};
  kv_range.unmasked_begin = min(kv_range.unmasked_begin, kv_range.end);
  kv_range.unmasked_end = max(kv_range.unmasked_begin, kv_range.unmasked_end);
  return kv_range;
}

// Heads per section: as many as have 16 MB of K and V, or one group that shares K and V.
inline int64_t heads_of_section(const Problem& p) {
  const int64_t heads = p.heads * p.batch, kv_bytes = 2 * p.seqlen_k * p.head_dim * 2;
  const int64_t most = std::max<int64_t>(1, (16 << 20) / kv_bytes) * p.group();
  return ceil_div(heads, ceil_div(heads, most));
}

// Sets masked scores to -inf. `row_minus_col`: key index on the
// diagonal of this lane's first row, minus the lane's first key; `left`: number of keys from the
// first column on.
template <int kTiles, int kColumns>
__device__ __forceinline__ void apply_mask(float (&s)[kTiles][kColumns][4], const Shape& shape,
                                           int row_minus_col, int left) {
  const auto mask_where = [&](auto unseen) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (unseen(8 * n + i % 2, 16 * m + 8 * (i / 2))) s[m][n][i] = -INFINITY;
  };
  const int last = row_minus_col + shape.window_right, first = row_minus_col - shape.window_left;
  if (shape.window_right < Shape::kNoWindow)
    mask_where([&](int key, int row) { return key - row > last; });
  if (shape.window_left < Shape::kNoWindow)
    mask_where([&](int key, int row) { return key - row < first; });
  if (const int keys = left - thread_index() % 4 * 2; left < 8 * kColumns)
    mask_where([&](int key, int) { return key >= keys; });
}

constexpr float kRescaleThreshold = 8;  // log2 units: P <= 2^8

// Row maxima, reduced within the quad of lanes that share a row. Rescale O and l only if a row's
// maximum grew by more than the threshold.
//! [rescale]
template <class Config, int kTiles>
__device__ __forceinline__ void update_max(float (&row_max)[kTiles][2], float (&row_sum)[kTiles][2],
                                           float (&o)[kTiles][Config::kHeadDim / 8][4],
                                           const float (&s)[kTiles][Config::kBlockN / 8][4],
                                           float softmax_scale_log2) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;
  float max[kTiles][2];
  bool grown = false;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[m][r] = fmaxf(s[m][0][2 * r], s[m][0][2 * r + 1]);
#pragma unroll
      for (int n = 1; n < kBlockN / 8; ++n)
        max[m][r] = fmaxf(max[m][r], fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
      max[m][r] = fmaxf(row_max[m][r], quad_max(max[m][r]) * softmax_scale_log2);
      grown = grown || max[m][r] > row_max[m][r] + kRescaleThreshold;
    }
  if (__any_sync(~0u, grown)) {  // uniform per warp; rare after the first KV blocks
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float rescale = exp2f(row_max[m][r] - max[m][r]);
        row_max[m][r] = max[m][r];
        row_sum[m][r] *= rescale;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
          o[m][n][2 * r] *= rescale, o[m][n][2 * r + 1] *= rescale;
      }
  }
}
//! [rescale]

// XOR swizzle: offset of element (row, col) in a tile [rows, kHeadDim]. 16-byte chunks of a row
// are permuted so that the 8 rows of an ldmatrix phase hit disjoint banks.
template <int kHeadDim>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  return row * kHeadDim + ((col / 8) ^ (row % 8)) * 8 + col % 8;
}
// Byte offset after advancing `cols` columns in the same row, from an even column of chunks.
template <int kSwizzleChunks>
__host__ __device__ constexpr int swizzle_advance(int offset, int cols) {
  return (offset ^ (2 * (cols % (8 * kSwizzleChunks)))) +
         cols / (8 * kSwizzleChunks) * (16 * kSwizzleChunks);
}
// Byte offsets that this lane passes to ldmatrix: for Q and V, for K; and those of O.
template <int kHeadDim>
constexpr bool free_of_conflicts() {
  for (int col = 0; col < kHeadDim; col += 16) {
    const auto q_or_v = [=](int l) {
      return 2 * swizzled_offset<kHeadDim>(l % 16, col + l / 16 * 8);
    };
    const auto k = [=](int l) {
      return 2 * swizzled_offset<kHeadDim>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8);
    };
    const auto o = [=](int l) { return 2 * swizzled_offset<kHeadDim>(l / 4, col + 2 * (l % 4)); };
    if (ldmatrix_access(q_or_v, 4).conflicts() + ldmatrix_access(k, 4).conflicts() +
            shared_access(o, 4).conflicts() >
        0)
      return false;
  }
  return true;
}
static_assert(free_of_conflicts<64>() && free_of_conflicts<128>() && free_of_conflicts<256>());

}  // namespace ATTN_BACKEND::paged
