// The passes of s9 before attention: three kernels that read Q, K and V twice, to measure and to
// quantise. s7 reads K once more, in seven kernels.
//
//     measure   Q, K, V -> q_mean, q_similar, k_means, k_similar as in pool_kernel
//                          (choose_blocks.h); v_parts [B Hkv, blocks, 3, d]: sum, min, max
//     reduce    those   -> k_mean [B Hkv, d], v_channel [B Hkv, d, 2]: mean and descale of V
//     codes     Q, K, V -> q8, k8, q_descale, k_descale, lse_shift (quantise.h); v8
//
// There are two reads because nothing can be rounded before the mean of all keys is known. V has
// one mean and scale per channel of a head: a query tile visits blocks from the whole sequence, so
// means per chunk (smooth_v.h) would need one O per chunk. Means and scales come from finite
// values.
#pragma once

#include "kernels/choose_blocks.h"
#include "kernels/hopper/smooth_v.h"
#include "kernels/quantise_v.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// As transpose_kernel of quantise_v.h: 64 columns `panel` of 128 keys `tile`. `chunk_of` returns
// the means and scales of a head's columns for the chunk of a key.
// One word of padding per row: fewer bank conflicts.
using TransposedWords = uint32_t[kTransposedColumns][kTransposedKeys / 4 + 1];
template <class Pass, int kHeadDim, class ChunkOf>
__device__ __forceinline__ void transpose_smoothed(const __nv_bfloat16* __restrict__ gV,
                                                   int seqlen_k, unsigned panel, unsigned tile,
                                                   ChunkOf chunk_of, TransposedWords& sWords,
                                                   uint8_t* __restrict__ gV8) {
  constexpr int kPanels = kHeadDim / kTransposedColumns;
  const int64_t head = panel / kPanels, padded = padded_keys(seqlen_k);
  const int column0 = static_cast<int>(panel) % kPanels * kTransposedColumns;
  const int key0 = static_cast<int>(tile) * kTransposedKeys;
  // 8 threads per row of 64 columns; 32 groups of four keys.
  const int column = static_cast<int>(threadIdx.x) % 8 * 8;
  const int group = static_cast<int>(threadIdx.x) / 8;
  float x[8][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = key0 + group / 4 * 16 + e4m3_column(group % 4 * 4 + i);
    const int64_t idx = (head * seqlen_k + key) * kHeadDim + column0 + column;
    const Bf16x8 e = key < seqlen_k ? load_bf16x8(gV + idx) : Bf16x8{};
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c][i] = finite_or_nan(e.x[c]);
  }
  const float2* const chunk = chunk_of(head, key0) + column0 + column;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const auto [mean, descale] = chunk[c];
    const float scale = 1 / descale;
    sWords[column + c][group] = pack4_e4m3((x[c][0] - mean) * scale, (x[c][1] - mean) * scale,
                                           (x[c][2] - mean) * scale, (x[c][3] - mean) * scale);
  }
  __syncthreads();  // all codes are visible
  const int word = static_cast<int>(threadIdx.x) % 32;
  if (key0 + 4 * word >= padded) return;
  uint8_t* const g = gV8 + (head * kHeadDim + column0) * padded + key0 + 4 * word;
  for (int col = threadIdx.x / 32; col < kTransposedColumns; col += Pass::kThreads / 32)
    *reinterpret_cast<uint32_t*>(g + col * padded) = sWords[col][word];
}

// Threads per column of a block. Each adds every n-th row; then one of them adds the partial sums.
// As in pool_kernel (choose_blocks.h), with 64 threads of eight columns.
constexpr int column_owners(int64_t head_dim) { return static_cast<int>(512 / head_dim); }

// Threads per column of a head. Each adds every n-th block.
constexpr int kReduceThreads = 1024;
constexpr int block_owners(int64_t head_dim) { return static_cast<int>(kReduceThreads / head_dim); }

