// v11_tuned's tiles for each head dim, and what a block works on: its tiles of queries, their sequence and head, and
// the blocks of keys that they see.
#pragma once

#include <algorithm>

#include "attn/kernel.h"

namespace ATTN_BACKEND::v11_tuned {
using namespace attn;

//! [tiles]
template <int kHeadDim_, int kConsumers_, int kBlockN_, int kStages_, int kQueries_, bool kTurns_, bool kSeldom_>
struct Tile {
  static constexpr int kHeadDim = kHeadDim_, kBlockN = kBlockN_, kStages = kStages_;  // d, B_c
  static constexpr int kConsumers = kConsumers_, kThreads = 128 * (kConsumers + 1);   // warpgroups; the last one copies
  static constexpr int kBlockM = 64 * kConsumers;                                     // B_r
  static constexpr int kQueries = kQueries_;  // tiles of Q in shared memory
  static constexpr bool kTurns = kTurns_;    // warpgroups take turns at the tensor cores
  static constexpr bool kSeldom = kSeldom_;  // O is rescaled where a maximum has grown by more than 2^8
  // Registers of a thread. A block has what it was launched with, 65536 / threads rounded down to 8: 168 of each of 384
  // threads, 128 of 512. Who takes more than others have given waits for ever.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40, kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8),
                "more registers than a block of so many threads has");
};
template <int kHeadDim, bool kShort>  // up to 1024 keys and a mask: smaller tiles of queries have less to hide
struct Config;
//                                          d  WGs  B_c stages Qs turns seldom
template <bool kShort> struct Config<64, kShort> : Tile<64, 3, 128, 2, 2, true, true> {};
template <> struct Config<64, true> : Tile<64, 2, 128, 3, 2, false, false> {};
template <bool kShort> struct Config<128, kShort> : Tile<128, 2, 128, 2, 2, true, true> {};
template <bool kShort> struct Config<256, kShort> : Tile<256, 2, 64, 2, 1, false, true> {};
// The same for softcap, which needs registers itself.
template <int kHeadDim>
struct WithSoftcap : Config<kHeadDim, false> {};
template <> struct WithSoftcap<64> : Tile<64, 2, 128, 2, 2, true, false> {};
//! [tiles]

// Blocks of keys: some row of [row0, row0 + rows) sees something of [begin, end), and every row sees all of
// [plain_begin, plain_end).
//! [ranges]
struct BlockRanges {
  int begin, plain_begin, plain_end, end;
};
inline __device__ BlockRanges blocks_seen(const Shape& shape, int seqlen_q, int seqlen_k, int row0, int rows,
                                          int block_n) {
  const int last = min(row0 + rows, seqlen_q) - 1, shift = seqlen_k - seqlen_q;
  const int begin = max(0, row0 + shift - shape.window_left);
  const int end = min(seqlen_k, last + shift + shape.window_right + 1);
  if (end <= begin) return {0, 0, 0, 1};  // O = 0 and lse = -inf for all: one tile that is masked as a whole
  const int all_begin = max(0, last + shift - shape.window_left);  // what the last row sees first ...
  const int all_end = min(seqlen_k, row0 + shift + shape.window_right + 1);  // ... and the first row last
  BlockRanges seen{begin / block_n, ceil_div(all_begin, block_n), all_end / block_n, ceil_div(end, block_n)};
  seen.plain_begin = min(seen.plain_begin, seen.end);
  seen.plain_end = max(seen.plain_begin, seen.plain_end);
  return seen;
}
//! [ranges]

