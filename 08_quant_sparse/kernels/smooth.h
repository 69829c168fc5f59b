// The mean of K over the keys of a head, before K is rounded: two kernels without atomics, so the
// result is bitwise reproducible. Blocks sum parts of a head; then the parts are added.
//
//     k_parts [B Hkv, parts, d]    k_mean [B Hkv, d]    lse_shift [B, Hq, seqlen_q]
//
// SageAttention (arXiv 2410.02367), section 4.2.
#pragma once

#include "kernels/mean_parts.h"
#include "kernels/quantise.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// A block sums one part of a head's keys, `keys` of them. A thread adds every kRowsPerPass-th key
// of eight columns; then one thread per column adds the partial sums.
//! [parts]
template <class Pass, int kHeadDim>
__global__ void __launch_bounds__(Pass::kThreads)
    mean_parts_kernel(const __nv_bfloat16* __restrict__ gK,  // [B Hkv, seqlen_k, d]
                      int seqlen_k, int parts, int keys, float* __restrict__ gParts) {
  constexpr int kLanes = kHeadDim / 8, kRowsPerPass = Pass::kThreads / kLanes;
  __shared__ float sSum[kRowsPerPass][kHeadDim];
  const int64_t head = blockIdx.x / parts;
  const int part = static_cast<int>(blockIdx.x % parts);
  const int lane = threadIdx.x % kLanes, thread_row = static_cast<int>(threadIdx.x) / kLanes;
  const int end = min(seqlen_k, (part + 1) * keys);
  float sum[8] = {};
#pragma unroll 2  // loads in flight
  for (int key = part * keys + thread_row; key < end; key += kRowsPerPass) {
    const Bf16x8 e = load_bf16x8(gK + (head * seqlen_k + key) * kHeadDim + 8 * lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += e.x[i];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sSum[thread_row][8 * lane + i] = sum[i];
  __syncthreads();  // the sums of all threads are stored
  for (int col = threadIdx.x; col < kHeadDim; col += Pass::kThreads) {
    float all = 0;
    for (int row = 0; row < kRowsPerPass; ++row) all += sSum[row][col];
    if (!(fabsf(all) < INFINITY))  // one bad key must not spoil the head's mean
      all = finite_column(gK + (head * seqlen_k + part * keys) * kHeadDim + col, kHeadDim,
                          end - part * keys)
                .sum;
    gParts[(head * parts + part) * kHeadDim + col] = all;
  }
}

// One block per head, one thread per column.
template <int kHeadDim>
__global__ void mean_kernel(const float* __restrict__ gParts, int seqlen_k, int parts,
                            float* __restrict__ gMean) {
  const int64_t head = blockIdx.x;
  float sum = 0;
  for (int part = 0; part < parts; ++part)
    sum += gParts[(head * parts + part) * kHeadDim + threadIdx.x];
  gMean[head * kHeadDim + threadIdx.x] = sum / static_cast<float>(seqlen_k);
}
//! [parts]

// The mean of K, in two launches.
template <int kHeadDim>
Status mean_of_k(const Arguments& args) {
  using Pass = QuantisePass;
  const Problem& p = args.problem;
  const int seqlen_k = static_cast<int>(p.seqlen_k), parts = mean_parts(p.seqlen_k);
  const auto heads = static_cast<unsigned>(p.batch * p.kv_heads);
  auto* const sums = args.out<float>("k_parts");
  args.phase("mean");
  if (const Status status = launch_kernel(
          mean_parts_kernel<Pass, kHeadDim>, dim3(heads * static_cast<unsigned>(parts)),
          dim3(Pass::kThreads), 0, args.stream, args.in<__nv_bfloat16>("k"), seqlen_k, parts,
          mean_part_keys(seqlen_k), sums);
      !status.ok())
    return status;
  return launch_kernel(mean_kernel<kHeadDim>, dim3(heads), dim3(kHeadDim), 0, args.stream, sums,
                       seqlen_k, parts, args.out<float>("k_mean"));
}

// The mean, then codes of the rest.
template <int kHeadDim, class Groups>
Status quantise_smoothed(const Arguments& args) {
  if (const Status status = mean_of_k<kHeadDim>(args); !status.ok()) return status;
  return quantise<kHeadDim, Groups, true>(
      args, {.gMean = args.out<float>("k_mean"),
             .gLseShift = args.out<float>("lse_shift"),
             .softmax_scale = shape_of(args.problem).softmax_scale,
             .group = static_cast<int>(args.problem.group())});
}

}  // namespace ATTN_BACKEND::hopper
