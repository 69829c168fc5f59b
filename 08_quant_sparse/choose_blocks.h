// Which blocks of keys a tile of queries visits, predicted from the means of both (SpargeAttn,
// arXiv 2502.18137, section 3.3), in two kernels:
//
//     pool     Q, K      -> q_mean [B Hq, tiles, d], q_similar [B Hq, tiles], k_mean, k_similar
//     choose   those     -> the lists of s1, with a scratch of `scores` [B Hq, tiles, blocks]
#pragma once

#include "fragments.h"
#include "ptx/mma.h"  // unpack
#include "predict.h"
#include "sparse.h"
#include "visits.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Blocks of rows of Q or of K, and what is found of them.
template <class Element>
struct Pooled {
  const Element* gX;  // [heads, rows, d]
  int rows, block, blocks;
  float *gMean, *gSimilar;  // [heads, blocks, d] and [heads, blocks]
};

// The mean of a block's rows, and how alike they are: the mean cosine of all pairs, of each with
// itself among them. That is the squared length of the mean of the rows' directions, so that one
// pass over the rows finds both. -1 where a mean is no number: such a block is seen by all.
//! [pool]
template <class Element, int kHeadDim, int kThreads>
__global__ void __launch_bounds__(kThreads)
    pool_kernel(Pooled<Element> of_q, Pooled<Element> of_k, int q_blocks) {
  constexpr int kLanes = kHeadDim / 8, kRowsAtOnce = kThreads / kLanes;
  __shared__ float sSum[kRowsAtOnce][kHeadDim], sDirection[kRowsAtOnce][kHeadDim];
  __shared__ float sLength[kHeadDim];
  const bool is_q = static_cast<int>(blockIdx.x) < q_blocks;
  const Pooled<Element> x = is_q ? of_q : of_k;
  const int block = static_cast<int>(blockIdx.x) - (is_q ? 0 : q_blocks);
  const int row0 = block % x.blocks * x.block;
  const int count = min(x.block, x.rows - row0);
  const int lane = threadIdx.x % kLanes, own = static_cast<int>(threadIdx.x) / kLanes;
  const Element* const gRows =
      x.gX + (int64_t{block / x.blocks} * x.rows + row0) * kHeadDim + 8 * lane;
  float sum[8] = {}, direction[8] = {};
#pragma unroll 4  // so many loads in flight
  for (int first = 0; first < x.block; first += kRowsAtOnce) {
    const int row = first + own;
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (row < count) bits = *reinterpret_cast<const uint4*>(gRows + int64_t{row} * kHeadDim);
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    float eight[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) eight[i] = unpack<Element>(words[i / 2], i % 2);
    float square = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) square = fmaf(eight[i], eight[i], square);
    for (int distance = 1; distance < kLanes; distance *= 2)
      square += __shfl_xor_sync(~0u, square, distance);
    const float inverse = square > 0 ? 1 / sqrtf(square) : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum[i] += eight[i];
      direction[i] = fmaf(eight[i], inverse, direction[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sSum[own][8 * lane + i] = sum[i];
    sDirection[own][8 * lane + i] = direction[i];
  }
  __syncthreads();  // the sums of all threads are there
  for (int col = threadIdx.x; col < kHeadDim; col += kThreads) {
    float all = 0, of_directions = 0;
    for (int row = 0; row < kRowsAtOnce; ++row)
      all += sSum[row][col], of_directions += sDirection[row][col];
    const float mean = all / static_cast<float>(count);
    x.gMean[int64_t{block} * kHeadDim + col] = mean;
    of_directions /= static_cast<float>(count);
    sLength[col] = fabsf(mean) < INFINITY ? of_directions : NAN;
  }
  __syncthreads();  // and of all columns
  if (threadIdx.x >= kWarp) return;
  float length = 0;
  for (int col = threadIdx.x; col < kHeadDim; col += kWarp)
    length = fmaf(sLength[col], sLength[col], length);
  for (int distance = 1; distance < kWarp; distance *= 2)
    length += __shfl_xor_sync(~0u, length, distance);
  if (threadIdx.x == 0) x.gSimilar[block] = length >= 0 ? length : -1;
}
//! [pool]

// Floats as whole numbers that compare as they do, and back. kAlways is above all of them.
constexpr unsigned kAlways = ~0u;
__device__ __forceinline__ unsigned order_of(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of(unsigned order) {
  return __uint_as_float(order >> 31 ? order & 0x7FFFFFFFu : ~order);
}

__device__ __forceinline__ unsigned warp_sum(unsigned x) {
  for (int distance = 1; distance < kWarp; distance *= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}
__device__ __forceinline__ unsigned warp_max(unsigned x) {
  for (int distance = 1; distance < kWarp; distance *= 2)
    x = max(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

struct Means {
  const float *gQ, *gQSimilar, *gK, *gKSimilar;
};

// A warp for each tile of queries; a lane has one of 32 blocks of keys. (1) scores of the blocks
// that a mean stands for; (2) the largest number t for which those of at least t are enough, bit
// by bit: no sorting, and equal scores are kept together; (3) the list.
//! [choose]
template <class Config, int kThreads>
__global__ void __launch_bounds__(kThreads)
    choose_kernel(Visits* gVisits, int* gVisited, unsigned* gScores, Means means, Shape shape,
                  PredictRule rule, int tiles, int n_blocks) {
  constexpr int kHeadDim = Config::kHeadDim;
  const int warp_id = static_cast<int>(threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
  const int tile = static_cast<int>(blockIdx.x) * (kThreads / kWarp) + warp_id;
  if (tile >= tiles) return;
  const int m_blocks = ceil_div(shape.seqlen_q, Config::kBlockM);
  const int row0 = tile % m_blocks * Config::kBlockM;
  const BlockRanges seen =
      blocks_seen(shape, shape.seqlen_q, shape.seqlen_k, row0, Config::kBlockM, Config::kBlockN);
  const int64_t of_k = int64_t{tile / m_blocks / (shape.heads / shape.kv_heads)} * n_blocks;
  unsigned* const gOwn = gScores + int64_t{tile} * n_blocks;
  const auto* const q = reinterpret_cast<const float4*>(means.gQ + int64_t{tile} * kHeadDim);
  const bool predicts = means.gQSimilar[tile] >= rule.least_similarity;
  unsigned count = 0, most = 0;
  for (int n = seen.begin + lane; n < seen.end; n += kWarp) {
    unsigned order = kAlways;
    if (predicts && means.gKSimilar[of_k + n] >= rule.least_similarity) {
      const auto* const k = reinterpret_cast<const float4*>(means.gK + (of_k + n) * kHeadDim);
      float score = 0;
#pragma unroll 4  // so many loads in flight
      for (int c = 0; c < kHeadDim / 4; ++c) {
        const float4 a = q[c], b = k[c];
        score = fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, score))));
      }
      if (fabsf(score) < INFINITY) order = order_of(score), most = max(most, order), ++count;
    }
    gOwn[n] = order;
  }
  const float best = score_of(warp_max(most)), scale = shape.softmax_scale * kLog2e;
  // What a block counts for. (A product that no compiler fuses with a sum.)
  const auto worth = [&](unsigned order) {
    return rule.by_mass ? weight_of(fmaf(score_of(order) - best, scale, 0.0f)) : 1;
  };
  const auto sum_from = [&](unsigned least) {
    unsigned sum = 0;
#pragma unroll 1
    for (int n = seen.begin + lane; n < seen.end; n += kWarp)
      if (const unsigned order = gOwn[n]; order != kAlways && order >= least) sum += worth(order);
    return warp_sum(sum);
  };
  const unsigned enough = needed(rule, rule.by_mass ? sum_from(0) : warp_sum(count));
  unsigned least = 0;
#pragma unroll 1
  for (unsigned bit = 1u << 31; bit > 0; bit >>= 1)
    if (sum_from(least | bit) >= enough) least |= bit;

  const int shift = shape.seqlen_k - shape.seqlen_q;
  const int last_row = min(row0 + Config::kBlockM, shape.seqlen_q) - 1;
  const auto kept = [&](int n) {
    if (rule.sink && n == 0) return true;
    if (rule.diagonal && n >= (row0 + shift) / Config::kBlockN &&
        n <= (last_row + shift) / Config::kBlockN)
      return true;
    return gOwn[n] >= least;
  };
  Visits visits{tile * n_blocks, 0, 0};
  int at = visits.first;
  for (int pass = 0; pass < 2; ++pass) {
    const bool masked = pass == 1;
    for (int n0 = seen.begin; n0 < seen.end; n0 += kWarp) {
      const int n = n0 + lane;
      const bool wanted =
          n < seen.end && kept(n) && masked == (n < seen.unmasked_begin || n >= seen.unmasked_end);
      const unsigned taken = __ballot_sync(~0u, wanted);
      if (wanted) gVisited[at + __popc(taken & ((1u << lane) - 1))] = n;
      at += __popc(taken);
    }
    (masked ? visits.end : visits.masked) = at;
  }
  if (lane == 0) gVisits[tile] = visits;
}
//! [choose]

// Phases "pool" and "choose", and what the attention kernel gets of them.
//! [launch]
template <class Element, class Config>
Status choose_visits(const Arguments& args, const PredictRule& rule, VisitLists& lists) {
  constexpr int kThreads = 256, kHeadDim = Config::kHeadDim;
  const Problem& p = args.problem;
  const auto pooled = [&](const std::string& name, int64_t rows, int block) {
    return Pooled<Element>{args.in<Element>(name),
                           static_cast<int>(rows),
                           block,
                           static_cast<int>(ceil_div(rows, block)),
                           args.out<float>(name + "_mean"),
                           args.out<float>(name + "_similar")};
  };
  const Pooled<Element> q = pooled("q", p.seqlen_q, Config::kBlockM),
                        k = pooled("k", p.seqlen_k, Config::kBlockN);
  const int64_t tiles = p.batch * p.heads * q.blocks, blocks = p.batch * p.kv_heads * k.blocks;
  args.phase("pool");
  if (const Status done = launch_kernel(pool_kernel<Element, kHeadDim, kThreads>,
                                        dim3(static_cast<unsigned>(tiles + blocks)), dim3(kThreads),
                                        0, args.stream, q, k, static_cast<int>(tiles));
      !done.ok())
    return done;
  args.phase("choose");
  if (const Status done = launch_kernel(
          choose_kernel<Config, kThreads>,
          dim3(static_cast<unsigned>(ceil_div(tiles, kThreads / kWarp))), dim3(kThreads), 0,
          args.stream, args.out<Visits>("visits"), args.out<int>("visited"),
          args.out<unsigned>("scores"), Means{q.gMean, q.gSimilar, k.gMean, k.gSimilar},
          shape_of(p), rule, static_cast<int>(tiles), k.blocks);
      !done.ok())
    return done;
  lists = {args.out<Visits>("visits"), args.out<int>("visited"),
           static_cast<int>(p.heads * q.blocks), q.blocks};
  return Status::success();
}
//! [launch]

}  // namespace ATTN_BACKEND::hopper
