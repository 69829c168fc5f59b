// d4_sparq: estimate which tokens matter from part of each key, and read only those (SparQ).
//
// parent    none: an operation of its own, on a cache in bf16
// change    Each score is estimated from the columns of K in which |q| is largest. The softmax of
//           the estimates selects the tokens to read; the others contribute their share of the
//           mean of V. K is stored twice, by rows and by columns. Query heads that share a K/V head
//           choose together.
// why       A decode step is bound by the bytes of the cache. Columns can be read contiguously
//           only from a transposed copy of K.
// expect    dram__bytes_read.sum falls to a fraction of the cache
// supports  --operation sparq, one query; bf16; head dims 64, 128, 256; lengths on the device, GQA
// source    SparQ (arXiv 2312.04985), algorithm 1
#include "attn/kernel.h"
#include "kernels/sparq.h"

namespace ATTN_BACKEND::d4_sparq {
using namespace attn;

using Element = __nv_bfloat16;

constexpr int kWarp = 32;

//! [config]
template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kThreads = sparq::kSumThreads;
  static constexpr int kNumWarps = kThreads / kWarp;
  static constexpr int kKeys = 8 * kThreads;  // keys per block of the estimate, 8 per thread
  static constexpr int kHeads = 4;  // query heads per pass
  static_assert(kThreads % kHeadDim == 0, "a thread has one column of O");
};
//! [config]

// The problem, as these kernels need it.
struct Sizes {
  int group, kv_heads, seqlen_k, padded;  // query heads per K/V head; padded to 16 bytes
  float scale_log2;
  sparq::Choice choice;
};

__device__ __forceinline__ float column(const Element* g, int64_t idx) { return to_float(g[idx]); }

// Fills the cache: K by columns, and the mean of V.
//
//     kt [B Hkv, d, padded]    v_mean [B Hkv, d]
//! [prepare]
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    transpose_kernel(const Element* __restrict__ gK, const int* __restrict__ gSeqused, Sizes sizes,
                     Element* __restrict__ gKt) {
  constexpr int kHeadDim = Config::kHeadDim, kTile = 32;
  __shared__ Element sK[kTile][kTile + 1];
  const int64_t head = blockIdx.x / (kHeadDim / kTile);
  const int col0 = static_cast<int>(blockIdx.x) % (kHeadDim / kTile) * kTile;
  const int key0 = static_cast<int>(blockIdx.y) * kTile, seqlen_k = gSeqused[head / sizes.kv_heads];
  const int x = static_cast<int>(threadIdx.x) % kTile, y = static_cast<int>(threadIdx.x) / kTile;
  for (int i = y; i < kTile; i += Config::kThreads / kTile) {
    const bool exists = key0 + i < seqlen_k;  // K past the end is not read
    sK[i][x] = exists ? gK[(head * sizes.seqlen_k + key0 + i) * kHeadDim + col0 + x]
                      : from_float<Element>(0);
  }
  __syncthreads();  // the tile is loaded
  for (int i = y; i < kTile; i += Config::kThreads / kTile)
    if (key0 + x < sizes.padded)
      gKt[(head * kHeadDim + col0 + i) * sizes.padded + key0 + x] = sK[x][i];
}
// One block per head; a thread sums one column over some of its keys.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    mean_kernel(const Element* __restrict__ gV, const int* __restrict__ gSeqused, Sizes sizes,
                float* __restrict__ gMean) {
  constexpr int kHeadDim = Config::kHeadDim, kSlices = Config::kThreads / kHeadDim;
  __shared__ float sSum[kSlices][kHeadDim];
  const int64_t head = blockIdx.x;
  const int seqlen_k = gSeqused[head / sizes.kv_heads];
  const int col = static_cast<int>(threadIdx.x) % kHeadDim;
  const int slice = static_cast<int>(threadIdx.x) / kHeadDim;
  float sum = 0;
  for (int key = slice; key < seqlen_k; key += kSlices)
    sum += column(gV, (head * sizes.seqlen_k + key) * kHeadDim + col);
  sSum[slice][col] = sum;
  __syncthreads();  // all slices are summed
  if (slice > 0) return;
  for (int n = 1; n < kSlices; ++n) sum += sSum[n][col];
  gMean[head * kHeadDim + col] = seqlen_k > 0 ? sum / static_cast<float>(seqlen_k) : 0;
}
//! [prepare]

