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

// How a block of threads reads and writes a tile. Four lanes have a row: lane l the eights of
// columns 8 (l + 4 j), for j below d / 32.
//
//     lane of the row      0     1     2     3     0      1      2      3      0 ...
//     columns             0-7  8-15  16-23 24-31 32-39  40-47  48-55  56-63  64-71 ...
//
// So a rotation adds up most numbers within a lane. A warp reads with one instruction 64 bytes of
// each of 8 rows, 16 a lane, and writes 32 bytes of their codes: whole sectors. With two
// lanes a row it would write halves.
template <int kHeadDim>
struct RowLanes {
  static constexpr int kLanes = 4, kEights = kHeadDim / 8 / kLanes;  // of a row; of a lane
  // Blocks on an SM, each with a tile in its registers: at most 64, 80 and 255 of a thread.
  static constexpr int kBlocks = kHeadDim == 64 ? 4 : kHeadDim == 128 ? 3 : 1;
};

// The sign of column i: a bit of a hash, the same for all rows, heads and tensors.
//! [sign]
constexpr __host__ __device__ float random_sign(int column) {
  uint32_t x = static_cast<uint32_t>(column) * 0x9E3779B9u;
  x = (x ^ x >> 15) * 0x85EBCA6Bu;
  return (x ^ x >> 13) & 1 ? -1.0f : 1.0f;
}
//! [sign]
// Those of a lane's columns of j = 4 part to 4 part + 3, 16 words of two numbers in bf16: bit
// 31 - w has the sign of the upper number of word w, bit 15 - w that of the lower one. Shifted by w
// they are where the word has its signs.
constexpr uint32_t signs_of_lane(int lane, int part) {
  uint32_t signs = 0;
  for (int i = 0; i < 32; ++i)
    if (random_sign(8 * (lane + 4 * (4 * part + i / 8)) + i % 8) < 0)
      signs |= 1u << (i % 2 * 16 + 15 - i / 2);
  return signs;
}
// Constants of the machine code, of which a lane selects its own.
template <int kPart>
__device__ __forceinline__ uint32_t select_signs(int lane) {
  constexpr uint32_t kSigns[] = {signs_of_lane(0, kPart), signs_of_lane(1, kPart),
                                 signs_of_lane(2, kPart), signs_of_lane(3, kPart)};
  return lane < 2 ? (lane == 0 ? kSigns[0] : kSigns[1]) : (lane == 2 ? kSigns[2] : kSigns[3]);
}
// Multiplies a lane's eight of bf16 by their signs.
__device__ __forceinline__ void flip_signs(uint4& eight, int lane, int j) {
  const uint32_t signs = (j < 4 ? select_signs<0>(lane) : select_signs<1>(lane)) << (j % 4 * 4);
  eight.x ^= signs & 0x80008000u, eight.y ^= signs << 1 & 0x80008000u;
  eight.z ^= signs << 2 & 0x80008000u, eight.w ^= signs << 3 & 0x80008000u;
}

// H x in place, not divided by sqrt(d): log2(d) times, numbers that are 1, 2, 4, ... apart become
// their sum and difference. Those that are 8 and 16 apart are in two lanes.
//! [hadamard]
template <int kCount>
__device__ __forceinline__ void add_and_subtract(float (&x)[kCount], int apart) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if ((i & apart) == 0) {
      const float a = x[i], b = x[i + apart];
      x[i] = a + b, x[i + apart] = a - b;
    }
}
template <int kLanes, int kCount>
__device__ __forceinline__ void hadamard(float (&x)[kCount], int lane) {
#pragma unroll
  for (int apart = 1; apart < 8; apart *= 2) add_and_subtract(x, apart);
#pragma unroll
  for (int apart = 1; apart < kLanes; apart *= 2) {
    const float sign = (lane & apart) == 0 ? 1.0f : -1.0f;  // one has the sum, one the difference
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = fmaf(sign, x[i], __shfl_xor_sync(~0u, x[i], apart));
  }
#pragma unroll
  for (int apart = 8; apart < kCount; apart *= 2) add_and_subtract(x, apart);
}
//! [hadamard]

