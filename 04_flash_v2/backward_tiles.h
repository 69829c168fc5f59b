// The tiles of the backward pass for each head dim, where their elements lie in shared memory, and what a block works
// on: its sequence, its heads and its blocks of rows.
#pragma once

#include <algorithm>

#include "attn/kernel.h"
#include "emulator/warp_access.h"

namespace ATTN_BACKEND::backward_tiles {
using namespace attn;

//! [tiles]
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kWarpKeys_, int kStages_, int kBuffers_, int kBlocksPerSm_,
          bool kRotate_, bool kStagger_ = false>
struct Tile {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_;  // d, B_r, B_c
  static constexpr int kWarpKeys = kWarpKeys_, kPairs = kBlockN / kWarpKeys;          // pairs of warps share their keys
  static constexpr int kNumWarps = 2 * kPairs, kThreads = 32 * kNumWarps;
  static constexpr int kStages = kStages_;    // of Q and dO: 2 is one tile ahead
  static constexpr int kBuffers = kBuffers_;  // of dS: 1 needs a second barrier a tile
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr bool kRotate = kRotate_;    // blocks begin at different rows
  static constexpr bool kStagger = kStagger_;  // the warps that own P add dQ a tile later than the others, after dV
  static_assert(!kStagger || (kStages > 1 && kBuffers > 1), "dS of two tiles");
  static constexpr int kKeyTiles = kWarpKeys / 16, kRowSteps = kBlockM / 16;
  // dQ: warps along the rows and along the columns.
  static constexpr int kQueryWarpsM = kBlockM / 32 > 0 && kHeadDim * (kBlockM / 32) / kNumWarps % 16 == 0 ? kBlockM / 32
                                                                                                       : kBlockM / 16;
  static constexpr int kQueryRows = kBlockM / kQueryWarpsM, kQueryCols = kHeadDim * kQueryWarpsM / kNumWarps;
  static constexpr int kFragments = kQueryRows / 16 * (kQueryCols / 8);  // of dQ, a thread
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kSpan = kHeadDim % 64 == 0 ? 8 : 4;  // 16-byte chunks that a row exchanges
  static constexpr int kCopyRows = kThreads / kSpan;        // rows that the block copies at once, of kSpan chunks
  static_assert(kWarpKeys % 16 == 0 && kBlockM % 16 == 0, "warps own whole products");
  static_assert(kQueryRows % 16 == 0 && kQueryCols % 16 == 0 && kQueryCols > 0, "warps own whole products of dQ");
  static_assert(kCopyRows % 8 == 0, "every row of a thread has the same exchange");
  static_assert(kPairs <= 15, "a barrier a pair");
};
template <int kHeadDim>
struct Config;
//                             d    M    N   keys a warp, stages, buffers of dS, blocks an SM, rotate
template <> struct Config<32> : Tile<32, 128, 128, 32, 2, 2, 1, true, true> {};
template <> struct Config<64> : Tile<64, 64, 64, 32, 2, 2, 3, true, true> {};
template <> struct Config<96> : Tile<96, 64, 128, 32, 2, 2, 1, true, true> {};
template <> struct Config<128> : Tile<128, 64, 128, 32, 2, 2, 1, true, true> {};
template <> struct Config<192> : Tile<192, 64, 64, 16, 2, 2, 1, true, true> {};
template <> struct Config<256> : Tile<256, 64, 64, 16, 2, 1, 1, true> {};
// The same for softcap and dropout, which need registers themselves.
template <int kHeadDim>
struct WithFeatures : Config<kHeadDim> {};
template <> struct WithFeatures<32> : Tile<32, 64, 128, 32, 2, 2, 1, true, true> {};
template <> struct WithFeatures<64> : Tile<64, 64, 128, 32, 2, 2, 1, true, true> {};
template <> struct WithFeatures<128> : Tile<128, 32, 128, 32, 2, 2, 1, true, true> {};
//! [tiles]

// The swizzled offset of element (row, col) of a tile with rows of kWidth elements: 16-byte chunks are exchanged among kSpan
// neighbours, so that those of 8 rows in one column lie in 8 groups of 4 banks.
//! [swizzle]
template <int kWidth>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  const int phase = kWidth % 64 == 0 ? row % 8 : row / 2 % 4;
  return row * kWidth + ((col / 8) ^ phase) * 8 + col % 8;
}
// The byte offset `cols` columns further in the same row, from an even column of chunks: see v13_tuned.
template <int kWidth>
__host__ __device__ constexpr int along_row(int offset, int cols) {
  constexpr int kSpan = kWidth % 64 == 0 ? 8 : 4;
  return (offset ^ (2 * (cols % (8 * kSpan)))) + cols / (8 * kSpan) * (16 * kSpan);
}
template <int kWidth>
constexpr bool free_of_conflicts() {
  for (int col = 0; col < kWidth; col += 16) {
    const auto rows = [=](int l) { return 2 * swizzled_offset<kWidth>(l % 16, col + l / 16 * 8); };
    const auto cols = [=](int l) { return 2 * swizzled_offset<kWidth>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8); };
    const auto pairs = [=](int l) { return 2 * swizzled_offset<kWidth>(l / 4, col + 2 * (l % 4)); };
    if (ldmatrix_access(rows, 4).conflicts() + ldmatrix_access(cols, 4).conflicts() +
            shared_access(pairs, 4).conflicts() > 0)
      return false;
    for (int l = 0; l < 32; ++l)  // along_row gives the very same addresses
      if (along_row<kWidth>(2 * swizzled_offset<kWidth>(l % 16, l / 16 * 8), col) != rows(l)) return false;
  }
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<96>() &&
              free_of_conflicts<128>() && free_of_conflicts<192>() && free_of_conflicts<256>());
