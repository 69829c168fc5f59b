// Smooth Q: the mean of each tile of Q, and its contribution to the scores. With q = q' + mean, q .
// k is q' . k + mean . k, and the second term is one number per key. So a tile of 128 queries has a
// vector over the keys, which its kernel adds to S.
//
//     q_sums [B Hq, tiles, d]    vectors [B Hq, tiles, padded keys]: in log2 units, scaled
//
// SageAttention2 (arXiv 2411.10958), section 3.1. The vector uses the unquantised K, so the mean
// adds no rounding error.
#pragma once

#include "kernels/fp8_fragments.h"
#include "kernels/smooth.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Rows of `vectors` are padded to 16 bytes.
inline __host__ __device__ int64_t padded_vector(int64_t keys) { return round_up(keys, 4); }

// A block has 512 keys and up to 16 query tiles of a head; a thread has 4 keys and 8 tiles. So it
// uses each loaded mean four times and each loaded key eight times.
//! [vectors]
constexpr int kVectorKeys = 512, kVectorTiles = 16, kOwnKeys = 4;
template <class Pass, int kHeadDim>
__global__ void __launch_bounds__(Pass::kThreads)
    vectors_kernel(const __nv_bfloat16* __restrict__ gK,  // [B Hkv, seqlen_k, d]
                   const float* __restrict__ gMean,       // [B Hkv, d]
                   const float* __restrict__ gQSums,      // [B Hq, tiles, d]
                   int seqlen_q, int seqlen_k, int group, float scale_log2,
                   float* __restrict__ gVectors) {
  constexpr int kKeysApart = kVectorKeys / kOwnKeys;
  constexpr int kOwnTiles = kVectorTiles / (Pass::kThreads / kKeysApart);
  alignas(16) __shared__ float sMeans[kVectorTiles][kHeadDim];  // of the tiles; 0 for missing ones
  alignas(16) __shared__ float sMean[kHeadDim];                 // of K
  const int tiles = ceil_div(seqlen_q, kScaleRows), blocks = ceil_div(tiles, kVectorTiles);
  const int64_t head = blockIdx.x / blocks, kv_head = head / group;
  const int tile0 = static_cast<int>(blockIdx.x) % blocks * kVectorTiles;
  const int count = min(kVectorTiles, tiles - tile0);
  for (int i = threadIdx.x; i < kVectorTiles * kHeadDim; i += Pass::kThreads) {
    const int n = i / kHeadDim;
    sMeans[n][i % kHeadDim] = n < count ? gQSums[(head * tiles + tile0) * kHeadDim + i] /
                                              rows_of_tile(seqlen_q, tile0 + n)
                                        : 0;
  }
  for (int i = threadIdx.x; i < kHeadDim; i += Pass::kThreads)
    sMean[i] = gMean[kv_head * kHeadDim + i];
  __syncthreads();  // all means are loaded
  const int key0 = static_cast<int>(blockIdx.y * kVectorKeys + threadIdx.x % kKeysApart);
  const int first = static_cast<int>(threadIdx.x) / kKeysApart * kOwnTiles;
  float sum[kOwnKeys][kOwnTiles] = {};
  for (int col = 0; col < kHeadDim; col += 8) {
    Bf16x8 k[kOwnKeys];
#pragma unroll
    for (int j = 0; j < kOwnKeys; ++j) {
      const int key = min(key0 + j * kKeysApart, seqlen_k - 1);
      k[j] = load_bf16x8(gK + (kv_head * seqlen_k + key) * kHeadDim + col);
#pragma unroll
      for (int i = 0; i < 8; ++i) k[j].x[i] -= sMean[col + i];
    }
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n)
#pragma unroll
      for (int half = 0; half < 8; half += 4) {
        const auto of = *reinterpret_cast<const float4*>(&sMeans[first + n][col + half]);
#pragma unroll
        for (int j = 0; j < kOwnKeys; ++j) {
          const float* const x = k[j].x + half;
          sum[j][n] = fmaf(of.x, x[0], sum[j][n]), sum[j][n] = fmaf(of.y, x[1], sum[j][n]);
          sum[j][n] = fmaf(of.z, x[2], sum[j][n]), sum[j][n] = fmaf(of.w, x[3], sum[j][n]);
        }
      }
  }
  const int64_t padded = padded_vector(seqlen_k);
