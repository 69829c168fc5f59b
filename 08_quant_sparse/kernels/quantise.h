// Quantisation pass of the INT8 steps, bf16 to int8. A block has a tile of 128 rows of a head of Q
// or K in registers, so it reads once. The rows of a tile are in groups; a group shares a scale,
// which maps its absolute maximum to 127. The inverse, the descale, is stored next to the codes.
//
//     q8 [B Hq, seqlen_q, d]    q_descale [B Hq, tiles, groups of Q]
//     k8 [B Hkv, seqlen_k, d]   k_descale [B Hkv, tiles, groups of K]
//
// SageAttention (arXiv 2410.02367), section 4. NaN and Inf propagate: int8 has no code for them, so
// the descale of their group is NaN, and so is O of each row whose query tile is multiplied with
// the group's tile.
#pragma once

#include "attn/finite.h"
#include "attn/kernel.h"
#include "ptx/wgmma_s8.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Lower bounds of the absolute maximum from which a scale is computed. Scores are multiplied by the
// descales of Q and of K: a product of 0 would turn the -inf of a masked score into NaN. l is
// divided by the descale of V, at least 2^-88.8: below l = 2^37 the quotient is below 2^126.
constexpr float kSmallestMax = 1e-10f, kSmallestV = 0x1p-80f;
constexpr int kScaleRows = 128;         // rows of a tile
struct QuantisePass {
  static constexpr int kThreads = 256;
};

// Which rows share a scale, and the code of the largest element: here all rows of a tile.
//! [groups]
struct BlockGroups {
  static constexpr int kQ = 1, kK = 1;  // groups per tile of Q, of K
  static constexpr float kLargest = 127;
  __device__ static int of_q(int) { return 0; }
  __device__ static int of_k(int) { return 0; }
};
// Per-thread scales: rows g and g + 8 of each 16, and keys 2t and 2t + 1 of every eight, so that
// each lane has one scale of Q and one of K (SageAttention2, arXiv 2411.10958, section 3.2).
struct ThreadGroups {
  static constexpr int kQ = 64, kK = 4;
  static constexpr float kLargest = 127;
  __device__ static int of_q(int row) { return row / 16 * 8 + row % 8; }
  __device__ static int of_k(int key) { return key % 8 / 2; }
};
//! [groups]

// Smooth K: the mean of a head's keys is subtracted before rounding. softmax(Q (K - mean)^T) is
// softmax(Q K^T), because all scores of a row decrease by the same number; lse gets it back.
//! [smoothing]
// Tiles of Q may have their own mean subtracted too (smooth_q.h).
struct Smoothing {
  const float* gMean = nullptr;  // [B Hkv, d]
  float* gLseShift = nullptr;    // [B, Hq, seqlen_q]: softmax_scale q . mean
  float softmax_scale = 0;
  int group = 1;  // query heads per K/V head
  const float* gQSums = nullptr;  // [B Hq, tiles, d]: sums over the rows of each tile of Q
};
//! [smoothing]

// Eight bf16 numbers, as floats.
struct Bf16x8 {
  float x[8];
};
__device__ __forceinline__ Bf16x8 bf16x8_of(const uint4& bits) {
  const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
  Bf16x8 e;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    e.x[2 * i] = __uint_as_float(pairs[i] << 16);
    e.x[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000u);
  }
  return e;
}
__device__ __forceinline__ Bf16x8 load_bf16x8(const __nv_bfloat16* g) {
  return bf16x8_of(*reinterpret_cast<const uint4*>(g));
}

// |x| as an integer. Integers compare like the floats, with Inf and then NaN at the end, whereas
// fmaxf ignores NaN.
__device__ __forceinline__ unsigned size_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// What turns a group's elements into codes, and codes back into elements.
struct Scale {
  float scale, descale;
};
//! [scale]
template <class Groups>
__device__ __forceinline__ Scale scale_of(unsigned largest_bits) {
  const float largest = fmaxf(__uint_as_float(largest_bits), kSmallestMax);
  if (largest_bits >= 0x7F800000u) return {0, NAN};
  return {Groups::kLargest / largest, largest / Groups::kLargest};
}
//! [scale]

// Rounds x to the nearest integer, ties to even: a float of 1.5 x 2^23 and above has no fraction
// bits, and its lowest byte is that of the integer. A conversion takes four times as long.
//! [whole]
constexpr float kWhole = 12582912;  // 1.5 x 2^23
__device__ __forceinline__ float whole_of(float x) {
#ifdef ATTN_EMULATED
  return x + kWhole;
#else
  return __fadd_rn(x, kWhole);  // an FFMA with the product would round only once
#endif
}
__device__ __forceinline__ uint32_t lowest_bytes(float a, float b, float c, float d) {
  const uint32_t bits[4] = {__float_as_uint(a), __float_as_uint(b), __float_as_uint(c),
                            __float_as_uint(d)};
#ifdef ATTN_EMULATED
  return (bits[0] & 0xFF) | (bits[1] & 0xFF) << 8 | (bits[2] & 0xFF) << 16 | bits[3] << 24;
#else
  return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040),
                     __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
