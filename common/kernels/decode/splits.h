// Number of blocks and splits, for the launches and for the cost models. Of chapter
// 05_flash_decoding.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attn/problem.h"

namespace attn::splits {

constexpr int64_t kSms = 132;
constexpr int kMaxRuns = 512;     // resident blocks at most
constexpr int kEmulatedSms = 3;   // few, so that a run has several heads and a head several runs
constexpr int64_t kMmaRows = 16;  // rows of an MMA

// Blocks without splits, each with up to `block_rows` rows of a K/V head.
inline int64_t row_blocks(const Problem& p, int64_t block_rows) {
  return p.batch * p.kv_heads * ((p.group() * p.seqlen_q + block_rows - 1) / block_rows);
}

// Maximum number of visible keys of a sequence. The host knows only the capacity: lengths are on
// the device.
inline int64_t most_keys(const Problem& p) {
  if (p.window_left < 0 || (p.window_right < 0 && !p.causal)) return p.seqlen_k;
  return std::min(p.seqlen_k, p.window_left + p.seqlen_q + (p.causal ? 0 : p.window_right));
}

// Even splits, computed from the cache's capacity: KV tiles per split, splits per head, and blocks.
//! [even]
struct EvenSplits {
  int64_t share, splits, blocks;
  bool full;  // the busiest SM has at most 1/16 more tiles than with runs
};
inline EvenSplits even_splits(const Problem& p, int64_t block_rows, int64_t tile_keys,
                              int64_t num_sms) {
  const int64_t tiles = std::max<int64_t>(1, (most_keys(p) + tile_keys - 1) / tile_keys);
  const int64_t heads = row_blocks(p, block_rows);
  const int64_t wanted = std::clamp<int64_t>(num_sms / heads, 1, tiles);
  EvenSplits even{(tiles + wanted - 1) / wanted, 0, 0, false};
  if (const auto given = p.own.find("split_keys"); given != p.own.end())
    even.share = static_cast<int64_t>(given->second[0]) / tile_keys;
  even.splits = (tiles + even.share - 1) / even.share;
  even.blocks = heads * even.splits;
  const int64_t busiest = (even.blocks + num_sms - 1) / num_sms * even.share;
  const int64_t of_runs = (heads * tiles + num_sms - 1) / num_sms;
  even.full = busiest <= of_runs + of_runs / 16;
  return even;
}
// Even splits are used if --split-keys asks for them, or if no lengths are given and they balance
// the SMs.
inline bool splits_evenly(const Problem& p, const EvenSplits& even) {
  return p.own.contains("split_keys") || (p.seqused_k.empty() && even.full);
}
//! [even]

}  // namespace attn::splits
