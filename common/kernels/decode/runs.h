// Stream-K schedule: runs of KV tiles of equal length, across heads and sequences. Used by
// v8_stream_k of chapter 05_flash_decoding and later steps.
#pragma once

#include "attn/kernel.h"
#include "kernels/decode/keys.h"

namespace ATTN_BACKEND::flash_decoding {
using namespace attn;

// Run of one block: tiles [begin, end), numbered across the heads of all sequences. There are fewer
// than 2^31 tiles in total.
//! [runs]
struct StreamKUnit {
  int begin, end, length;  // length: of every run but the last
  int b, first;            // sequence of tile `begin`, and the first tile of that sequence
};
// Each warp scans the lengths by itself, 32 sequences at a time, so no barrier is needed.
// `num_row_blocks`: of a sequence, its K/V heads times the row blocks of each. If all sequences
// have the same number of tiles, runs are lengthened by up to 1/16 so that row blocks end where
// runs end. A thread block then rarely begins a second row block, whose first keys no earlier
// iteration has prefetched.
__device__ __forceinline__ StreamKUnit run_of(const Shape& shape, const int* gSeqused, int batch,
                                              int num_row_blocks, int tile_keys) {
  const int lane_id = threadIdx.x % 32, block = blockIdx.x, blocks = gridDim.x;
  const auto tiles = [&](int b) { return b < batch ? tiles_of(shape, gSeqused[b], tile_keys) : 0; };
  int total = 0, most = 0;  // tiles per row block: over all sequences, and of the longest
  for (int b = lane_id; b < batch; b += 32) total += tiles(b), most = max(most, tiles(b));
  for (int distance = 16; distance > 0; distance /= 2) {
    total += __shfl_xor_sync(~0u, total, distance);
    most = max(most, __shfl_xor_sync(~0u, most, distance));
  }
  const bool equal = total == batch * most;
  total *= num_row_blocks;
  StreamKUnit run{0, 0, ceil_div(total, blocks), 0, 0};
  if (equal) {
    // Equal splits of one head, or several whole heads.
    const int whole =
        run.length < most ? ceil_div(most, most / run.length) : round_up(run.length, most);
    if (whole - run.length <= run.length / 16) run.length = whole;
  }
  run.begin = min(total, block * run.length), run.end = min(total, run.begin + run.length);
  if (equal) {
    run.b = run.begin / (num_row_blocks * most), run.first = run.b * num_row_blocks * most;
    return run;
  }
  for (; run.b < batch; run.b += 32) {
    int sum = num_row_blocks * tiles(run.b + lane_id);  // inclusive prefix sum over lanes
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, sum, distance);
      if (lane_id >= distance) sum += before;
    }
    // sequences that end before `begin`
    const int before = __popc(__ballot_sync(~0u, run.first + sum <= run.begin));
    const int tiles_before = __shfl_sync(~0u, sum, (before + 31) % 32);
    if (before > 0) run.first += tiles_before;
    if (before < 32) {
      run.b += before;
      break;
    }
  }
  return run;
}
//! [runs]

// Work tile, `segment` in the steps: the part of one row block that is in a run, KV tiles
// [tile, tile + count) of `tiles`.
//! [segment]
struct StreamKTile {
  int seqlen_k, row_block, tile, count, tiles;
  int first_block, num_splits, split;  // blocks that share this row block; split: which one this is
};
// Removes the first work tile from the rest of a run and returns it.
__device__ __forceinline__ StreamKTile next_work_tile(StreamKUnit& run, const Shape& shape,
                                                      const int* gSeqused, int num_row_blocks,
                                                      int tile_keys) {
  StreamKTile s;
  s.seqlen_k = gSeqused[run.b], s.tiles = tiles_of(shape, s.seqlen_k, tile_keys);
  const int n = (run.begin - run.first) / s.tiles;  // row block of the sequence
  const int first_tile = run.first + n * s.tiles;
  s.row_block = run.b * num_row_blocks + n;
  s.tile = run.begin - first_tile;
  s.count = min(s.tiles - s.tile, run.end - run.begin);
  s.first_block = first_tile / run.length;
  s.num_splits = (first_tile + s.tiles - 1) / run.length - s.first_block + 1;
  s.split = blockIdx.x - s.first_block;
  run.begin += s.count;
  if (n + 1 == num_row_blocks && s.tile + s.count == s.tiles)
    run.first += num_row_blocks * s.tiles, ++run.b;
  return s;
}
// Index of a partial result. A block has two: for the row block that its run starts in and for the
// one that it ends in. `n`: the split, counted from the first block of the row block.
__device__ __forceinline__ int64_t partial_of(int first_block, int n) {
  return 2 * int64_t{first_block + n} + (n == 0);
}
//! [segment]

}  // namespace ATTN_BACKEND::flash_decoding