// (1) The chosen columns of a K/V head, in ascending order, and the factor of each query head's
// partial dot products. Every block recomputes them. NaN orders above Inf, and Inf above all else.
//! [columns]
template <class Config>
__device__ __forceinline__ void choose_columns(const Element* gQ,  // [group, d]
                                               const Sizes& sizes,
                                               unsigned (&sSum)[Config::kHeadDim],
                                               int (&sColumns)[Config::kHeadDim], float* sScale) {
  constexpr int kHeadDim = Config::kHeadDim;
  const int tid = static_cast<int>(threadIdx.x);
  if (tid < kHeadDim) {
    float sum = 0;
    for (int h = 0; h < sizes.group; ++h) sum += fabsf(column(gQ, h * kHeadDim + tid));
    sSum[tid] = __float_as_uint(sum);
  }
  __syncthreads();  // |q| of all columns is stored
  const auto chosen = [&](int col) {
    int before = 0;  // columns that are larger, or equal and earlier
    for (int c = 0; c < kHeadDim; ++c)
      before += sSum[c] > sSum[col] || (sSum[c] == sSum[col] && c < col);
    return before < sizes.choice.columns;
  };
  const bool is_chosen = tid < kHeadDim && chosen(tid);
  __syncthreads();  // all threads have read sums
  if (tid < kHeadDim) sSum[tid] = is_chosen;
  __syncthreads();  // the choice is visible
  if (is_chosen) {
    int place = 0;
    for (int c = 0; c < tid; ++c) place += static_cast<int>(sSum[c]);
    sColumns[place] = tid;
  }
  for (int h = tid; h < sizes.group; h += Config::kThreads) {
    float all = 0, part = 0;
#pragma unroll 16
    for (int c = 0; c < kHeadDim; ++c) {
      const float size = fabsf(column(gQ, h * kHeadDim + c));
      all += size;
      if (sSum[c] != 0) part += size;
    }
    sScale[h] = sparq::guess_scale(sizes.scale_log2, all, part);
  }
  __syncthreads();  // columns and factors are stored
}
//! [columns]

// Eight contiguous elements.
__device__ __forceinline__ void load_bf16x8(float (&x)[8], const Element* g) {
  const uint4 bits = *reinterpret_cast<const uint4*>(g);
  const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    x[i] = __uint_as_float(i % 2 ? pairs[i / 2] & 0xFFFF0000u : pairs[i / 2] << 16);
}

