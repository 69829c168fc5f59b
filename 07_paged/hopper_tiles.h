// Tiles of queries: their order, what each of them is of, and the blocks of keys that it sees; the
// places of keys in pages; the tensor maps of Q and of a pool. Most of it is as in chapter 06.
#pragma once

#include <algorithm>

#include "attn/kernel.h"
#include "ptx/tma.h"
#include "boxes.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Blocks of keys: some row of [row0, row0 + rows) sees something of [begin, end), and every row
// sees all of [unmasked_begin, unmasked_end).
//! [ranges]
struct BlockRanges {
  int begin, unmasked_begin, unmasked_end, end;
};
inline __device__ BlockRanges blocks_seen(const Shape& shape, int seqlen_q, int seqlen_k, int row0,
                                          int rows, int block_n) {
  const int last = min(row0 + rows, seqlen_q) - 1, shift = seqlen_k - seqlen_q;
  const int begin = max(0, row0 + shift - shape.window_left);
  const int end = min(seqlen_k, last + shift + shape.window_right + 1);
  if (end <= begin) return {0, 0, 0, 1};  // O = 0, lse = -inf: one block, masked entirely
  // What the last row sees first, and the first row last.
  const int all_begin = max(0, last + shift - shape.window_left);
  const int all_end = min(seqlen_k, row0 + shift + shape.window_right + 1);
  BlockRanges seen{begin / block_n, ceil_div(all_begin, block_n), all_end / block_n,
                   ceil_div(end, block_n)};
  seen.unmasked_begin = min(seen.unmasked_begin, seen.end);
  seen.unmasked_end = max(seen.unmasked_begin, seen.unmasked_end);
  return seen;
}
//! [ranges]

// Heads of a section: as many as have K and V of 12 MB, of an H200's L2 of 60 MB; but with a mask
// so many that an SM gets three tiles on average, long and short ones, if these have no more than
// 32 MB. Sections are of equal size.
//! [section]
inline int64_t heads_of_section(const Problem& p, int64_t num_m_blocks) {
  constexpr int64_t kMega = 1 << 20, kTilesPerSm = 3, kSms = 132;
  const int64_t heads = p.heads * p.batch, bytes = 2 * p.seqlen_k * p.head_dim * 2;
  const auto fit = [&](int64_t limit) { return std::max<int64_t>(1, limit / bytes) * p.group(); };
  const int64_t balanced =
      p.masked() ? std::min(fit(32 * kMega), ceil_div(kTilesPerSm * kSms, num_m_blocks)) : 1;
  return ceil_div(heads, std::max<int64_t>(1, heads / std::max(fit(12 * kMega), balanced)));
}
//! [section]

// Heads come in sections; in one, the tiles with the most keys come first, those of all its heads.
//! [order]
struct TileOrder {
  unsigned num_m_blocks, num_heads, section;
  TileOrder(const Problem& p, int block_m)
      : num_m_blocks(static_cast<unsigned>(ceil_div(p.seqlen_q, block_m))),
        num_heads(static_cast<unsigned>(p.heads * p.batch)),
        section(static_cast<unsigned>(heads_of_section(p, num_m_blocks))) {}
  __host__ __device__ unsigned count() const { return num_m_blocks * num_heads; }
  struct Tile {
    int bh, row0;  // its head, counted through the batch, and its first row
  };
  template <int kBlockM>
  __device__ Tile at(unsigned tile) const {
    const unsigned first_head = tile / (section * num_m_blocks) * section;
    const unsigned heads = min(section, num_heads - first_head);
    const unsigned in_section = tile - first_head * num_m_blocks;
    return {static_cast<int>(first_head + in_section % heads),
            static_cast<int>((num_m_blocks - 1 - in_section / heads) * kBlockM)};
  }
};
//! [order]

// Dynamic persistent: a block begins with the tile of its own number. The next ones come from a
// counter in device memory, so that a block with short tiles gets more of them.
//! [tiles]
struct DynamicPersistent : TileOrder {
  unsigned* counter = nullptr;  // 0 before the first launch, and after each one
  using TileOrder::TileOrder;
  __device__ unsigned first() const { return blockIdx.x; }
  // Whoever has had a tile counts once, so that it is counted count() times in all, and is 0 again.
  __device__ unsigned next(unsigned) const { return gridDim.x + atomicInc(counter, count() - 1); }
};
//! [tiles]

constexpr int kEmulatedSms = 2;  // so few that each block has several tiles

