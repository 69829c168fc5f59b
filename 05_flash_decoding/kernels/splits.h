// Number of splits per sequence, for the launches and for the cost models of chapter.cpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/decode/splits.h"

namespace attn::splits {

constexpr int64_t kMaxSplits = 128;

// Rows per block on CUDA cores: the rows of a K/V head rounded up to a power of 2, limited by
// registers.
inline int64_t rows_of_a_block(const Problem& p) {
  const int64_t most = p.head_dim <= 128 ? 4 : 2;
  int64_t rows = 1;
  while (rows < most && rows < p.group() * p.seqlen_q) rows *= 2;
  return rows;
}

// Blocks per SM that v2 to v7 split for: as many as the tiles of v3 leave room for in shared memory
// at d=128 and d=256.
inline int64_t blocks_per_sm(const Problem& p) { return p.head_dim <= 128 ? 2 : 1; }

// As many splits as fill the 132 SMs of an H200 with resident blocks, of at least `least` keys
// each.
//! [fill]
inline int64_t splits_that_fill(const Problem& p, int64_t block_rows, int64_t least = 64) {
  const int64_t wanted = kSms * blocks_per_sm(p) / row_blocks(p, block_rows);
  const int64_t most = std::max<int64_t>(1, most_keys(p) / least);
  return std::clamp<int64_t>(wanted, 1, std::min(most, kMaxSplits));
}
//! [fill]
// Model of the launch time in seconds: a start, the loads of K and V, the reduction, and a cost per
// block. All constants are fitted to a search over 200 random problems on an H200 (host/sweep.cu).
// One block reads at kBlockRate, all SMs together at kRoof; the SM with the most blocks finishes
// last. combine() loads eight partial results at a time and the remainder one by one, so that one
// takes about as long as eight.
//! [model]
inline double modelled_seconds(const Problem& p, int64_t block_rows, int64_t num_splits) {
  constexpr double kStart = 8e-6, kBlockRate = 51e9, kRoof = 5.1e12, kBlocks = 2.5e-6;
  constexpr double kMerge = 2.5e-6, kEightParts = 0.6e-6, kPart = 1e-6;
  constexpr int64_t kTile = 64;
  const int64_t resident = kSms * blocks_per_sm(p), keys = most_keys(p);
  const int64_t split_keys = (keys + num_splits * kTile - 1) / (num_splits * kTile) * kTile;
  const int64_t blocks = row_blocks(p, block_rows) * num_splits;
  const int64_t busiest = (blocks + kSms - 1) / kSms * std::min(blocks, kSms);
  const int64_t waves = (blocks + resident - 1) / resident;
  const double bytes = 2.0 * double(split_keys * p.head_dim * size_of(p.dtype));
  const double stream =
      std::max(double(waves) * bytes / kBlockRate, double(busiest) * bytes / kRoof);
  const double merge =
      kMerge + kEightParts * double(num_splits / 8) + kPart * double(num_splits % 8);
  return kStart + stream + (num_splits > 1 ? merge : 0) +
         kBlocks * double(blocks) / double(resident);
}
inline int64_t best_splits(const Problem& p, int64_t block_rows) {
  if (const auto given = p.own.find("num_splits"); given != p.own.end())
    return std::clamp<int64_t>(static_cast<int64_t>(given->second[0]), 1, kMaxSplits);
  int64_t best = 1;
  for (int64_t n = 2; n <= std::min(kMaxSplits, (most_keys(p) + 63) / 64); ++n)
    if (modelled_seconds(p, block_rows, n) < modelled_seconds(p, block_rows, best)) best = n;
  return best;
}
//! [model]

}  // namespace attn::splits