// (2) Estimated scores of all tokens in log2 units: guesses [B, Hq, padded]. A thread has 8
// contiguous keys, for `kHeads` query heads at once.
//! [guess]
template <class Config, int kHeads>
__device__ __forceinline__ void guess_of_heads(const Element* gQ,     // [heads, d]
                                               // this thread's keys, column 0
                                               const Element* gKeys,
                                               const int* sColumns, const float* sScale, int heads,
                                               const Sizes& sizes, float* gGuesses) {
  float sum[kHeads][8] = {};
#pragma unroll 8  // loads in flight
  for (int n = 0; n < sizes.choice.columns; ++n) {
    float k[8];
    load_bf16x8(k, gKeys + int64_t{sColumns[n]} * sizes.padded);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float q = h < heads ? column(gQ, h * Config::kHeadDim + sColumns[n]) : 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[h][i] = fmaf(q, k[i], sum[h][i]);
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= heads) break;
    float4* const g = reinterpret_cast<float4*>(gGuesses + int64_t{h} * sizes.padded);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      g[i] = make_float4(sum[h][4 * i] * sScale[h], sum[h][4 * i + 1] * sScale[h],
                         sum[h][4 * i + 2] * sScale[h], sum[h][4 * i + 3] * sScale[h]);
  }
}
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    guess_kernel(const Element* __restrict__ gQ,   // [B, Hq, d]
                 const Element* __restrict__ gKt,  // [B Hkv, d, padded]
                 const int* __restrict__ gSeqused, Sizes sizes, float* __restrict__ gGuesses) {
  constexpr int kHeadDim = Config::kHeadDim, kHeads = Config::kHeads;
  __shared__ float sScale[sparq::kMaxGroup];
  __shared__ unsigned sSum[kHeadDim];
  __shared__ int sColumns[kHeadDim];
  const int64_t head = blockIdx.x;
  const int key0 = static_cast<int>(blockIdx.y) * Config::kKeys;
  const int seqlen_k = gSeqused[head / sizes.kv_heads];
  if (key0 >= seqlen_k) return;  // block-uniform
  const Element* const gOwnQ = gQ + head * sizes.group * kHeadDim;
  choose_columns<Config>(gOwnQ, sizes, sSum, sColumns, sScale);
  const int key = key0 + static_cast<int>(threadIdx.x) * 8;
  if (key >= seqlen_k) return;
  const Element* const gKeys = gKt + head * kHeadDim * sizes.padded + key;
  float* const gOwn = gGuesses + head * sizes.group * sizes.padded + key;
  for (int h = 0; h < sizes.group; h += kHeads) {
    const Element* const gHeads = gOwnQ + h * kHeadDim;
    float* const g = gOwn + int64_t{h} * sizes.padded;
    if (sizes.group - h == 1)
      guess_of_heads<Config, 1>(gHeads, gKeys, sColumns, sScale + h, 1, sizes, g);
    else
      guess_of_heads<Config, kHeads>(gHeads, gKeys, sColumns, sScale + h,
                                     min(kHeads, sizes.group - h), sizes, g);
  }
}
//! [guess]

// Reduction over all threads, in a fixed order.
template <class Config, class T, class Combine>
__device__ __forceinline__ T of_block(T value, T (&s)[Config::kThreads], Combine combine) {
  s[threadIdx.x] = value;
  for (int distance = Config::kThreads / 2; distance > 0; distance /= 2) {
    __syncthreads();  // the values of this round are stored
    if (static_cast<int>(threadIdx.x) < distance)
      s[threadIdx.x] = combine(s[threadIdx.x], s[threadIdx.x + distance]);
  }
  __syncthreads();  // the result is stored
  const T all = s[0];
  __syncthreads();  // all threads have read it
  return all;
}

// Exclusive prefix sum over the threads.
template <class Config>
__device__ __forceinline__ int sum_before(int value, int (&s)[Config::kNumWarps]) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int sum = value;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int before = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += before;
  }
  if (lane == kWarp - 1) s[warp] = sum;
  __syncthreads();  // the sums of all warps are visible
  int all = sum - value;
  for (int n = 0; n < warp; ++n) all += s[n];
  __syncthreads();  // the sums of all warps have been read
  return all;
}

