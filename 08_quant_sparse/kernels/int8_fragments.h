// int8 counterparts of kernels/hopper/fragments.h and tiles.h: int32 scores converted to float, and
// the tensor maps of codes.
#pragma once

#include <algorithm>

#include "kernels/hopper/fragments.h"
#include "kernels/scaled_epilogue.h"
#include "kernels/tiles.h"
#include "ptx/tma.h"
#include "ptx/tma_bytes.h"
#include "ptx/wgmma_s8.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Bytes per panel row of Q and K: 128 columns, or all 64.
template <int kHeadDim>
constexpr int kPanelBytes = kHeadDim < 128 ? 64 : 128;

// A score is at most 127 * 127 * 256 < 2^23, so a float represents it exactly.
//! [to_floats]
template <int kTiles>
__device__ __forceinline__ void to_floats(float (&s)[kTiles][4], const int (&s_acc)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = static_cast<float>(s_acc[n][i]);
}
//! [to_floats]

// No conversion: accumulators that start at the bits of kScoreBias end as the bits of the float
// kScoreBias + S. The floats from 2^23 to 2^24 are the integers, with consecutive bit patterns, and
// kScoreBias is in the middle. So |S| may be up to 2^22 = 4194304, and
// it is at most 127 * 127 * 256 = 4129024.
//! [bias]
constexpr float kScoreBias = 0x1.8p23f;
constexpr int kLargestScore = 127 * 127 * 256;
static_assert(kScoreBias - kLargestScore > 0x1p23f && kScoreBias + kLargestScore < 0x1p24f);
static_assert(kMaskedScore<int> < -kLargestScore, "a masked score is below all others");
// Clears the last bits of a scale, so that kScoreBias times it is exact, and so is the sum of that
// and an integer. The bias is as large as 2^24 scores; a rounding error of its last bit would be
// one unit of S. NaN stays NaN.
__device__ __forceinline__ float without_last_bits(float scale) {
  return __int_as_float(__float_as_int(scale) & ~3);
}
template <int kTiles>
__device__ __forceinline__ void init_accumulators(float (&s)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = kScoreBias;
}
template <int kTiles>
__device__ __forceinline__ void as_floats(float (&s)[kTiles][4], const int (&s_acc)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = __int_as_float(s_acc[n][i]);
}
//! [bias]

// TMA boxes are tiles of rows with all panels: 128 columns (or 64) of codes, 64 columns of 16-bit
// V.
//! [maps]
inline Status map_of_codes(TensorMap& map, const uint8_t* g8, const Problem& p, int64_t heads,
                           int64_t rows, int tile_rows) {
  const int64_t d = p.head_dim, row = std::min<int64_t>(d, 128);
  return make_byte_tensor_map<4>(map, g8, {row, rows, d / row, heads}, {d, row, d * rows},
                                 {static_cast<int>(row), tile_rows, static_cast<int>(d / row), 1});
}
struct Int8TensorMaps {
  TensorMap q, k, v;
  Status make(const Arguments& args, int block_m, int block_n) {
    const Problem& p = args.problem;
    const int64_t d = p.head_dim, heads_k = p.batch * p.kv_heads;
    for (const Status& status :
         {map_of_codes(q, args.out<uint8_t>("q8"), p, p.batch * p.heads, p.seqlen_q, block_m),
          map_of_codes(k, args.out<uint8_t>("k8"), p, heads_k, p.seqlen_k, block_n),
          make_tensor_map<4>(v, args.in<__nv_bfloat16>("v"), {64, p.seqlen_k, d / 64, heads_k},
                             {2 * d, 128, 2 * d * p.seqlen_k},
                             {64, block_n, static_cast<int>(d / 64), 1}, Swizzle::k128)})
      if (!status.ok()) return status;
    return Status::success();
  }
};
//! [maps]

}  // namespace ATTN_BACKEND::hopper
