// What a block works on from v13_even_splits of chapter 05_flash_decoding on: runs, or splits of the
// same length.
#pragma once

#include "attn/kernel.h"
#include "kernels/decode/runs.h"

namespace ATTN_BACKEND::flash_decoding {

// What a block works on, a segment after the other, and where it leaves its part of one.
//! [schedules]
struct Runs {
  int batch;
  StreamKUnit run = {};
  __device__ void begin(const Shape& shape, const int* gSeqused, int heads, int tile_keys) {
    run = run_of(shape, gSeqused, batch, heads, tile_keys);
  }
  __device__ bool next(StreamKTile& s, const Shape& shape, const int* gSeqused, int heads,
                       int tile_keys) {
    if (run.begin >= run.end) return false;
    s = next_work_tile(run, shape, gSeqused, heads, tile_keys);
    return true;
  }
  __device__ static int64_t slot(const StreamKTile& s, int n) {
    return partial_of(s.first_block, n);
  }
};
struct Even {         // split n of every head has `share` tiles, or what is left of them
  int share, splits;  // of a head at most
  bool done = false;
  __device__ void begin(const Shape&, const int*, int, int) {}
  __device__ bool next(StreamKTile& s, const Shape& shape, const int* gSeqused, int heads,
                       int tile_keys) {
    if (done) return false;
    done = true;
    s.row_block = blockIdx.x / splits, s.split = blockIdx.x % splits;
    s.seqlen_k = gSeqused[s.row_block / heads];
    s.tiles = tiles_of(shape, s.seqlen_k, tile_keys), s.num_splits = ceil_div(s.tiles, share);
    s.tile = s.split * share, s.count = min(share, s.tiles - s.tile);
    s.first_block = s.row_block * splits;
    return s.count > 0;  // else this sequence has fewer splits
  }
  __device__ static int64_t slot(const StreamKTile& s, int n) { return int64_t{s.first_block} + n; }
};
//! [schedules]

}  // namespace ATTN_BACKEND::flash_decoding