// Pools a block of rows as pool_kernel does, with four times as many threads, which have all of it
// in flight at once. The means are bitwise those of pool_kernel: rows go through shared memory,
// where column_owners() threads have two columns each, in its order.
//! [pool_rows]
template <class Pass, int kHeadDim, int kRows>
struct PoolStorage {
  static constexpr int kLanes = kHeadDim / 8, kRowsPerPass = Pass::kThreads / kLanes;
  static constexpr int kTimes = kRows / kRowsPerPass;  // rows per thread
  static constexpr int kTogether = kTimes < kPoolRows ? kTimes : kPoolRows;  // rows per pass
  static constexpr int kStaged = kTogether * kRowsPerPass;  // rows in sRows, over all threads
  static constexpr int kPairs = kHeadDim / 2, kOwners = column_owners(kHeadDim);
  static_assert(kOwners == kPoolThreads / kLanes && kOwners * kPairs == Pass::kThreads);
  uint4 sRows[kStaged][kLanes];
  float sInverse[kStaged], sLength[kHeadDim];
  float2 sSum[kOwners][kPairs], sDirection[kOwners][kPairs];
};
template <class Pass, int kHeadDim, int kRows>
__device__ __forceinline__ void pool_rows(PoolStorage<Pass, kHeadDim, kRows>& smem,
                                          const __nv_bfloat16* gRows, int count, float* gMean,
                                          float* gSimilar) {
  using Storage = PoolStorage<Pass, kHeadDim, kRows>;
  constexpr int kLanes = Storage::kLanes, kRowsPerPass = Storage::kRowsPerPass;
  constexpr int kTogether = Storage::kTogether, kPairs = Storage::kPairs;
  const int lane = threadIdx.x % kLanes, thread_row = static_cast<int>(threadIdx.x) / kLanes;
  const int pair = threadIdx.x % kPairs, owner = static_cast<int>(threadIdx.x) / kPairs;
  uint4 bits[Storage::kTimes];
#pragma unroll
  for (int n = 0; n < Storage::kTimes; ++n) {
    const int row = thread_row + n * kRowsPerPass;
    bits[n] = make_uint4(0, 0, 0, 0);
    if (row < count) bits[n] = *reinterpret_cast<const uint4*>(gRows + row * kHeadDim + 8 * lane);
  }
  float2 sum = make_float2(0, 0), direction = sum;
#pragma unroll
  for (int first = 0; first < Storage::kTimes; first += kTogether) {
    if (first > 0) __syncthreads();  // all threads have read the previous rows
    float square[kPoolRows] = {};
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const Bf16x8 e = bf16x8_of(bits[first + r]);
#pragma unroll
      for (int i = 0; i < 8; ++i) square[r] = fmaf(e.x[i], e.x[i], square[r]);
      smem.sRows[thread_row + r * kRowsPerPass][lane] = bits[first + r];
    }
    const float of_row = sums_of_rows<kLanes>(square, lane);
    if (lane < kTogether)
      smem.sInverse[thread_row + lane * kRowsPerPass] = of_row > 0 ? 1 / sqrtf(of_row) : 0;
    __syncthreads();  // the rows and their inverse norms are stored
#pragma unroll 8
    for (int row = owner; row < Storage::kStaged; row += Storage::kOwners) {
      const uint32_t two = reinterpret_cast<const uint32_t*>(smem.sRows[row])[pair];
      const float x = __uint_as_float(two << 16), y = __uint_as_float(two & 0xFFFF0000u);
      const float inverse = smem.sInverse[row];
      sum.x += x, sum.y += y;
      direction.x = fmaf(x, inverse, direction.x), direction.y = fmaf(y, inverse, direction.y);
    }
  }
  smem.sSum[owner][pair] = sum, smem.sDirection[owner][pair] = direction;
  __syncthreads();  // the sums of all owners are stored
  for (int col = threadIdx.x; col < kHeadDim; col += Pass::kThreads) {
    float all = 0, of_directions = 0;
    for (int n = 0; n < Storage::kOwners; ++n) {
      all += reinterpret_cast<const float*>(smem.sSum[n])[col];
      of_directions += reinterpret_cast<const float*>(smem.sDirection[n])[col];
    }
    const float mean = all / static_cast<float>(count);
    gMean[col] = mean;
    of_directions /= static_cast<float>(count);
    smem.sLength[col] = fabsf(mean) < INFINITY ? of_directions : NAN;
  }
  __syncthreads();  // the mean direction is stored
  if (threadIdx.x >= kWarp) return;
  float length = 0;
  for (int col = threadIdx.x; col < kHeadDim; col += kWarp)
    length = fmaf(smem.sLength[col], smem.sLength[col], length);
  for (int distance = 1; distance < kWarp; distance *= 2)
    length += __shfl_xor_sync(~0u, length, distance);
  if (threadIdx.x == 0) *gSimilar = length >= 0 ? length : -1;
}
//! [pool_rows]

