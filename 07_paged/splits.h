// How many blocks there are: what a launch uses and the table states.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attn/problem.h"

namespace attn::splits {

constexpr int64_t kSms = 132;
constexpr int kMostRuns = 512;    // resident blocks
constexpr int kEmulatedSms = 3;   // so few that a run has several heads, and a head several runs
constexpr int64_t kMmaRows = 16;  // of a block of v2 and later

// Blocks without splits, if each has up to `block_rows` rows of a K/V head.
inline int64_t row_blocks(const Problem& p, int64_t block_rows) {
  return p.batch * p.kv_heads * ((p.group() * p.seqlen_q + block_rows - 1) / block_rows);
}

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
