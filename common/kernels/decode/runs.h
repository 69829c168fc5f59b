// Runs of tiles of equal length, across heads and sequences: what a block works on from v8_stream_k
// of chapter 05_flash_decoding on.
#pragma once

#include "attn/kernel.h"
#include "kernels/decode/keys.h"

namespace ATTN_BACKEND::flash_decoding {
using namespace attn;

// The tiles of a block, counted through the heads of all sequences: fewer than 2^31 in all.
//! [runs]
struct StreamKUnit {
  int begin, end, length;  // length: of each block's run but the last
  int b, first;            // where `begin` is: its sequence, and the first tile of that
};
// Every warp adds up the sequences for itself, 32 at a time. `heads`: row tiles of a sequence.
// Where all sequences have as many tiles, runs are made a little longer, so that heads end where
// runs do: then a block rarely begins a second head, whose first keys nobody has fetched ahead.
__device__ __forceinline__ StreamKUnit run_of(const Shape& shape, const int* gSeqused, int batch,
                                              int heads, int tile_keys) {
  const int lane_id = threadIdx.x % 32, block = blockIdx.x, blocks = gridDim.x;
  const auto tiles = [&](int b) { return b < batch ? tiles_of(shape, gSeqused[b], tile_keys) : 0; };
  int total = 0, most = 0;  // of a row tile of each sequence
  for (int b = lane_id; b < batch; b += 32) total += tiles(b), most = max(most, tiles(b));
  for (int distance = 16; distance > 0; distance /= 2) {
    total += __shfl_xor_sync(~0u, total, distance);
    most = max(most, __shfl_xor_sync(~0u, most, distance));
  }
  const bool equal = total == batch * most;
  total *= heads;
  StreamKUnit run{0, 0, ceil_div(total, blocks), 0, 0};
  if (equal) {
    const int whole = run.length < most ? ceil_div(most, most / run.length)  // a part of a head
                                        : round_up(run.length, most);
    if (whole - run.length <= run.length / 16) run.length = whole;
  }
  run.begin = min(total, block * run.length), run.end = min(total, run.begin + run.length);
  if (equal) {
    run.b = run.begin / (heads * most), run.first = run.b * heads * most;
    return run;
  }
  for (; run.b < batch; run.b += 32) {
    int sum = heads * tiles(run.b + lane_id);  // up to this lane's sequence
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, sum, distance);
      if (lane_id >= distance) sum += before;
    }
    const int before = __popc(__ballot_sync(~0u, run.first + sum <= run.begin));  // sequences
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

// A head's rows, as far as they are in a run: tiles [tile, tile + count) of `tiles`.
//! [segment]
struct StreamKTile {
  int seqlen_k, row_block, tile, count, tiles;
  int first_block, num_splits, split;  // of the blocks that share the head; which of them this is
};
// The first segment of what is left of a run, and takes it off.
__device__ __forceinline__ StreamKTile next_work_tile(StreamKUnit& run, const Shape& shape,
                                                   const int* gSeqused, int heads, int tile_keys) {
  StreamKTile s;
  s.seqlen_k = gSeqused[run.b], s.tiles = tiles_of(shape, s.seqlen_k, tile_keys);
  const int head = (run.begin - run.first) / s.tiles;
  const int first_tile = run.first + head * s.tiles;
  s.row_block = run.b * heads + head;
  s.tile = run.begin - first_tile;
  s.count = min(s.tiles - s.tile, run.end - run.begin);
  s.first_block = first_tile / run.length;
  s.num_splits = (first_tile + s.tiles - 1) / run.length - s.first_block + 1;
  s.split = blockIdx.x - s.first_block;
  run.begin += s.count;
  if (head + 1 == heads && s.tile + s.count == s.tiles) run.first += heads * s.tiles, ++run.b;
  return s;
}
// Where a block leaves its part of a head: it has two places, for the head that it begins with and
// for the head that it ends with. `n`: how many blocks after the first one of the head.
__device__ __forceinline__ int64_t partial_of(int first_block, int n) {
  return 2 * int64_t{first_block + n} + (n == 0);
}
//! [segment]

}  // namespace ATTN_BACKEND::flash_decoding
