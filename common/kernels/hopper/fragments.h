// Per-thread parts of S, P and O in a consumer warpgroup (masks, P operands, epilogue), and
// pipeline states. From chapter 06_flash_v3_hopper.
//
// Layout of an accumulator of 64 rows and n columns (drawn in ptx/wgmma.h): lane l of a warp holds,
// of every 8 columns, columns 2 (l % 4) and the next one, of rows l / 4 and l / 4 + 8: [n / 8][4]
// per thread.
#pragma once

#include "attn/kernel.h"
#include "kernels/hopper/tile_order.h"
#include "ptx/mma.h"
#include "ptx/wgmma.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Finite initial row maximum: avoids (-inf) - (-inf) = NaN.
constexpr float kLowest = -3.4028234e38f;
constexpr int kWarpgroup = 128, kWarp = 32;  // threads

// Stage index and mbarrier phase parity of a pipeline, both derived from the number of tiles so
// far. A consumer waits on phase(), the producer on phase() ^ 1, which passes at once the first
// time.
//! [pipeline]
template <int kStages>
struct PipelineState {
  int count = 0;
  __device__ int index() const { return count % kStages; }
  __device__ int phase() const { return count / kStages % 2; }
  __device__ void advance() { ++count; }
  __device__ PipelineState previous() const { return {count - 1}; }
};
//! [pipeline]

// Reads threadIdx.x each time: as one variable, it and all values derived from it would occupy
// registers in the loop.
__device__ __forceinline__ int thread_index() {
#ifdef ATTN_EMULATED
  return static_cast<int>(threadIdx.x);
#else
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
#endif
}
// The first of this lane's two rows in the tile (the other is 8 below), and the first of its two
// columns in each group of 8.
__device__ __forceinline__ int first_row() {
  return thread_index() / kWarp * 16 + thread_index() % kWarp / 4;
}
__device__ __forceinline__ int quad_col() { return thread_index() % 4 * 2; }

// The descriptor with a stride of `bytes` between groups of 8 rows, for tiles whose groups are not
// contiguous.
__device__ __forceinline__ SmemDescriptor with_stride_byte_offset(SmemDescriptor operand,
                                                                  int bytes) {
  return {(operand.bits & ~(uint64_t{0x3FFF} << 32)) | static_cast<uint64_t>(bytes >> 4) << 32};
}

__device__ __forceinline__ float quad_max(float x) {  // over the 4 lanes that share a row
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// tanh y = 1 - 2 / (e^2y + 1). Cancellation near 0: use the Taylor series there.
//! [softcap]
template <class Config>
__device__ __forceinline__ void apply_softcap(float (&s)[Config::kBlockN / 8][4],
                                              const Shape& shape) {
  const float in = shape.softmax_scale / shape.softcap;
#pragma unroll
  for (int n = 0; n < Config::kBlockN / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float y = s[n][i] * in, y2 = y * y;
      const float series = y * fmaf(y2, fmaf(y2, fmaf(y2, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1);
      const float whole = fmaf(-2, __fdividef(1, exp2f(2 * kLog2e * y) + 1), 1);
      s[n][i] = shape.softcap * (fabsf(y) < 0.25f ? series : whole);
    }
}
//! [softcap]

// Sets the scores of masked keys to kMaskedScore. `row0`: key index on the diagonal of the tile's
// first row.
//! [mask]
template <class Score>
constexpr Score kMaskedScore = -INFINITY;
template <>
inline constexpr int kMaskedScore<int> = -0x800000;  // below every int8 score; the bits of -inf
template <class Config, class Score>
__device__ __forceinline__ void apply_mask(Score (&s)[Config::kBlockN / 8][4], const Shape& shape,
                                           const KvBlockRange& kv_range, int n_block, int row0,
                                           int last_key) {
  if (n_block >= kv_range.unmasked_begin && n_block < kv_range.unmasked_end) return;
  // Indices relative to this lane's first key: the last and first visible key of each of its rows.
  const int key0 = n_block * Config::kBlockN + quad_col();
  const int row_minus_col = row0 + first_row() - key0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int last = min(row_minus_col + 8 * r + shape.window_right, last_key - key0);
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (8 * n + i > last) s[n][2 * r + i] = kMaskedScore<Score>;
  }
  if (n_block >= kv_range.unmasked_begin) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {  // left window edge
    const int first = row_minus_col + 8 * r - shape.window_left;
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (8 * n + i < first) s[n][2 * r + i] = kMaskedScore<Score>;
  }
}
//! [mask]

template <int kColumns>
__device__ __forceinline__ void rescale_rows(float (&o)[kColumns / 8][4],
                                             const float (&rescale)[2]) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[n][i] *= rescale[i / 2];
}

// Two neighbouring accumulators, rounded in pairs, form the A operand of 16 keys.
template <class Element, int kBlockN>
__device__ __forceinline__ void round_p(uint32_t (&p)[kBlockN / 16][4],
                                        const float (&s)[kBlockN / 8][4]) {
#pragma unroll
  for (int n = 0; n < kBlockN / 8; ++n) {
    p[n / 2][n % 2 * 2] = pack2<Element>(s[n][0], s[n][1]);
    p[n / 2][n % 2 * 2 + 1] = pack2<Element>(s[n][2], s[n][3]);
  }
}

// Register epilogue: (7) O = O / l, once; (8) store O and lse. The four lanes of a row hold two
// columns of every eight, 16 bytes in all: half a sector. So pairs of lanes exchange halves first:
// then each lane has four contiguous columns, and a quad stores 32 bytes, a whole sector.
//! [epilogue]
template <class Element, int kHeadDim, class Tile>
__device__ __forceinline__ void store_o(Element* gO, float* gLse, const Tile& work,
                                        int64_t row_stride, const float (&o)[kHeadDim / 8][4],
                                        const float (&row_max)[2], float (&row_sum)[2]) {
  const bool upper = thread_index() % 2 != 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] = quad_sum(row_sum[r]);
    // O = 0 for a fully masked row. Not `> 0`: a NaN would get the lse of such a row.
    const float factor = row_sum[r] != 0 ? __fdividef(1, row_sum[r]) : 0;
    const int row = first_row() + 8 * r;
    const bool exists = work.row0 + row < work.seqlen_q;
    Element* const gRow =
        gO + work.o + row * row_stride + (upper ? 8 : 0) + thread_index() / 2 % 2 * 4;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n += 2) {
      const uint32_t even = pack2<Element>(o[n][2 * r] * factor, o[n][2 * r + 1] * factor);
      const uint32_t odd = pack2<Element>(o[n + 1][2 * r] * factor, o[n + 1][2 * r + 1] * factor);
      const uint32_t got = __shfl_xor_sync(~0u, upper ? even : odd, 1);
      if (exists)
        *reinterpret_cast<uint2*>(gRow + 8 * n) =
            upper ? make_uint2(got, odd) : make_uint2(even, got);
    }
    if (quad_col() == 0 && exists)
      gLse[work.lse + row] =
          row_sum[r] != 0 ? kLn2 * (row_max[r] + __log2f(row_sum[r])) : -INFINITY;
  }
}
//! [epilogue]

}  // namespace ATTN_BACKEND::hopper