#pragma unroll
  for (int j = 0; j < kOwnKeys; ++j)
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n)
      if (const int key = key0 + j * kKeysApart; key < padded && first + n < count)
        gVectors[(head * tiles + tile0 + first + n) * padded + key] =
            key < seqlen_k ? scale_log2 * sum[j][n] : 0;
}
//! [vectors]

// The whole pass: means of K and of Q, codes of the rest, vectors, codes of V.
template <int kHeadDim, class Groups>
Status quantise_smooth_q(const Arguments& args) {
  const ForwardParams<__nv_bfloat16> params(args);
  using Pass = QuantisePass;
  const Problem& p = args.problem;
  const int seqlen_q = static_cast<int>(p.seqlen_q), seqlen_k = static_cast<int>(p.seqlen_k);
  const auto heads = static_cast<unsigned>(p.batch * p.heads);
  const int tiles = ceil_div(seqlen_q, kScaleRows), group = static_cast<int>(p.group());
  auto* const mean = args.out<float>("k_mean");
  auto* const sums = args.out<float>("q_sums");
  const float scale = shape_of(p).softmax_scale;
  if (const Status status = mean_of_k<kHeadDim>(args); !status.ok()) return status;
  if (const Status status = launch_kernel(  // the parts of a head are its tiles
          mean_parts_kernel<Pass, kHeadDim>, dim3(heads * static_cast<unsigned>(tiles)),
          dim3(Pass::kThreads), 0, args.stream, params.q, seqlen_q, tiles, kScaleRows, sums);
      !status.ok())
    return status;
  if (const Status status = quantise<kHeadDim, Groups, true>(
          args, {mean, args.out<float>("lse_shift"), scale, group, sums});
      !status.ok())
    return status;
  args.phase("vectors");
  const auto blocks = static_cast<unsigned>(ceil_div(tiles, kVectorTiles));
  if (const Status status = launch_kernel(
          vectors_kernel<Pass, kHeadDim>,
          dim3(heads * blocks, static_cast<unsigned>(ceil_div(seqlen_k, kVectorKeys))),
          dim3(Pass::kThreads), 0, args.stream, params.k, mean, sums, seqlen_q, seqlen_k, group,
          scale * kLog2e, args.out<float>("vectors"));
      !status.ok())
    return status;
  return quantise_v<kHeadDim>(args);
}

// TMA boxes of the vectors: one key tile, as pairs of 16 bits.
struct SmoothTensorMaps : Fp8TensorMaps {
  TensorMap vectors;
  Status make(const Arguments& args, int block_m, int block_n) {
    const Problem& p = args.problem;
    const int64_t row = padded_vector(p.seqlen_k), tiles = ceil_div(p.seqlen_q, int64_t{block_m});
    if (const Status status = Fp8TensorMaps::make(args, block_m, block_n); !status.ok())
      return status;
    return make_tensor_map<3>(vectors, args.out<uint16_t>("vectors"),
                              {2 * row, tiles, p.batch * p.heads}, {4 * row, 4 * row * tiles},
                              {2 * block_n, 1, 1}, Swizzle::kNone);
  }
};

// Scores in log2 units, each plus the vector's element of its key.
//! [add_vector]
template <int kTiles>
__device__ __forceinline__ void scores_with_vector(float (&s)[kTiles][4],
                                                   const int (&s_acc)[kTiles][4],
                                                   const float* sVector, float scale_log2) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float2 of_keys = *reinterpret_cast<const float2*>(sVector + 8 * n + quad_col());
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[n][i] = fmaf(static_cast<float>(s_acc[n][i]), scale_log2, i % 2 ? of_keys.y : of_keys.x);
  }
}
//! [add_vector]

}  // namespace ATTN_BACKEND::hopper
