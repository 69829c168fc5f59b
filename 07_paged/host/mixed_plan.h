// Plans of batches in which some sequences decode and others are prompts, or chunks of prompts.
#pragma once

#include <cstdint>
#include <vector>

#include "attn/step.h"
#include "kernels/work.h"

namespace attn::plans {

// Pieces of sequences that decode, for each SM. More are shared out more evenly, and each begins
// with copies that nobody has fetched ahead. It is a guess until a sweep on a GPU.
constexpr int64_t kPiecesPerSm = 4;

struct MixedPlan {
  std::vector<MixedWork> prefill, decode;  // each with the longest first
  int parts = 0, row_blocks = 0;           // of sequences that decode
  bool prefill_first = false;              // all blocks take prefill before they decode; else half
};
// Whether that is faster, for work with the longest first and two blocks an SM. With half of the
// blocks at prefill the tensor cores and memory are busy at the same time; but of a few long tiles
// half of the blocks may need a second round, while all have room for them at once. Both orders are
// simulated, tile by tile.
bool prefill_first(const std::vector<MixedWork>& prefill, const std::vector<MixedWork>& decode,
                   int64_t sms);
// `lengths_q`, `lengths_k`: queries and keys of each sequence.
MixedPlan mixed_plan(const Problem&, const std::vector<int64_t>& lengths_q,
                     const std::vector<int64_t>& lengths_k, int64_t sms);

// What a step gets: work [most, 9], tiles of prefill in front, and work_counts [3]: of each kind,
// and whether all blocks take prefill first.
HostTensors mixed_tensors(const Problem&, const HostTensors& inputs);

// What a tile of keys of a sequence that decodes takes of an SM's share of the memory, in keys that
// a tile of prefill sees meanwhile: on an H200 with d=128, 32 KB at 31 GB/s are 1.05 us, and 52 ns
// a key of two blocks of prefill on an SM (0.40 ms for 256 tiles of 7700 keys).
constexpr double kKeysPerDecodeTile = 20;
// And how much longer sequences decode with half of the blocks (0.32 ms for 0.27).
constexpr double kHalfDecodes = 1.2;

}  // namespace attn::plans
