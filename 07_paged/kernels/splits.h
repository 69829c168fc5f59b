// Tile sizes and page counts, shared by the launches and the chapter's table.
#pragma once

#include <cstdint>

#include "kernels/decode/splits.h"

namespace attn::splits {

// Keys per tile of a block, from v2 on.
constexpr int tile_keys(int64_t head_dim) { return head_dim <= 128 ? 128 : 64; }

// Prefill: queries per tile, queries per warp, keys per block.
constexpr int prefill_rows(int64_t head_dim) { return head_dim <= 128 ? 128 : 64; }
constexpr int kPrefillWarps = 4, kPrefillKeys = 64;
// Shared prefixes: rows per tile.
constexpr int prefix_rows(int64_t head_dim) { return prefill_rows(head_dim); }

// Latent attention: elements per key and per value; rows per block of v13_mla_wgmma and
// v16_mla_seesaw.
constexpr int kLatentDim = 576, kLatentValues = 512;
constexpr int kWgmmaRows = 64;

// 32-bit words per query's row of a tree mask.
inline int64_t tree_words(const Problem& p) { return (p.seqlen_q + 31) / 32; }

// Tokens per page, and pages per sequence (capacity).
inline int64_t page_size_of(const Problem& p) {
  const auto given = p.own.find("page_size");
  return given == p.own.end() ? 16 : static_cast<int64_t>(given->second.at(0));
}
inline int64_t max_pages_of(const Problem& p) {
  if (const auto given = p.own.find("max_pages"); given != p.own.end())
    return static_cast<int64_t>(given->second.at(0));  // loaded page table
  return (p.seqlen_k + page_size_of(p) - 1) / page_size_of(p);
}

}  // namespace attn::splits
