// v13_tuned's tiles per head dim, from a sweep (host/sweep.cu).
#pragma once

#include "attn/kernel.h"

namespace ATTN_BACKEND::flash2 {

//! [config]
struct Tuning {
  int block_m = 128, block_n = 64;  // B_r, B_c
  int num_warps = 4;
  int q_steps = 0;  // 16-column fragments of Q in registers
  int stages = 1;   // 1: V loads during Q K^T, the next K during P V; 2: K and V one block ahead
  int blocks_per_sm = 2;
};
template <int kHeadDim_, Tuning kTuning>
struct Tuned {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kTuning.block_m, kBlockN = kTuning.block_n;  // B_r, B_c
  static constexpr int kNumWarps = kTuning.num_warps, kThreads = 32 * kNumWarps;
  // 16-row MMA tiles per warp
  static constexpr int kWarpRows = kBlockM / kNumWarps, kTiles = kWarpRows / 16;
  static constexpr int kQSteps = kTuning.q_steps, kStages = kTuning.stages;
  static constexpr int kBlocksPerSm = kTuning.blocks_per_sm;
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kSwizzleChunks =
      kHeadDim % 64 == 0 ? 8 : 4;  // 16-byte chunks that the swizzle permutes
  static constexpr int kCopyRows = kThreads / kSwizzleChunks;  // rows that the block copies at once
  static_assert(kWarpRows % 16 == 0 && kBlockN % 16 == 0, "warps own whole MMAs");
  static_assert(kBlockM % kCopyRows == 0 && kBlockN % kCopyRows == 0, "threads copy alike");
  static_assert(kQSteps <= kHeadDim / 16, "there are no more columns");
};
template <int kHeadDim>
struct Config : Tuned<kHeadDim, Tuning{}> {};
template <>
struct Config<32> : Tuned<32, Tuning{.q_steps = 2, .stages = 2}> {};
template <>
struct Config<64> : Tuned<64, Tuning{.q_steps = 4, .stages = 2}> {};
template <>
struct Config<192> : Tuned<192, Tuning{.block_m = 64}> {};
template <>
struct Config<256> : Tuned<256, Tuning{.block_m = 64, .q_steps = 8}> {};
// Tiles for softcap, ALiBi and dropout, which need registers.
template <int kHeadDim>
struct WithFeatures : Config<kHeadDim> {};
template <>
struct WithFeatures<64> : Tuned<64, Tuning{.stages = 2}> {};
template <>
struct WithFeatures<96> : Tuned<96, Tuning{.block_m = 64, .blocks_per_sm = 3}> {};
template <>
struct WithFeatures<128> : Tuned<128, Tuning{.block_m = 64, .blocks_per_sm = 3}> {};
template <>
struct WithFeatures<256> : Tuned<256, Tuning{.block_m = 64}> {};
//! [config]

}  // namespace ATTN_BACKEND::flash2
