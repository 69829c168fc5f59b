// Smooth V (SageAttention2, arXiv 2411.10958), bf16 to e4m3: codes of V minus its mean, with a mean
// and a scale per channel (column) of a chunk of 4096 keys. V is transposed, because wgmma takes
// 8-bit operands K-major only, and its keys are in the order of e4m3_column in each 16.
//
//     v_chunk  [B Hkv, chunks, d, 2]    mean, descale
//     v8       [B Hkv, d, padded]       (V - mean) / descale; rows are padded to 16 bytes
//
// Means and scales come from finite values. NaN and Inf become e4m3's NaN code, so they affect
// their own key only.
#pragma once

#include <algorithm>
#include <bit>

#include "attn/finite.h"
#include "attn/kernel.h"
#include "ptx/cluster.h"
#include "ptx/launch.h"
#include "ptx/wgmma_e4m3.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

constexpr int kChunkKeys = 4096;

// A cluster reads 64 columns of a chunk once. Each block keeps its 512 keys in registers while the
// blocks exchange the statistics of their columns.
//! [smooth_v]
struct alignas(16) ColumnStatistics {
  float sum = 0, least = INFINITY, most = -INFINITY, unused = 0;
  __device__ __forceinline__ void add(const ColumnStatistics& other) {
    sum += other.sum, least = fminf(least, other.least), most = fmaxf(most, other.most);
  }
};
struct SmoothV {  // a block: its parameters and its shared memory
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kColumns = 64;
  static constexpr int kKeys = 512, kTileKeys = 128, kTiles = kKeys / kTileKeys;
  // e4m3's largest number, and the least absolute maximum: 1 / descale is at most 2^88.8.
  static constexpr float kLargest = 448, kSmallest = 0x1p-80f;
  ColumnStatistics sWarps[kWarps][kColumns];
  ColumnStatistics sBlock[kColumns];         // all blocks of the cluster read it
  float2 sChunk[kColumns];                   // mean, scale
  uint32_t sWords[kColumns][kKeys / 4 + 1];  // four codes each; padding: fewer bank conflicts
  ATTN_MEMBERS(SmoothV, sWarps, sBlock, sChunk, sWords)
};

// Pairs of bf16 in a word. Their minimum and maximum leave NaN out.
__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}
__device__ __forceinline__ uint32_t min_pair(uint32_t a, uint32_t b) {
#ifdef ATTN_EMULATED
  return __float_as_uint(fminf(low_of(a), low_of(b))) >> 16 |
         __float_as_uint(fminf(high_of(a), high_of(b)));
#else
  asm("min.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
#endif
}
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
#ifdef ATTN_EMULATED
  return __float_as_uint(fmaxf(low_of(a), low_of(b))) >> 16 |
         __float_as_uint(fmaxf(high_of(a), high_of(b)));
#else
  asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
#endif
}
// After this, the compiler unpacks the pair once more. Otherwise it keeps the floats of the
// statistics, twice the registers, for the codes: it spills, and the kernel takes a fifth longer.
__device__ __forceinline__ void forget_unpacked([[maybe_unused]] uint32_t& pair) {
#ifndef ATTN_EMULATED
  asm volatile("" : "+r"(pair));
#endif
}

