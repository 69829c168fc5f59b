// Parts of the steps for head dim 256 that are not part of the pipeline: the order of visits, the
// exchange of fragments between warpgroups, tensor maps, and the conversion of dQ.
#pragma once

#include "attn/kernel.h"
#include "kernels/backward_tiles.h"
#include "kernels/hopper/fragments.h"
#include "ptx/grid_dependency.h"
#include "ptx/tma.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// The visits of a key tile, one after another: its query tiles, of all query heads of the group.
struct Visit {
  int head, m_block;
  __device__ explicit Visit(const KeyTile& work)
      : head(work.first_head), m_block(work.q_range.begin) {}
  __device__ void advance(const KeyTile& work) {
    if (++m_block == work.q_range.end) m_block = work.q_range.begin, ++head;
  }
};
__device__ __forceinline__ int count_visits(const KeyTile& work) {
  return (work.end - work.first_head) * (work.q_range.end - work.q_range.begin);
}

// Passes fragments to the thread with the same index in the other warpgroup: both warpgroups have
// the same layout.
__device__ __forceinline__ void store_fragments(uint4 (&s)[4][kWarpgroup],
                                                const uint32_t (&x)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    s[i][thread_index() % kWarpgroup] = make_uint4(x[i][0], x[i][1], x[i][2], x[i][3]);
}
__device__ __forceinline__ void load_fragments(uint32_t (&x)[4][4],
                                               const uint4 (&s)[4][kWarpgroup]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 a = s[i][thread_index() % kWarpgroup];
    x[i][0] = a.x, x[i][1] = a.y, x[i][2] = a.z, x[i][3] = a.w;
  }
}

// A map as of map_of, of boxes of 64 rows and two panels.
template <class Element>
Status map_of_half(TensorMap& map, const Element* g, const Problem& p, int64_t heads,
                   int64_t rows) {
  const int64_t d = p.head_dim;
  return make_tensor_map<4>(map, g, {64, rows, d / 64, heads * p.batch},
                            {2 * d, 128, 2 * d * rows}, {64, 64, 2, 1}, Swizzle::k128);
}

// Postprocess of half of the columns of a query tile: dQ = scale * accumulator, rounded.
template <class Element, class Config>
__global__ void __launch_bounds__(Config::kConsumerThreads)
    convert_halves_kernel(const float4* gAccum,  // [tiles, 2, kFragments / 2, threads]
                          Element* gdQ,          // [B, Hq, seqlen_q, d]
                          Shape shape, int num_m_blocks) {
  wait_for_launch_before();
  const int64_t tile = blockIdx.x / 2, bh = tile / num_m_blocks;
  const int row = static_cast<int>(tile % num_m_blocks) * Config::kBlockM + first_row() % 64;
  const int column = static_cast<int>(blockIdx.x % 2) * Config::kColumns +
                     thread_index() / kWarpgroup * (Config::kColumns / 2);
  float x[8][4];
#pragma unroll
  for (int f = 0; f < 8; ++f) {
    const float4 sum =
        gAccum[(int64_t{blockIdx.x} * 8 + f) * Config::kConsumerThreads + thread_index()];
    x[f][0] = sum.x, x[f][1] = sum.y, x[f][2] = sum.z, x[f][3] = sum.w;
  }
  store_gradient(gdQ + (bh * shape.seqlen_q + row) * Config::kHeadDim + column, Config::kHeadDim,
                 shape.seqlen_q - row, x, shape.softmax_scale);
}

}  // namespace ATTN_BACKEND::hopper
