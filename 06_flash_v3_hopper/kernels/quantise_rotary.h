// Rotary embedding of Q and K in a separate pass, which reads bf16 and writes bf16. f7_rotary fuses
// it into the quantisation pass. Columns c and c + d/2 of a row are turned by the angle of the
// row's position.
//
//     cos_sin              [positions, d]: d/2 cosines, d/2 sines (attn/rotary.h)
//     q_turned, k_turned   layout of Q and K, bf16
#pragma once

#include "kernels/quantise_tiles.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

struct RotaryAngles {
  const float* g;        // [positions, d]
  int first_q, first_k;  // rows of query 0 and of key 0
  RotaryAngles(const Arguments& args) : g(args.in<float>("cos_sin")) {
    const auto more_keys = static_cast<int>(args.problem.seqlen_k - args.problem.seqlen_q);
    first_q = std::max(0, more_keys), first_k = std::max(0, -more_keys);
  }
};
// All heads have the same angles, so a block loads them once and turns several heads.
struct RotaryPass : QuantisePass {
  static constexpr int kHeads = 4;
};

// (a, b) turned.
//! [turn]
__device__ __forceinline__ void turn(float& a, float& b, float cosine, float sine) {
  const float x = a, y = b;
  a = fmaf(x, cosine, -(y * sine)), b = fmaf(y, cosine, x * sine);
}
//! [turn]

// A lane holds groups of eight from both halves of a row, and their angles in registers for several
// heads.
//! [apart]
template <class Pass, int kHeadDim>
__global__ void __launch_bounds__(Pass::kThreads)
    rotary_kernel(RowsOf q, RowsOf k, __nv_bfloat16* gQTurned, __nv_bfloat16* gKTurned,
                  RotaryAngles angles) {
  constexpr int kHalf = kHeadDim / 2, kLanes = kHalf / 8, kRowsPerPass = Pass::kThreads / kLanes;
  const bool is_q = blockIdx.y == 0;
  const RowsOf t = is_q ? q : k;
  const int blocks = ceil_div(t.rows, kRowsPerPass), block = static_cast<int>(blockIdx.x % blocks);
  const int64_t head0 = int64_t{blockIdx.x / blocks} * Pass::kHeads;
  const int row = block * kRowsPerPass + static_cast<int>(threadIdx.x) / kLanes;
  const int column = static_cast<int>(threadIdx.x) % kLanes * 8;
  if (row >= t.rows) return;
  const float* const row_angles =
      angles.g + int64_t{(is_q ? angles.first_q : angles.first_k) + row} * kHeadDim + column;
  float cosine[8], sine[8];
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    *reinterpret_cast<float4*>(cosine + i) = *reinterpret_cast<const float4*>(row_angles + i);
    *reinterpret_cast<float4*>(sine + i) = *reinterpret_cast<const float4*>(row_angles + kHalf + i);
  }
  const int64_t idx = (head0 * t.rows + row) * kHeadDim + column, next = int64_t{t.rows} * kHeadDim;
  Bf16x8 x[Pass::kHeads][2];  // from the two halves
#pragma unroll
  for (int n = 0; n < Pass::kHeads; ++n)
    if (head0 + n < t.heads)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        x[n][half] = load_bf16x8(t.g + idx + n * next + half * kHalf);
#pragma unroll
  for (int n = 0; n < Pass::kHeads; ++n) {
    if (head0 + n >= t.heads) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) turn(x[n][0].x[i], x[n][1].x[i], cosine[i], sine[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float(&e)[8] = x[n][half].x;
      *reinterpret_cast<uint4*>((is_q ? gQTurned : gKTurned) + idx + n * next + half * kHalf) =
          make_uint4(pack2<__nv_bfloat16>(e[0], e[1]), pack2<__nv_bfloat16>(e[2], e[3]),
                     pack2<__nv_bfloat16>(e[4], e[5]), pack2<__nv_bfloat16>(e[6], e[7]));
    }
  }
}
//! [apart]

// Turns Q and K in a separate pass, then quantises them.
//! [launch_rotary]
template <class Pass, int kHeadDim>
Status turn_and_quantise(const Arguments& args) {
  constexpr int kRowsPerPass = Pass::kThreads / (kHeadDim / 16);
  const RowsOf q = rows_of(args, "q", "q"), k = rows_of(args, "k", "k");
  const auto blocks_of = [](const RowsOf& t) {
    return ceil_div(t.heads, int64_t{Pass::kHeads}) * ceil_div(t.rows, kRowsPerPass);
  };
  args.phase("rotary");
  const Status turned =
      launch_kernel(rotary_kernel<Pass, kHeadDim>,
                    dim3(static_cast<unsigned>(std::max(blocks_of(q), blocks_of(k))), 2),
                    dim3(Pass::kThreads), 0, args.stream, q, k, args.out<__nv_bfloat16>("q_turned"),
                    args.out<__nv_bfloat16>("k_turned"), RotaryAngles(args));
  return turned.ok() ? quantise_q_and_k<Pass, true, kHeadDim>(args, "_turned") : turned;
}
//! [launch_rotary]

}  // namespace ATTN_BACKEND::hopper
