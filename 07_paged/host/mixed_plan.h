// Plans for mixed batches: decoding sequences together with prompts or chunks of prompts.
#pragma once

#include <cstdint>
#include <vector>

#include "attn/step.h"
#include "kernels/work.h"

namespace attn::plans {

// Decode work tiles per SM. More balance better, but each starts with copies that no earlier
// iteration has prefetched. A guess; no sweep on a GPU yet.
constexpr int64_t kPiecesPerSm = 4;

struct MixedPlan {
  std::vector<MixedWork> prefill, decode;  // each longest first
  int parts = 0, row_blocks = 0;           // of decoding sequences
  bool prefill_first = false;              // all blocks prefer prefill; otherwise half of them
};
// Whether it is faster if all blocks prefer prefill, for work in longest-first order and two blocks
// per SM. If half of them prefer prefill, tensor cores and memory are busy at the same time; but a
// few long tiles may need a second wave on half of the blocks, and only one on all. Both are
// simulated, tile by tile.
bool prefill_first(const std::vector<MixedWork>& prefill, const std::vector<MixedWork>& decode,
                   int64_t sms);
// `lengths_q`, `lengths_k`: queries and keys per sequence.
MixedPlan mixed_plan(const Problem&, const std::vector<int64_t>& lengths_q,
                     const std::vector<int64_t>& lengths_k, int64_t sms);

// Tensors of a step: work [most, 9], prefill tiles first, and work_counts [3]: entries of each
// kind, and whether all blocks prefer prefill.
HostTensors mixed_tensors(const Problem&, const HostTensors& inputs);

// Cost of a decode tile in keys of a prefill tile: the time it takes with an SM's share of the
// memory bandwidth. On an H200 with d=128, 32 KB at 31 GB/s take 1.05 us, and a key of two prefill
// blocks on an SM takes 52 ns (0.40 ms for 256 tiles of 7700 keys).
constexpr double kKeysPerDecodeTile = 20;
// Factor by which decoding takes longer on half of the blocks (0.32 ms instead of 0.27).
constexpr double kHalfDecodes = 1.2;

}  // namespace attn::plans