#endif
}
//! [whole]

// How many rows a tile has, as a float: the divisor of its mean.
__device__ __forceinline__ float rows_of_tile(int rows, int tile) {
  return static_cast<float>(min(kScaleRows, rows - tile * kScaleRows));
}

// A block has 128 rows of a head. blockIdx.y: Q or K.
//! [tiles]
struct RowsOf {
  const __nv_bfloat16* g;  // [heads, rows, d]
  uint8_t* g8;
  float* gDescale;  // [heads, tiles, groups]
  int64_t heads;
  int rows, tiles;
};

template <class Groups>
constexpr int kMaxGroups = Groups::kQ > Groups::kK ? Groups::kQ : Groups::kK;
template <class Pass, int kHeadDim, class Groups, bool kSmooth>
__device__ __forceinline__ void quantise_tile(RowsOf q, RowsOf k, Smoothing smoothing,
                                              unsigned (&sLargest)[kMaxGroups<Groups>],
                                              Scale (&sScale)[kMaxGroups<Groups>]) {
  constexpr int kLanes = kHeadDim / 8, kRowsPerPass = Pass::kThreads / kLanes;
  constexpr int kTimes = kScaleRows / kRowsPerPass;
  const bool of_q = blockIdx.y == 0;
  const RowsOf t = of_q ? q : k;
  const int64_t head = blockIdx.x / t.tiles;
  const int tile = static_cast<int>(blockIdx.x % t.tiles), lane = threadIdx.x % kLanes;
  if (head >= t.heads) return;  // block-uniform
  for (int i = threadIdx.x; i < kMaxGroups<Groups>; i += Pass::kThreads) sLargest[i] = 0;
  __syncthreads();  // the maxima are 0
  const int thread_row =
      static_cast<int>(threadIdx.x) / kLanes;  // the thread's first row in the tile
  const int64_t first = (head * t.rows + tile * kScaleRows + thread_row) * kHeadDim + 8 * lane;
  const auto exists = [&](int n) {
    return tile * kScaleRows + thread_row + n * kRowsPerPass < t.rows;
  };
  const auto group = [&](int n) {
    const int row = thread_row + n * kRowsPerPass;
    return of_q ? Groups::of_q(row) : Groups::of_k(row);
  };
  float mean[8] = {};
  if constexpr (kSmooth)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      mean[i] = smoothing.gMean[(of_q ? head / smoothing.group : head) * kHeadDim + 8 * lane + i];
  float tile_mean[8] = {};  // of Q
  if (kSmooth && of_q && smoothing.gQSums != nullptr) {
    const float* const gSums = smoothing.gQSums + blockIdx.x * kHeadDim + 8 * lane;
    const float count = rows_of_tile(t.rows, tile);
#pragma unroll
    for (int i = 0; i < 8; ++i) tile_mean[i] = gSums[i] / count;
  }
  // Rows stay in bf16, in half of the registers: twice as many blocks fit on an SM.
  uint4 bits[kTimes];
#pragma unroll
  for (int n = 0; n < kTimes; ++n)
    bits[n] = exists(n) ? *reinterpret_cast<const uint4*>(t.g + first + n * kRowsPerPass * kHeadDim)
                        : uint4{};
  
  const auto numbers = [&](int n) {
    Bf16x8 e = bf16x8_of(bits[n]);
    if (kSmooth && exists(n))
#pragma unroll
      for (int i = 0; i < 8; ++i) e.x[i] -= of_q ? tile_mean[i] : mean[i];
    return e;
  };
#pragma unroll
  for (int n = 0; n < kTimes; ++n) {
    const Bf16x8 e = numbers(n);
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max(largest, size_bits(e.x[i]));
    for (int mask = kLanes / 2; mask > 0; mask /= 2)  // over the lanes of the row
      largest = max(largest, __shfl_xor_sync(~0u, largest, mask));
    if (lane == 0) atomicMax(&sLargest[group(n)], largest);
  }
  __syncthreads();  // the maxima of all groups are stored
  const int groups = of_q ? Groups::kQ : Groups::kK;
  for (int i = threadIdx.x; i < groups; i += Pass::kThreads) {
    sScale[i] = scale_of<Groups>(sLargest[i]);
    t.gDescale[(head * t.tiles + tile) * groups + i] = sScale[i].descale;
  }
  __syncthreads();  // the scales of all groups are stored
#pragma unroll
  for (int n = 0; n < kTimes; ++n) {
    const bool there = exists(n);
    const auto [scale, descale] = sScale[group(n)];
    auto [x] = numbers(n);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = whole_of(x[i] * scale);
    if (there)
      *reinterpret_cast<uint2*>(t.g8 + first + n * kRowsPerPass * kHeadDim) =
          make_uint2(lowest_bytes(x[0], x[1], x[2], x[3]), lowest_bytes(x[4], x[5], x[6], x[7]));
    if (kSmooth && of_q) {
      float dot = 0;  // of the decoded values, which are what is multiplied
#pragma unroll
      for (int i = 0; i < 8; ++i)
        dot = fmaf(fmaf(descale, x[i] - kWhole, tile_mean[i]), mean[i], dot);
      for (int mask = kLanes / 2; mask > 0; mask /= 2) dot += __shfl_xor_sync(~0u, dot, mask);
      if (there && lane == 0)
        smoothing.gLseShift[head * t.rows + tile * kScaleRows + thread_row + n * kRowsPerPass] =
            smoothing.softmax_scale * dot;
    }
  }
}

