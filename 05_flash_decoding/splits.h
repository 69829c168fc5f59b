// Into how many parts the keys of a sequence are split: what a launch uses and the table states.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attn/problem.h"

namespace attn::splits {

constexpr int64_t kMostSplits = 128, kSms = 132, kBlocksPerSm = 2;
constexpr int kMostRuns = 512;    // resident blocks of v8 and later
constexpr int kEmulatedSms = 3;   // so few that a run has several heads, and a head several runs
constexpr int64_t kMmaRows = 16;  // of a block of v5 and later

// Blocks without splits, if each has up to `block_rows` rows of a K/V head.
inline int64_t row_blocks(const Problem& p, int64_t block_rows) {
  return p.batch * p.kv_heads * ((p.group() * p.seqlen_q + block_rows - 1) / block_rows);
}

// Rows of a block on CUDA cores: those of a group, up to the next power of 2, but no more than fit
// into registers.
inline int64_t rows_of_a_block(const Problem& p) {
  const int64_t most = p.head_dim <= 128 ? 4 : 2;
  int64_t rows = 1;
  while (rows < most && rows < p.group() * p.seqlen_q) rows *= 2;
  return rows;
}

// As many as fill an H200's 132 SMs with two blocks each, of at least `least` keys.
//! [fill]
inline int64_t splits_that_fill(const Problem& p, int64_t block_rows, int64_t least = 64) {
  const int64_t wanted = kSms * kBlocksPerSm / row_blocks(p, block_rows);
  const int64_t most = (p.seqlen_k + least - 1) / least;
  return std::clamp<int64_t>(wanted, 1, std::min(most, kMostSplits));
}
//! [fill]
inline int64_t best_splits(const Problem& p, int64_t block_rows) {
  if (const auto given = p.own.find("num_splits"); given != p.own.end())
    return std::clamp<int64_t>(static_cast<int64_t>(given->second[0]), 1, kMostSplits);
  return splits_that_fill(p, block_rows);
}

}  // namespace attn::splits