//! [tiles]
struct RowsOf {            // Q or K
  const __nv_bfloat16* g;  // [heads, rows, d]
  uint8_t* g8;
  float* gDescale;  // [heads, tiles]
  int64_t heads;
  int rows, tiles;
};
// A tile of 128 rows. `turn(x, row)` is what is done before to a lane's numbers of a row of it.
template <class Pass, int kHeadDim, bool kRotated, class Turn>
__device__ __forceinline__ void quantise_tile(const RowsOf& t, int64_t head, int tile,
                                              float (&sMax)[Pass::kWarps], Turn turn) {
  constexpr int kLanes = RowLanes<kHeadDim>::kLanes, kEights = RowLanes<kHeadDim>::kEights;
  constexpr int kRowsAtOnce = Pass::kThreads / kLanes, kTimes = kScaleRows / kRowsAtOnce;
  const int64_t first = (head * t.rows + tile * kScaleRows) * kHeadDim;
  const __nv_bfloat16* const gTile = t.g + first;
  uint8_t* const gTile8 = t.g8 + first;
  const int rows = t.rows - tile * kScaleRows;
  const int row = static_cast<int>(threadIdx.x) / kLanes, lane = threadIdx.x % kLanes;
  const auto place = [=](int n, int j) {  // of the lane's eights
    return (row + n * kRowsAtOnce) * kHeadDim + 8 * (lane + kLanes * j);
  };
  uint4 eights[kTimes][kEights];
#pragma unroll
  for (int n = 0; n < kTimes; ++n)
#pragma unroll
    for (int j = 0; j < kEights; ++j)
      eights[n][j] = row + n * kRowsAtOnce < rows
                         ? *reinterpret_cast<const uint4*>(gTile + place(n, j))
                         : uint4{};
  float x[kTimes][8 * kEights], largest = 0;
#pragma unroll
  for (int n = 0; n < kTimes; ++n) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      if constexpr (kRotated) flip_signs(eights[n][j], lane, j);
      const Eight e = load_eight(reinterpret_cast<const __nv_bfloat16*>(&eights[n][j]));
#pragma unroll
      for (int i = 0; i < 8; ++i) x[n][8 * j + i] = e.x[i];
    }
    turn(x[n], row + n * kRowsAtOnce);
    if constexpr (kRotated) hadamard<kLanes>(x[n], lane);
#pragma unroll
    for (const float number : x[n]) largest = fmaxf(largest, fabsf(number));
  }
  largest = fmaxf(block_max(largest, sMax), kSmallestMax);
  const float scale = kLargestE4M3 / largest;
  // H x is sqrt(d) times too large, which codes do not see, as the scale is that of the largest.
  constexpr float kNorm =
      !kRotated ? 1 : kHeadDim == 64 ? 0.125f : kHeadDim == 128 ? 0.0883883476f : 0.0625f;
  if (threadIdx.x == 0) t.gDescale[head * t.tiles + tile] = largest / kLargestE4M3 * kNorm;
#pragma unroll
  for (int n = 0; n < kTimes; ++n) {
    if (row + n * kRowsAtOnce >= rows) break;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const float* const e = x[n] + 8 * j;
      *reinterpret_cast<uint2*>(gTile8 + place(n, j)) =
          make_uint2(pack4_e4m3(e[0] * scale, e[1] * scale, e[2] * scale, e[3] * scale),
                     pack4_e4m3(e[4] * scale, e[5] * scale, e[6] * scale, e[7] * scale));
    }
  }
}

// Q and K: a block has a tile of one of them, blockIdx.y says of which.
template <class Pass, int kHeadDim, bool kRotated>
__global__ void __launch_bounds__(Pass::kThreads, RowLanes<kHeadDim>::kBlocks)
    quantise_tiles_kernel(RowsOf q, RowsOf k) {
  __shared__ float sMax[Pass::kWarps];
  const RowsOf t = blockIdx.y == 0 ? q : k;
  const int64_t head = blockIdx.x / t.tiles;
  if (head >= t.heads) return;  // the whole block
  quantise_tile<Pass, kHeadDim, kRotated>(t, head, static_cast<int>(blockIdx.x % t.tiles), sMax,
                                          [](auto&, int) {});
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

// Q or K, from `given`.
inline RowsOf rows_of(const Arguments& args, const std::string& name, const std::string& given) {
  const Problem& p = args.problem;
  const int64_t rows = name == "q" ? p.seqlen_q : p.seqlen_k;
  return RowsOf{args.in<__nv_bfloat16>(given),
                args.out<uint8_t>(name + "8"),
                args.out<float>(name + "_descale"),
                p.batch * (name == "q" ? p.heads : p.kv_heads),
                static_cast<int>(rows),
                static_cast<int>(ceil_div(rows, kScaleRows))};
}

//! [launch_tiles]
template <class Pass, bool kRotated, int kHeadDim>
Status quantise_q_and_k(const Arguments& args, const std::string& suffix = "") {
  const RowsOf q = rows_of(args, "q", "q" + suffix), k = rows_of(args, "k", "k" + suffix);
  args.phase("quantise");
  const int64_t blocks = std::max(q.heads * q.tiles, k.heads * k.tiles);
  return launch_kernel(quantise_tiles_kernel<Pass, kHeadDim, kRotated>,
                       dim3(static_cast<unsigned>(blocks), 2), dim3(Pass::kThreads), 0, args.stream,
                       q, k);
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
