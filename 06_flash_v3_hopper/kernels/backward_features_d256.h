// Parts of b14 and b15 that are not part of the pipeline: softcap, tensor maps, and the
// conversion of dQ, for packed sequences too.
#pragma once

#include "kernels/backward_d256.h"
#include "kernels/backward_packed.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// With softcap S^T becomes tanh(scale S^T); then it is masked. `scale`: softmax_scale / softcap.
// tanh y = 1 - 2 / (e^2y + 1). Cancellation near 0: use the Taylor series there.
template <class Config>
__device__ __forceinline__ void tanh_scores(float (&s)[Config::kBlockM / 8][4], float scale) {
#pragma unroll
  for (int n = 0; n < Config::kBlockM / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float y = s[n][i] * scale, y2 = y * y;
      const float series = y * fmaf(y2, fmaf(y2, fmaf(y2, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1);
      const float whole = fmaf(-2, __fdividef(1, exp2f(2 * kLog2e * y) + 1), 1);
      s[n][i] = fabsf(y) < 0.25f ? series : whole;
    }
}
// tanh becomes P^T = exp(cap tanh - lse); P^T (1 - tanh^2) is rounded to `capped`. Of a masked
// score the tanh is -inf: P = 0. `sLse`: at this lane's first row.
//! [capped]
template <class Element, class Config>
__device__ __forceinline__ void capped_probabilities(float (&s)[Config::kBlockM / 8][4],
                                                     uint32_t (&capped)[Config::kBlockM / 16][4],
                                                     const float* sLse, float softcap_log2) {
#pragma unroll
  for (int n = 0; n < Config::kBlockM / 8; ++n) {
    const float2 lse_log2 = *reinterpret_cast<const float2*>(sLse + 8 * n);
    float slope[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      slope[i] = 1 - fminf(1, s[n][i] * s[n][i]);
      s[n][i] = exp2f(fmaf(s[n][i], softcap_log2, i % 2 == 0 ? -lse_log2.x : -lse_log2.y));
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      capped[n / 2][n % 2 * 2 + i / 2] =
          pack2<Element>(s[n][i] * slope[i], s[n][i + 1] * slope[i + 1]);
  }
}
//! [capped]

// A map of [heads, rows, d], or of packed [rows, heads, d], like map_of's, but in boxes of 64 rows
// and two panels. `rows`: of a head, of all packed sequences.
template <class Element>
Status map_of_packed_half(TensorMap& map, const Element* g, const Problem& p, int64_t heads,
                          int64_t rows) {
  const bool packed = p.varlen();
  const int64_t d = p.head_dim, row_bytes = 2 * d * (packed ? heads : 1);
  return make_tensor_map<4>(map, g, {64, rows, d / 64, heads * (packed ? 1 : p.batch)},
                            {row_bytes, 128, 2 * d * (packed ? 1 : rows)}, {64, 64, 2, 1},
                            Swizzle::k128);
}
template <class Element, class Config>
Status make_half_maps(BackwardMaps& maps, const Arguments& args, const Packing& packing) {
  const BackwardParams<Element> params(args);
  const Problem& p = args.problem;
  constexpr int kBlockM = Config::kBlockM;
  const int64_t rows_q = p.varlen() ? p.tokens_q() : p.seqlen_q;
  const int64_t rows_k = p.varlen() ? p.tokens_k() : p.seqlen_k;
  const int64_t tiles = (p.varlen() ? 1 : p.batch) * p.heads * packing.num_tiles;
  for (const Status& made :
       {map_of_packed_half(maps.q, params.q, p, p.heads, rows_q),
        map_of_packed_half(maps.dout, params.dout, p, p.heads, rows_q),
        map_of_packed_half(maps.k, params.k, p, p.kv_heads, rows_k),
        map_of_packed_half(maps.v, params.v, p, p.kv_heads, rows_k),
        make_tensor_map<3>(maps.rows, args.in<__half>("rows"), {2 * kBlockM, 2, tiles},
                           {4 * kBlockM, 8 * kBlockM}, {2 * kBlockM, 1, 1}, Swizzle::kNone)})
    if (!made.ok()) return made;
  return Status::success();
}

// As convert_halves_kernel, for packed sequences too: a block past the end of its sequence has
// no work.
template <class Element, class Config>
__global__ void __launch_bounds__(Config::kConsumerThreads)
    packed_convert_halves_kernel(const float4* gAccum,  // [tiles, blocks, kFragments / 2, threads]
                                 Element* gdQ,  // [B, Hq, seqlen_q, d] or [tokens, Hq, d]
                                 Shape shape, Packing packing, int num_m_blocks) {
  wait_for_launch_before();
  const int half = static_cast<int>(blockIdx.x % 2), block = static_cast<int>(blockIdx.x / 2);
  const Place at = place_of<Config>(shape, packing, block / num_m_blocks, shape.heads);
  const int m_block = block % num_m_blocks, row = m_block * Config::kBlockM + first_row() % 64;
  if (m_block * Config::kBlockM >= shape.seqlen_q) return;
  const int64_t tile = int64_t{at.head} * packing.num_tiles + at.first_tile + m_block;
  const float4* const accum = gAccum + (tile * 2 + half) * (8 * Config::kConsumerThreads);
  float x[8][4];
#pragma unroll
  for (int f = 0; f < 8; ++f) {
    const float4 sum = accum[f * Config::kConsumerThreads + thread_index()];
    x[f][0] = sum.x, x[f][1] = sum.y, x[f][2] = sum.z, x[f][3] = sum.w;
  }
  const int column =
      half * Config::kColumns + thread_index() / kWarpgroup * (Config::kColumns / 2);
  store_gradient(gdQ + at.head * packing.q_head + (at.q_token + row) * packing.q_row + column,
                 packing.q_row, shape.seqlen_q - row, x, shape.softmax_scale);
}

}  // namespace ATTN_BACKEND::hopper
