// What the steps of the backward pass do beside their products: rows before and after, copies, masks, softcap, dropout.
#pragma once

#include "attn/philox.h"
#include "backward_tiles.h"
#include "ptx/cp_async.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::backward_tiles {

constexpr float kLog2E = 1.44269504f;  // log2(e)

// (1) Of the rows of a tile: lse in base 2, D = rowsum(dO . O), and 0 where dQ is to be added up.
//! [dot]
template <class Element, class Config>
__global__ void __launch_bounds__(256)
    dot_kernel(const Element* gO,    // [B, Hq, seqlen_q, d]
               const Element* gdO,   // [B, Hq, seqlen_q, d]
               const float* gLse,    // [B, Hq, seqlen_q]
               float* gRows,         // [tiles, 2, kBlockM]: lse / log(2), D
               float4* gAccum,       // [slices, tiles, fragments, threads]
               Shape shape, Packing packing) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM;
  constexpr int kLanes = kHeadDim % 128 == 0 ? kHeadDim / 8 : kHeadDim % 64 == 0 ? 8 : 4;  // of a row
  const int m_block = blockIdx.x % packing.num_m_blocks, row0 = m_block * kBlockM;
  const Sequence own = sequence_of(shape, packing, blockIdx.x / packing.num_m_blocks, kHeadDim, kBlockM);
  if (row0 >= own.seqlen_q) return;  // of a batch with longer sequences
  const int64_t tile = own.tile + m_block;
  for (int slice = 0; slice < packing.num_slices; ++slice) {
    float4* const accum = gAccum + (slice * packing.slice_tiles + tile) * (kBlockM * kHeadDim / 4);
    for (int i = threadIdx.x; i < kBlockM * kHeadDim / 4; i += 256) accum[i] = float4{};
  }
  for (int r = threadIdx.x / kLanes; r < kBlockM; r += 256 / kLanes) {
    const bool inside = row0 + r < own.seqlen_q;
    const int64_t row = own.q + int64_t{row0 + r} * packing.q_step;
    float sum = 0;
    if (inside)
#pragma unroll
      for (int c = threadIdx.x % kLanes * 8; c < kHeadDim; c += kLanes * 8) {
        const uint4 o = *reinterpret_cast<const uint4*>(gO + row + c);
        const uint4 d_o = *reinterpret_cast<const uint4*>(gdO + row + c);
        const uint32_t a[4] = {o.x, o.y, o.z, o.w}, b[4] = {d_o.x, d_o.y, d_o.z, d_o.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += unpack<Element>(a[i / 2], i % 2) * unpack<Element>(b[i / 2], i % 2);
      }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (threadIdx.x % kLanes == 0) {
      const float lse = inside ? gLse[own.lse + row0 + r] : -INFINITY;
      gRows[tile * (2 * kBlockM) + r] = lse == -INFINITY ? INFINITY : lse * kLog2E;  // P = 0: nothing is seen
      gRows[tile * (2 * kBlockM) + kBlockM + r] = sum;
    }
  }
}
//! [dot]

// Starts to copy kRows rows, of which `rows` exist; the others become 0. `g` is this thread's first chunk of them, of
// row tid / kSpan and chunk tid % kSpan.
template <int kRows, class Config, class Element>
__device__ __forceinline__ void load_tile(Element* tile, const Element* g, int step, int rows) {
  constexpr int kSpan = Config::kSpan, kCopyRows = Config::kCopyRows, kHeadDim = Config::kHeadDim;
  const int row = threadIdx.x / kSpan;
  Element* const to = tile + swizzled_offset<kHeadDim>(row, threadIdx.x % kSpan * 8);
#pragma unroll
  for (int r = 0; r < kRows; r += kCopyRows) {
    if (r + kCopyRows > kRows && row + r >= kRows) break;
#pragma unroll
    for (int c = 0; c < kHeadDim; c += 8 * kSpan) {
      const bool inside = row + r < rows;
      cp_async_16(to + r * kHeadDim + c, g + (inside ? r : -row) * step + c, inside ? 16 : 0);
    }
  }
}

// (4) -inf where a query does not see a key. `own`: position of this lane's first row from its first key.
//! [mask]
template <class Config>
__device__ __forceinline__ void hide(float (&s)[Config::kKeyTiles][Config::kBlockM / 8][4], const Shape& shape, int own,
                                     int keys) {
#pragma unroll
  for (int m = 0; m < Config::kKeyTiles; ++m)
#pragma unroll
    for (int n = 0; n < Config::kBlockM / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = 16 * m + 8 * (e / 2), row = 8 * n + e % 2;  // from this lane's first
        if (key - row < own - shape.window_left || key - row > own + shape.window_right || key >= keys)
          s[m][n][e] = -INFINITY;
      }
}
//! [mask]

