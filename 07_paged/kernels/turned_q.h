// Loads queries to shared memory and rotates them by their positions (RoPE), for pages that hold
// rotated keys.
#pragma once

#include "attn/kernel.h"
#include "kernels/rotate.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::paged {
using namespace attn;

// Stores the rows of Q at `gRows`, each rotated by its position. A query before the first key takes
// position 0, whose angles are 0, so it stays unchanged; rows past the last become 0. One thread
// needs 16 bytes of both halves of a row, so this is not a cp.async: it waits for Q.
// `offset(row, col)`: offset in sQ. A barrier must follow before other threads read sQ.
//! [turn_q]
template <class Config, class Element>
__device__ __forceinline__ void load_rotated_q(Element* sQ, const Element* gRows,
                                               const float* gCosSin, const Rows& rows,
                                               int first_position, int seqlen_q,
                                               int (*offset)(int row, int col)) {
  constexpr int kHeadDim = Config::kHeadDim, kHalf = kHeadDim / 2, kLanes = kHalf / 8;
  for (int idx = threadIdx.x; idx < Config::kRows * kLanes; idx += Config::kThreads) {
    const int row = idx / kLanes, col = idx % kLanes * 8;
    uint4 x{}, y{};
    if (row < rows.count) {
      x = *reinterpret_cast<const uint4*>(gRows + row * kHeadDim + col);
      y = *reinterpret_cast<const uint4*>(gRows + row * kHeadDim + col + kHalf);
      const int position = max(0, first_position + (rows.row0 + row) % seqlen_q);
      const auto* const angles =
          reinterpret_cast<const float4*>(gCosSin + int64_t{position} * kHeadDim + col);
      rotate<Element>(x, y, angles, angles + kHalf / 4);
    }
    *reinterpret_cast<uint4*>(sQ + offset(row, col)) = x;
    *reinterpret_cast<uint4*>(sQ + offset(row, col + kHalf)) = y;
  }
}
//! [turn_q]

}  // namespace ATTN_BACKEND::paged
