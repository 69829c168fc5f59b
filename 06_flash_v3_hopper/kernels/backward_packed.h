// Backward pass of packed sequences: where a sequence begins, and the preprocess and postprocess
// kernels of b12 and b15. They serve batches of one length as well.
#pragma once

#include "kernels/backward_tiles.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Strides in elements: of [B, H, seqlen, d], or of packed [tokens, H, d], where sequence b begins
// at token cu_seqlens[b].
//! [packing]
struct Packing {
  const int *cu_seqlens_q, *cu_seqlens_k;  // [B + 1]; null if not packed
  int64_t q_head, q_row, kv_head, kv_row;  // from one head, or row, to the next
  int64_t lse_head;  // rows of lse from one head to the next
  int num_tiles;  // of a query head, in `rows` and `accum`: each sequence starts a new one
  Packing(const Arguments& args, int block_m)
      : cu_seqlens_q(args.in_or_null<int>("cu_seqlens_q")),
        cu_seqlens_k(args.in_or_null<int>("cu_seqlens_k")) {
    const Problem& p = args.problem;
    const bool packed = p.varlen();
    const int64_t d = p.head_dim;
    q_head = packed ? d : p.seqlen_q * d, q_row = packed ? p.heads * d : d;
    kv_head = packed ? d : p.seqlen_k * d, kv_row = packed ? p.kv_heads * d : d;
    lse_head = packed ? p.tokens_q() : p.seqlen_q;
    num_tiles = static_cast<int>(packed ? p.tokens_q() / block_m + p.batch
                                        : ceil_div(p.seqlen_q, block_m));
  }
};

// A head in the tensor maps, the first rows of its sequence there, and the index of the sequence's
// first tile in `rows` and `accum`.
struct Place {
  int head, q_token, kv_token, first_tile;
};
// `head`: b * heads + h; `heads`: heads of a sequence. Sets the lengths in `shape` to those of the
// sequence. Before a packed sequence there is at most a tile per kBlockM tokens, and one more per
// sequence.
template <class Config>
__device__ __forceinline__ Place place_of(Shape& shape, const Packing& packing, int head,
                                          int heads) {
  if (packing.cu_seqlens_q == nullptr) return {head, 0, 0, 0};
  const int b = head / heads;
  const int q = packing.cu_seqlens_q[b], k = packing.cu_seqlens_k[b];
  shape.seqlen_q = packing.cu_seqlens_q[b + 1] - q;
  shape.seqlen_k = packing.cu_seqlens_k[b + 1] - k;
  return {head % heads, q, k, q / Config::kBlockM + b};
}
// Maps of all tokens of a head, one sequence after another. As in the forward pass, a box may reach
// into the next sequences: their rows have P = 0, their keys are masked. 0 times NaN is NaN, so
// values that are not finite affect gradients of the sequences before, as far as a tile reaches.
template <class Element, class Config>
Status make_maps(BackwardMaps& maps, const Arguments& args, const Packing& packing) {
  const BackwardParams<Element> params(args);
  const Problem& p = args.problem;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  const int64_t rows_q = p.varlen() ? p.tokens_q() : p.seqlen_q;
  const int64_t rows_k = p.varlen() ? p.tokens_k() : p.seqlen_k;
  const int64_t tiles = (p.varlen() ? 1 : p.batch) * p.heads * packing.num_tiles;
  for (const Status& status :
       {map_of(maps.q, params.q, p, p.heads, rows_q, kBlockM),
        map_of(maps.dout, params.dout, p, p.heads, rows_q, kBlockM),
        map_of(maps.k, params.k, p, p.kv_heads, rows_k, kBlockN),
        map_of(maps.v, params.v, p, p.kv_heads, rows_k, kBlockN),
        make_tensor_map<3>(maps.rows, args.in<__half>("rows"), {2 * kBlockM, 2, tiles},
                           {4 * kBlockM, 8 * kBlockM}, {2 * kBlockM, 1, 1}, Swizzle::kNone)})
    if (!status.ok()) return status;
  return Status::success();
}
//! [packing]