// What a block works on: some rows of one head of a sequence, and the blocks of keys that they see.
// Of a ragged batch cu_seqlens_q[b] is the first query of sequence b (else null): the map of Q then
// holds all tokens of a head, one sequence after the other.
//! [work]
struct Work {
  int row0 = -1;           // in its sequence; -1: there is no more
  int seqlen_q, seqlen_k;  // of that
  int sequence;
  int q_head, kv_head;  // in the map of Q; of a token
  int q_token;          // the sequence's first row in the map
  BlockRanges seen;
  int64_t o, lse;  // of its first row: elements from the beginning
};
template <class Config>
__device__ __forceinline__ Work work_of(const Shape& shape, TileOrder::Tile tile,
                                        const int* gCuSeqlensQ, const int* gSeqused) {
  const auto [bh, row0] = tile;
  const int b = bh / shape.heads, h = bh % shape.heads;
  Work w{row0, shape.seqlen_q, gSeqused[b], b,  bh, h / (shape.heads / shape.kv_heads),
         0,    {},             0,           0};
  int64_t row = int64_t{bh} * shape.seqlen_q + row0;  // of all rows of [B, Hq, seqlen_q]
  w.lse = row;
  if (gCuSeqlensQ != nullptr) {
    w.q_token = gCuSeqlensQ[b], w.seqlen_q = gCuSeqlensQ[b + 1] - w.q_token;
    w.q_head = h;
    row = int64_t{w.q_token + row0} * shape.heads + h;
    w.lse = int64_t{h} * shape.tokens_q + w.q_token + row0;
  }
  w.o = row * Config::kHeadDim;
  if (row0 < w.seqlen_q)
    w.seen = blocks_seen(shape, w.seqlen_q, w.seqlen_k, row0, Config::kBlockM, Config::kBlockN);
  return w;
}
//! [work]

// Where keys lie. A tile of them is boxes of `box_rows` rows, each of one page.
//! [pages]
struct Pages {
  const int* gTable;  // [B, max_pages]: the pages of each sequence
  int max_pages, page_size, box_rows;
};
// A box here is outside of the pool: its rows arrive as zeros, and nothing is read.
constexpr int kNowhere = -256;
// The page of a key; behind the end the table is not read.
__device__ __forceinline__ int page_of(const Pages& pages, const Work& work, int key) {
  if (key >= work.seqlen_k) return 0;
  return pages.gTable[int64_t{work.sequence} * pages.max_pages + key / pages.page_size];
}
// Its place in the pool, counted in tokens: fewer than 2^31.
__device__ __forceinline__ int slot_of(const Pages& pages, const Work& work, int key, int page) {
  return key < work.seqlen_k ? page * pages.page_size + key % pages.page_size : kNowhere;
}
//! [pages]

// A map of Q [heads, rows, d], or of ragged [rows, heads, d], whose boxes are tiles of `tile_rows`
// rows and all panels of 64 columns. Rows that are not there arrive as zeros.
//! [map]
template <class Element>
Status map_of(TensorMap& map, const Element* g, const Problem& p, int64_t heads, int64_t rows,
              int tile_rows) {
  const int64_t d = p.head_dim, row_bytes = 2 * d * (p.varlen() ? heads : 1);
  const int64_t head_bytes = 2 * d * (p.varlen() ? 1 : rows);
  const int panels = static_cast<int>(d / 64);
  return make_tensor_map<4>(map, g, {64, rows, panels, heads * (p.varlen() ? 1 : p.batch)},
                            {row_bytes, 128, head_bytes}, {64, tile_rows, panels, 1},
                            Swizzle::k128);
}
// Of a pool [num_pages, page_size, Hkv, d], taken as [tokens, Hkv d / 64, 64], whose boxes are
// `rows` tokens in a panel of 64 columns.
template <class Element>
Status map_of_pool(TensorMap& map, const Element* g, const Problem& p, int rows) {
  const int64_t tokens = num_pages_of(p) * splits::page_size_of(p);
  const int64_t panels = p.kv_heads * p.head_dim / 64;
  return make_tensor_map<3>(map, g, {64, tokens, panels}, {128 * panels, 128}, {64, rows, 1},
                            Swizzle::k128);
}
struct TensorMaps {
  TensorMap q, k, v, row;  // of V
  template <class Element>
  Status make(const Arguments& args, int block_m, int box_rows) {
    const Problem& p = args.problem;
    const auto *k_pages = args.in<Element>("k"), *v_pages = args.in<Element>("v");
    const int64_t rows_q = p.varlen() ? p.tokens_q() : p.seqlen_q;
    for (const Status& status : {map_of(q, args.in<Element>("q"), p, p.heads, rows_q, block_m),
                                 map_of_pool(k, k_pages, p, box_rows),
                                 map_of_pool(v, v_pages, p, box_rows),
                                 map_of_pool(row, v_pages, p, 1)})
      if (!status.ok()) return status;
    return Status::success();
  }
};
//! [map]

}  // namespace ATTN_BACKEND::hopper
