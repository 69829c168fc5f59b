// Shared by the backward steps from b2 on: swizzle, KV tile range of a query tile, the MMA loop,
// and the preprocess and postprocess kernels.
#pragma once

#include "attn/kernel.h"
#include "emulator/warp_access.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::backward_tiles {
using namespace attn;

// XOR swizzle: offset of element (row, col) of a tile with rows of kWidth elements. The 16-byte
// chunks of a row are permuted so that the 8 rows that ldmatrix reads at once lie in disjoint
// banks. Rows of 4 chunks share the 32 banks in pairs, so their permutation changes every second
// row.
//! [swizzle]
template <int kWidth>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  constexpr int kChunks = kWidth / 8;  // 4, 8 or 16 per row
  const int phase = kChunks >= 8 ? row % 8 : row / 2 % 4;
  return row * kWidth + ((col / 8) ^ phase) * 8 + col % 8;
}
template <int kWidth>
constexpr bool free_of_conflicts() {  // for the two ldmatrix patterns of multiply()
  for (int col = 0; col < kWidth; col += 16)
    if (ldmatrix_access(
            [=](int l) { return 2 * swizzled_offset<kWidth>(l % 16, col + l / 16 * 8); }, 4)
                .conflicts() > 0 ||
        ldmatrix_access(
            [=](int l) {
              return 2 * swizzled_offset<kWidth>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8);
            },
            4)
                .conflicts() > 0)
      return false;
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<128>());
//! [swizzle]

// The KV tiles that at least one query of rows [row0, row0 + rows) sees. If there is none, the
// first tile is visited, fully masked, so that dQ = 0 is written.
struct KvBlockRange {
  int begin, end;
};
inline __device__ KvBlockRange kv_block_range(const Shape& shape, int row0, int rows, int block_n) {
  const int last = min(row0 + rows, shape.seqlen_q) - 1,
            causal_offset = shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, row0 + causal_offset - shape.window_left);
  const int end = min(shape.seqlen_k, last + causal_offset + shape.window_right + 1);
  if (end <= begin) return {0, 1};
  return {begin / block_n, ceil_div(end, block_n)};
}

// Copies rows [row0, row0 + kRows) of a [rows, d] matrix; rows past the end become 0.
template <int kRows, class Config, class Element>
__device__ void load_tile(Element* tile, const Element* g, int row0, int rows) {
  constexpr int kVectors = Config::kHeadDim / 8;  // of 16 bytes, per row
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kVectors; i += Config::kThreads) {
    const int r = i / kVectors, c = i % kVectors * 8;
    const auto* from = reinterpret_cast<const uint4*>(g + int64_t{row0 + r} * Config::kHeadDim + c);
    *reinterpret_cast<uint4*>(tile + swizzled_offset<Config::kHeadDim>(r, c)) =
        row0 + r < rows ? *from : uint4{};
  }
}

// C += A B for one warp: rows of A from `row0` on, columns of B from `col0` on. Shared memory holds
// A as [rows, kK], or as [kK, rows] if kTransposedA; B as [kK, columns], or as [columns, kK] if
// kTransposedB. kWidthA and kWidthB are the lengths of stored rows.
//! [multiply]
template <int kK, bool kTransposedA, bool kTransposedB, int kWidthA, int kWidthB, int kTilesM,
          int kTilesN, class Element>
__device__ __forceinline__ void multiply(float (&c)[kTilesM][kTilesN][4], const Element* sA,
                                         int row0, const Element* sB, int col0) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kK; k += 16) {
    uint32_t a[kTilesM][4], b[4];
#pragma unroll
    for (int m = 0; m < kTilesM; ++m)
      if constexpr (kTransposedA)
        ldmatrix_x4_trans(a[m], sA + swizzled_offset<kWidthA>(k + lane_id / 16 * 8 + lane_id % 8,
                                                              row0 + 16 * m + lane_id / 8 % 2 * 8));
      else
        ldmatrix_x4(a[m], sA + swizzled_offset<kWidthA>(row0 + 16 * m + lane_id % 16,
                                                        k + lane_id / 16 * 8));
#pragma unroll
    for (int n = 0; n < kTilesN; n += 2) {
      if constexpr (kTransposedB)
        ldmatrix_x4(b, sB + swizzled_offset<kWidthB>(col0 + 8 * n + lane_id / 16 * 8 + lane_id % 8,
                                                     k + lane_id / 8 % 2 * 8));
      else
        ldmatrix_x4_trans(
            b, sB + swizzled_offset<kWidthB>(k + lane_id % 16, col0 + 8 * n + lane_id / 16 * 8));
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        mma_m16n8k16<Element>(c[m][n], a[m], {b[0], b[1]}, c[m][n]);
        mma_m16n8k16<Element>(c[m][n + 1], a[m], {b[2], b[3]}, c[m][n + 1]);
      }
    }
  }
}
//! [multiply]

// (1) Preprocess: D = rowsum(dO . O), one warp per row; zeroes the dQ accumulator.
//! [dot]
template <class Element>
__global__ void dot_kernel(const Element* gO,   // [rows, d]
                           const Element* gdO,  // [rows, d]
                           float* gD,           // [rows]
                           float4* gAccum,      // [accums]: dQ accumulator
                           int64_t rows, int d, int64_t accums) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, row = thread / 32;
  for (int64_t i = thread; i < accums; i += int64_t{gridDim.x} * blockDim.x) gAccum[i] = float4{};
  float sum = 0;
  if (row < rows)
    for (int x = thread % 32; x < d; x += 32)
      sum += to_float(gO[row * d + x]) * to_float(gdO[row * d + x]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (row < rows && thread % 32 == 0) gD[row] = sum;
}
//! [dot]

// (8) Postprocess: rounds dQ; thread and fragment indices are those of the MMAs.
//! [convert]
template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    convert_kernel(const float4* gAccum,  // [B, Hq, num_m_blocks, fragments, threads]
                   Element* gdQ,          // [B, Hq, seqlen_q, d]
                   Shape shape) {
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int num_m_blocks = ceil_div(shape.seqlen_q, Config::kBlockM);
  const int64_t bh = blockIdx.x / num_m_blocks;
  const int row0 =
      blockIdx.x % num_m_blocks * Config::kBlockM + warp_id / Config::kWarpsN * Config::kQueryRows;
  const int col0 = warp_id % Config::kWarpsN * Config::kQueryCols + 2 * (lane_id % 4);
  constexpr int kTilesN = Config::kQueryCols / 8, kFragments = Config::kQueryRows / 16 * kTilesN;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
    const float4 x =
        gAccum[(int64_t{blockIdx.x} * kFragments + f) * Config::kThreads + threadIdx.x];
    const int row = row0 + f / kTilesN * 16 + lane_id / 4;
    Element* const dq =
        gdQ + (bh * shape.seqlen_q + row) * Config::kHeadDim + col0 + f % kTilesN * 8;
    const float scale = shape.softmax_scale;
    if (row < shape.seqlen_q)
      *reinterpret_cast<uint32_t*>(dq) = pack2<Element>(x.x * scale, x.y * scale);
    if (row + 8 < shape.seqlen_q)
      *reinterpret_cast<uint32_t*>(dq + 8 * Config::kHeadDim) =
          pack2<Element>(x.z * scale, x.w * scale);
  }
}
//! [convert]

}  // namespace ATTN_BACKEND::backward_tiles