// (3) The tokens with the largest sums, over the heads, of the softmax of the estimates (ties: the
// first), and the newest ones in any case. chosen [B Hkv, keys], ascending; their shares of the
// softmax, alpha [B, Hq]. The sums compare like their bit patterns: a radix select on 8-bit digits,
// most significant first, finds the last one taken.
//! [choose]
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    choose_kernel(const float* __restrict__ gGuesses, const int* __restrict__ gSeqused, Sizes sizes,
                  unsigned* __restrict__ gShares,  // [B Hkv, padded]
                  int* __restrict__ gChosen, float* __restrict__ gAlpha) {
  __shared__ float sMax[sparq::kMaxGroup], sSum[sparq::kMaxGroup];  // of each head's estimates
  __shared__ float sReduced[Config::kThreads];
  __shared__ int sCount[256], sWarps[Config::kNumWarps];
  static_assert(Config::kThreads == 256, "a thread has a digit");
  __shared__ unsigned sPrefix;
  __shared__ int sLeft;
  const int64_t head = blockIdx.x;
  const int tid = static_cast<int>(threadIdx.x), seqlen_k = gSeqused[head / sizes.kv_heads];
  const int wanted = min(sizes.choice.keys, seqlen_k);
  if (seqlen_k == 0) return;  // block-uniform
  const float* const g = gGuesses + head * sizes.group * sizes.padded;
  unsigned* const gOwn = gShares + head * sizes.padded;
  for (int h = 0; h < sizes.group; ++h) {
    float max = -INFINITY, sum = 0;
    for (int key = tid; key < seqlen_k; key += Config::kThreads)
      max = fmaxf(max, g[int64_t{h} * sizes.padded + key]);
    max = of_block<Config>(max, sReduced, [](float a, float b) { return fmaxf(a, b); });
    for (int key = tid; key < seqlen_k; key += Config::kThreads)
      sum += sparq::exp2_of(g[int64_t{h} * sizes.padded + key] - max);
    sum = of_block<Config>(sum, sReduced, [](float a, float b) { return a + b; });
    if (tid == 0) sMax[h] = max, sSum[h] = sum;
  }
  __syncthreads();  // max and sum of each head are stored
  const auto part = [&](int h, int key) {
    return sparq::exp2_of(g[int64_t{h} * sizes.padded + key] - sMax[h]) / sSum[h];
  };
  for (int key = tid; key < seqlen_k; key += Config::kThreads) {
    float share = 0;
    for (int h = 0; h < sizes.group; ++h) share += part(h, key);
    gOwn[key] = key >= seqlen_k - sizes.choice.newest ? ~0u : __float_as_uint(share) & 0x7FFFFFFFu;
  }
  if (tid == 0) sPrefix = 0, sLeft = wanted;
  __syncthreads();  // this block's shares are stored
  for (int shift = 24; shift >= 0; shift -= 8) {
    sCount[tid] = 0;
    __syncthreads();  // counts are 0
    const unsigned prefix = sPrefix, mask = shift == 24 ? 0 : ~0u << (shift + 8);
    for (int key = tid; key < seqlen_k; key += Config::kThreads)
      if ((gOwn[key] & mask) == prefix) atomicAdd(&sCount[gOwn[key] >> shift & 255], 1);
    __syncthreads();  // all are counted
    // The thread whose digit, counted from the top, contains the last token taken.
    const int digit = 255 - tid, count = sCount[digit], left = sLeft;
    const int above = sum_before<Config>(count, sWarps);
    if (above < left && left <= above + count)
      sPrefix = prefix | static_cast<unsigned>(digit) << shift, sLeft = left - above;
    __syncthreads();  // the digit is stored
  }
  // Threads have contiguous keys: how many of them are above the threshold, how many equal to it.
  const unsigned last = sPrefix;
  const int per_thread = ceil_div(seqlen_k, Config::kThreads);
  const int begin = min(seqlen_k, tid * per_thread), end = min(seqlen_k, begin + per_thread);
  int above = 0, ties = 0;
  for (int key = begin; key < end; ++key) above += gOwn[key] > last, ties += gOwn[key] == last;
  int ties_before = sum_before<Config>(ties, sWarps), place = sum_before<Config>(above, sWarps);
  place += min(ties_before, sLeft);
  for (int key = begin; key < end; ++key) {
    const bool tie = gOwn[key] == last;
    if (gOwn[key] > last || (tie && ties_before < sLeft))
      gChosen[head * sizes.choice.keys + place++] = key;
    ties_before += tie;
  }
  __syncthreads();  // the tokens are stored
  for (int h = 0; h < sizes.group; ++h) {
    float alpha = 0;
    for (int n = tid; n < wanted; n += Config::kThreads)
      alpha += part(h, gChosen[head * sizes.choice.keys + n]);
    alpha = of_block<Config>(alpha, sReduced, [](float a, float b) { return a + b; });
    if (tid == 0) gAlpha[head * sizes.group + h] = alpha;
  }
}
//! [choose]