template <int kHeadDim>
__global__ void __launch_bounds__(SmoothV::kThreads, 2)
    smooth_v_kernel(const __nv_bfloat16* __restrict__ gV,  // [B Hkv, seqlen_k, d]
                    int seqlen_k, int blocks,              // per cluster
                    float2* __restrict__ gChunks,          // [B Hkv, chunks, d]: mean, descale
                    uint8_t* __restrict__ gV8) {           // [B Hkv, d, padded keys]
  constexpr int kColumns = SmoothV::kColumns, kTiles = SmoothV::kTiles, kKeys = SmoothV::kKeys;
  constexpr int kPanels = kHeadDim / kColumns;
  auto& smem = dynamic_shared<SmoothV>();
  const int thread = static_cast<int>(threadIdx.x), cluster = static_cast<int>(blockIdx.x) / blocks;
  const int chunks = ceil_div(seqlen_k, kChunkKeys), chunk = cluster / kPanels % chunks;
  const int64_t head = cluster / kPanels / chunks, padded = round_up(int64_t{seqlen_k}, 16);
  const int panel_column = cluster % kPanels * kColumns;
  const int chunk_key = chunk * kChunkKeys, end = min(seqlen_k, chunk_key + kChunkKeys);
  const int block_key = chunk_key + cluster_rank() * kKeys;
  const __nv_bfloat16* const gPanel = gV + head * seqlen_k * kHeadDim + panel_column;
  // A thread holds 8 columns of the four keys in neighbouring slots, in each tile of 128 keys.
  const int column = thread % 8 * 8, group = thread / 8;
  const int key0 = block_key + group / 4 * 16 + e4m3_column(group % 4 * 4);
  // `whole` is a type. If it is true, all keys of the block exist, and nothing is compared.
  const auto quantise = [&](auto whole) {
    const auto after = [](int tile, int i) { return tile * SmoothV::kTileKeys + e4m3_column(i); };
    const auto exists = [&](int tile, int i) { return whole.value || key0 + after(tile, i) < end; };
    uint32_t pairs[kTiles][4][4];  // as bf16: floats would take twice the registers
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint4 eight{};
        if (exists(tile, i))
          eight = *reinterpret_cast<const uint4*>(
              gPanel + (int64_t{key0} + after(tile, i)) * kHeadDim + column);
        pairs[tile][i][0] = eight.x, pairs[tile][i][1] = eight.y;
        pairs[tile][i][2] = eight.z, pairs[tile][i][3] = eight.w;
      }

    // Sums are added in a fixed order: keys of a thread, lanes, warps, blocks.
    constexpr uint32_t kInfinities = 0x7F807F80u, kMinusInfinities = 0xFF80FF80u;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float low = 0, high = 0;
      uint32_t least = kInfinities, most = kMinusInfinities;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (exists(tile, i)) {
            const uint32_t x = pairs[tile][i][pair];
            low += low_of(x), high += high_of(x);
            least = min_pair(least, x), most = max_pair(most, x);
          }
#pragma unroll
      for (int lanes = 8; lanes < 32; lanes *= 2) {  // lanes of the same columns
        low += __shfl_xor_sync(~0u, low, lanes), high += __shfl_xor_sync(~0u, high, lanes);
        least = min_pair(least, __shfl_xor_sync(~0u, least, lanes));
        most = max_pair(most, __shfl_xor_sync(~0u, most, lanes));
      }
      if (thread % 32 < 8) {
        ColumnStatistics* const two = smem.sWarps[thread / 32] + column + 2 * pair;
        two[0] = {low, low_of(least), low_of(most)};
        two[1] = {high, high_of(least), high_of(most)};
      }
    }
    __syncthreads();  // statistics of all warps are visible
    if (thread < kColumns) {
      ColumnStatistics all;
      for (const auto& warp : smem.sWarps) all.add(warp[thread]);
      smem.sBlock[thread] = all;
    }
    cluster_sync();  // statistics of all blocks are visible
    if (thread < kColumns) {
      ColumnStatistics all;
      for (int rank = 0; rank < blocks; ++rank)
        all.add(cluster_load<ColumnStatistics>(cluster_address(&smem.sBlock[thread], rank)));
      if (!(fabsf(all.sum) < INFINITY)) {  // non-finite keys are left out of the mean
        const FiniteColumn finite = finite_column(gPanel + int64_t{chunk_key} * kHeadDim + thread,
                                                  kHeadDim, end - chunk_key);
        all = {finite.sum, finite.least, finite.most};
      }
      const float mean = all.sum / static_cast<float>(end - chunk_key);
      const float largest = fmaxf(fmaxf(all.most - mean, mean - all.least), SmoothV::kSmallest);
      const float descale = largest / SmoothV::kLargest;
      smem.sChunk[thread] = make_float2(mean, 1 / descale);
      if (cluster_rank() == 0)
        gChunks[(head * chunks + chunk) * kHeadDim + panel_column + thread] =
            make_float2(mean, descale);
    }
    cluster_arrive();  // this block has read the statistics of the others
    __syncthreads();   // mean and scale are visible

#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float2 low = smem.sChunk[column + 2 * pair], high = smem.sChunk[column + 2 * pair + 1];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float lows[4] = {}, highs[4] = {};  // of four keys; 0 past the last one
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (exists(tile, i)) {
            uint32_t x = pairs[tile][i][pair];
            forget_unpacked(x);
            lows[i] = finite_or_nan((low_of(x) - low.x) * low.y);
            highs[i] = finite_or_nan((high_of(x) - high.x) * high.y);
          }
        const int word = tile * (SmoothV::kTileKeys / 4) + group;
        smem.sWords[column + 2 * pair][word] = pack4_e4m3(lows[0], lows[1], lows[2], lows[3]);
        smem.sWords[column + 2 * pair + 1][word] =
            pack4_e4m3(highs[0], highs[1], highs[2], highs[3]);
      }
    }
  };
  if (block_key + kKeys <= end)
    quantise(std::true_type{});
  else
    quantise(std::false_type{});
  __syncthreads();  // all codes are visible
  uint8_t* const gColumns = gV8 + (head * kHeadDim + panel_column) * padded;
  for (int row = thread / 32; row < kColumns; row += SmoothV::kWarps)
#pragma unroll
    for (int word = thread % 32; word < kKeys / 4; word += 32)
      if (const int key = block_key + 4 * word; key < padded)
        *reinterpret_cast<uint32_t*>(gColumns + row * padded + key) = smem.sWords[row][word];
  cluster_wait();  // the others have read the statistics of this block
}
//! [smooth_v]

//! [launch_smooth_v]
template <int kHeadDim>
Status smooth_v(const Arguments& args) {
  const Problem& p = args.problem;
  const int64_t keys = std::min<int64_t>(p.seqlen_k, kChunkKeys);
  const unsigned blocks = std::bit_ceil(static_cast<unsigned>(ceil_div(keys, SmoothV::kKeys)));
  const int64_t clusters =
      p.batch * p.kv_heads * ceil_div(p.seqlen_k, kChunkKeys) * kHeadDim / SmoothV::kColumns;
  return launch_kernel({.cluster = blocks}, smooth_v_kernel<kHeadDim>,
                       dim3(static_cast<unsigned>(clusters) * blocks), dim3(SmoothV::kThreads),
                       sizeof(SmoothV), args.stream, args.in<__nv_bfloat16>("v"),
                       static_cast<int>(p.seqlen_k), static_cast<int>(blocks),
                       reinterpret_cast<float2*>(args.out<float>("v_chunk")),
                       args.out<uint8_t>("v8"));
}
//! [launch_smooth_v]

}  // namespace ATTN_BACKEND::hopper