//! [swizzle]

// Where sequences lie. Of several lengths they are packed, [tokens, H, d]; cu_seqlens[b] is the first token of
// sequence b. Else the pointers are null.
struct Packing {
  const int *cu_seqlens_q, *cu_seqlens_k;  // [B + 1]
  int q_step, kv_step;                     // elements from a row to the next
  int num_tiles;                           // of rows, a head: in `rows` and `accum`, where each sequence begins a tile
  int num_m_blocks, num_n_blocks;          // of the longest sequence
  int num_slices;                          // of `accum`: sums of dQ that are added up at the end
  int64_t slice_tiles;                     // tiles of a slice
};
template <class Config>
Packing packing_of(const Arguments& args, int num_slices = 1) {
  const Problem& p = args.problem;
  const int num_m_blocks = static_cast<int>(ceil_div(p.seqlen_q, Config::kBlockM));
  const int num_tiles = p.varlen() ? static_cast<int>(p.tokens_q() / Config::kBlockM + p.batch) : num_m_blocks;
  return {args.in_or_null<int>("cu_seqlens_q"), args.in_or_null<int>("cu_seqlens_k"),
          static_cast<int>(p.head_dim * (p.varlen() ? p.heads : 1)),
          static_cast<int>(p.head_dim * (p.varlen() ? p.kv_heads : 1)), num_tiles, num_m_blocks,
          static_cast<int>(ceil_div(p.seqlen_k, Config::kBlockN)), num_slices,
          (p.varlen() ? 1 : p.batch) * p.heads * num_tiles};
}
// A sequence and a query head of it.
//! [sequence]
struct Sequence {
  int64_t q, kv, lse, tile;  // before the head's first row: elements of Q, of K; of lse; tiles
  int seqlen_q, seqlen_k;
};
__device__ __forceinline__ Sequence sequence_of(const Shape& shape, const Packing& packing, int64_t bh, int head_dim,
                                                int block_m) {
  const int64_t b = bh / shape.heads, hq = bh % shape.heads, hkv = hq / (shape.heads / shape.kv_heads);
  if (packing.cu_seqlens_q == nullptr)
    return {bh * shape.seqlen_q * head_dim, (b * shape.kv_heads + hkv) * shape.seqlen_k * head_dim,
            bh * shape.seqlen_q, bh * packing.num_tiles, shape.seqlen_q, shape.seqlen_k};
  const int64_t q = packing.cu_seqlens_q[b], k = packing.cu_seqlens_k[b];
  return {q * packing.q_step + hq * head_dim, k * packing.kv_step + hkv * head_dim, hq * shape.tokens_q + q,
          hq * packing.num_tiles + q / block_m + b,  // the sequences before have no more tiles than these
          static_cast<int>(packing.cu_seqlens_q[b + 1] - q), static_cast<int>(packing.cu_seqlens_k[b + 1] - k)};
}
//! [sequence]

// Blocks of rows: some row of [begin, end) sees a key of [key0, key0 + keys), and every row of [unmasked_begin, unmasked_end)
// sees all of them.
//! [ranges]
struct BlockRanges {
  int begin, unmasked_begin, unmasked_end, end;
};
__device__ __forceinline__ BlockRanges blocks_that_see(const Shape& shape, int seqlen_q, int seqlen_k, int key0,
                                                       int keys, int block_m) {
  const int last = min(key0 + keys, seqlen_k) - 1, shift = seqlen_k - seqlen_q;
  const int begin = max(0, key0 - shift - shape.window_right);  // the first row that sees the first key ...
  const int end = min(seqlen_q, last - shift + shape.window_left + 1);  // ... to the last that sees the last
  if (end <= begin) return {0, 0, 0, 0};  // dK = dV = 0 for all
  const int all_begin = max(0, last - shift - shape.window_right);  // the first row that sees the last key ...
  const int all_end = min(seqlen_q, key0 - shift + shape.window_left + 1);  // ... to the last that sees the first
  BlockRanges seen{begin / block_m, ceil_div(all_begin, block_m), 0, ceil_div(end, block_m)};
  // Rows behind the last have P = 0, so that a block which they cut is plain all the same; keys are another matter.
  seen.unmasked_end = all_end == seqlen_q ? seen.end : max(0, all_end) / block_m;
  if (key0 + keys > seqlen_k) seen.unmasked_end = 0;
  seen.unmasked_begin = min(seen.unmasked_begin, seen.end);
  seen.unmasked_end = max(seen.unmasked_begin, seen.unmasked_end);
  return seen;
}
//! [ranges]

// Key heads of a section: so many that their Q, dO and sums of dQ take `bytes` of L2.
//! [section]
inline int64_t heads_of_section(const Problem& p, int64_t bytes) {
  const int64_t head = p.group() * p.seqlen_q * p.head_dim * (2 + 2 + 4);
  return std::min(p.kv_heads * p.batch, std::max<int64_t>(1, bytes / head));
}
//! [section]

}  // namespace ATTN_BACKEND::backward_tiles
