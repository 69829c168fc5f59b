// Tiles and pages: what a launch uses and the table states.
#pragma once

#include <cstdint>

#include "kernels/decode/splits.h"

namespace attn::splits {

// Keys of a block's tile, in v2 and later.
constexpr int tile_keys(int64_t head_dim) { return head_dim <= 128 ? 128 : 64; }

// Queries of a tile of prefill, and of each of its warps; keys of a block.
constexpr int prefill_rows(int64_t head_dim) { return head_dim <= 128 ? 128 : 64; }
constexpr int kPrefillWarps = 4, kPrefillKeys = 64;
// Of a shared prefix: the rows of a tile.
constexpr int prefix_rows(int64_t head_dim) { return prefill_rows(head_dim); }

// Of latent attention: numbers of a token, and of its value; rows of a block of v13_mla_wgmma
// and v16_mla_seesaw.
constexpr int kLatentDim = 576, kLatentValues = 512;
constexpr int kWgmmaRows = 64;

// Words of 32 bits of a query's row of a tree mask.
inline int64_t tree_words(const Problem& p) { return (p.seqlen_q + 31) / 32; }

// Tokens of a page, and the pages that a sequence has room for.
inline int64_t page_size_of(const Problem& p) {
  const auto given = p.own.find("page_size");
  return given == p.own.end() ? 16 : static_cast<int64_t>(given->second.at(0));
}
inline int64_t max_pages_of(const Problem& p) {
  if (const auto given = p.own.find("max_pages"); given != p.own.end())
    return static_cast<int64_t>(given->second.at(0));  // a table that was loaded
  return (p.seqlen_k + page_size_of(p) - 1) / page_size_of(p);
}

}  // namespace attn::splits
