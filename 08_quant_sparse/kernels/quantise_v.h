// V from bf16 to e4m3, one scale per channel (column) of a head, transposed: wgmma takes 8-bit
// operands K-major only, and the summed index is the key here. Absolute maxima of parts of a head
// come first, then those of the head, then the codes.
//
//     v_parts [B Hkv, parts, d]    v_descale [B Hkv, d]
//     v8 [B Hkv, d, padded]        its keys in the order of e4m3_column in each 16 (wgmma_e4m3.h)
//
// SageAttention2 (arXiv 2411.10958), section 3.3. Scales come from finite values. NaN and Inf
// become e4m3's NaN code, so they affect their own key only.
#pragma once

#include "kernels/mean_parts.h"
#include "kernels/quantise.h"
#include "kernels/smooth.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

constexpr float kLargestE4M3 = 448;
// Rows of v8 are padded to 16 bytes.
inline __host__ __device__ int64_t padded_keys(int64_t keys) { return round_up(keys, 16); }

// As mean_parts_kernel of smooth.h, with the maximum instead of the sum.
//! [largest]
template <class Pass, int kHeadDim>
__global__ void __launch_bounds__(Pass::kThreads)
    channel_parts_kernel(const __nv_bfloat16* __restrict__ gV,  // [B Hkv, seqlen_k, d]
                         int seqlen_k, int parts, unsigned* __restrict__ gParts) {
  constexpr int kLanes = kHeadDim / 8, kRowsPerPass = Pass::kThreads / kLanes;
  __shared__ unsigned sLargest[kRowsPerPass][kHeadDim];
  const int64_t head = blockIdx.x / parts;
  const int part = static_cast<int>(blockIdx.x % parts), keys = mean_part_keys(seqlen_k);
  const int lane = threadIdx.x % kLanes, thread_row = static_cast<int>(threadIdx.x) / kLanes;
  const int end = min(seqlen_k, (part + 1) * keys);
  unsigned largest[8] = {};
#pragma unroll 2  // loads in flight
  for (int key = part * keys + thread_row; key < end; key += kRowsPerPass) {
    const Bf16x8 e = load_bf16x8(gV + (head * seqlen_k + key) * kHeadDim + 8 * lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) largest[i] = max(largest[i], size_bits(e.x[i]));
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sLargest[thread_row][8 * lane + i] = largest[i];
  __syncthreads();  // the maxima of all threads are stored
  for (int col = threadIdx.x; col < kHeadDim; col += Pass::kThreads) {
    unsigned all = 0;
    for (int row = 0; row < kRowsPerPass; ++row) all = max(all, sLargest[row][col]);
    if (all >= 0x7F800000u) {  // one bad key must not spoil the channel's scale
      const FiniteColumn column = finite_column(
          gV + (head * seqlen_k + part * keys) * kHeadDim + col, kHeadDim, end - part * keys);
      all = size_bits(fmaxf(fmaxf(-column.least, column.most), 0));
    }
    gParts[(head * parts + part) * kHeadDim + col] = all;
  }
}

__device__ __forceinline__ Scale e4m3_scale_of(unsigned largest_bits) {
  const float largest = fmaxf(__uint_as_float(largest_bits), kSmallestV);
  return {kLargestE4M3 / largest, largest / kLargestE4M3};
}
// One block per head, one thread per channel. The maximum of a head replaces that of its first
// part.
template <int kHeadDim>
__global__ void channel_kernel(unsigned* __restrict__ gParts, int parts,
                               float* __restrict__ gDescale) {
  unsigned* const g = gParts + int64_t{blockIdx.x} * parts * kHeadDim + threadIdx.x;
  unsigned largest = 0;
  for (int part = 0; part < parts; ++part) largest = max(largest, g[part * kHeadDim]);
  g[0] = largest;
  gDescale[int64_t{blockIdx.x} * kHeadDim + threadIdx.x] = e4m3_scale_of(largest).descale;
}
//! [largest]

// A block transposes 128 keys of 64 columns. A thread has 8 columns of the four keys in
// neighbouring slots: in shared memory they are one word per column.
//! [transpose]
constexpr int kTransposedKeys = 128, kTransposedColumns = 64;
template <class Pass, int kHeadDim>
__global__ void __launch_bounds__(Pass::kThreads)
    transpose_kernel(const __nv_bfloat16* __restrict__ gV, int seqlen_k,
                     const unsigned* __restrict__ gParts, int parts, uint8_t* __restrict__ gV8) {
  __shared__ uint32_t sWords[kTransposedColumns][kTransposedKeys / 4 + 1];  // fewer bank conflicts
  constexpr int kPanels = kHeadDim / kTransposedColumns;
  const int64_t head = blockIdx.x / kPanels, padded = padded_keys(seqlen_k);
  const int column0 = static_cast<int>(blockIdx.x) % kPanels * kTransposedColumns;
  const int key0 = static_cast<int>(blockIdx.y) * kTransposedKeys;
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
  const unsigned* const gLargest = gParts + head * parts * kHeadDim + column0 + column;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const float scale = e4m3_scale_of(gLargest[c]).scale;
    sWords[column + c][group] =
        pack4_e4m3(x[c][0] * scale, x[c][1] * scale, x[c][2] * scale, x[c][3] * scale);
  }
  __syncthreads();  // all codes are visible
  const int word = static_cast<int>(threadIdx.x) % 32;
  if (key0 + 4 * word >= padded) return;
  uint8_t* const g = gV8 + (head * kHeadDim + column0) * padded + key0 + 4 * word;
  for (int col = threadIdx.x / 32; col < kTransposedColumns; col += Pass::kThreads / 32)
    *reinterpret_cast<uint32_t*>(g + col * padded) = sWords[col][word];
}
//! [transpose]

template <int kHeadDim>
Status quantise_v(const Arguments& args) {
  using Pass = QuantisePass;
  const Problem& p = args.problem;
  const int seqlen_k = static_cast<int>(p.seqlen_k), parts = mean_parts(p.seqlen_k);
  const auto heads = static_cast<unsigned>(p.batch * p.kv_heads);
  const auto* const v = args.in<__nv_bfloat16>("v");
  auto* const largest = args.out<unsigned>("v_parts");
  args.phase("scales");
  if (const Status status = launch_kernel(
          channel_parts_kernel<Pass, kHeadDim>, dim3(heads * static_cast<unsigned>(parts)),
          dim3(Pass::kThreads), 0, args.stream, v, seqlen_k, parts, largest);
      !status.ok())
    return status;
  if (const Status status =
          launch_kernel(channel_kernel<kHeadDim>, dim3(heads), dim3(kHeadDim), 0, args.stream,
                        largest, parts, args.out<float>("v_descale"));
      !status.ok())
    return status;
  args.phase("transpose");
  return launch_kernel(
      transpose_kernel<Pass, kHeadDim>,
      dim3(heads * kHeadDim / kTransposedColumns,
           static_cast<unsigned>(ceil_div(padded_keys(p.seqlen_k), kTransposedKeys))),
      dim3(Pass::kThreads), 0, args.stream, v, seqlen_k, largest, parts, args.out<uint8_t>("v8"));
}

// A step's whole pass: the mean of K, codes of Q and K, codes of V.
template <int kHeadDim, class Groups>
Status quantise_all(const Arguments& args) {
  if (const Status status = quantise_smoothed<kHeadDim, Groups>(args); !status.ok()) return status;
  return quantise_v<kHeadDim>(args);
}

}  // namespace ATTN_BACKEND::hopper
