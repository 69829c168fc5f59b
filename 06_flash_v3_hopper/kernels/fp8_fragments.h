// FP8 counterparts of kernels/hopper/fragments.h and tiles.h: P as an 8-bit operand, tensor maps of
// the codes.
#pragma once

#include "kernels/hopper/fragments.h"
#include "kernels/tiles.h"
#include "kernels/quantise.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Bytes per panel row of Q and K: 128 columns, or all 64.
template <int kHeadDim>
constexpr int kPanelBytes = kHeadDim < 128 ? 64 : 128;
// Keys per panel of V^T, one byte each.
template <int kBlockN>
constexpr int kPanelKeys = kBlockN % 128 == 0 ? 128 : 64;

// Four accumulators of a row, for 16 keys, form one register of the A operand: the slots of
// e4m3_column.
//! [round]
template <int kBlockN>
__device__ __forceinline__ void round_p_e4m3(uint32_t (&p)[kBlockN / 32][4],
                                             const float (&s)[kBlockN / 8][4]) {
#pragma unroll
  for (int i = 0; i < kBlockN / 16; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r)  // the row, and the row 8 below
      p[i / 2][i % 2 * 2 + r] = pack4_e4m3(s[2 * i][2 * r], s[2 * i][2 * r + 1],
                                           s[2 * i + 1][2 * r], s[2 * i + 1][2 * r + 1]);
}
//! [round]

// TMA boxes: row tiles of Q and K with all their panels; of V^T panels of 128 keys, or 64, with all
// columns.
//! [maps]
struct ByteTensorMaps {
  TensorMap q, k, v;
  Status make(const Arguments& args, int block_m, int block_n) {
    const Problem& p = args.problem;
    const int64_t d = p.head_dim, row = std::min<int64_t>(d, 128), padded = padded_keys(p.seqlen_k);
    const auto rows_of = [&](TensorMap& map, const char* name, int64_t heads, int64_t rows,
                             int tile_rows) {
      return make_byte_tensor_map<4>(
          map, args.out<uint8_t>(name), {row, rows, d / row, heads}, {d, row, d * rows},
          {static_cast<int>(row), tile_rows, static_cast<int>(d / row), 1});
    };
    for (const Status& status :
         {rows_of(q, "q8", p.batch * p.heads, p.seqlen_q, block_m),
          rows_of(k, "k8", p.batch * p.kv_heads, p.seqlen_k, block_n),
          make_byte_tensor_map<3>(v, args.out<uint8_t>("v8"), {padded, d, p.batch * p.kv_heads},
                                  {padded, padded * d},
                                  {block_n % 128 == 0 ? 128 : 64, static_cast<int>(d), 1})})
      if (!status.ok()) return status;
    return Status::success();
  }
};
//! [maps]

}  // namespace ATTN_BACKEND::hopper
