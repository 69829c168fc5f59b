// The passes of q8: the mean of K; codes of Q and K, with fewer instructions than in quantise.h;
// codes of V as in smooth_v.h.
#pragma once

#include <algorithm>

#include "kernels/hopper/smooth_v.h"
#include "kernels/quantise_v.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// The larger of each pair of unsigned 16-bit integers.
__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) {
#ifdef ATTN_EMULATED
  return max(a & 0xFFFFu, b & 0xFFFFu) | max(a & 0xFFFF0000u, b & 0xFFFF0000u);
#else
  return __vmaxu2(a, b);
#endif
}
// size_bits of the largest of eight numbers. In bf16 an instruction compares two pairs.
__device__ __forceinline__ unsigned largest_of(const uint4& bits) {
  const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
  uint32_t largest = 0;
#pragma unroll
  for (const uint32_t pair : pairs) largest = max_u16x2(largest, pair & 0x7FFF7FFFu);
  return max(largest << 16, largest & 0xFFFF0000u);
}
__device__ __forceinline__ unsigned largest_of(const Bf16x8& e) {
#ifdef ATTN_EMULATED
  unsigned largest = 0;
  for (const float x : e.x) largest = max(largest, size_bits(x));
  return largest;
#else
  float largest = 0;
#pragma unroll
  for (const float x : e.x)
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(x)));
  return __float_as_uint(largest);
#endif
}
// Makes the compiler unpack the bf16 numbers again for the codes. Otherwise it keeps the floats
// that it unpacked for the maxima, in twice the registers.
__device__ __forceinline__ void forget_unpacked([[maybe_unused]] uint4& bits) {
#ifndef ATTN_EMULATED
  asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
#endif
}

// Reduces each of kCount numbers over 2 kCount lanes; lane i returns number i / 2. In each round a
// lane keeps half of its numbers and sends the others: kCount shuffles, not kCount log2(2 kCount).
//! [reduce_each]
template <int kCount, class Number, class Operation>
__device__ __forceinline__ Number reduce_each(const Number (&x)[kCount], int lane,
                                              Operation operation) {
  if constexpr (kCount == 1) {
    return operation(x[0], __shfl_xor_sync(~0u, x[0], 1));
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = (lane & kCount) != 0;
    Number half[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const Number sent = __shfl_xor_sync(~0u, upper ? x[i] : x[i + kHalf], kCount);
      half[i] = operation(upper ? x[i + kHalf] : x[i], sent);
    }
    return reduce_each(half, lane, operation);
  }
}
//! [reduce_each]