// A thread has every kOwners-th row of two columns of a block of V.
//! [measure]
template <int kHeadDim>
using ChannelParts = float2[3][column_owners(kHeadDim)][kHeadDim / 2];
template <int kHeadDim>
__device__ __forceinline__ void channels_of_block(ChannelParts<kHeadDim>& sParts,
                                                  const __nv_bfloat16* gRows, int count,
                                                  float* gParts) {
  constexpr int kPairs = kHeadDim / 2, kOwners = column_owners(kHeadDim);
  const int pair = threadIdx.x % kPairs, owner = static_cast<int>(threadIdx.x) / kPairs;
  float2 sum = make_float2(0, 0), least = make_float2(INFINITY, INFINITY);
  float2 most = make_float2(-INFINITY, -INFINITY);
#pragma unroll 16  // loads in flight
  for (int row = owner; row < count; row += kOwners) {
    const uint32_t two = reinterpret_cast<const uint32_t*>(gRows + int64_t{row} * kHeadDim)[pair];
    const float x = __uint_as_float(two << 16), y = __uint_as_float(two & 0xFFFF0000u);
    sum.x += x, sum.y += y;
    least.x = fminf(least.x, x), least.y = fminf(least.y, y);
    most.x = fmaxf(most.x, x), most.y = fmaxf(most.y, y);
  }
  sParts[0][owner][pair] = sum, sParts[1][owner][pair] = least, sParts[2][owner][pair] = most;
  __syncthreads();  // the partial results of all owners are stored
  if (owner > 0) return;
  for (int n = 1; n < kOwners; ++n) {
    const float2 a = sParts[0][n][pair], low = sParts[1][n][pair], high = sParts[2][n][pair];
    sum.x += a.x, sum.y += a.y;
    least.x = fminf(least.x, low.x), least.y = fminf(least.y, low.y);
    most.x = fmaxf(most.x, high.x), most.y = fmaxf(most.y, high.y);
  }
  if (!(fabsf(sum.x + sum.y) < INFINITY)) {  // one bad key must not spoil the channel
    const FiniteColumn x = finite_column(gRows + 2 * pair, kHeadDim, count),
                       y = finite_column(gRows + 2 * pair + 1, kHeadDim, count);
    sum = make_float2(x.sum, y.sum);
    least = make_float2(x.least, y.least), most = make_float2(x.most, y.most);
  }
  auto* const g = reinterpret_cast<float2*>(gParts) + pair;
  g[0] = sum, g[kPairs] = least, g[2 * kPairs] = most;
}