// Softcap and dropout. Of a score: P, and the factor of dP - D that the other warp takes, P times the slope of the cap.
//! [features]
struct Factors {
  float p, ds;
};
__device__ __forceinline__ Factors capped(float s, float lse_log2, const Shape& shape) {
  if (s == -INFINITY) return {0, 0};
  if (shape.softcap == 0) {
    const float p = exp2f(fmaf(s, shape.softmax_scale * kLog2E, -lse_log2));
    return {p, p};
  }
  // tanh y = 1 - 2 / (e^2y + 1), a difference of like numbers where y is small; its slope is 1 - tanh^2.
  const float y = s * (shape.softmax_scale / shape.softcap), y2 = y * y;
  const float series = y * fmaf(y2, fmaf(y2, fmaf(y2, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1);
  const float half = __fdividef(1, exp2f(2 * kLog2E * y) + 1), tanh_y = fabsf(y) < 0.25f ? series : fmaf(-2, half, 1);
  const float p = exp2f(fmaf(shape.softcap * kLog2E, tanh_y, -lse_log2));
  return {p, p * (4 * half * (1 - half))};
}
// The bytes of dropout for rows `row` and row + 1 and each 16 keys of this lane, in the order of the accumulators. The
// lanes of two neighbouring keys need the same two calls of Philox: each makes one.
template <int kKeyTiles>
__device__ __forceinline__ void draw(uint32_t (&bytes)[2][kKeyTiles], uint64_t seed, int64_t bh, int row, int key) {
  const int odd = threadIdx.x / 4 % 2;
  const PhiloxBits bits = dropout_bits(seed, bh, row + odd, key / 64, threadIdx.x % 32 / 8);
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m) {
    uint32_t own = bits.word[m];
#pragma unroll
    for (int w = 1; w + m < 4; ++w)
      if (key % 64 / 16 == w) own = bits.word[w + m];
    const uint32_t other = __shfl_xor_sync(~0u, own, 4);
    bytes[0][m] = (odd ? other : own) >> 8 * odd;
    bytes[1][m] = (odd ? own : other) >> 8 * odd;
  }
}
//! [features]

// (8) dQ, rounded: the same threads and fragments as in the product.
//! [convert]
template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    convert_kernel(const float4* gAccum,  // [slices, tiles, fragments, threads]
                   Element* gdQ,          // [B, Hq, seqlen_q, d]
                   Shape shape, Packing packing) {
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int m_block = blockIdx.x % packing.num_m_blocks;
  const Sequence own =
      sequence_of(shape, packing, blockIdx.x / packing.num_m_blocks, Config::kHeadDim, Config::kBlockM);
  if (m_block * Config::kBlockM >= own.seqlen_q) return;  // of a batch with longer sequences
  constexpr int kTilesN = Config::kQueryCols / 8;
  const int row0 = m_block * Config::kBlockM + warp_id % Config::kQueryWarpsM * Config::kQueryRows;
  const int col0 = warp_id / Config::kQueryWarpsM * Config::kQueryCols + 2 * (lane_id % 4);
  float4 sums[Config::kFragments] = {};
  for (int slice = 0; slice < packing.num_slices; ++slice) {
    const int64_t tile = slice * packing.slice_tiles + own.tile + m_block;
#pragma unroll
    for (int f = 0; f < Config::kFragments; ++f) {
      const float4 x = sums[f], y = gAccum[(tile * Config::kFragments + f) * Config::kThreads + threadIdx.x];
      sums[f] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
  }
#pragma unroll
  for (int f = 0; f < Config::kFragments; ++f) {
    const float4 x = sums[f];
    const int row = row0 + f / kTilesN * 16 + lane_id / 4;
    Element* const dq = gdQ + own.q + int64_t{row} * packing.q_step + col0 + f % kTilesN * 8;
    const float scale = shape.softmax_scale;
    if (row < own.seqlen_q) *reinterpret_cast<uint32_t*>(dq) = pack2<Element>(x.x * scale, x.y * scale);
    if (row + 8 < own.seqlen_q)
      *reinterpret_cast<uint32_t*>(dq + 8 * packing.q_step) = pack2<Element>(x.z * scale, x.w * scale);
  }
}
//! [convert]

}  // namespace ATTN_BACKEND::backward_tiles
