// What a tile of queries is of, the places of keys in pages, and the tensor maps of Q and of a pool.
#pragma once

#include "attn/kernel.h"
#include "kernels/boxes.h"
#include "kernels/hopper/tensor_maps.h"
#include "kernels/hopper/tile_order.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// What a block works on: some rows of one head of a sequence, and the blocks of keys that they see.
// Of a ragged batch cu_seqlens_q[b] is the first query of sequence b (else null): the map of Q then
// holds all tokens of a head, one sequence after the other.
//! [work]
struct WorkTile {
  int row0 = -1;           // first row in its sequence; -1: end of work
  int seqlen_q, seqlen_k;  // lengths of that sequence
  int sequence;
  int q_head, kv_head;  // in the map of Q; of a token
  int q_token;          // the sequence's first row in the map
  KvBlockRange kv_range;
  int64_t o, lse;  // offsets of the first row, in elements
};
template <class Config>
__device__ __forceinline__ WorkTile work_of(const Shape& shape, TileOrder::Tile tile,
                                        const int* gCuSeqlensQ, const int* gSeqused) {
  const auto [bh, row0] = tile;
  const int b = bh / shape.heads, h = bh % shape.heads;
  WorkTile w{row0, shape.seqlen_q, gSeqused[b], b,  bh, h / (shape.heads / shape.kv_heads),
         0,    {},             0,           0};
  int64_t row = int64_t{bh} * shape.seqlen_q + row0;  // row index in [B, Hq, seqlen_q]
  w.lse = row;
  if (gCuSeqlensQ != nullptr) {
    w.q_token = gCuSeqlensQ[b], w.seqlen_q = gCuSeqlensQ[b + 1] - w.q_token;
    w.q_head = h;
    row = int64_t{w.q_token + row0} * shape.heads + h;
    w.lse = int64_t{h} * shape.tokens_q + w.q_token + row0;
  }
  w.o = row * Config::kHeadDim;
  if (row0 < w.seqlen_q)
    w.kv_range =
        kv_block_range(shape, w.seqlen_q, w.seqlen_k, row0, Config::kBlockM, Config::kBlockN);
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
__device__ __forceinline__ int page_of(const Pages& pages, const WorkTile& work, int key) {
  if (key >= work.seqlen_k) return 0;
  return pages.gTable[int64_t{work.sequence} * pages.max_pages + key / pages.page_size];
}
// Its place in the pool, counted in tokens: fewer than 2^31.
__device__ __forceinline__ int slot_of(const Pages& pages, const WorkTile& work, int key,
                                       int page) {
  return key < work.seqlen_k ? page * pages.page_size + key % pages.page_size : kNowhere;
}
//! [pages]

//! [map]
// Of a pool [num_pages, page_size, Hkv, d], taken as [tokens / 8, Hkv d / 64, 8, 64]: a box is
// `rows` tokens of a head, and arrives as atoms of 8 rows and 64 columns, [rows / 8, d / 64].
template <class Element>
Status map_of_pool(TensorMap& map, const Element* g, const Problem& p, int rows) {
  const int64_t tokens = num_pages_of(p) * splits::page_size_of(p), panels = p.head_dim / 64;
  const int64_t token_bytes = 2 * p.kv_heads * p.head_dim;
  return make_tensor_map<4>(map, g, {64, 8, p.kv_heads * panels, tokens / 8},
                            {token_bytes, 128, 8 * token_bytes},
                            {64, 8, static_cast<int>(panels), rows / 8}, Swizzle::k128);
}
// The same pool, taken as [tokens, Hkv d / 64, 64]: a box is 64 columns of a token.
template <class Element>
Status map_of_rows(TensorMap& map, const Element* g, const Problem& p) {
  const int64_t tokens = num_pages_of(p) * splits::page_size_of(p);
  const int64_t panels = p.kv_heads * p.head_dim / 64;
  return make_tensor_map<3>(map, g, {64, tokens, panels}, {128 * panels, 128}, {64, 1, 1},
                            Swizzle::k128);
}
struct TensorMaps {
  TensorMap q, k, v, row;  // of V
  template <class Element>
  Status make(const Arguments& args, int block_m, int box_rows) {
    const ForwardParams<Element> params(args);
    const Problem& p = args.problem;
    const auto *k_pages = params.k, *v_pages = params.v;
    const int64_t rows_q = p.varlen() ? p.tokens_q() : p.seqlen_q;
    for (const Status& status :
         {map_of(q, params.q, p, p.heads, rows_q, block_m), map_of_pool(k, k_pages, p, box_rows),
          map_of_pool(v, v_pages, p, box_rows), map_of_rows(row, v_pages, p)})
      if (!status.ok()) return status;
    return Status::success();
  }
};
//! [map]

}  // namespace ATTN_BACKEND::hopper
