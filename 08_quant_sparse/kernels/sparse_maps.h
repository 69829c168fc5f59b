// Tensor maps of the block-sparse steps: Q, K and V of 16 bits, in tiles.
#pragma once

#include "attn/kernel.h"
#include "ptx/tma.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Tensor map of 16-bit [heads, rows, d], with boxes of `tile_rows` rows and all panels of 64
// columns. TMA fills missing rows with zeros.
struct TensorMaps {
  TensorMap q, k, v;
  template <class Element>
  Status make(const Arguments& args, int block_m, int block_n) {
    const ForwardParams<Element> params(args);
    const Problem& p = args.problem;
    const int64_t d = p.head_dim;
    const auto map_of = [&](TensorMap& map, const Element* g, int64_t heads, int64_t rows,
                            int tile_rows) {
      const int panels = static_cast<int>(d / 64);
      return make_tensor_map<4>(map, g, {64, rows, panels, heads * p.batch},
                                {2 * d, 128, 2 * d * rows}, {64, tile_rows, panels, 1},
                                Swizzle::k128);
    };
    for (const Status& status : {map_of(q, params.q, p.heads, p.seqlen_q, block_m),
                                 map_of(k, params.k, p.kv_heads, p.seqlen_k, block_n),
                                 map_of(v, params.v, p.kv_heads, p.seqlen_k, block_n)})
      if (!status.ok()) return status;
    return Status::success();
  }
};

}  // namespace ATTN_BACKEND::hopper