// quantise_tile with smooth K and per-thread scales. Q and K are separate instances. If
// `kWholeTile`, all rows of the tile exist, and no row is compared with the end.
//! [rows]
template <int kHeadDim, bool kOfQ, bool kWholeTile>
__device__ __forceinline__ void quantise_rows(const RowsOf& t, const Smoothing& smoothing,
                                              unsigned* sLargest, Scale* sScale) {
  constexpr int kThreads = QuantisePass::kThreads, kLanes = kHeadDim / 8;
  constexpr int kRowsPerPass = kThreads / kLanes, kTimes = kScaleRows / kRowsPerPass;
  constexpr int kGroups = kOfQ ? ThreadGroups::kQ : ThreadGroups::kK;
  static_assert(kRowsPerPass % 8 == 0);  // so all rows of a thread have one scale of K
  static_assert(2 * kTimes == kLanes);   // for reduce_each
  const int64_t head = blockIdx.x / t.tiles;
  const int tile = static_cast<int>(blockIdx.x % t.tiles), thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kLanes, tile_row = thread / kLanes;  // the thread's first row
  const int64_t row0 = head * t.rows + tile * kScaleRows + tile_row;
  const auto exists = [&](int n) {
    return kWholeTile || tile * kScaleRows + tile_row + n * kRowsPerPass < t.rows;
  };
  const auto group = [&](int n) {
    return kOfQ ? ThreadGroups::of_q(tile_row + n * kRowsPerPass) : ThreadGroups::of_k(tile_row);
  };
  // Rows stay in bf16, in half of the registers: twice as many blocks fit on an SM.
  uint4 bits[kTimes];
#pragma unroll
  for (int n = 0; n < kTimes; ++n)
    bits[n] = exists(n) ? *reinterpret_cast<const uint4*>(
                              t.g + (row0 + n * kRowsPerPass) * kHeadDim + 8 * lane)
                        : uint4{};
  for (int i = thread; i < kGroups; i += kThreads) sLargest[i] = 0;
  __syncthreads();  // the maxima are 0
  float mean[8];    // of K
  const auto load_mean = [&] {
    const float* const g = smoothing.gMean + (kOfQ ? head / smoothing.group : head) * kHeadDim;
#pragma unroll
    for (int i = 0; i < 8; ++i) mean[i] = g[8 * lane + i];
  };
  if (!kOfQ) load_mean();
  const auto centred = [&](int n) {  // K
    Bf16x8 e = bf16x8_of(bits[n]);
    if (exists(n))
#pragma unroll
      for (int i = 0; i < 8; ++i) e.x[i] -= mean[i];
    return e;
  };

  const auto max_of = [](unsigned a, unsigned b) { return max(a, b); };
  if constexpr (kOfQ) {
    unsigned largest[kTimes];
#pragma unroll
    for (int n = 0; n < kTimes; ++n) largest[n] = largest_of(bits[n]);
    const unsigned of_row = reduce_each(largest, lane, max_of);
    if (lane % 2 == 0) atomicMax(&sLargest[group(lane / 2)], of_row);
    load_mean();  // not earlier: the maxima need its 8 registers
  } else {
    unsigned largest = 0;
#pragma unroll
    for (int n = 0; n < kTimes; ++n) largest = max(largest, largest_of(centred(n)));
    for (int apart = kLanes / 2; apart > 0; apart /= 2)
      largest = max(largest, __shfl_xor_sync(~0u, largest, apart));
    if (lane == 0) atomicMax(&sLargest[group(0)], largest);
  }
  __syncthreads();  // the maxima of all groups are stored
  for (int i = thread; i < kGroups; i += kThreads) {
    sScale[i] = scale_of<ThreadGroups>(sLargest[i]);
    t.gDescale[blockIdx.x * kGroups + i] = sScale[i].descale;
  }
  __syncthreads();     // the scales of all groups are stored
  float dots[kTimes];  // of Q's decoded values, which are what is multiplied, with K's mean
#pragma unroll
  for (int n = 0; n < kTimes; ++n) {
    const auto [scale, descale] = sScale[group(n)];
    forget_unpacked(bits[n]);
    auto [x] = kOfQ ? bf16x8_of(bits[n]) : centred(n);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = whole_of(x[i] * scale);
    if (exists(n))
      *reinterpret_cast<uint2*>(t.g8 + (row0 + n * kRowsPerPass) * kHeadDim + 8 * lane) =
          make_uint2(lowest_bytes(x[0], x[1], x[2], x[3]), lowest_bytes(x[4], x[5], x[6], x[7]));
    if constexpr (kOfQ) {
      float dot = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) dot = fmaf(x[i] - kWhole, mean[i], dot);
      dots[n] = descale * dot;
    }
  }
  if constexpr (kOfQ) {
    const float dot = reduce_each(dots, lane, [](float a, float b) { return a + b; });
    if (lane % 2 == 0 && exists(lane / 2))
      smoothing.gLseShift[row0 + lane / 2 * kRowsPerPass] = smoothing.softmax_scale * dot;
  }
}

// A block has 128 rows of a head. blockIdx.y: Q or K.
template <int kHeadDim>
__global__ void __launch_bounds__(QuantisePass::kThreads, kHeadDim == 256 ? 2 : 3)
    quantise_rows_kernel(RowsOf q, RowsOf k, Smoothing smoothing) {
  __shared__ unsigned sLargest[ThreadGroups::kQ];
  __shared__ Scale sScale[ThreadGroups::kQ];
  const bool of_q = blockIdx.y == 0;
  const int rows = of_q ? q.rows : k.rows, tiles = of_q ? q.tiles : k.tiles;
  if (blockIdx.x / tiles >= (of_q ? q.heads : k.heads)) return;  // block-uniform
  const bool whole = static_cast<int>(blockIdx.x % tiles + 1) * kScaleRows <= rows;
  if (of_q && whole)
    quantise_rows<kHeadDim, true, true>(q, smoothing, sLargest, sScale);
  else if (of_q)
    quantise_rows<kHeadDim, true, false>(q, smoothing, sLargest, sScale);
  else if (whole)
    quantise_rows<kHeadDim, false, true>(k, smoothing, sLargest, sScale);
  else
    quantise_rows<kHeadDim, false, false>(k, smoothing, sLargest, sScale);
}
//! [rows]

//! [launch_chunks]
template <int kHeadDim>
Status quantise_chunks(const Arguments& args) {
  if (const Status status = mean_of_k<kHeadDim>(args); !status.ok()) return status;
  const Problem& p = args.problem;
  const RowsOf q = rows_of_q(args), k = rows_of_k(args);
  const int64_t tiles = std::max(q.heads * q.tiles, k.heads * k.tiles);
  args.phase("quantise");
  if (const Status status =
          launch_kernel(quantise_rows_kernel<kHeadDim>, dim3(static_cast<unsigned>(tiles), 2),
                        dim3(QuantisePass::kThreads), 0, args.stream, q, k,
                        Smoothing{.gMean = args.out<float>("k_mean"),
                                  .gLseShift = args.out<float>("lse_shift"),
                                  .softmax_scale = shape_of(p).softmax_scale,
                                  .group = static_cast<int>(p.group())});
      !status.ok())
    return status;
  args.phase("chunks");
  return smooth_v<kHeadDim>(args);
}
//! [launch_chunks]

}  // namespace ATTN_BACKEND::hopper
