// Predicted block lists: which key blocks a query tile visits, from the means of both (SpargeAttn,
// arXiv 2502.18137, section 3.3), in two kernels:
//
//     pool     Q, K      -> q_mean [B Hq, tiles, d], q_similar [B Hq, tiles], k_mean, k_similar
//     choose   those     -> the lists of s1; for long sequences with a workspace `scores`
//                           [B Hq, tiles, blocks]
#pragma once

#include "kernels/hopper/fragments.h"
#include "ptx/cp_async.h"
#include "ptx/mma.h"  // unpack
#include "kernels/predict_rule.h"
#include "kernels/sparse.h"
#include "kernels/visits.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Blocks of rows of Q or of K, and the results for them.
template <class Element>
struct Pooled {
  const Element* gX;  // [heads, rows, d]
  int rows, block, blocks;
  float *gMean, *gSimilar;  // [heads, blocks, d] and [heads, blocks]
};

constexpr int kPoolRows = 8;  // rows per thread and pass: this many 16-byte loads in flight

template <class Element>
__device__ __forceinline__ void unpack_bf16x8(float (&eight)[8], uint4 bits) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>)  // the upper half of a float
      eight[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000u);
    else
      eight[i] = unpack<Element>(words[i / 2], i % 2);
  }
}

// Reduces kPoolRows values at once over the kLanes lanes that share rows (transposed butterfly), in
// pairwise order. Lane `lane % kPoolRows` gets that row's sum. At each exchange a lane keeps every
// other value and sends the rest: kPoolRows - 1 shuffles plus one per further doubling of lanes,
// instead of log2(kLanes) per value.
//! [sums]
template <int kLanes>
__device__ __forceinline__ float sums_of_rows(float (&x)[kPoolRows], int lane) {
  static_assert(kPoolRows <= kLanes);
  int distance = 1;
#pragma unroll
  for (int left = kPoolRows / 2; left > 0; left /= 2, distance *= 2) {
    const bool odd = (lane & distance) != 0;
#pragma unroll
    for (int r = 0; r < left; ++r) {
      const float kept = odd ? x[2 * r + 1] : x[2 * r], other = odd ? x[2 * r] : x[2 * r + 1];
      x[r] = kept + __shfl_xor_sync(~0u, other, distance);
    }
  }
#pragma unroll
  for (; distance < kLanes; distance *= 2) x[0] += __shfl_xor_sync(~0u, x[0], distance);
  return x[0];
}
//! [sums]