// One thread block per block of rows of a head. blockIdx.y: Q, K or V.
template <class Pass, int kHeadDim, int kBlockM, int kBlockN>
__global__ void __launch_bounds__(Pass::kThreads, 3)
    measure_kernel(Pooled<__nv_bfloat16> q, Pooled<__nv_bfloat16> k, int64_t q_heads,
                   int64_t kv_heads, const __nv_bfloat16* __restrict__ gV,
                   float* __restrict__ gVParts) {
  __shared__ PoolStorage<Pass, kHeadDim, kBlockM> smem;
  __shared__ ChannelParts<kHeadDim> sParts;
  const Pooled<__nv_bfloat16> x = blockIdx.y == 0 ? q : k;
  if (blockIdx.x >= (blockIdx.y == 0 ? q_heads : kv_heads) * x.blocks) return;  // block-uniform
  const int row0 = static_cast<int>(blockIdx.x) % x.blocks * x.block;
  const int count = min(x.block, x.rows - row0);
  const int64_t first = (int64_t{blockIdx.x} / x.blocks * x.rows + row0) * kHeadDim;
  if (blockIdx.y < 2)
    pool_rows(smem, x.gX + first, count, x.gMean + int64_t{blockIdx.x} * kHeadDim,
              x.gSimilar + blockIdx.x);
  else
    channels_of_block<kHeadDim>(sParts, gV + first, count,
                                gVParts + int64_t{blockIdx.x} * 3 * kHeadDim);
}
//! [measure]

// One block per head, of K (blockIdx.y is 0) or of V; kOwners threads per column.
//! [reduce]
struct ReducePass {
  static constexpr int kThreads = kReduceThreads;
};
template <class Pass, int kHeadDim, int kBlockN>
__global__ void __launch_bounds__(Pass::kThreads)
    reduce_kernel(const float* __restrict__ gKMeans, const float* __restrict__ gVParts,
                  int seqlen_k, float* __restrict__ gKMean, float2* __restrict__ gVChannel) {
  constexpr int kOwners = block_owners(kHeadDim);
  __shared__ float sSum[kOwners][kHeadDim], sLeast[kOwners][kHeadDim], sMost[kOwners][kHeadDim];
  const int64_t head = blockIdx.x;
  const int blocks = ceil_div(seqlen_k, kBlockN);
  const int col = threadIdx.x % kHeadDim, owner = static_cast<int>(threadIdx.x) / kHeadDim;
  float sum = 0, least = INFINITY, most = -INFINITY;
  if (blockIdx.y == 0) {
    const float* const g = gKMeans + head * blocks * kHeadDim + col;
#pragma unroll 8  // loads in flight
    for (int n = owner; n < blocks; n += kOwners) {
      const float mean = g[int64_t{n} * kHeadDim];
      if (fabsf(mean) < INFINITY)
        sum = fmaf(mean, static_cast<float>(min(kBlockN, seqlen_k - n * kBlockN)), sum);
    }
  } else {
    const float* const g = gVParts + head * blocks * 3 * kHeadDim + col;
#pragma unroll 4
    for (int n = owner; n < blocks; n += kOwners) {
      const float* const part = g + int64_t{n} * 3 * kHeadDim;
      sum += part[0];
      least = fminf(least, part[kHeadDim]), most = fmaxf(most, part[2 * kHeadDim]);
    }
  }
  sSum[owner][col] = sum, sLeast[owner][col] = least, sMost[owner][col] = most;
  __syncthreads();  // those of all owners are stored
  if (owner > 0) return;
  for (int n = 1; n < kOwners; ++n) {
    sum += sSum[n][col];
    least = fminf(least, sLeast[n][col]), most = fmaxf(most, sMost[n][col]);
  }
  const float mean = sum / static_cast<float>(seqlen_k);
  if (blockIdx.y == 0) {
    gKMean[head * kHeadDim + col] = mean;
    return;
  }
  const float largest = fmaxf(fmaxf(most - mean, mean - least), kSmallestV);
  gVChannel[head * kHeadDim + col] = make_float2(mean, largest / kLargestE4M3);
}
//! [reduce]

