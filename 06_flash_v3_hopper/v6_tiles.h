// v6_tuned's tiles for each head dim, and what a block works on: its tiles of queries, their sequence and head, and the
// blocks of keys that they see.
#pragma once

#include <algorithm>

#include "attn/kernel.h"

namespace ATTN_BACKEND::v6_tuned {
using namespace attn;

//! [tiles]
template <int kHeadDim_, int kConsumers_, int kBlockN_, int kStages_, bool kOwnO_, bool kTurns_, bool kSeldom_>
struct Tile {
  static constexpr int kHeadDim = kHeadDim_, kBlockN = kBlockN_, kStages = kStages_;  // d, B_c
  static constexpr int kConsumers = kConsumers_, kThreads = 128 * (kConsumers + 1);   // warpgroups; the last one copies
  static constexpr int kBlockM = 64 * kConsumers;                                     // B_r
  static constexpr bool kOwnO = kOwnO_;      // O has a place of its own; else it takes that of Q
  static constexpr bool kTurns = kTurns_;    // warpgroups take turns at the tensor cores
  static constexpr bool kSeldom = kSeldom_;  // O is rescaled where a maximum has grown by more than 2^8
  // Registers of a thread: 512 for the four of a lane in as many warpgroups, 65536 in all.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24, kConsumerRegisters = kConsumers == 3 ? 160 : 240;
};
template <int kHeadDim, bool kMasked>
struct Config;
//                                           d  WGs  B_c stages own O, turns, seldom
template <bool kMasked> struct Config<64, kMasked> : Tile<64, 3, 128, 2, true, true, false> {};
template <> struct Config<128, false> : Tile<128, 2, 176, 2, false, true, false> {};
template <> struct Config<128, true> : Tile<128, 2, 128, 2, true, true, false> {};
template <bool kMasked> struct Config<256, kMasked> : Tile<256, 2, 80, 2, false, true, false> {};
// The same for softcap, which needs registers itself.
template <int kHeadDim>
struct WithSoftcap : Config<kHeadDim, true> {};
template <> struct WithSoftcap<64> : Tile<64, 2, 128, 2, true, true, false> {};
//! [tiles]

// Blocks of keys: some row of [row0, row0 + rows) sees something of [begin, end), and every row sees all of
// [plain_begin, plain_end).
//! [ranges]
struct BlockRanges {
  int begin, plain_begin, plain_end, end;
};
__device__ BlockRanges blocks_seen(const Shape& shape, int seqlen_q, int seqlen_k, int row0, int rows, int block_n) {
  const int last = min(row0 + rows, seqlen_q) - 1, shift = seqlen_k - seqlen_q;
  const int begin = max(0, row0 + shift - shape.window_left);
  const int end = min(seqlen_k, last + shift + shape.window_right + 1);
  if (end <= begin) return {0, 0, 0, 0};  // O = 0 and lse = -inf for all
  const int all_begin = max(0, last + shift - shape.window_left);  // what the last row sees first ...
  const int all_end = min(seqlen_k, row0 + shift + shape.window_right + 1);  // ... and the first row last
  BlockRanges seen{begin / block_n, ceil_div(all_begin, block_n), all_end / block_n, ceil_div(end, block_n)};
  seen.plain_begin = min(seen.plain_begin, seen.end);
  seen.plain_end = max(seen.plain_begin, seen.plain_end);
  return seen;
}
//! [ranges]

// The head that a tile of queries is of, and its sequence. Of several lengths sequences are packed, [tokens, H, d], and
// begin at cu_seqlens[b] (else null): maps then hold all tokens of a head, one sequence after the other.
//! [sequence]
struct Sequence {
  int q_head, kv_head;    // in the maps
  int q_token, kv_token;  // their first rows there
  int seqlen_q, seqlen_k;
  int64_t lse;  // of its first row
};
__device__ __forceinline__ Sequence sequence_of(const Shape& shape, const int* cu_seqlens_q, const int* cu_seqlens_k,
                                                int bh) {
  const int group = shape.heads / shape.kv_heads;
  if (cu_seqlens_q == nullptr)
    return {bh, bh / group, 0, 0, shape.seqlen_q, shape.seqlen_k, int64_t{bh} * shape.seqlen_q};
  const int b = bh / shape.heads, h = bh % shape.heads, q = cu_seqlens_q[b], k = cu_seqlens_k[b];
  return {h, h / group, q, k, cu_seqlens_q[b + 1] - q, cu_seqlens_k[b + 1] - k, int64_t{h} * shape.tokens_q + q};
}
//! [sequence]

// Which tiles of queries a block works on. Heads come in sections; in one, tiles with the most keys first, those of all
// its heads. In round r the blocks take the next gridDim.x of them, by turns from the first block on and from the last,
// so that who got the longest one gets the shortest one then.
//! [deal]
struct Tiles {
  int num_m_blocks, num_heads, section;
  __device__ int index(int round) const {
    const int block = blockIdx.x, blocks = gridDim.x;
    return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  }
  __device__ bool exists(int round) const { return index(round) < num_m_blocks * num_heads; }
  struct Tile {
    int bh, row0;
  };
  template <int kBlockM>
  __device__ Tile at(int round) const {
    const int first_head = index(round) / (section * num_m_blocks) * section;
    const int heads = min(section, num_heads - first_head), turn = index(round) - first_head * num_m_blocks;
    return {first_head + turn % heads, (num_m_blocks - 1 - turn / heads) * kBlockM};
  }
};
//! [deal]

// Heads of a section: so many that their K and V take half of the L2 of an H200 (50 MB), or one group that shares them.
//! [section]
inline int64_t heads_of_section(const Problem& p) {
  const int64_t kv_bytes = 2 * p.seqlen_k * p.head_dim * 2;
  return std::min(p.heads * p.batch, std::max<int64_t>(1, (24 << 20) / kv_bytes) * p.group());
}
//! [section]

}  // namespace ATTN_BACKEND::v6_tuned