template <class Pass, int kHeadDim, class Groups, bool kSmooth>
__global__ void __launch_bounds__(Pass::kThreads, kHeadDim == 256 ? 2 : 3)
    quantise_kernel(RowsOf q, RowsOf k, Smoothing smoothing) {
  __shared__ unsigned sLargest[kMaxGroups<Groups>];
  __shared__ Scale sScale[kMaxGroups<Groups>];
  quantise_tile<Pass, kHeadDim, Groups, kSmooth>(q, k, smoothing, sLargest, sScale);
}
//! [tiles]

// Descales by row of a head.
struct BlockDescales {
  const float *gQ, *gK;  // [B Hq, tiles_q], [B Hkv, tiles_k]
  int tiles_q, tiles_k;
  BlockDescales(const Arguments& args)
      : gQ(args.out<float>("q_descale")),
        gK(args.out<float>("k_descale")),
        tiles_q(static_cast<int>(ceil_div(args.problem.seqlen_q, kScaleRows))),
        tiles_k(static_cast<int>(ceil_div(args.problem.seqlen_k, kScaleRows))) {}
  __device__ float q(int head, int row) const { return gQ[head * tiles_q + row / kScaleRows]; }
  __device__ float k(int head, int key) const { return gK[head * tiles_k + key / kScaleRows]; }
};

// The same for ThreadGroups: the first scale of the tile.
struct ThreadDescales {
  const float *gQ, *gK;  // [B Hq, tiles_q, 64], [B Hkv, tiles_k, 4]
  int tiles_q, tiles_k;
  ThreadDescales(const Arguments& args)
      : gQ(args.out<float>("q_descale")),
        gK(args.out<float>("k_descale")),
        tiles_q(static_cast<int>(ceil_div(args.problem.seqlen_q, kScaleRows))),
        tiles_k(static_cast<int>(ceil_div(args.problem.seqlen_k, kScaleRows))) {}
  __device__ const float* q(int head, int row) const {
    return gQ + (int64_t{head} * tiles_q + row / kScaleRows) * ThreadGroups::kQ;
  }
  __device__ const float* k(int head, int key) const {
    return gK + (int64_t{head} * tiles_k + key / kScaleRows) * ThreadGroups::kK;
  }
};

//! [launch]
inline RowsOf rows_of_q(const Arguments& args) {
  const Problem& p = args.problem;
  return {args.in<__nv_bfloat16>("q"), args.out<uint8_t>("q8"), args.out<float>("q_descale"),
          p.batch * p.heads, static_cast<int>(p.seqlen_q),
          static_cast<int>(ceil_div(p.seqlen_q, kScaleRows))};
}
inline RowsOf rows_of_k(const Arguments& args) {
  const Problem& p = args.problem;
  return {args.in<__nv_bfloat16>("k"), args.out<uint8_t>("k8"), args.out<float>("k_descale"),
          p.batch * p.kv_heads, static_cast<int>(p.seqlen_k),
          static_cast<int>(ceil_div(p.seqlen_k, kScaleRows))};
}
template <int kHeadDim, class Groups, bool kSmooth = false>
Status quantise(const Arguments& args, const Smoothing& smoothing = {}) {
  using Pass = QuantisePass;
  const RowsOf q = rows_of_q(args), k = rows_of_k(args);
  args.phase("quantise");
  const int64_t blocks = std::max(q.heads * q.tiles, k.heads * k.tiles);
  return launch_kernel(quantise_kernel<Pass, kHeadDim, Groups, kSmooth>,
                       dim3(static_cast<unsigned>(blocks), 2), dim3(Pass::kThreads), 0, args.stream,
                       q, k, smoothing);
}
//! [launch]

}  // namespace ATTN_BACKEND::hopper