// The mean of a block's rows, and its self-similarity: the mean cosine over all pairs of rows, each
// with itself included. That is the squared norm of the mean unit vector, so one pass over the rows
// finds both. -1 if a mean is NaN or Inf: such a block is always visited.
//
// All lanes of a row need its inverse norm, but few compute it: a square root and a division are
// some 20 instructions.
//! [pool]
template <class Element, int kHeadDim, int kThreads>
__global__ void __launch_bounds__(kThreads)
    pool_kernel(Pooled<Element> of_q, Pooled<Element> of_k, int q_blocks) {
  constexpr int kLanes = kHeadDim / 8, kRowsPerPass = kThreads / kLanes;
  __shared__ float sSum[kRowsPerPass][kHeadDim], sDirection[kRowsPerPass][kHeadDim];
  __shared__ float sLength[kHeadDim];
  const bool is_q = static_cast<int>(blockIdx.x) < q_blocks;
  const Pooled<Element> x = is_q ? of_q : of_k;
  const int block = static_cast<int>(blockIdx.x) - (is_q ? 0 : q_blocks);
  const int row0 = block % x.blocks * x.block;
  const int count = min(x.block, x.rows - row0);
  const int lane = threadIdx.x % kLanes, thread_row = static_cast<int>(threadIdx.x) / kLanes;
  const Element* const gRows =
      x.gX + (int64_t{block / x.blocks} * x.rows + row0) * kHeadDim + 8 * lane;
  float sum[8] = {}, direction[8] = {};
#pragma unroll 1
  for (int first = 0; first < count; first += kPoolRows * kRowsPerPass) {
    uint4 bits[kPoolRows];  // all loads are issued before the first use
#pragma unroll
    for (int r = 0; r < kPoolRows; ++r) {
      const int row = first + r * kRowsPerPass + thread_row;
      bits[r] = make_uint4(0, 0, 0, 0);
      if (row < count) bits[r] = *reinterpret_cast<const uint4*>(gRows + int64_t{row} * kHeadDim);
    }
    float square[kPoolRows] = {}, eight[8];
#pragma unroll
    for (int r = 0; r < kPoolRows; ++r) {
      unpack_bf16x8<Element>(eight, bits[r]);
#pragma unroll
      for (int i = 0; i < 8; ++i) square[r] = fmaf(eight[i], eight[i], square[r]);
    }
    const float of_row = sums_of_rows<kLanes>(square, lane);
    const float inverse_of_row = of_row > 0 ? 1 / sqrtf(of_row) : 0;
#pragma unroll
    for (int r = 0; r < kPoolRows; ++r) {
      const float inverse = __shfl_sync(~0u, inverse_of_row, r, kLanes);
      unpack_bf16x8<Element>(eight, bits[r]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[i] += eight[i];
        direction[i] = fmaf(eight[i], inverse, direction[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sSum[thread_row][8 * lane + i] = sum[i];
    sDirection[thread_row][8 * lane + i] = direction[i];
  }
  __syncthreads();  // the sums of all threads are stored
  for (int col = threadIdx.x; col < kHeadDim; col += kThreads) {
    float all = 0, of_directions = 0;
    for (int row = 0; row < kRowsPerPass; ++row)
      all += sSum[row][col], of_directions += sDirection[row][col];
    const float mean = all / static_cast<float>(count);
    x.gMean[int64_t{block} * kHeadDim + col] = mean;
    of_directions /= static_cast<float>(count);
    sLength[col] = fabsf(mean) < INFINITY ? of_directions : NAN;
  }
  __syncthreads();  // the mean direction is stored
  if (threadIdx.x >= kWarp) return;
  float length = 0;
  for (int col = threadIdx.x; col < kHeadDim; col += kWarp)
    length = fmaf(sLength[col], sLength[col], length);
  for (int distance = 1; distance < kWarp; distance *= 2)
    length += __shfl_xor_sync(~0u, length, distance);
  if (threadIdx.x == 0) x.gSimilar[block] = length >= 0 ? length : -1;
}
//! [pool]

// Order-preserving map of floats to unsigned integers, and its inverse. kAlways is above all of
// them.
constexpr unsigned kAlways = ~0u;
__device__ __forceinline__ unsigned order_of(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of(unsigned order) {
  return __uint_as_float(order >> 31 ? order & 0x7FFFFFFFu : ~order);
}

// Reduction over a warp: one instruction (redux); shuffles in the emulator.
#ifdef ATTN_EMULATED
template <class Operation>
__device__ unsigned warp_reduce(unsigned x, Operation operation) {
  for (int distance = 1; distance < kWarp; distance *= 2)
    x = operation(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}
__device__ inline unsigned warp_sum(unsigned x) {
  return warp_reduce(x, [](unsigned a, unsigned b) { return a + b; });
}
__device__ inline unsigned warp_min(unsigned x) {
  return warp_reduce(x, [](unsigned a, unsigned b) { return min(a, b); });
}
__device__ inline unsigned warp_max(unsigned x) {
  return warp_reduce(x, [](unsigned a, unsigned b) { return max(a, b); });
}
#else
__device__ __forceinline__ unsigned warp_sum(unsigned x) { return __reduce_add_sync(~0u, x); }
__device__ __forceinline__ unsigned warp_min(unsigned x) { return __reduce_min_sync(~0u, x); }
__device__ __forceinline__ unsigned warp_max(unsigned x) { return __reduce_max_sync(~0u, x); }
#endif

struct Means {
  const float *gQ, *gQSimilar, *gK, *gKSimilar;
};

// Means in shared memory: those of the block's query tiles, and of kKeys key blocks at a time. The
// scores [kTiles, key blocks] follow, if there are few enough.
template <class Config>
struct MeansStorage {
  static constexpr int kTiles = kTilesTogether, kThreads = kTiles * kWarp, kKeys = 64;
  static_assert(kTiles % (kKeys / kWarp) == 0 && kThreads % (Config::kHeadDim / 4) == 0);
  // The padding puts the 16-byte reads of eight lanes, one row each, into different banks.
  static constexpr int kRow = Config::kHeadDim + 4;
  float sK[kKeys][kRow], sQ[kTiles][Config::kHeadDim];
  ATTN_MEMBERS(MeansStorage, sK, sQ)
  static std::size_t bytes(int n_blocks) {
    return sizeof(MeansStorage) +
           (n_blocks > kScoresInShared ? 0 : sizeof(unsigned) * kTiles * n_blocks);
  }
};

// The query tiles of a thread block: `count` tiles from `first` on, counted over all heads.
struct TilesTogether {
  int head, m_block, first, count;
};

// Scores of the block's tiles and all key blocks visible to one of them, mapped by `order_of`;
// kAlways if one of the two blocks has low self-similarity. A warp has 32 key means, one per lane,
// and kTilesOfWarp tiles; a lane multiplies each K value it reads by all of them. One thread adds
// all products of a score sequentially, in the host's order.
//! [score]
template <class Config>
__device__ __forceinline__ void score(MeansStorage<Config>& smem, unsigned* scores,
                                      const Means& means, TilesTogether tiles,
                                      KvBlockRange kv_range, int64_t of_k, int n_blocks,
                                      float least_similarity) {
  using Storage = MeansStorage<Config>;
  constexpr int kHeadDim = Config::kHeadDim, kPieces = kHeadDim / 4;  // per row: 16 bytes each
  constexpr int kKeyGroups = Storage::kKeys / kWarp, kTilesOfWarp = kKeyGroups;
  const int warp_id = static_cast<int>(threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
  // A thread copies one piece of every kRowsPerPass-th row; past the end, the last row again.
  constexpr int kRowsPerPass = Storage::kThreads / kPieces;
  const int row0 = static_cast<int>(threadIdx.x) / kPieces, col = threadIdx.x % kPieces * 4;
  const float* const gQ = means.gQ + int64_t{tiles.first} * kHeadDim + col;
  const float* const gK = means.gK + of_k * kHeadDim + col;
  for (int row = row0; row < Storage::kTiles; row += kRowsPerPass)
    cp_async_16(&smem.sQ[row][col], gQ + min(row, tiles.count - 1) * kHeadDim);
  const int own_key = warp_id % kKeyGroups * kWarp + lane;
  const int own_tile = warp_id / kKeyGroups * kTilesOfWarp;
  const auto* const k = reinterpret_cast<const float4*>(smem.sK[own_key]);
  for (int n0 = kv_range.begin; n0 < kv_range.end; n0 += Storage::kKeys) {
    for (int row = row0; row < Storage::kKeys; row += kRowsPerPass)
      cp_async_16(&smem.sK[row][col], gK + min(n0 + row, kv_range.end - 1) * kHeadDim);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // the means are loaded
    const int n = n0 + own_key;
    if (n < kv_range.end) {
      const float k_similar = means.gKSimilar[of_k + n];  // in flight during the products
      float q_similar[kTilesOfWarp], sum[kTilesOfWarp] = {};
#pragma unroll
      for (int t = 0; t < kTilesOfWarp; ++t)
        q_similar[t] = means.gQSimilar[tiles.first + min(own_tile + t, tiles.count - 1)];
#pragma unroll 4
      for (int c = 0; c < kPieces; ++c) {
        const float4 b = k[c];
#pragma unroll
        for (int t = 0; t < kTilesOfWarp; ++t) {
          const float4 a = *reinterpret_cast<const float4*>(&smem.sQ[own_tile + t][4 * c]);
          sum[t] = fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum[t]))));
        }
      }
#pragma unroll
      for (int t = 0; t < kTilesOfWarp; ++t) {
        const int tile = own_tile + t;
        if (tile >= tiles.count) break;
        const bool k_stands = k_similar >= least_similarity;
        const bool q_stands = q_similar[t] >= least_similarity;
        scores[int64_t{tile} * n_blocks + n] =
            k_stands && q_stands && fabsf(sum[t]) < INFINITY ? order_of(sum[t]) : kAlways;
      }
    }
    __syncthreads();  // all warps have read the means, and the scores are stored
  }
}
//! [score]

// The largest threshold that enough scores reach, found bit by bit (radix select): no sorting, and
// equal scores are kept together. At each bit the candidates are the scores in a range that starts
// at `least`; `above` counts the scores above the range. The upper half of the range is counted
// next.
//! [search]
__device__ __forceinline__ unsigned least_kept(const unsigned* scores, KvBlockRange kv_range,
                                               const PredictRule& rule, float scale) {
  const int lane = threadIdx.x % kWarp;
  unsigned count = 0, most = 0, lowest = kAlways;
#pragma unroll 4
  for (int n = kv_range.begin + lane; n < kv_range.end; n += kWarp)
    if (const unsigned order = scores[n]; order != kAlways)
      ++count, most = max(most, order), lowest = min(lowest, order);
  count = warp_sum(count), most = warp_max(most), lowest = warp_min(lowest);
  if (count == 0) return 0;
  const float best = score_of(most);
  // The number of scores between two bounds, or the sum of their weights. (The fmaf with 0 prevents
  // the compiler from fusing the product with a sum.)
  const auto sum_between = [&](unsigned from, unsigned to) {
    const auto is_between = [&](unsigned order) { return order >= from && order <= to; };
    unsigned sum = 0;
    if (rule.by_mass) {
#pragma unroll 1
      for (int n = kv_range.begin + lane; n < kv_range.end; n += kWarp)
        if (const unsigned order = scores[n]; is_between(order))
          sum += weight_of(fmaf(score_of(order) - best, scale, 0.0f));
    } else {
#pragma unroll 4
      for (int n = kv_range.begin + lane; n < kv_range.end; n += kWarp)
        sum += is_between(scores[n]);
    }
    return warp_sum(sum);
  };
  const unsigned enough = needed(rule, rule.by_mass ? sum_between(lowest, most) : count);
  unsigned least = 0, above = 0;
#pragma unroll 1
  for (unsigned bit = 1u << 31; bit > 0; bit >>= 1) {
    if (bit > (most ^ lowest)) {  // all scores share this bit
      least |= most & bit;
      continue;
    }
    const unsigned half = least | bit;
    const unsigned from_half = above + sum_between(half, min(half | (bit - 1), most));
    if (from_half >= enough)
      least = half;
    else
      above = from_half;
    if (from_half == enough && !rule.by_mass) break;  // exactly enough (a weight may be 0)
  }
  return least;
}
//! [search]

// (1) The scores of eight query tiles of a head, by all threads. Then one warp per tile: (2) the
// threshold, (3) the list, one lane per block of 32.
//! [choose]
template <class Config>
__global__ void __launch_bounds__(MeansStorage<Config>::kThreads)
    choose_kernel(BlockList* gVisits, int* gVisited, unsigned* gScores, Means means, Shape shape,
                  PredictRule rule, int n_blocks) {
  using Storage = MeansStorage<Config>;
  auto& smem = dynamic_shared<Storage>();
  const int warp_id = static_cast<int>(threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
  const int m_blocks = ceil_div(shape.seqlen_q, Config::kBlockM);
  const int groups = ceil_div(m_blocks, Storage::kTiles);
  TilesTogether tiles{static_cast<int>(blockIdx.x) / groups,
                      static_cast<int>(blockIdx.x) % groups * Storage::kTiles, 0, 0};
  tiles.first = tiles.head * m_blocks + tiles.m_block;
  tiles.count = min(Storage::kTiles, m_blocks - tiles.m_block);
  const auto seen_by = [&](int m_block, int count) {
    return kv_block_range(shape, shape.seqlen_q, shape.seqlen_k, m_block * Config::kBlockM,
                       count * Config::kBlockM, Config::kBlockN);
  };
  unsigned* const scores = n_blocks > kScoresInShared ? gScores + int64_t{tiles.first} * n_blocks
                                                      : reinterpret_cast<unsigned*>(&smem + 1);
  score<Config>(smem, scores, means, tiles, seen_by(tiles.m_block, tiles.count),
                int64_t{tiles.head / (shape.heads / shape.kv_heads)} * n_blocks, n_blocks,
                rule.least_similarity);
  if (warp_id >= tiles.count) return;
  const int tile = tiles.first + warp_id, row0 = (tiles.m_block + warp_id) * Config::kBlockM;
  const KvBlockRange kv_range = seen_by(tiles.m_block + warp_id, 1);
  const unsigned* const row_scores = scores + int64_t{warp_id} * n_blocks;
  const unsigned least = least_kept(row_scores, kv_range, rule, shape.softmax_scale * kLog2e);

  const int shift = shape.seqlen_k - shape.seqlen_q;
  const int last_row = min(row0 + Config::kBlockM, shape.seqlen_q) - 1;
  const auto kept = [&](int n) {
    if (rule.sink && n == 0) return true;
    // Products, not quotients, which would round a diagonal before key 0 to block 0.
    if (rule.diagonal && (n + 1) * Config::kBlockN > row0 + shift &&
        n * Config::kBlockN <= last_row + shift)
      return true;
    return row_scores[n] >= least;
  };
  BlockList visits{tile * n_blocks, 0, 0};
  int idx = visits.first;
  const auto list = [&](int begin, int end) {
#pragma unroll 1  // the lambda is inlined three times
    for (int n0 = begin; n0 < end; n0 += kWarp) {
      const int n = n0 + lane;
      const bool wanted = n < end && kept(n);
      const unsigned taken = __ballot_sync(~0u, wanted);
      if (wanted) gVisited[idx + __popc(taken & ((1u << lane) - 1))] = n;
      idx += __popc(taken);
    }
  };
  list(kv_range.unmasked_begin, kv_range.unmasked_end);
  visits.masked = idx;
  list(kv_range.begin, kv_range.unmasked_begin);
  list(kv_range.unmasked_end, kv_range.end);
  visits.end = idx;
  if (lane == 0) gVisits[tile] = visits;
}
//! [choose]

// Blocks of Q or of K, and where the results go: `means` and `similar`.
//! [launch]
template <class Element>
Pooled<Element> pooled(const Arguments& args, const std::string& name, int64_t rows, int block,
                       const std::string& means) {
  return {args.in<Element>(name),
          static_cast<int>(rows),
          block,
          static_cast<int>(ceil_div(rows, block)),
          args.out<float>(means),
          args.out<float>(name + "_similar")};
}

// Phase "choose", from the pooled means; returns the lists for the attention kernel.
template <class Element, class Config>
Status choose_pooled(const Arguments& args, const PredictRule& rule, const Pooled<Element>& q,
                     const Pooled<Element>& k, BlockLists& lists) {
  using Storage = MeansStorage<Config>;
  const Problem& p = args.problem;
  args.phase("choose");
  if (const Status done = launch_kernel(
          choose_kernel<Config>,
          dim3(static_cast<unsigned>(p.batch * p.heads * ceil_div(q.blocks, Storage::kTiles))),
          dim3(Storage::kThreads), Storage::bytes(k.blocks), args.stream,
          args.out<BlockList>("visits"), args.out<int>("visited"),
          k.blocks > kScoresInShared ? args.out<unsigned>("scores") : nullptr,
          Means{q.gMean, q.gSimilar, k.gMean, k.gSimilar}, shape_of(p), rule, k.blocks);
      !done.ok())
    return done;
  lists = {args.out<BlockList>("visits"), args.out<int>("visited"),
           static_cast<int>(p.heads * q.blocks), q.blocks};
  return Status::success();
}

// Phases "pool" and "choose".
template <class Element, class Config>
Status choose_visits(const Arguments& args, const PredictRule& rule, BlockLists& lists) {
  const Problem& p = args.problem;
  const auto q = pooled<Element>(args, "q", p.seqlen_q, Config::kBlockM, "q_mean");
  const auto k = pooled<Element>(args, "k", p.seqlen_k, Config::kBlockN, "k_mean");
  const int64_t tiles = p.batch * p.heads * q.blocks, blocks = p.batch * p.kv_heads * k.blocks;
  args.phase("pool");
  if (const Status done =
          launch_kernel(pool_kernel<Element, Config::kHeadDim, kPoolThreads>,
                        dim3(static_cast<unsigned>(tiles + blocks)), dim3(kPoolThreads), 0,
                        args.stream, q, k, static_cast<int>(tiles));
      !done.ok())
    return done;
  return choose_pooled<Element, Config>(args, rule, q, k, lists);
}
//! [launch]

}  // namespace ATTN_BACKEND::hopper
