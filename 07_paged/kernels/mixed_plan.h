// Plans of batches in which some sequences decode and others are prompts, or chunks of prompts.
#pragma once

#include <cstdint>
#include <vector>

#include "attn/step.h"
#include "kernels/splits.h"

namespace attn::plans {

// What a block of v11_mixed works on at a time. Of a sequence with many queries: a tile of them of
// one query head. Of one that decodes: some tiles of keys, [tile, tile + count), for up to 16 rows
// of one K/V head; where several pieces share the rows, parts as in plan.h.
//! [mixed]
struct MixedWork {
  int sequence, head;  // a query head, or of a sequence that decodes a K/V head
  int row0;            // the first query, or the first row of the group
  int row_block;       // of those that decode
  int tile, count;     // tiles of keys; of prefill `count` is its keys: orders and times need it
  int part, num_parts, first_part;
};
//! [mixed]
constexpr int kMixedNumbers = 9;
// Counters of a launch: work that was taken of each kind, blocks that are done, and blocks on each
// SM (of more SMs some share one); and of another launch, which may run at the same time.
constexpr int kCountedSms = 256;
constexpr int64_t kTickets = 2 * (3 + kCountedSms);

// A sequence with up to so many queries decodes.
constexpr int64_t kMostDecoding = 16;
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

// Bounds that hold for sequences with these queries and any keys.
struct MixedBounds {
  int64_t work, parts, row_blocks;
};
MixedBounds mixed_bounds(const Problem&);
// What a step gets: work [most, 9], tiles of prefill in front, and work_counts [3]: of each kind,
// and whether all blocks take prefill first.
HostTensors mixed_tensors(const Problem&, const HostTensors& inputs);

// What a tile of keys of a sequence that decodes takes of an SM's share of the memory, in keys that
// a tile of prefill sees meanwhile: on an H200 with d=128, 32 KB at 31 GB/s are 1.05 us, and 52 ns
// a key of two blocks of prefill on an SM (0.40 ms for 256 tiles of 7700 keys).
constexpr double kKeysPerDecodeTile = 20;
// And how much longer sequences decode with half of the blocks (0.32 ms for 0.27).
constexpr double kHalfDecodes = 1.2;

// Keys of a tile of a block that decodes: 16 for each of its 4 warps.
constexpr int kMixedTileKeys = 64;

}  // namespace attn::plans
