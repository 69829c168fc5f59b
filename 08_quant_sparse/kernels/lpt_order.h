// LPT order of the query tiles: those with the longest block lists first. A long tile that starts
// last would leave all other SMs idle (Graham 1969, "longest processing time").
//
//     tile_order [tiles]    the n-th tile to be processed, as TileOrder counts them
//
// Sections stay contiguous, so that K and V of a section's heads stay in L2.
#pragma once

#include "kernels/visits.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

constexpr int kLengthClasses = 64;
// The length class of a tile that visits `count` of `n_blocks`: class 0 has the longest lists.
inline __host__ __device__ int length_class(int count, int n_blocks) {
  return (n_blocks - count) * kLengthClasses / (n_blocks + 1);
}
struct OrderPass {
  static constexpr int kThreads = 256;
};

// One block per section. Lists of similar length form a class; the order within a class is
// arbitrary, because no bit of a tile depends on it.
//! [longest_first]
template <class Pass, class Config>
__global__ void __launch_bounds__(Pass::kThreads)
    order_kernel(TileOrder tiles, BlockLists lists, int n_blocks, int* __restrict__ gOrder) {
  __shared__ int sCount[kLengthClasses], sNext[kLengthClasses];
  const auto tid = static_cast<int>(threadIdx.x);
  const unsigned of_section = tiles.section * tiles.num_m_blocks;
  const unsigned first = blockIdx.x * of_section, end = min(tiles.count(), first + of_section);
  const auto class_of = [&](unsigned n) {
    const TileOrder::Tile tile = tiles.at<Config::kBlockM>(n);
    const int list = tile.bh * static_cast<int>(tiles.num_m_blocks) + tile.row0 / Config::kBlockM;
    return length_class(lists.gVisits[list].count(), n_blocks);
  };
  if (tid < kLengthClasses) sCount[tid] = 0;
  __syncthreads();  // all counts are 0
  for (unsigned n = first + tid; n < end; n += Pass::kThreads) atomicAdd(&sCount[class_of(n)], 1);
  __syncthreads();  // all are counted
  if (tid < kLengthClasses) {
    auto before = static_cast<int>(first);
    for (int i = 0; i < tid; ++i) before += sCount[i];
    sNext[tid] = before;
  }
  __syncthreads();  // the start of each class is known
  for (unsigned n = first + tid; n < end; n += Pass::kThreads)
    gOrder[atomicAdd(&sNext[class_of(n)], 1)] = static_cast<int>(n);
}
//! [longest_first]

// Heads per section as in heads_of_section(), for 1-byte K and V: the same bytes, so twice as many
// heads. A section with more tiles has more short ones to fill the end.
inline unsigned section_of_codes(Problem p, unsigned num_m_blocks) {
  p.seqlen_k = ceil_div(p.seqlen_k, 2);
  return static_cast<unsigned>(heads_of_section(p, num_m_blocks));
}

// Phase "order".
template <class Config>
Status longest_first(const Arguments& args, const TileOrder& tiles, const BlockLists& lists) {
  args.phase("order");
  return launch_kernel(order_kernel<OrderPass, Config>,
                       dim3(ceil_div(tiles.num_heads, tiles.section)), dim3(OrderPass::kThreads), 0,
                       args.stream, tiles, lists,
                       static_cast<int>(ceil_div(args.problem.seqlen_k, Config::kBlockN)),
                       args.out<int>("tile_order"));
}

}  // namespace ATTN_BACKEND::hopper
