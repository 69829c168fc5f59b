// What a block works on, from lists that the host or another kernel has made, and how many blocks a
// launch has: what kernels, plans and the table share.
#pragma once

#include <cstdint>

#include "attn/problem.h"
#include "kernels/splits.h"

namespace attn::plans {

// Some tiles of the keys of a row block: [tile, tile + count) of all that its queries see. A row
// block whose keys several pieces share has parts first_part to first_part + num_parts - 1 of the
// workspace, one a piece, in the order of the keys.
//! [work]
struct WorkTile {
  int row_block, tile, count;
  int part, num_parts, first_part;
};
//! [work]
constexpr int kWorkNumbers = 6;

// What a piece costs besides its tiles: Q, the first copies and the merge, in tiles. With 2 the
// kernel of v5 was faster than with 0 and 1 in the three batches that were timed on an H200: 256
// sequences of 16 to 512 tokens, 64 of 512 to 2048, and one of 131072 among 63 of 1024
// (docs/reports/h200/07_paged.tried.txt).
constexpr int kPieceTiles = 2;

// Neighbouring row blocks of a sequence that are in step: as many blocks, one for each, go through
// the same keys at the same time, so that a token, whose heads lie side by side, is presumably read
// in fewer stretches of DRAM. The most of which all blocks have some to do: on 132 SMs 4 of 8
// heads.
int in_step(const Problem&, int64_t blocks);

// Resident blocks, one an SM: as many as --blocks says, or as the GPU has SMs; without one 132.
int64_t planned_blocks(const Problem&);
// Blocks of a launch with a uniform plan.
int64_t most_chunks(const Problem&);

// Of latent attention: the blocks that have the rows of a sequence, `rows` each, are a team and
// work on the same piece at a time. So a plan has pieces for teams, and Work::row_block is a
// sequence.
int64_t teams(const Problem&, int64_t rows);

// What a block of v11_mixed works on at a time. Of a sequence with many queries: a tile of them of
// one query head. Of one that decodes: some tiles of keys, [tile, tile + count), for up to 16 rows
// of one K/V head; where several pieces share the rows, parts as of Work.
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
constexpr int64_t kMaxDecoding = 16;
// Bounds that hold for sequences with these queries and any keys.
struct MixedBounds {
  int64_t work, parts, row_blocks;
};
MixedBounds mixed_bounds(const Problem&);

// Keys of a tile of a block that decodes: 16 for each of its 4 warps.
constexpr int kMixedTileKeys = 64;

// Tiles of the kernel that reads prefixes: rows, keys of a block; and its resident blocks an SM,
// which the plan has pieces for. Of v8_shared_prefix, and of v17_prefix_tma.
struct PrefixTiles {
  int64_t rows, keys, blocks_per_sm;
};
constexpr PrefixTiles mma_prefix_tiles(int64_t head_dim) {
  return {splits::prefix_rows(head_dim), splits::kPrefillKeys, 2};
}
constexpr PrefixTiles wgmma_prefix_tiles(int64_t head_dim) {
  return {head_dim == 64 ? 192 : 128, splits::tile_keys(head_dim), 1};
}

// Some blocks of the keys of a prefix, with a tile of the queries of all sequences that share it:
// they are the rows of one matrix, member after member, each with the rows of its K/V head.
//! [prefix_work]
struct PrefixWork {
  int sequence, kv_head;   // whose row of the page table has the pages
  int first_member, rows;  // members[first_member] and on, and the rows of all of them
  int row0;                // of the tile
  int keys;                // of the prefix
  int begin, end;          // blocks of keys; where both are the same nothing is to be done
  int place;               // in the workspace, of the first row of all
};
//! [prefix_work]
constexpr int kPrefixNumbers = 9;

// Room for either tiles: entries of the list.
int64_t most_prefix_work(const Problem&);

}  // namespace attn::plans
