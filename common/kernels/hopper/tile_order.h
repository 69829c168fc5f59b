// Query tiles: their order, and the range of key blocks of each. From chapter 06_flash_v3_hopper.
#pragma once

#include <algorithm>

#include "attn/kernel.h"
#include "device/device.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Range of key blocks with a visible key for some row of [row0, row0 + rows): [begin, end). Blocks
// [unmasked_begin, unmasked_end) are visible to every row.
//! [ranges]
struct KvBlockRange {
  int begin, unmasked_begin, unmasked_end, end;
};
inline __device__ KvBlockRange kv_block_range(const Shape& shape, int seqlen_q, int seqlen_k,
                                              int row0, int rows, int block_n) {
  const int last = min(row0 + rows, seqlen_q) - 1, causal_offset = seqlen_k - seqlen_q;
  const int begin = max(0, row0 + causal_offset - shape.window_left);
  const int end = min(seqlen_k, last + causal_offset + shape.window_right + 1);
  // fully masked: one block is visited, so that O = 0 and lse = -inf are written
  if (end <= begin) return {0, 0, 0, 1};
  // Range visible to every row: first key of the last row to last key of the first row.
  const int all_begin = max(0, last + causal_offset - shape.window_left);
  const int all_end = min(seqlen_k, row0 + causal_offset + shape.window_right + 1);
  KvBlockRange kv_range{begin / block_n, ceil_div(all_begin, block_n), all_end / block_n,
                        ceil_div(end, block_n)};
  kv_range.unmasked_begin = min(kv_range.unmasked_begin, kv_range.end);
  kv_range.unmasked_end = max(kv_range.unmasked_begin, kv_range.unmasked_end);
  return kv_range;
}
//! [ranges]

// Heads per section: K and V take a fifth of L2, 12 MB of an H200's 60 MB. With a mask, enough
// heads for three tiles per SM on average, long and short ones, if their K and V fit in 8/15 of L2
// (32 MB). Sections are balanced: a short last section would start its longest tiles late and leave
// most SMs idle.
//! [section]
inline int64_t heads_of_section(const Problem& p, int64_t num_m_blocks) {
  constexpr int64_t kTilesPerSm = 3;
  const Machine machine = this_machine();
  const int64_t heads = p.heads * p.batch, bytes = 2 * p.seqlen_k * p.head_dim * 2;
  const auto fit = [&](double share) {
    return std::max<int64_t>(1, static_cast<int64_t>(share * machine.l2_bytes) / bytes) * p.group();
  };
  const int64_t balanced =
      p.masked() ? std::min(fit(8. / 15), ceil_div(kTilesPerSm * machine.num_sms, num_m_blocks))
                 : 1;
  return ceil_div(heads, std::max<int64_t>(1, heads / std::max(fit(1. / 5), balanced)));
}
//! [section]

// Sections of heads in turn; within a section longest tiles first (LPT order), across all its
// heads.
//! [order]
struct TileOrder {
  unsigned num_m_blocks, num_heads, section;
  TileOrder(const Problem& p, int block_m)
      : num_m_blocks(static_cast<unsigned>(ceil_div(p.seqlen_q, block_m))),
        num_heads(static_cast<unsigned>(p.heads * p.batch)),
        section(static_cast<unsigned>(heads_of_section(p, num_m_blocks))) {}
  __host__ __device__ unsigned count() const { return num_m_blocks * num_heads; }
  struct Tile {
    int bh, row0;  // head index through the batch; first row
  };
  template <int kBlockM>
  __device__ Tile at(unsigned tile) const {
    const unsigned first_head = tile / (section * num_m_blocks) * section;
    const unsigned heads = min(section, num_heads - first_head);
    const unsigned in_section = tile - first_head * num_m_blocks;
    return {static_cast<int>(first_head + in_section % heads),
            static_cast<int>((num_m_blocks - 1 - in_section / heads) * kBlockM)};
  }
};
//! [order]

// Dynamic persistent: a block starts with tile blockIdx.x. Further tiles come from a counter in
// device memory, so a block with short tiles gets more of them.
//! [tiles]
struct DynamicPersistent : TileOrder {
  unsigned* counter = nullptr;  // 0 before the first launch, and after each one
  using TileOrder::TileOrder;
  __device__ unsigned first() const { return blockIdx.x; }
  // One increment per tile, count() in all: atomicInc wraps, so the counter ends at 0.
  __device__ unsigned next(unsigned) const { return gridDim.x + atomicInc(counter, count() - 1); }
};
//! [tiles]

constexpr int kEmulatedSms = 2;  // few, so that each block gets several tiles

}  // namespace ATTN_BACKEND::hopper
