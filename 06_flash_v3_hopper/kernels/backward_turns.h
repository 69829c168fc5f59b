// dQ in a fixed order, for the deterministic backward steps. Each query tile has a semaphore: the
// number of visits that have added to its dQ; the last visit does not advance it. Here are the
// position of a visit in that order, the two threads of a block that wait for semaphores and
// advance them, the addition, and the preprocess kernel.
#pragma once

#include "attn/kernel.h"
#include "kernels/backward_tiles.h"
#include "ptx/global_flag.h"
#include "ptx/grid_dependency.h"
#include "ptx/mbarrier.h"
#include "ptx/reduce_add.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// The position of a visit in the order of its query tile: `before` of `count` visits add to dQ
// first. `tile`: index of the query tile through heads and batch; -1: end of work.
//! [turn]
struct Turn {
  int tile, before, count;
  __device__ bool first() const { return before == 0; }
  __device__ bool last() const { return before + 1 == count; }
};
// The key tiles that visit a query tile add in descending order.
template <class Config>
__device__ __forceinline__ Turn turn_of(const Shape& shape, int head, int m_block, int key0,
                                        int num_m_blocks) {
  const int row0 = m_block * Config::kBlockM;
  const int last_row = min(row0 + Config::kBlockM, shape.seqlen_q) - 1;
  const int last_key =
      min(shape.seqlen_k - 1, last_row + shape.seqlen_k - shape.seqlen_q + shape.window_right);
  // The key tiles that visit this query tile: [first, last].
  const int first = first_visible_key(shape, row0) / Config::kBlockN;
  const int last = last_key / Config::kBlockN;
  return {head * num_m_blocks + m_block, last - key0 / Config::kBlockN, last - first + 1};
}
//! [turn]

constexpr int kTurns = 4;  // per block: visits whose semaphore may be awaited ahead of the MMAs

// One thread: waits for the semaphore of each visit, and passes the turn to the consumers.
// `gSemaphore`: [tiles, kSemaphoresPerTile]; null: no other block adds to these tiles.
// next_tile(tile) returns false at the end of work.
//! [wait]
template <class Config, int kSemaphoresPerTile, class SharedStorage, class NextTile>
__device__ __forceinline__ void wait_for_turns(SharedStorage& smem, const unsigned* gSemaphore,
                                               const Shape& shape, int num_m_blocks,
                                               const NextTile& next_tile) {
  PipelineState<kTurns> turns;
  const auto pass = [&](const Turn& turn) {
    const int slot = turns.index();
    mbarrier_wait(&smem.turn_empty[slot], turns.phase() ^ 1);
    if (gSemaphore != nullptr && turn.before > 0)
      flag_wait(gSemaphore + kSemaphoresPerTile * int64_t{turn.tile},
                static_cast<unsigned>(turn.before));
    smem.turns[slot] = turn;
    mbarrier_arrive(&smem.turn_full[slot]);
    turns.advance();
  };
  for (KeyTile work{}; next_tile(work);)
    for (int head = work.first_head; head < work.end; ++head)
#pragma unroll 1  // few registers
      for (int m_block = work.q_range.begin; m_block < work.q_range.end; ++m_block)
        pass(turn_of<Config>(shape, head, m_block, work.key0, num_m_blocks));
  pass({-1, 0, 0});  // end of work
}
//! [wait]

// One thread: advances the semaphore when all consumer warps have added. The release orders their
// additions, which this thread has observed through `added`, before those of the next visit.
//! [advance]
template <int kSemaphoresPerTile, class SharedStorage>
__device__ __forceinline__ void advance_semaphores(SharedStorage& smem, unsigned* gSemaphore) {
  for (PipelineState<kTurns> turns;; turns.advance()) {
    const int slot = turns.index();
    mbarrier_wait(&smem.turn_full[slot], turns.phase());
    const Turn turn = smem.turns[slot];
    if (turn.tile < 0) return;
    mbarrier_wait(&smem.added[slot], turns.phase());
    if (gSemaphore != nullptr && !turn.last())
      flag_store(gSemaphore + kSemaphoresPerTile * int64_t{turn.tile},
                 static_cast<unsigned>(turn.before) + 1);
    mbarrier_arrive(&smem.turn_empty[slot]);
  }
}
//! [advance]

// Adds a thread's fragments of dQ to the accumulator at `accum`, fragments `kThreads` apart. The
// first visit stores instead, so nothing is cleared. The last one reads the sum of the others, and
// returns true: then dq is complete, and no kernel has to convert it.
//! [add]
template <int kThreads, int kFragments>
__device__ __forceinline__ bool add_dq(float4* accum, float (&dq)[kFragments][4],
                                       const Turn& turn) {
  if (turn.last()) {
    if (!turn.first())
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const float4 sum = accum[f * kThreads];
        dq[f][0] += sum.x, dq[f][1] += sum.y, dq[f][2] += sum.z, dq[f][3] += sum.w;
      }
    return true;
  }
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
    const float4 x = make_float4(dq[f][0], dq[f][1], dq[f][2], dq[f][3]);
    if (turn.first())
      accum[f * kThreads] = x;
    else
      reduce_add(accum + f * kThreads, x);
  }
  return false;
}
//! [add]

// (1) Preprocess of a query tile, as dot_kernel; clears the semaphores and the tile counter instead
// of the accumulator, and dQ if no key tile visits the query tile.
//! [preprocess]
template <class Element, class Config, int kSemaphoresPerTile = 1>
__global__ void __launch_bounds__(256)
    preprocess_kernel(const Element* gO,     // [B, Hq, seqlen_q, d]
                      const Element* gdO,    // [B, Hq, seqlen_q, d]
                      const float* gLse,     // [B, Hq, seqlen_q]
                      float* gRows,          // [tiles, 2, kBlockM]: lse / log(2), D
                      Element* gdQ,          // [B, Hq, seqlen_q, d]
                      unsigned* gSemaphore,  // [tiles, kSemaphoresPerTile]
                      unsigned* gCounter,    // of the tile scheduler
                      Shape shape, int num_m_blocks) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM;
  constexpr int kLanes = kHeadDim / 8;  // per row, 16 bytes each
  launch_dependents();
  const int64_t tile = blockIdx.x, bh = tile / num_m_blocks;
  const int row0 = static_cast<int>(tile % num_m_blocks) * kBlockM;
  if (threadIdx.x < kSemaphoresPerTile) gSemaphore[kSemaphoresPerTile * tile + threadIdx.x] = 0;
  if (tile == 0 && threadIdx.x == 0) *gCounter = 0;
  preprocess_rows<Element, Config>(gO, gdO, gLse, gRows, shape, tile, num_m_blocks);
  if (is_visited(shape, row0, kBlockM)) return;
#pragma unroll
  for (int r = static_cast<int>(threadIdx.x) / kLanes; r < kBlockM; r += 256 / kLanes)
    if (row0 + r < shape.seqlen_q)
      *reinterpret_cast<uint4*>(gdQ + (bh * shape.seqlen_q + row0 + r) * kHeadDim +
                                threadIdx.x % kLanes * 8) = uint4{};
}
//! [preprocess]

}  // namespace ATTN_BACKEND::hopper
