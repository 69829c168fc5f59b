// FP8 P V, in addition to int8_fragments.h: P as an e4m3 operand, and the tensor map of V's codes.
#pragma once

#include "kernels/int8_fragments.h"
#include "kernels/quantise_v.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

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

// O += P V of a slice of columns, in fp32.
//! [add]
template <int kTiles, int kSliceTiles>
__device__ __forceinline__ void add_slice(float (&o)[kTiles][4], const float (&pv)[kSliceTiles][4],
                                          int slice) {
#pragma unroll
  for (int n = 0; n < kSliceTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[slice * kSliceTiles + n][i] += pv[n][i];
}
// O = O rescale + P V of a slice, in as many instructions.
template <int kTiles, int kSliceTiles>
__device__ __forceinline__ void add_slice(float (&o)[kTiles][4], const float (&rescale)[2],
                                          const float (&pv)[kSliceTiles][4], int slice) {
#pragma unroll
  for (int n = 0; n < kSliceTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = o[slice * kSliceTiles + n][i];
      x = fmaf(x, rescale[i / 2], pv[n][i]);
    }
}
//! [add]

// TMA boxes of V^T are panels of 128 keys, or 64, and all columns.
struct Fp8TensorMaps {
  TensorMap q, k, v;
  Status make(const Arguments& args, int block_m, int block_n) {
    const Problem& p = args.problem;
    const int64_t d = p.head_dim, heads_k = p.batch * p.kv_heads, padded = padded_keys(p.seqlen_k);
    for (const Status& status :
         {map_of_codes(q, args.out<uint8_t>("q8"), p, p.batch * p.heads, p.seqlen_q, block_m),
          map_of_codes(k, args.out<uint8_t>("k8"), p, heads_k, p.seqlen_k, block_n),
          make_byte_tensor_map<3>(v, args.out<uint8_t>("v8"), {padded, d, heads_k},
                                  {padded, padded * d},
                                  {block_n % 128 == 0 ? 128 : 64, static_cast<int>(d), 1})})
      if (!status.ok()) return status;
    return Status::success();
  }
};

}  // namespace ATTN_BACKEND::hopper
