// Description of a query tile, and the tensor maps of Q, K and V. Shared by all steps of this
// chapter and its tests.
#pragma once

#include "attn/kernel.h"
#include "kernels/hopper/tensor_maps.h"
#include "kernels/hopper/tile_order.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// A unit of work: some rows of one head, and their range of key blocks. Sequences of different
// lengths are packed, [tokens, H, d], and begin at cu_seqlens[b] (else null): tensor maps then hold
// all tokens of a head, one sequence after another.
//! [work]
struct WorkTile {
  int row0 = -1;           // first row in its sequence; -1: end of work
  int seqlen_q, seqlen_k;  // lengths of that sequence
  int q_head, kv_head;     // heads in the tensor maps
  int q_token, kv_token;   // first rows of the sequence in the maps
  KvBlockRange kv_range;
  int64_t o, lse;  // offsets of the first row, in elements
};
template <class Config>
__device__ __forceinline__ WorkTile work_of(const Shape& shape, TileOrder::Tile tile,
                                            const int* gCuSeqlensQ = nullptr,
                                            const int* gCuSeqlensK = nullptr) {
  const auto [bh, row0] = tile;
  const int group = shape.heads / shape.kv_heads;
  WorkTile w{row0, shape.seqlen_q, shape.seqlen_k, bh, bh / group, 0, 0, {}, 0, 0};
  int64_t row = int64_t{bh} * shape.seqlen_q + row0;  // row index in [B, Hq, seqlen_q]
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
    w.kv_range =
        kv_block_range(shape, w.seqlen_q, w.seqlen_k, row0, Config::kBlockM, Config::kBlockN);
  return w;
}
//! [work]

//! [maps]
struct TensorMaps {
  TensorMap q, k, v;
  template <class Element>
  Status make(const Arguments& args, int block_m, int block_n) {
    const ForwardParams<Element> params(args);
    const Problem& p = args.problem;
    const int64_t rows_q = p.varlen() ? p.tokens_q() : p.seqlen_q;
    const int64_t rows_k = p.varlen() ? p.tokens_k() : p.seqlen_k;
    for (const Status& status : {map_of(q, params.q, p, p.heads, rows_q, block_m),
                                 map_of(k, params.k, p, p.kv_heads, rows_k, block_n),
                                 map_of(v, params.v, p, p.kv_heads, rows_k, block_n)})
      if (!status.ok()) return status;
    return Status::success();
  }
};
//! [maps]

}  // namespace ATTN_BACKEND::hopper