// What a block works on: some rows of one head, and the keys that they see. Of several lengths sequences are packed,
// [tokens, H, d], and begin at cu_seqlens[b] (else null): maps then hold all tokens of a head, one sequence after the
// other.
//! [work]
struct Work {
  int row0;                   // in its sequence; -1: there is no more
  int seqlen_q, seqlen_k;     // of that
  int q_head, kv_head;        // in the maps
  int q_token, kv_token;      // the sequence's first rows there
  BlockRanges seen;
  int64_t o, lse;             // of its first row: elements from the beginning
};
__device__ __forceinline__ Work work_of(const Shape& shape, const int* cu_seqlens_q, const int* cu_seqlens_k, int bh,
                                        int row0, int head_dim, int block_m, int block_n) {
  const int group = shape.heads / shape.kv_heads;
  Work w{row0, shape.seqlen_q, shape.seqlen_k, bh, bh / group, 0, 0, {}, 0, 0};
  int64_t row = int64_t{bh} * shape.seqlen_q + row0;  // of all rows of [B, Hq, seqlen_q]
  w.lse = row;
  if (cu_seqlens_q != nullptr) {
    const int b = bh / shape.heads, h = bh % shape.heads;
    w.q_token = cu_seqlens_q[b], w.kv_token = cu_seqlens_k[b];
    w.seqlen_q = cu_seqlens_q[b + 1] - w.q_token, w.seqlen_k = cu_seqlens_k[b + 1] - w.kv_token;
    w.q_head = h, w.kv_head = h / group;
    row = int64_t{w.q_token + row0} * shape.heads + h;
    w.lse = int64_t{h} * shape.tokens_q + w.q_token + row0;
  }
  w.o = row * head_dim;
  if (row0 < w.seqlen_q) w.seen = blocks_seen(shape, w.seqlen_q, w.seqlen_k, row0, block_m, block_n);
  return w;
}
//! [work]

// Heads of a section: as many as have K and V of 12 MB, of an H200's L2 of 60 MB; but with a mask so many that an SM
// gets three tiles on average, long and short ones, if these have no more than 32 MB. Sections are of equal size.
//! [section]
inline int64_t heads_of_section(const Problem& p, int64_t num_m_blocks) {
  constexpr int64_t kMega = 1 << 20, kTilesOfAnSm = 3, kSms = 132;
  const int64_t heads = p.heads * p.batch, bytes = 2 * p.seqlen_k * p.head_dim * 2;
  const auto fit = [&](int64_t limit) { return std::max<int64_t>(1, limit / bytes) * p.group(); };
  const int64_t balanced = p.masked() ? std::min(fit(32 * kMega), ceil_div(kTilesOfAnSm * kSms, num_m_blocks)) : 1;
  return ceil_div(heads, std::max<int64_t>(1, heads / std::max(fit(12 * kMega), balanced)));
}
//! [section]

// Tiles of queries in the order in which blocks take them: heads come in sections; in one, tiles with the most keys
// first, those of all its heads. A block begins with the one of its own number. The next ones come from a queue, so
// that a block with short tiles gets more of them.
//! [queue]
struct Tiles {
  unsigned num_m_blocks, num_heads, section;
  Tiles(const Problem& p, int block_m)
      : num_m_blocks(static_cast<unsigned>(ceil_div(p.seqlen_q, block_m))),
        num_heads(static_cast<unsigned>(p.heads * p.batch)),
        section(static_cast<unsigned>(heads_of_section(p, num_m_blocks))) {}
  __host__ __device__ unsigned count() const { return num_m_blocks * num_heads; }
  struct Tile {
    int bh, row0;
  };
  template <int kBlockM>
  __device__ Tile at(unsigned index) const {
    const unsigned first_head = index / (section * num_m_blocks) * section;
    const unsigned heads = min(section, num_heads - first_head), turn = index - first_head * num_m_blocks;
    return {static_cast<int>(first_head + turn % heads), static_cast<int>((num_m_blocks - 1 - turn / heads) * kBlockM)};
  }
  // Who has taken a tile asks for the next one, once: the queue is asked count() times in all, and is 0 again.
  __device__ unsigned next(unsigned* queue) const {
    return gridDim.x + atomicInc(queue, count() - 1);
  }
};
//! [queue]

}  // namespace ATTN_BACKEND::v11_tuned