// (1) As dot_kernel. A block per query tile of the longest sequence, head and sequence: blocks past
// the end of their sequence have no work.
template <class Element, class Config>
__global__ void __launch_bounds__(256)
    packed_dot_kernel(const Element* gO, const Element* gdO, const float* gLse,
                      float* gRows,        // [tiles, 2, kBlockM]: lse / log(2), D
                      float4* gAccum,      // [tiles, kFragments, 256]; null: not cleared
                      unsigned* gCounter,  // of the tile scheduler
                      Shape shape, Packing packing, int num_m_blocks) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM;
  constexpr int kLanes = kHeadDim / 8;  // per row, 16 bytes each
  launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x == 0) *gCounter = 0;
  const int bh = static_cast<int>(blockIdx.x) / num_m_blocks;
  const int m_block = static_cast<int>(blockIdx.x) % num_m_blocks, row0 = m_block * kBlockM;
  const Place at = place_of<Config>(shape, packing, bh, shape.heads);
  if (row0 >= shape.seqlen_q) return;
  const int64_t tile = int64_t{at.head} * packing.num_tiles + at.first_tile + m_block;
  if (gAccum != nullptr)
#pragma unroll
    for (int f = 0; f < Config::kFragments; ++f)
      gAccum[(tile * Config::kFragments + f) * 256 + threadIdx.x] = float4{};
#pragma unroll
  for (int r = static_cast<int>(threadIdx.x) / kLanes; r < kBlockM; r += 256 / kLanes) {
    const bool inside = row0 + r < shape.seqlen_q;
    const int64_t row = at.q_token + row0 + r;
    float sum = 0;
    if (inside) {
      const int64_t i = at.head * packing.q_head + row * packing.q_row + threadIdx.x % kLanes * 8;
      const uint4 o = *reinterpret_cast<const uint4*>(gO + i);
      const uint4 d_o = *reinterpret_cast<const uint4*>(gdO + i);
      const uint32_t a[4] = {o.x, o.y, o.z, o.w}, b[4] = {d_o.x, d_o.y, d_o.z, d_o.w};
#pragma unroll
      for (int c = 0; c < 8; ++c)
        sum += unpack<Element>(a[c / 2], c % 2) * unpack<Element>(b[c / 2], c % 2);
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (threadIdx.x % kLanes == 0) {
      const float lse = inside ? gLse[at.head * packing.lse_head + row] : -INFINITY;
      gRows[tile * (2 * kBlockM) + r] = lse == -INFINITY ? INFINITY : lse * kLog2e;
      gRows[tile * (2 * kBlockM) + kBlockM + r] = sum;
    }
  }
}

// (8) As convert_kernel, a dependent of the kernel that adds to gAccum.
template <class Element, class Config>
__global__ void __launch_bounds__(Config::kConsumerThreads)
    packed_convert_kernel(const float4* gAccum,  // [tiles, kFragments, threads]
                          Element* gdQ, Shape shape, Packing packing, int num_m_blocks) {
  wait_for_launch_before();
  const int thread = thread_index(), warpgroup = thread / kWarpgroup;
  const int bh = static_cast<int>(blockIdx.x) / num_m_blocks;
  const int m_block = static_cast<int>(blockIdx.x) % num_m_blocks;
  const Place at = place_of<Config>(shape, packing, bh, shape.heads);
  const int row = m_block * Config::kBlockM + dq_row<Config>(warpgroup) + first_row() % 64;
  const int64_t tile = int64_t{at.head} * packing.num_tiles + at.first_tile + m_block;
  if (m_block * Config::kBlockM >= shape.seqlen_q) return;
  float x[Config::kFragments][4];
#pragma unroll
  for (int f = 0; f < Config::kFragments; ++f) {
    const float4 sum = gAccum[(tile * Config::kFragments + f) * Config::kConsumerThreads + thread];
    x[f][0] = sum.x, x[f][1] = sum.y, x[f][2] = sum.z, x[f][3] = sum.w;
  }
  Element* const g = gdQ + at.head * packing.q_head + (at.q_token + row) * packing.q_row +
                     dq_col<Config>(warpgroup);
  store_gradient(g, packing.q_row, shape.seqlen_q - row, x, shape.softmax_scale);
}

}  // namespace ATTN_BACKEND::hopper
