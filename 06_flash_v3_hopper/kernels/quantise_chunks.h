// Smooth V: e4m3 codes of V minus its mean, with a mean and a scale per channel (column) of a chunk
// of 4096 keys. One kernel computes them, another one rounds and transposes. Q and K are quantised
// as in quantise_tiles.h; with a rotary embedding, as in quantise_rotary.h or f7_rotary.
//
//     v_chunk  [B Hkv, chunks, d, 2]    mean, descale
//     v8       [B Hkv, d, padded]       (V - mean) / descale, as in quantise.h
#pragma once

#include "kernels/quantise_rotary.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

constexpr int kChunkKeys = 4096;
struct ChunksPass : RotaryPass {};

// A block handles 64 columns of a chunk. Each thread sums every 32nd row, then one thread per
// column adds these sums, always in the same order.
//! [chunks]
template <class Pass>
__global__ void __launch_bounds__(Pass::kThreads)
    chunks_kernel(const __nv_bfloat16* __restrict__ gV,  // [B Hkv, seqlen_k, d]
                  int seqlen_k, int head_dim, float2* __restrict__ gChunks) {
  constexpr int kColumns = kTransposedColumns, kRowsPerPass = 8 * Pass::kThreads / kColumns;
  __shared__ float sSum[kRowsPerPass][kColumns], sLeast[kRowsPerPass][kColumns];
  __shared__ float sMost[kRowsPerPass][kColumns];
  const int panels = head_dim / kColumns, chunks = ceil_div(seqlen_k, kChunkKeys);
  const int panel = static_cast<int>(blockIdx.x) % panels;
  const int64_t head = blockIdx.x / panels / chunks;
  const int chunk = static_cast<int>(blockIdx.x / panels % chunks);
  const int column = static_cast<int>(threadIdx.x) % 8 * 8;
  const int thread_row = static_cast<int>(threadIdx.x) / 8;
  const int key0 = chunk * kChunkKeys, end = min(seqlen_k, key0 + kChunkKeys);
  float sum[8] = {}, least[8], most[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) least[i] = INFINITY, most[i] = -INFINITY;
#pragma unroll 8  // loads in flight
  for (int key = key0 + thread_row; key < end; key += kRowsPerPass) {
    const Bf16x8 e =
        load_bf16x8_as_given(gV + (head * seqlen_k + key) * head_dim + panel * kColumns + column);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum[i] += e.x[i];
      least[i] = fminf(least[i], e.x[i]), most[i] = fmaxf(most[i], e.x[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sSum[thread_row][column + i] = sum[i];
    sLeast[thread_row][column + i] = least[i], sMost[thread_row][column + i] = most[i];
  }
  __syncthreads();  // partial sums of all threads are visible
  if (threadIdx.x >= kColumns) return;
  float all = 0, low = INFINITY, high = -INFINITY;
  for (int row = 0; row < kRowsPerPass; ++row) {
    all += sSum[row][threadIdx.x];
    low = fminf(low, sLeast[row][threadIdx.x]), high = fmaxf(high, sMost[row][threadIdx.x]);
  }
  if (!(fabsf(all) < INFINITY)) {  // non-finite keys are left out of the mean
    const FiniteColumn of_column =
        finite_column(gV + (head * seqlen_k + key0) * head_dim + panel * kColumns + threadIdx.x,
                      head_dim, end - key0);
    all = of_column.sum, low = of_column.least, high = of_column.most;
  }
  const float mean = all / static_cast<float>(end - key0);
  const float largest = fmaxf(fmaxf(high - mean, mean - low), kSmallestV);
  gChunks[(head * chunks + chunk) * head_dim + panel * kColumns + threadIdx.x] =
      make_float2(mean, largest / kLargestE4M3);
}
//! [chunks]

// A block transposes 128 keys of 64 columns, as quantise_transposed_kernel does.
//! [transpose_chunks]
template <class Pass>
__global__ void __launch_bounds__(Pass::kThreads)
    transpose_chunks_kernel(const __nv_bfloat16* __restrict__ gV, int seqlen_k, int head_dim,
                            const float2* __restrict__ gChunks, uint8_t* __restrict__ gV8) {
  __shared__ TransposeStorage smem;
  static_assert(kChunkKeys % kTransposedKeys == 0);
  const int panels = head_dim / kTransposedColumns, chunks = ceil_div(seqlen_k, kChunkKeys);
  const int64_t head = blockIdx.x / panels, padded = padded_keys(seqlen_k);
  const int column0 = static_cast<int>(blockIdx.x) % panels * kTransposedColumns;
  const int key0 = static_cast<int>(blockIdx.y) * kTransposedKeys;
  const int column = static_cast<int>(threadIdx.x) % 8 * 8;
  const int group = static_cast<int>(threadIdx.x) / 8;
  Bf16x8 four[4];
  load_keys(gV + head * seqlen_k * head_dim + column0 + column, head_dim, key0, seqlen_k, group,
            four);
  const float2* const chunk =
      gChunks + (head * chunks + key0 / kChunkKeys) * head_dim + column0 + column;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const float2 v = chunk[c];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i].x[c] = (four[i].x[c] - v.x) * (1 / v.y);
  }
  store_transposed(smem, four, 1, group, column);
  __syncthreads();  // all codes are visible
  write_transposed(smem, gV8 + (head * head_dim + column0) * padded, padded, key0);
}
//! [transpose_chunks]

//! [launch_chunks]
// `quantise_turned` turns and quantises Q and K, if there is a rotary embedding.
template <int kHeadDim>
Status quantise_chunks(const Arguments& args,
                       LaunchFunction quantise_turned = turn_and_quantise<ChunksPass, kHeadDim>) {
  using Pass = ChunksPass;
  const Problem& p = args.problem;
  const auto* const v = args.in<__nv_bfloat16>("v");
  auto* const chunks = reinterpret_cast<float2*>(args.out<float>("v_chunk"));
  const int seqlen_k = static_cast<int>(p.seqlen_k);
  const auto panels = static_cast<unsigned>(p.batch * p.kv_heads * kHeadDim / kTransposedColumns);
  args.phase("chunks");
  if (const Status status =
          launch_kernel(chunks_kernel<Pass>,
                        dim3(panels * static_cast<unsigned>(ceil_div(p.seqlen_k, kChunkKeys))),
                        dim3(Pass::kThreads), 0, args.stream, v, seqlen_k, kHeadDim, chunks);
      !status.ok())
    return status;
  const bool turned = args.in_or_null<float>("cos_sin") != nullptr;
  if (const Status status =
          turned ? quantise_turned(args) : quantise_q_and_k<Pass, true, kHeadDim>(args);
      !status.ok())
    return status;
  return launch_kernel(
      transpose_chunks_kernel<Pass>,
      dim3(panels, static_cast<unsigned>(ceil_div(padded_keys(p.seqlen_k), kTransposedKeys))),
      dim3(Pass::kThreads), 0, args.stream, v, seqlen_k, kHeadDim, chunks, args.out<uint8_t>("v8"));
}
//! [launch_chunks]

}  // namespace ATTN_BACKEND::hopper
