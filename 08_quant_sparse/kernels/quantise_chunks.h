// Smooth V, bf16 to e4m3 (SageAttention2, arXiv 2411.10958), per chunk: one mean and one scale per
// channel (column) of a chunk of 4096 keys. As in 06's quantise_chunks.h.
//
//     v_chunk [B Hkv, chunks, d, 2]    mean, descale
//     v8       [B Hkv, d, padded]        (V - mean) / descale, as in quantise_v.h
//
// Means and scales come from finite values. NaN and Inf become e4m3's NaN code, so they affect
// their own key only.
#pragma once

#include "kernels/quantise_v.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

constexpr int kChunkKeys = 4096;

// A block has 64 columns of a chunk. Each thread adds every 32nd row; then one thread per column
// adds the partial sums, always in the same order.
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
#pragma unroll 4  // loads in flight
  for (int key = key0 + thread_row; key < end; key += kRowsPerPass) {
    const Bf16x8 e =
        load_bf16x8(gV + (head * seqlen_k + key) * head_dim + panel * kColumns + column);
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

// As transpose_kernel of quantise_v.h: 64 columns `panel` of 128 keys `tile`. `chunk_of` returns
// the means and scales of a head's columns for the chunk of a key.
//! [transpose_chunks]
// One word of padding per row: fewer bank conflicts.
using TransposedWords = uint32_t[kTransposedColumns][kTransposedKeys / 4 + 1];
template <class Pass, int kHeadDim, class ChunkOf>
__device__ __forceinline__ void transpose_smoothed(const __nv_bfloat16* __restrict__ gV,
                                                   int seqlen_k, unsigned panel, unsigned tile,
                                                   ChunkOf chunk_of, TransposedWords& sWords,
                                                   uint8_t* __restrict__ gV8) {
  constexpr int kPanels = kHeadDim / kTransposedColumns;
  const int64_t head = panel / kPanels, padded = padded_keys(seqlen_k);
  const int column0 = static_cast<int>(panel) % kPanels * kTransposedColumns;
  const int key0 = static_cast<int>(tile) * kTransposedKeys;
  // 8 threads per row of 64 columns; 32 groups of four keys.
  const int column = static_cast<int>(threadIdx.x) % 8 * 8;
  const int group = static_cast<int>(threadIdx.x) / 8;
  float x[8][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = key0 + group / 4 * 16 + e4m3_column(group % 4 * 4 + i);
    const int64_t idx = (head * seqlen_k + key) * kHeadDim + column0 + column;
    const Bf16x8 e = key < seqlen_k ? load_bf16x8(gV + idx) : Bf16x8{};
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c][i] = finite_or_nan(e.x[c]);
  }
  const float2* const chunk = chunk_of(head, key0) + column0 + column;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const auto [mean, descale] = chunk[c];
    const float scale = 1 / descale;
    sWords[column + c][group] = pack4_e4m3((x[c][0] - mean) * scale, (x[c][1] - mean) * scale,
                                           (x[c][2] - mean) * scale, (x[c][3] - mean) * scale);
  }
  __syncthreads();  // all codes are visible
  const int word = static_cast<int>(threadIdx.x) % 32;
  if (key0 + 4 * word >= padded) return;
  uint8_t* const g = gV8 + (head * kHeadDim + column0) * padded + key0 + 4 * word;
  for (int col = threadIdx.x / 32; col < kTransposedColumns; col += Pass::kThreads / 32)
    *reinterpret_cast<uint32_t*>(g + col * padded) = sWords[col][word];
}

template <class Pass, int kHeadDim>
__global__ void __launch_bounds__(Pass::kThreads)
    transpose_chunks_kernel(const __nv_bfloat16* __restrict__ gV, int seqlen_k,
                            const float2* __restrict__ gChunks, uint8_t* __restrict__ gV8) {
  __shared__ TransposedWords sWords;
  static_assert(kChunkKeys % kTransposedKeys == 0);
  transpose_smoothed<Pass, kHeadDim>(
      gV, seqlen_k, blockIdx.x, blockIdx.y,
      [&](int64_t head, int key0) {
        const int chunks = ceil_div(seqlen_k, kChunkKeys);
        return gChunks + (head * chunks + key0 / kChunkKeys) * kHeadDim;
      },
      sWords, gV8);
}
//! [transpose_chunks]

// A step's whole pass: the mean of K, codes of Q and K, means and scales of V, codes of V.
//! [launch_chunks]
template <int kHeadDim, class Groups>
Status quantise_chunks(const Arguments& args) {
  using Pass = QuantisePass;
  const Problem& p = args.problem;
  if (const Status status = quantise_smoothed<kHeadDim, Groups>(args); !status.ok()) return status;
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
  args.phase("transpose");
  return launch_kernel(
      transpose_chunks_kernel<Pass, kHeadDim>,
      dim3(panels, static_cast<unsigned>(ceil_div(padded_keys(p.seqlen_k), kTransposedKeys))),
      dim3(Pass::kThreads), 0, args.stream, v, seqlen_k, chunks, args.out<uint8_t>("v8"));
}
//! [launch_chunks]

}  // namespace ATTN_BACKEND::hopper
