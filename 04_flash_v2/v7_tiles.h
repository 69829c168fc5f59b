// v7_tuned's tiles for each head dim, where their elements lie in shared memory, and what a block works on: its
// sequence, its head and its blocks of keys.
#pragma once

#include <algorithm>

#include "attn/kernel.h"
#include "emulator/warp_access.h"

namespace ATTN_BACKEND::v7_tuned {
using namespace attn;

//! [tiles]
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kNumWarps_, int kKept_, int kStages_, int kBlocksPerSm_>
struct Tile {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_;  // d, B_r, B_c
  static constexpr int kNumWarps = kNumWarps_, kThreads = 32 * kNumWarps;
  static constexpr int kKept = kKept_;      // of every 16 columns of Q, how many stay in registers as fragments: they
                                            // are not read again for each block of keys
  static constexpr int kStages = kStages_;  // 1: K and V each on their way during the other product; 2: both, one block
                                            // of keys ahead, with one barrier a block instead of two
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kWarpRows = kBlockM / kNumWarps, kTiles = kWarpRows / 16;  // products of 16 rows by a warp
  static constexpr int kSlack = 8;  // log2 of how far a maximum may grow before O is rescaled
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kSpan = kHeadDim % 64 == 0 ? 8 : 4;  // 16-byte chunks that a row exchanges
  static constexpr int kCopyRows = kThreads / kSpan;        // rows that the block copies at once, of kSpan chunks
  static_assert(kWarpRows % 16 == 0 && kBlockN % 16 == 0, "warps own whole products");
  static_assert(kBlockM % kCopyRows == 0 && kBlockN % kCopyRows == 0, "no thread copies less than another");
  static_assert(kKept <= kHeadDim / 16, "there are no more columns");
};
template <int kHeadDim>
struct Config;
//                              d    M    N  warps kept, stages, blocks an SM
template <> struct Config<32> : Tile<32, 128, 64, 4, 2, 2, 2> {};
template <> struct Config<64> : Tile<64, 128, 64, 4, 4, 2, 2> {};
template <> struct Config<96> : Tile<96, 128, 64, 4, 0, 1, 2> {};
template <> struct Config<128> : Tile<128, 128, 64, 4, 0, 1, 2> {};
template <> struct Config<192> : Tile<192, 64, 64, 4, 0, 1, 2> {};
template <> struct Config<256> : Tile<256, 64, 64, 4, 8, 1, 2> {};
// The same for softcap, ALiBi and dropout, which need registers themselves.
template <int kHeadDim>
struct WithFeatures : Config<kHeadDim> {};
template <> struct WithFeatures<64> : Tile<64, 128, 64, 4, 0, 2, 2> {};
template <> struct WithFeatures<96> : Tile<96, 64, 64, 4, 0, 1, 3> {};
template <> struct WithFeatures<128> : Tile<128, 64, 64, 4, 0, 1, 3> {};
template <> struct WithFeatures<256> : Tile<256, 64, 64, 4, 0, 1, 2> {};
//! [tiles]

// The swizzled offset of element (row, col) of a tile [rows, kHeadDim]: 16-byte chunks are exchanged among kSpan neighbours, so
// that those of 8 rows in one column lie in 8 groups of 4 banks. Rows of 32 and 96 elements begin in two banks by
// turns.
//! [swizzle]
template <int kHeadDim>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  const int phase = kHeadDim % 64 == 0 ? row % 8 : row / 2 % 4;
  return row * kHeadDim + ((col / 8) ^ phase) * 8 + col % 8;
}
// The byte offset `cols` columns further in the same row, from an even column of chunks: bits 4 to 6 of the start of a
// row are 0 (bits 4 and 5 where kSpan is 4), so that a chunk changes place by an XOR, and kSpan chunks by a sum.
template <int kSpan>
__host__ __device__ constexpr int along_row(int offset, int cols) {
  return (offset ^ (2 * (cols % (8 * kSpan)))) + cols / (8 * kSpan) * (16 * kSpan);
}
//! [swizzle]
//! [proof]
template <int kHeadDim>
constexpr bool free_of_conflicts() {
  constexpr int kSpan = kHeadDim % 64 == 0 ? 8 : 4;
  for (int col = 0; col < kHeadDim; col += 16) {
    const auto q_or_v = [=](int l) { return 2 * swizzled_offset<kHeadDim>(l % 16, col + l / 16 * 8); };
    const auto k = [=](int l) { return 2 * swizzled_offset<kHeadDim>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8); };
    const auto o = [=](int l) { return 2 * swizzled_offset<kHeadDim>(l / 4, col + 2 * (l % 4)); };
    if (ldmatrix_access(q_or_v, 4).conflicts() + ldmatrix_access(k, 4).conflicts() > 0) return false;
    if (shared_access(o, 4).conflicts() > 0) return false;
    for (int l = 0; l < 32; ++l)  // along_row gives the very same addresses
      if (along_row<kSpan>(2 * swizzled_offset<kHeadDim>(l % 16, l / 16 * 8), col) != q_or_v(l)) return false;
  }
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<96>() &&
              free_of_conflicts<128>() && free_of_conflicts<192>() && free_of_conflicts<256>());
