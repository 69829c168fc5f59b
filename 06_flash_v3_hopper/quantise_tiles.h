// From bf16 to e4m3 with a scale for each tile of 128 rows. A block has a tile in its registers, so
// it knows the largest number before it rounds the first: one pass, where one scale for a tensor
// needs two.
//
//     q_descale [B Hq, tiles], k_descale and v_descale [B Hkv, tiles]
//
// Incoherent processing (kRotated): Q and K are multiplied by one orthogonal matrix, so that Q K^T
// stays as it is. It is diag(+-1) H / sqrt(d), with Hadamard's matrix H: each number becomes a sum of
// all of its row, and an outlier is spread over them.
#pragma once

#include "quantise.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

constexpr int kScaleRows = 128;  // rows of a tile that has a scale

// The sign of column i: a bit of a hash, the same for all rows, heads and tensors.
//! [sign]
inline __host__ __device__ float random_sign(int column) {
  uint32_t x = static_cast<uint32_t>(column) * 0x9E3779B9u;
  x = (x ^ x >> 15) * 0x85EBCA6Bu;
  return (x ^ x >> 13) & 1 ? -1.0f : 1.0f;
}
//! [sign]

// H x in place, not divided by sqrt(d): log2(d) times, numbers that are 1, 2, 4, ... apart become their
// sum and difference. Eight neighbours are a lane's own, kLanes lanes have a row.
//! [hadamard]
template <int kLanes>
__device__ __forceinline__ void hadamard(Eight& e, int lane) {
#pragma unroll
  for (int apart = 1; apart < 8; apart *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if ((i & apart) == 0) {
        const float a = e.x[i], b = e.x[i + apart];
        e.x[i] = a + b, e.x[i + apart] = a - b;
      }
#pragma unroll
  for (int apart = 1; apart < kLanes; apart *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(~0u, e.x[i], apart);
      e.x[i] = (lane & apart) == 0 ? e.x[i] + other : other - e.x[i];
    }
}
//! [hadamard]

// Q and K: a block has 128 rows of a head. blockIdx.y: which of them.
//! [tiles]
struct RowsOf {
  const __nv_bfloat16* g;  // [heads, rows, d]
  uint8_t* g8;
  float* gDescale;  // [heads, tiles]
  int64_t heads;
  int rows, tiles;
};
template <class Pass, int kHeadDim, bool kRotated>
__global__ void __launch_bounds__(Pass::kThreads)
    quantise_tiles_kernel(RowsOf q, RowsOf k) {
  __shared__ float sMax[Pass::kWarps];
  constexpr int kLanes = kHeadDim / 8, kRowsAtOnce = Pass::kThreads / kLanes;
  constexpr int kTimes = kScaleRows / kRowsAtOnce;
  const RowsOf t = blockIdx.y == 0 ? q : k;
  const int64_t head = blockIdx.x / t.tiles;
  const int tile = static_cast<int>(blockIdx.x % t.tiles), lane = threadIdx.x % kLanes;
  if (head >= t.heads) return;  // the whole block
  const int row0 = tile * kScaleRows + static_cast<int>(threadIdx.x) / kLanes;
  const int64_t first = (head * t.rows + row0) * kHeadDim + 8 * lane;
  Eight e[kTimes];
  float largest = 0;
#pragma unroll
  for (int n = 0; n < kTimes; ++n) {
    const bool exists = row0 + n * kRowsAtOnce < t.rows;
    e[n] = exists ? load_eight(t.g + first + n * kRowsAtOnce * kHeadDim) : Eight{};
    if constexpr (kRotated) {
#pragma unroll
      for (int i = 0; i < 8; ++i) e[n].x[i] *= random_sign(8 * lane + i);
      hadamard<kLanes>(e[n], lane);
    }
    largest = largest_of(e[n], largest);
  }
  largest = fmaxf(block_max(largest, sMax), kSmallestMax);
  const float scale = kLargestE4M3 / largest;
  // H x is sqrt(d) times too large, which codes do not see, as the scale is that of the largest.
  constexpr float kNorm = !kRotated ? 1 : kHeadDim == 64 ? 0.125f : kHeadDim == 128 ? 0.0883883476f : 0.0625f;
  if (threadIdx.x == 0) t.gDescale[head * t.tiles + tile] = largest / kLargestE4M3 * kNorm;
#pragma unroll
  for (int n = 0; n < kTimes; ++n) {
    if (row0 + n * kRowsAtOnce >= t.rows) break;
    const float(&x)[8] = e[n].x;
    *reinterpret_cast<uint2*>(t.g8 + first + n * kRowsAtOnce * kHeadDim) =
        make_uint2(pack4_e4m3(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale),
                   pack4_e4m3(x[4] * scale, x[5] * scale, x[6] * scale, x[7] * scale));
  }
}
//! [tiles]

// V: a block has 128 keys of a head, all columns, and transposes 64 of them at a time.
//! [transposed]
template <class Pass, int kHeadDim>
__global__ void __launch_bounds__(Pass::kThreads)
    transpose_tiles_kernel(const __nv_bfloat16* __restrict__ gV, int seqlen_k,
                           uint8_t* __restrict__ gV8, float* __restrict__ gDescale) {
  __shared__ TransposeStorage smem;
  __shared__ float sMax[Pass::kWarps];
  constexpr int kPanels = kHeadDim / kTransposedColumns;
  static_assert(kScaleRows == kTransposedKeys);
  const int tiles = ceil_div(seqlen_k, kScaleRows);
  const int64_t head = blockIdx.x / tiles, padded = padded_keys(seqlen_k);
  const int tile = static_cast<int>(blockIdx.x % tiles), key0 = tile * kScaleRows;
  const int column = static_cast<int>(threadIdx.x) % 8 * 8;
  const int group = static_cast<int>(threadIdx.x) / 8;
  Eight e[kPanels][4];
  float largest = 0;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    load_keys(gV + head * seqlen_k * kHeadDim + panel * kTransposedColumns + column, kHeadDim, key0,
              seqlen_k, group, e[panel]);
    for (const Eight& one : e[panel]) largest = largest_of(one, largest);
  }
  largest = fmaxf(block_max(largest, sMax), kSmallestMax);
  if (threadIdx.x == 0) gDescale[head * tiles + tile] = largest / kLargestE4M3;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    store_transposed(smem, e[panel], kLargestE4M3 / largest, group, column);
    __syncthreads();  // all codes are there
    write_transposed(smem, gV8 + (head * kHeadDim + panel * kTransposedColumns) * padded, padded,
                     key0);
    __syncthreads();  // all have read them
  }
}
//! [transposed]

