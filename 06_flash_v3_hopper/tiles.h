// Tiles of queries: their order, what each of them is of, and the blocks of keys that it sees; and
// the tensor maps that they are loaded by. The same for all steps of this chapter and for its
// tests.
#pragma once

#include <algorithm>

#include "attn/kernel.h"
#include "ptx/tma.h"

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

constexpr int kEmulatedSms = 2;  // so few that each block has several tiles

// What a block works on: some rows of one head, and the blocks of keys that they see. Of several
// lengths sequences are packed, [tokens, H, d], and begin at cu_seqlens[b] (else null): tensor maps
// then hold all tokens of a head, one sequence after the other.
//! [work]
struct Work {
  int row0 = -1;           // in its sequence; -1: there is no more
  int seqlen_q, seqlen_k;  // of that
  int q_head, kv_head;     // in the maps
  int q_token, kv_token;   // the sequence's first rows there
  BlockRanges seen;
  int64_t o, lse;  // of its first row: elements from the beginning
};
template <class Config>
__device__ __forceinline__ Work work_of(const Shape& shape, TileOrder::Tile tile,
                                        const int* gCuSeqlensQ = nullptr,
                                        const int* gCuSeqlensK = nullptr) {
  const auto [bh, row0] = tile;
  const int group = shape.heads / shape.kv_heads;
  Work w{row0, shape.seqlen_q, shape.seqlen_k, bh, bh / group, 0, 0, {}, 0, 0};
  int64_t row = int64_t{bh} * shape.seqlen_q + row0;  // of all rows of [B, Hq, seqlen_q]
  w.lse = row;
  if (gCuSeqlensQ != nullptr) {
    const int b = bh / shape.heads, h = bh % shape.heads;
    w.q_token = gCuSeqlensQ[b], w.kv_token = gCuSeqlensK[b];
    w.seqlen_q = gCuSeqlensQ[b + 1] - w.q_token, w.seqlen_k = gCuSeqlensK[b + 1] - w.kv_token;
    w.q_head = h, w.kv_head = h / group;
    row = int64_t{w.q_token + row0} * shape.heads + h;
    w.lse = int64_t{h} * shape.tokens_q + w.q_token + row0;
  }
  w.o = row * Config::kHeadDim;
  if (row0 < w.seqlen_q)
    w.seen = blocks_seen(shape, w.seqlen_q, w.seqlen_k, row0, Config::kBlockM, Config::kBlockN);
  return w;
}
//! [work]

// A map of [heads, rows, d], or of packed [rows, heads, d], whose boxes are tiles of `tile_rows`
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
struct TensorMaps {
  TensorMap q, k, v;
  template <class Element>
  Status make(const Arguments& args, int block_m, int block_n) {
    const Problem& p = args.problem;
    const int64_t rows_q = p.varlen() ? p.tokens_q() : p.seqlen_q;
    const int64_t rows_k = p.varlen() ? p.tokens_k() : p.seqlen_k;
    for (const Status& status : {map_of(q, args.in<Element>("q"), p, p.heads, rows_q, block_m),
                                 map_of(k, args.in<Element>("k"), p, p.kv_heads, rows_k, block_n),
                                 map_of(v, args.in<Element>("v"), p, p.kv_heads, rows_k, block_n)})
      if (!status.ok()) return status;
    return Status::success();
  }
};
//! [map]

}  // namespace ATTN_BACKEND::hopper
