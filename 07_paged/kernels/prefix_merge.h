// Merges a suffix with the partial results of its prefix: the last phase of v17_prefix_tma, a copy
// of the code in v8_shared_prefix.
#pragma once

#include "attn/kernel.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::paged {

// One warp per row; a lane owns four of each 128 columns.
constexpr int kMergeWarps = 4;
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(32 * kMergeWarps)
    // [B, 4]: parts, first partial result, first row, rows
    merge_prefix_kernel(const int* gPrefixOf,
                        const float* gOPartial,    // [partial results, d]
                        const float* gLsePartial,  // [partial results], in log2 units
                        Element* gO,               // [B, Hq, seqlen_q, d]
                        float* gLse,               // [B, Hq, seqlen_q]
                        Shape shape, int rows) {
  const int lane_id = threadIdx.x % 32, idx = blockIdx.x * kMergeWarps + threadIdx.x / 32;
  if (idx >= rows) return;
  const int each = shape.heads / shape.kv_heads * shape.seqlen_q;
  const int head = idx / each % shape.kv_heads, b = idx / (each * shape.kv_heads);
  // of[1]: first partial result; of[2], of[3]: the sequence's first row and all rows of the group
  const int *const of = gPrefixOf + 4 * b, parts = of[0];
  if (parts == 0) return;  // no shared prefix
  const auto partial_index = [&](int n) {
    return int64_t{of[1]} + (head * parts + n) * of[3] + of[2] + idx % each;
  };
  const float lse_suffix = gLse[idx] * kLog2e;
  float max = lse_suffix, sum = 0;
  for (int n = 0; n < parts; ++n) max = fmaxf(max, gLsePartial[partial_index(n)]);
#pragma unroll
  for (int c = 4 * lane_id; c < kHeadDim; c += 128) {
    uint2& out = *reinterpret_cast<uint2*>(gO + int64_t{idx} * kHeadDim + c);
    const float weight = exp2f(lse_suffix - max);
    float x[4] = {weight * unpack<Element>(out.x, 0), weight * unpack<Element>(out.x, 1),
                  weight * unpack<Element>(out.y, 0), weight * unpack<Element>(out.y, 1)};
    sum = weight;
    for (int n = 0; n < parts; ++n) {
      const float of_part = exp2f(gLsePartial[partial_index(n)] - max);
      add_scaled(x, of_part,
                 *reinterpret_cast<const float4*>(gOPartial + partial_index(n) * kHeadDim + c));
      sum += of_part;
    }
    store_row_part(gO + int64_t{idx} * kHeadDim + c, x, 1 / sum);
  }
  __syncwarp();  // all lanes have read the lse that is overwritten
  if (lane_id == 0) gLse[idx] = kLn2 * (max + log2f(sum));
}

template <class Element, int kHeadDim>
Status merge_prefix(const Arguments& args) {
  const ForwardParams<Element> params(args);
  const Problem& p = args.problem;
  const int64_t rows = p.batch * p.heads * p.seqlen_q;
  args.phase("merge");
  return launch_kernel(merge_prefix_kernel<Element, kHeadDim>,
                       dim3(static_cast<unsigned>(ceil_div(rows, kMergeWarps))),
                       dim3(32 * kMergeWarps), 0, args.stream, args.in<int>("prefix_of"),
                       args.in<float>("prefix_o"), args.in<float>("prefix_lse"), params.o,
                       params.lse, shape_of(p), static_cast<int>(rows));
}

}  // namespace ATTN_BACKEND::paged