// Of Q and K: a scale for each tile.
struct RowDescales {
  const float *gQ, *gK;  // [B Hq, tiles_q], [B Hkv, tiles_k]
  int tiles_q, tiles_k;
  RowDescales(const Arguments& args)
      : gQ(args.out<float>("q_descale")),
        gK(args.out<float>("k_descale")),
        tiles_q(static_cast<int>(ceil_div(args.problem.seqlen_q, kScaleRows))),
        tiles_k(static_cast<int>(ceil_div(args.problem.seqlen_k, kScaleRows))) {}
  __device__ float q(int head, int row) const { return gQ[head * tiles_q + row / kScaleRows]; }
  __device__ float k(int head, int key) const { return gK[head * tiles_k + key / kScaleRows]; }
};
struct TileDescales : RowDescales {  // and of V
  const float* gV;  // as gK
  TileDescales(const Arguments& args) : RowDescales(args), gV(args.out<float>("v_descale")) {}
  __device__ float v(int head, int key) const { return gV[head * tiles_k + key / kScaleRows]; }
};

//! [launch_tiles]
template <class Pass, bool kRotated, int kHeadDim>
Status quantise_q_and_k(const Arguments& args) {
  const Problem& p = args.problem;
  const auto rows_of = [&](const std::string& name, int64_t heads, int64_t rows) {
    return RowsOf{args.in<__nv_bfloat16>(name), args.out<uint8_t>(name + "8"),
                  args.out<float>(name + "_descale"), heads, static_cast<int>(rows),
                  static_cast<int>(ceil_div(rows, kScaleRows))};
  };
  const RowsOf q = rows_of("q", p.batch * p.heads, p.seqlen_q);
  const RowsOf k = rows_of("k", p.batch * p.kv_heads, p.seqlen_k);
  args.phase("quantise");
  const int64_t blocks = std::max(q.heads * q.tiles, k.heads * k.tiles);
  return launch_kernel(quantise_tiles_kernel<Pass, kHeadDim, kRotated>,
                       dim3(static_cast<unsigned>(blocks), 2), dim3(Pass::kThreads), 0,
                       args.stream, q, k);
}

template <bool kRotated, int kHeadDim>
Status quantise_tiles(const Arguments& args) {
  using Pass = QuantisePass;
  const Problem& p = args.problem;
  const Status status = quantise_q_and_k<Pass, kRotated, kHeadDim>(args);
  if (!status.ok()) return status;
  const int64_t blocks = p.batch * p.kv_heads * ceil_div(p.seqlen_k, kScaleRows);
  return launch_kernel(transpose_tiles_kernel<Pass, kHeadDim>,
                       dim3(static_cast<unsigned>(blocks)), dim3(Pass::kThreads), 0, args.stream,
                       args.in<__nv_bfloat16>("v"), static_cast<int>(p.seqlen_k),
                       args.out<uint8_t>("v8"), args.out<float>("v_descale"));
}
//! [launch_tiles]

}  // namespace ATTN_BACKEND::hopper
