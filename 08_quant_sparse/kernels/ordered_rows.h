// Reordered tokens: rows of Q, K and V are copied into the new order, because a TMA box has
// consecutive rows. Rows of O and lse are stored at their original positions.
//
//     token_order [seqlen]: the n-th token    q_ordered [B, Hq, seqlen, d], k_ordered ...
#pragma once

#include "attn/kernel.h"
#include "kernels/hopper/fragments.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

template <class Element>
struct Ordered {
  const Element* gFrom;  // [heads, seqlen, d]
  Element* gTo;
  int heads;
};

// A block copies some rows of a head, 16 bytes per thread at a time. blockIdx.y: Q, K or V.
//! [order]
template <class Element, int kHeadDim, int kThreads, int kTimes>
__global__ void order_kernel(Ordered<Element> q, Ordered<Element> k, Ordered<Element> v,
                             const int* __restrict__ gOrder, int seqlen, int blocks) {
  constexpr int kLanes = kHeadDim / 8, kRowsPerPass = kThreads / kLanes;
  const Ordered<Element> x = blockIdx.y == 0 ? q : blockIdx.y == 1 ? k : v;
  const int head = static_cast<int>(blockIdx.x) / blocks;
  const int row0 = static_cast<int>(blockIdx.x) % blocks * (kTimes * kRowsPerPass) +
                   static_cast<int>(threadIdx.x) / kLanes;
  if (head >= x.heads) return;  // block-uniform
  const int64_t offset = int64_t{head} * seqlen * kHeadDim + threadIdx.x % kLanes * 8;
  uint4 bits[kTimes];  // loads in flight
#pragma unroll
  for (int n = 0; n < kTimes; ++n)
    if (const int row = row0 + n * kRowsPerPass; row < seqlen)
      bits[n] = *reinterpret_cast<const uint4*>(x.gFrom + offset + int64_t{gOrder[row]} * kHeadDim);
#pragma unroll
  for (int n = 0; n < kTimes; ++n)
    if (const int row = row0 + n * kRowsPerPass; row < seqlen)
      *reinterpret_cast<uint4*>(x.gTo + offset + int64_t{row} * kHeadDim) = bits[n];
}
//! [order]

// Phase "order". Afterwards `args` has the copies instead of Q, K and V.
template <class Element, int kHeadDim>
Status put_in_order(Arguments& args) {
  constexpr int kThreads = 256, kTimes = 4, kRows = kTimes * kThreads / (kHeadDim / 8);
  const Problem& p = args.problem;
  const auto ordered = [&](const std::string& name, int64_t heads) {
    return Ordered<Element>{args.in<Element>(name), args.out<Element>(name + "_ordered"),
                            static_cast<int>(p.batch * heads)};
  };
  const auto blocks = static_cast<int>(ceil_div(p.seqlen_k, kRows));
  args.phase("order");
  const Status done = launch_kernel(
      order_kernel<Element, kHeadDim, kThreads, kTimes>,
      dim3(static_cast<unsigned>(p.batch * p.heads * blocks), 3), dim3(kThreads), 0, args.stream,
      ordered("q", p.heads), ordered("k", p.kv_heads), ordered("v", p.kv_heads),
      args.in<int>("token_order"), static_cast<int>(p.seqlen_k), blocks);
  for (const char* name : {"q", "k", "v"})
    args.bind(name, args.out<Element>(std::string(name) + "_ordered"));
  return done;
}

// Original positions of this lane's two rows of a tile; -1 if there is no such row.
__device__ __forceinline__ void read_places(int (&places)[2], const int* gOrder,
                                            const WorkTile& work) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = work.row0 + first_row() + 8 * r;
    places[r] = row < work.seqlen_q ? gOrder[row] : -1;
  }
}

// store_o of kernels/hopper/fragments.h, with rows at arbitrary positions of their head.
//! [epilogue]
template <class Element, int kHeadDim>
__device__ __forceinline__ void store_o_at(Element* gO, float* gLse, const WorkTile& work,
                                           const int (&places)[2],
                                           const float (&o)[kHeadDim / 8][4],
                                           const float (&row_max)[2], float (&row_sum)[2]) {
  const bool upper = thread_index() % 2 != 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] = quad_sum(row_sum[r]);
    const bool none = row_sum[r] == 0;
    const float factor = none ? 0 : __fdividef(1, row_sum[r]);
    const int64_t row = int64_t{work.q_head} * work.seqlen_q + places[r];
    Element* const gRow = gO + row * kHeadDim + (upper ? 8 : 0) + thread_index() / 2 % 2 * 4;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n += 2) {
      const uint32_t even = pack2<Element>(o[n][2 * r] * factor, o[n][2 * r + 1] * factor);
      const uint32_t odd = pack2<Element>(o[n + 1][2 * r] * factor, o[n + 1][2 * r + 1] * factor);
      const uint32_t got = __shfl_xor_sync(~0u, upper ? even : odd, 1);
      if (places[r] >= 0)
        *reinterpret_cast<uint2*>(gRow + 8 * n) =
            upper ? make_uint2(got, odd) : make_uint2(even, got);
    }
    if (quad_col() == 0 && places[r] >= 0)
      gLse[row] = none ? -INFINITY : kLn2 * (row_max[r] + __log2f(row_sum[r]));
  }
}
//! [epilogue]

}  // namespace ATTN_BACKEND::hopper