//! [proof]

// Where sequences lie. Of several lengths they are packed, [tokens, H, d]; cu_seqlens[b] is the first token of
// sequence b. Else the pointers are null.
struct Packing {
  const int *cu_seqlens_q, *cu_seqlens_k;  // [B + 1]
  int q_step, kv_step;                     // elements from a row to the next
};
// The sequence and the head that a block works on.
//! [sequence]
struct Sequence {
  int64_t q, kv, lse;  // elements of Q and O, of K and V, of lse before the head's first row
  int seqlen_q, seqlen_k;
};
__device__ __forceinline__ Sequence sequence_of(const Shape& shape, const Packing& packing, int bh, int head_dim) {
  const int b = bh / shape.heads, hq = bh % shape.heads, hkv = hq / (shape.heads / shape.kv_heads);
  if (packing.cu_seqlens_q == nullptr)
    return {int64_t{bh} * shape.seqlen_q * head_dim, (int64_t{b} * shape.kv_heads + hkv) * shape.seqlen_k * head_dim,
            int64_t{bh} * shape.seqlen_q, shape.seqlen_q, shape.seqlen_k};
  const int64_t q = packing.cu_seqlens_q[b], k = packing.cu_seqlens_k[b];
  return {q * packing.q_step + hq * head_dim, k * packing.kv_step + hkv * head_dim, int64_t{hq} * shape.tokens_q + q,
          static_cast<int>(packing.cu_seqlens_q[b + 1] - q), static_cast<int>(packing.cu_seqlens_k[b + 1] - k)};
}
//! [sequence]

// Blocks of keys: some row of [row0, row0 + rows) sees something of [begin, end), and every row sees all of
// [unmasked_begin, unmasked_end).
//! [ranges]
struct BlockRanges {
  int begin, unmasked_begin, unmasked_end, end;
};
__device__ __forceinline__ BlockRanges blocks_seen(const Shape& shape, int seqlen_q, int seqlen_k, int row0, int rows,
                                                   int block_n) {
  const int last = min(row0 + rows, seqlen_q) - 1, shift = seqlen_k - seqlen_q;
  const int begin = max(0, row0 + shift - shape.window_left);
  const int end = min(seqlen_k, last + shift + shape.window_right + 1);
  if (end <= begin) return {0, 0, 0, 0};  // O = 0 and lse = -inf for all
  const int all_begin = max(0, last + shift - shape.window_left);  // what the last row sees first ...
  const int all_end = min(seqlen_k, row0 + shift + shape.window_right + 1);  // ... and the first row last
  BlockRanges seen{begin / block_n, ceil_div(all_begin, block_n), all_end / block_n, ceil_div(end, block_n)};
  seen.unmasked_begin = min(seen.unmasked_begin, seen.end);
  seen.unmasked_end = max(seen.unmasked_begin, seen.unmasked_end);
  return seen;
}
//! [ranges]

// Heads of a section: so many that their K and V take 24 MB of an H200's L2 (60 MB), or one group that shares them.
//! [section]
inline int64_t heads_of_section(const Problem& p) {
  const int64_t kv_bytes = 2 * p.seqlen_k * p.head_dim * 2;
  return std::min(p.heads * p.batch, std::max<int64_t>(1, (24 << 20) / kv_bytes) * p.group());
}
//! [section]

}  // namespace ATTN_BACKEND::v7_tuned
