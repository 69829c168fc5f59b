// Stream-K runs or even splits. Used by v13_even_splits of chapter 05_flash_decoding and later
// steps.
#pragma once

#include "attn/kernel.h"
#include "kernels/decode/runs.h"

namespace ATTN_BACKEND::flash_decoding {

// A schedule gives a block its work tiles one by one. `slot`: the index of split n's partial result
// in the workspace (in chapter 07 the slot of a token is another thing).
//! [schedules]
struct Runs {
  int batch;
  StreamKUnit run = {};
  __device__ void begin(const Shape& shape, const int* gSeqused, int num_row_blocks,
                        int tile_keys) {
    run = run_of(shape, gSeqused, batch, num_row_blocks, tile_keys);
  }
  __device__ bool next(StreamKTile& s, const Shape& shape, const int* gSeqused, int num_row_blocks,
                       int tile_keys) {
    if (run.begin >= run.end) return false;
    s = next_work_tile(run, shape, gSeqused, num_row_blocks, tile_keys);
    return true;
  }
  __device__ static int64_t slot(const StreamKTile& s, int n) {
    return partial_of(s.first_block, n);
  }
};
struct Even {         // each split has `share` KV tiles; the last may have fewer
  int share, splits;  // splits: the maximum per row block
  bool done = false;
  __device__ void begin(const Shape&, const int*, int, int) {}
  __device__ bool next(StreamKTile& s, const Shape& shape, const int* gSeqused, int num_row_blocks,
                       int tile_keys) {
    if (done) return false;
    done = true;
    s.row_block = blockIdx.x / splits, s.split = blockIdx.x % splits;
    s.seqlen_k = gSeqused[s.row_block / num_row_blocks];
    s.tiles = tiles_of(shape, s.seqlen_k, tile_keys), s.num_splits = ceil_div(s.tiles, share);
    s.tile = s.split * share, s.count = min(share, s.tiles - s.tile);
    s.first_block = s.row_block * splits;
    return s.count > 0;  // otherwise this sequence has fewer splits
  }
  __device__ static int64_t slot(const StreamKTile& s, int n) { return int64_t{s.first_block} + n; }
};
//! [schedules]

}  // namespace ATTN_BACKEND::flash_decoding
