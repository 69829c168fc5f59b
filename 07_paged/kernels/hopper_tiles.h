// Query tiles, slots of keys in pages, and the tensor maps of Q and of a pool.
#pragma once

#include "attn/kernel.h"
#include "kernels/boxes.h"
#include "kernels/hopper/tensor_maps.h"
#include "kernels/hopper/tile_order.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Work tile: some rows of one head of a sequence, and the range of their visible key blocks. In a
// ragged batch cu_seqlens_q[b] is the first query of sequence b (else the pointer is null), and the
// map of Q holds the packed tokens of a head.
//! [work]
struct WorkTile {
  int row0 = -1;           // first row in its sequence; -1: end of work
  int seqlen_q, seqlen_k;  // lengths of that sequence
  int sequence;
  int q_head, kv_head;  // row in the map of Q; head of a token
  int q_token;          // the sequence's first row in the map
  KvBlockRange kv_range;
  int64_t o, lse;  // offsets of the first row, in elements
};
template <class Config>
__device__ __forceinline__ WorkTile work_of(const Shape& shape, TileOrder::Tile tile,
                                            const int* gCuSeqlensQ, const int* gSeqused) {
  const auto [bh, row0] = tile;
  const int b = bh / shape.heads, h = bh % shape.heads;
  WorkTile w{row0, shape.seqlen_q, gSeqused[b], b, bh, h / (shape.heads / shape.kv_heads), 0, {}, 0,
             0};
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

// Addresses of keys. A KV tile consists of boxes of `box_rows` rows, each within one page.
//! [pages]
struct Pages {
  const int* gTable;  // [B, max_pages]: page table
  int max_pages, page_size, box_rows;
};
// Coordinate outside the pool: TMA reads nothing and fills the box with zeros.
constexpr int kNowhere = -256;
// Page of a key; past the end the page table is not read.
__device__ __forceinline__ int page_of(const Pages& pages, const WorkTile& work, int key) {
  if (key >= work.seqlen_k) return 0;
  return pages.gTable[int64_t{work.sequence} * pages.max_pages + key / pages.page_size];
}
// Slot of a key: its index in the pool, counted in tokens, below 2^31.
__device__ __forceinline__ int slot_of(const Pages& pages, const WorkTile& work, int key,
                                       int page) {
  return key < work.seqlen_k ? page * pages.page_size + key % pages.page_size : kNowhere;
}
//! [pages]

//! [map]
// Map of a pool [num_pages, page_size, Hkv, d] as [tokens / 8, Hkv d / 64, 8, 64]. A box is `rows`
// tokens of one head; it arrives as atoms of 8 rows and 64 columns, [rows / 8, d / 64].
template <class Element>
Status map_of_pool(TensorMap& map, const Element* g, const Problem& p, int rows) {
  const int64_t tokens = num_pages_of(p) * splits::page_size_of(p), panels = p.head_dim / 64;
  const int64_t token_bytes = 2 * p.kv_heads * p.head_dim;
  return make_tensor_map<4>(map, g, {64, 8, p.kv_heads * panels, tokens / 8},
                            {token_bytes, 128, 8 * token_bytes},
                            {64, 8, static_cast<int>(panels), rows / 8}, Swizzle::k128);
}
// Map of the same pool as [tokens, Hkv d / 64, 64]: a box is 64 columns of one token.
template <class Element>
Status map_of_rows(TensorMap& map, const Element* g, const Problem& p) {
  const int64_t tokens = num_pages_of(p) * splits::page_size_of(p);
  const int64_t panels = p.kv_heads * p.head_dim / 64;
  return make_tensor_map<3>(map, g, {64, tokens, panels}, {128 * panels, 128}, {64, 1, 1},
                            Swizzle::k128);
}
struct TensorMaps {
  TensorMap q, k, v, row;  // for V
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