// blockIdx.y: a tile of 128 rows of Q, or of K; or 64 columns of 128 keys of V.
//! [codes]
template <class Pass, int kHeadDim, class Groups>
__global__ void __launch_bounds__(Pass::kThreads, kHeadDim == 256 ? 2 : 3)
    codes_kernel(RowsOf q, RowsOf k, Smoothing smoothing, const __nv_bfloat16* gV,
                 const float2* gVChannel, uint8_t* gV8) {
  __shared__ unsigned sLargest[kMaxGroups<Groups>];
  __shared__ Scale sScale[kMaxGroups<Groups>];
  __shared__ TransposedWords sWords;
  if (blockIdx.y < 2) {
    quantise_tile<Pass, kHeadDim, Groups, true>(q, k, smoothing, sLargest, sScale);
    return;
  }
  const auto panels = static_cast<unsigned>(k.heads * (kHeadDim / kTransposedColumns));
  const unsigned tile = blockIdx.x / panels;
  if (int64_t{tile} * kTransposedKeys >= padded_keys(k.rows)) return;  // block-uniform
  transpose_smoothed<Pass, kHeadDim>(
      gV, k.rows, blockIdx.x % panels, tile,
      [&](int64_t head, int) { return gVChannel + head * kHeadDim; }, sWords, gV8);
}
//! [codes]

// Phases "measure", "reduce" and "codes", then "choose": all that attention needs, and its lists.
//! [launch_two]
template <class Config, class Groups>
Status read_twice(const Arguments& args, const PredictRule& rule, BlockLists& lists) {
  using Pass = QuantisePass;
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  const Problem& p = args.problem;
  const auto pooled_q = pooled<__nv_bfloat16>(args, "q", p.seqlen_q, kBlockM, "q_mean");
  const auto pooled_k = pooled<__nv_bfloat16>(args, "k", p.seqlen_k, kBlockN, "k_means");
  const auto* const v = args.in<__nv_bfloat16>("v");
  auto* const parts = args.out<float>("v_parts");
  auto* const channel = reinterpret_cast<float2*>(args.out<float>("v_channel"));
  const RowsOf q = rows_of_q(args), k = rows_of_k(args);
  const auto blocks_of = [](std::initializer_list<int64_t> of_each) {
    return dim3(static_cast<unsigned>(std::max(of_each)), static_cast<unsigned>(of_each.size()));
  };
  const int64_t of_k = k.heads * pooled_k.blocks;
  args.phase("measure");
  if (const Status done =
          launch_kernel(measure_kernel<Pass, kHeadDim, kBlockM, kBlockN>,
                        blocks_of({q.heads * pooled_q.blocks, of_k, of_k}), dim3(Pass::kThreads), 0,
                        args.stream, pooled_q, pooled_k, q.heads, k.heads, v, parts);
      !done.ok())
    return done;
  args.phase("reduce");
  if (const Status done = launch_kernel(reduce_kernel<ReducePass, kHeadDim, kBlockN>,
                                        dim3(static_cast<unsigned>(k.heads), 2),
                                        dim3(kReduceThreads), 0, args.stream, pooled_k.gMean, parts,
                                        k.rows, args.out<float>("k_mean"), channel);
      !done.ok())
    return done;
  const int64_t of_v = k.heads * (kHeadDim / kTransposedColumns) *
                       ceil_div(padded_keys(p.seqlen_k), kTransposedKeys);
  args.phase("codes");
  if (const Status done = launch_kernel(codes_kernel<Pass, kHeadDim, Groups>,
                                        blocks_of({q.heads * q.tiles, k.heads * k.tiles, of_v}),
                                        dim3(Pass::kThreads), 0, args.stream, q, k,
                                        Smoothing{.gMean = args.out<float>("k_mean"),
                                                  .gLseShift = args.out<float>("lse_shift"),
                                                  .softmax_scale = shape_of(p).softmax_scale,
                                                  .group = static_cast<int>(p.group())},
                                        v, channel, args.out<uint8_t>("v8"));
      !done.ok())
    return done;
  return choose_pooled<__nv_bfloat16, Config>(args, rule, pooled_q, pooled_k, lists);
}
//! [launch_two]

}  // namespace ATTN_BACKEND::hopper
