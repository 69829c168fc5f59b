// Work tiles, which the host or the planning kernel lists, and the number of blocks of a launch.
// Shared by kernels, plans and the chapter's table.
#pragma once

#include <cstdint>

#include "attn/problem.h"
#include "kernels/splits.h"

namespace attn::plans {

// Work tile: KV tiles [tile, tile + count) among those visible to a row block. If several work
// tiles split a row block, partial results first_part to first_part + num_parts - 1 of the
// workspace are theirs, in key order (v6: first_part is the first of their blocks, see line.h).
//! [work]
struct WorkTile {
  int row_block, tile, count;
  int part, num_parts, first_part;
};
//! [work]
constexpr int kWorkNumbers = 6;

// Price of a work tile, in KV tiles: Q, the first copies and the reduction. With 2 the kernel of v5
// was faster than with 0 and 1 in the three batches that were timed on an H200: 256 sequences of 16
// to 512 tokens, 64 of 512 to 2048, and one of 131072 among 63 of 1024
// (docs/reports/h200/07_paged.tried.txt).
constexpr int kPieceTiles = 2;

// Neighbouring row blocks of a sequence that are cut at the same tiles: as many blocks process the
// same keys at the same time. The heads of a token are contiguous in a page, so presumably this
// helps DRAM locality. The largest number with which all blocks have work: on 132 SMs 4 of 8 heads.
int in_step(const Problem&, int64_t blocks);

// Resident blocks, one per SM: --blocks, or the number of SMs of the GPU; 132 without a GPU.
int64_t planned_blocks(const Problem&);
// Blocks of a launch with a uniform plan.
int64_t most_chunks(const Problem&);

// Latent attention: a team is the blocks that have the rows of a sequence, `rows` each, and process
// the same work tile at the same time. Plans assign work tiles to teams, and WorkTile::row_block is
// a sequence.
int64_t teams(const Problem&, int64_t rows);

// Sequence of more than few_parts() parts, which combine_kernel reduces (v16_mla_seesaw).
//! [split_sequence]
struct SplitSequence {
  int sequence, num_parts, first_part;
};
//! [split_sequence]
constexpr int kSplitNumbers = 3;
// Parts whose rows, of 512 columns each, are at most 256: the block that arrives last reduces them.
int few_parts(const Problem&, int64_t rows);
// Upper bound on such sequences: each is cut at least few_parts() times, and all of them at most
// once per team but the last.
int64_t most_split_sequences(const Problem&, int64_t rows);
// Whether combine_kernel is launched: by the lengths that the host knows, the longest sequence has
// more than few_parts() parts. On an H200 the launch costs 2 us, even if the list is empty. Without
// it the block that arrives last reduces all parts.
bool combines(const Problem&, int64_t rows);

// Work tile of v11_mixed. Prefill: one query tile of one query head. Decode: KV tiles
// [tile, tile + count) for up to 16 rows of one K/V head; parts as in WorkTile.
//! [mixed]
struct MixedWork {
  int sequence, head;  // query head (prefill) or K/V head (decode)
  int row0;            // first query (prefill) or first row of the group (decode)
  int row_block;       // decode only
  int tile, count;     // KV tiles; for prefill `count` is the number of keys, for ordering and cost
  int part, num_parts, first_part;
};
//! [mixed]
constexpr int kMixedNumbers = 9;
// Counters of a launch: entries taken per kind, blocks that have exited, and blocks on each SM (if
// a GPU has more SMs, some share a counter). Two sets, for two concurrent launches.
constexpr int kCountedSms = 256;
constexpr int64_t kTickets = 2 * (3 + kCountedSms);

// A sequence with at most this many queries counts as decoding.
constexpr int64_t kMaxDecoding = 16;
// Upper bounds for sequences with these queries and any keys.
struct MixedBounds {
  int64_t work, parts, row_blocks;
};
MixedBounds mixed_bounds(const Problem&);

// Keys per decode tile of a block: 16 for each of its 4 warps.
constexpr int kMixedTileKeys = 64;

// Tiles of the prefix kernels of v8_shared_prefix and v17_prefix_tma: rows, keys per block, and the
// resident blocks per SM for which the plan makes work tiles.
struct PrefixTiles {
  int64_t rows, keys, blocks_per_sm;
};
constexpr PrefixTiles mma_prefix_tiles(int64_t head_dim) {
  return {splits::prefix_rows(head_dim), splits::kPrefillKeys, 2};
}
constexpr PrefixTiles wgmma_prefix_tiles(int64_t head_dim) {
  return {head_dim == 64 ? 192 : 128, splits::tile_keys(head_dim), 1};
}

// Prefix work tile: a range of key blocks of a prefix, and one tile of the queries of all sequences
// that share it. These form one matrix, member after member, each with the rows of its K/V head.
//! [prefix_work]
struct PrefixWork {
  int sequence, kv_head;   // `sequence`: its row of the page table lists the pages
  int first_member, rows;  // rows of members[first_member] and the following ones
  int row0;                // first row of the tile
  int keys;                // of the prefix
  int begin, end;          // key blocks; empty where both are equal
  int place;               // partial result of the first row of the group
};
//! [prefix_work]
constexpr int kPrefixNumbers = 9;

// Entries of the list, enough for both tile sizes.
int64_t most_prefix_work(const Problem&);

}  // namespace attn::plans