// (4) Exact attention to the chosen tokens. O is alpha times its result plus 1 - alpha times the
// mean of V over all tokens.
//! [attention]
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    attention_kernel(const Element* __restrict__ gQ, const Element* __restrict__ gK,
                     const Element* __restrict__ gV, const int* __restrict__ gSeqused,
                     const int* __restrict__ gChosen, const float* __restrict__ gAlpha,
                     const float* __restrict__ gMean, Sizes sizes,
                     float* __restrict__ gWeights,  // [B, Hq, keys]
                     Element* __restrict__ gO, float* __restrict__ gLse) {
  constexpr int kHeadDim = Config::kHeadDim, kHeads = Config::kHeads;
  constexpr int kLanes = kHeadDim / 8;  // threads per row, 16 bytes each
  constexpr int kSlices = Config::kThreads / kLanes;  // tokens per pass
  __shared__ float sO[kSlices][kHeads][kHeadDim];
  __shared__ float sSum[sparq::kMaxGroup];
  const int64_t head = blockIdx.x, q_head = head * sizes.group;
  const int tid = static_cast<int>(threadIdx.x), lane = tid % kWarp, warp = tid / kWarp;
  const int own_columns = tid % kLanes * 8, slice = tid / kLanes;
  const int count = min(sizes.choice.keys, gSeqused[head / sizes.kv_heads]);
  const int* const chosen = gChosen + head * sizes.choice.keys;
  float* const weights = gWeights + q_head * sizes.choice.keys;
  const auto row_of = [&](int n) { return (head * sizes.seqlen_k + chosen[n]) * kHeadDim; };
#pragma unroll 4  // loads in flight
  for (int n0 = 0; n0 < count; n0 += kSlices) {
    const int n = min(n0 + slice, count - 1);
    float k[8];
    load_bf16x8(k, gK + row_of(n) + own_columns);
    for (int h = 0; h < sizes.group; ++h) {
      float q[8], dot = 0;
      load_bf16x8(q, gQ + (q_head + h) * kHeadDim + own_columns);
#pragma unroll
      for (int i = 0; i < 8; ++i) dot = fmaf(q[i], k[i], dot);
      for (int mask = kLanes / 2; mask > 0; mask /= 2) dot += __shfl_xor_sync(~0u, dot, mask);
      if (tid % kLanes == 0 && n0 + slice < count)
        weights[h * sizes.choice.keys + n] = dot * sizes.scale_log2;
    }
  }
  __syncthreads();  // all scores are stored
  for (int h = warp; h < sizes.group; h += Config::kNumWarps) {
    float* const row_weights = weights + h * sizes.choice.keys;
    float max = -INFINITY, sum = 0;
    for (int n = lane; n < count; n += kWarp) max = fmaxf(max, row_weights[n]);
    for (int mask = kWarp / 2; mask > 0; mask /= 2)
      max = fmaxf(max, __shfl_xor_sync(~0u, max, mask));
    for (int n = lane; n < count; n += kWarp) sum += row_weights[n] = exp2f(row_weights[n] - max);
    for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (lane == 0) {
      sSum[h] = sum;
      gLse[q_head + h] = count == 0 ? -INFINITY : kLn2 * (max + log2f(sum));
    }
  }
  __syncthreads();  // all weights are stored
  for (int h0 = 0; h0 < sizes.group; h0 += kHeads) {
    const int heads = min(kHeads, sizes.group - h0);
    float o[kHeads][8] = {};
#pragma unroll 4
    for (int n = slice; n < count; n += kSlices) {
      float v[8];
      load_bf16x8(v, gV + row_of(n) + own_columns);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= heads) break;
        const float weight = weights[(h0 + h) * sizes.choice.keys + n];
#pragma unroll
        for (int i = 0; i < 8; ++i) o[h][i] = fmaf(weight, v[i], o[h][i]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
#pragma unroll
      for (int i = 0; i < 8; ++i) sO[slice][h][own_columns + i] = o[h][i];
    __syncthreads();  // all slices of O are stored
    const int col = tid % kHeadDim;
    for (int h = tid / kHeadDim; h < heads; h += Config::kThreads / kHeadDim) {
      float sum = 0;
      for (int n = 0; n < kSlices; ++n) sum += sO[n][h][col];
      const float alpha = count == 0 ? 0 : gAlpha[q_head + h0 + h];
      const float read = count == 0 ? 0 : sum / sSum[h0 + h];
      const float rest = (1 - alpha) * gMean[head * kHeadDim + col];
      gO[(q_head + h0 + h) * kHeadDim + col] = from_float<Element>(fmaf(alpha, read, rest));
    }
    __syncthreads();  // they have been read
  }
}
//! [attention]

Sizes sizes_of(const Problem& p) {
  return {static_cast<int>(p.group()),
          static_cast<int>(p.kv_heads),
          static_cast<int>(p.seqlen_k),
          static_cast<int>(round_up(p.seqlen_k, 8)),
          static_cast<float>(p.softmax_scale) * kLog2e,
          sparq::choice_of(p)};
}

template <class Config>
Status launch(const Arguments& args) {
  const DecodeParams<Element> params(args);
  const Problem& p = args.problem;
  const Sizes sizes = sizes_of(p);
  const auto heads = static_cast<unsigned>(p.batch * p.kv_heads);
  const dim3 threads(Config::kThreads);
  const auto *q = params.q, *k = params.k, *v = params.v;
  const int* const seqlen_k = params.seqused_k;
  auto* const guesses = args.out<float>("guesses");
  auto *const chosen = args.out<int>("chosen");
  auto* const alpha = args.out<float>("alpha");
  args.phase("guess");
  if (const Status status = launch_kernel(
          guess_kernel<Config>,
          dim3(heads, static_cast<unsigned>(ceil_div(sizes.seqlen_k, Config::kKeys))), threads,
          0, args.stream, q, args.out<Element>("kt"), seqlen_k, sizes, guesses);
      !status.ok())
    return status;
  args.phase("choose");
  if (const Status status =
          launch_kernel(choose_kernel<Config>, dim3(heads), threads, 0, args.stream,
                        guesses, seqlen_k, sizes, args.out<unsigned>("shares"), chosen, alpha);
      !status.ok())
    return status;
  args.phase("attention");
  return launch_kernel(attention_kernel<Config>, dim3(heads), threads, 0, args.stream, q, k, v,
                       seqlen_k, chosen, alpha, args.out<float>("v_mean"), sizes,
                       args.out<float>("weights"), params.o, params.lse);
}

// K by columns and the mean of V, computed once: a server does it token by token.
template <class Config>
Status prepare(const Arguments& args) {
  const DecodeParams<Element> params(args);
  const Problem& p = args.problem;
  const Sizes sizes = sizes_of(p);
  const auto heads = static_cast<unsigned>(p.batch * p.kv_heads);
  const dim3 threads(Config::kThreads);
  const int* const seqlen_k = params.seqused_k;
  if (const Status status = launch_kernel(
          transpose_kernel<Config>,
          dim3(heads * (Config::kHeadDim / 32), static_cast<unsigned>(ceil_div(sizes.padded, 32))),
          threads, 0, args.stream, params.k, seqlen_k, sizes, args.out<Element>("kt"));
      !status.ok())
    return status;
  return launch_kernel(mean_kernel<Config>, dim3(heads), threads, 0, args.stream, params.v,
                       seqlen_k, sizes, args.out<float>("v_mean"));
}

Status launch(const Arguments& args) {
  switch (args.problem.head_dim) {
    case 64: return launch<Config<64>>(args);
    case 128: return launch<Config<128>>(args);
    case 256: return launch<Config<256>>(args);
  }
  return Status::unsupported("only head dims 64, 128 and 256");
}
Status prepare(const Arguments& args) {
  switch (args.problem.head_dim) {
    case 64: return prepare<Config<64>>(args);
    case 128: return prepare<Config<128>>(args);
    case 256: return prepare<Config<256>>(args);
  }
  return Status::unsupported("only head dims 64, 128 and 256");
}

}  // namespace ATTN_BACKEND::d4_sparq
