// From bf16 to e4m3 with a scale for each tile of 128 rows. A block has a tile in its registers, so
// it knows the largest number before it rounds the first: one pass, where one scale for a tensor
// needs two. The next tile's loads are in flight while it works on this one.
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
  // A thread has 32 or 64 numbers of a tile as floats, and of the next one in bf16. Blocks on an SM
  // have at most 64 registers a thread at d=64, and 128 else: 64 KB are in flight.
  static constexpr int kThreads = kHeadDim == 256 ? 512 : 256;
  static constexpr int kBlocks = kHeadDim == 64 ? 4 : kHeadDim == 128 ? 2 : 1;
  static constexpr int kRowsAtOnce = kThreads / kLanes, kTimes = kScaleRows / kRowsAtOnce;
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
struct TileOfRows {        // 128 rows of a head, or what is left
  const __nv_bfloat16* g;  // [rows, d]
  uint8_t* g8;
  float* gDescale;
  int rows;
};
struct RowsOf {            // Q or K
  const __nv_bfloat16* g;  // [heads, rows, d]
  uint8_t* g8;
  float* gDescale;  // [heads, tiles]
  int64_t heads;
  int rows, tiles;  // of a head
  template <int kHeadDim>
  __device__ TileOfRows tile(int64_t head, int tile) const {
    const int row0 = tile * kScaleRows;
    const int64_t first = (head * rows + row0) * kHeadDim;
    return {g + first, g8 + first, gDescale + head * tiles + tile, rows - row0};
  }
};

// What threads of a block tell each other of a tile. Two of them, used in turn: a warp that writes
// the next has passed this one's barrier, and nobody still reads the one before.
template <int kHeadDim>
using TileMaxima = float[2][RowLanes<kHeadDim>::kThreads / 32];
template <int kWarps>
__device__ __forceinline__ float largest_of_block(float x, float (&sMax)[kWarps]) {
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  if (threadIdx.x % 32 == 0) sMax[threadIdx.x / 32] = x;
  __syncthreads();  // all have written
#pragma unroll
  for (int w = 0; w < kWarps; ++w) x = fmaxf(x, sMax[w]);
  return x;
}

// A thread's numbers of a tile, as they are read: two of a word.
template <int kHeadDim>
struct TileBits {
  using Lanes = RowLanes<kHeadDim>;
  uint4 eights[Lanes::kTimes][Lanes::kEights];
  __device__ static int row(int n) {
    return static_cast<int>(threadIdx.x) / Lanes::kLanes + n * Lanes::kRowsAtOnce;
  }
  __device__ static int place(int n, int j) {  // in the tile
    const int lane = threadIdx.x % Lanes::kLanes;
    return row(n) * kHeadDim + 8 * (lane + Lanes::kLanes * j);
  }
  __device__ __forceinline__ void load(const TileOfRows& t) {
#pragma unroll
    for (int n = 0; n < Lanes::kTimes; ++n)
#pragma unroll
      for (int j = 0; j < Lanes::kEights; ++j)
        eights[n][j] =
            row(n) < t.rows ? *reinterpret_cast<const uint4*>(t.g + place(n, j)) : uint4{};
  }
};

// Quantises the tile `t`, whose numbers are in `bits`. `turn(x, row)` is what is done before to a
// lane's numbers of a row; `prefetch` may load the next tile into `bits`.
template <int kHeadDim, bool kRotated, class Turn, class Prefetch>
__device__ __forceinline__ void quantise_tile(const TileOfRows& t, TileBits<kHeadDim>& bits,
                                              float (&sMax)[RowLanes<kHeadDim>::kThreads / 32],
                                              Turn turn, Prefetch prefetch) {
  using Lanes = RowLanes<kHeadDim>;
  const int lane = threadIdx.x % Lanes::kLanes;
  float x[Lanes::kTimes][8 * Lanes::kEights], largest = 0;
#pragma unroll
  for (int n = 0; n < Lanes::kTimes; ++n)
#pragma unroll
    for (int j = 0; j < Lanes::kEights; ++j) {
      if constexpr (kRotated) flip_signs(bits.eights[n][j], lane, j);
      const Eight e = load_eight(reinterpret_cast<const __nv_bfloat16*>(&bits.eights[n][j]));
#pragma unroll
      for (int i = 0; i < 8; ++i) x[n][8 * j + i] = e.x[i];
    }
  prefetch();
#pragma unroll
  for (int n = 0; n < Lanes::kTimes; ++n) {
    turn(x[n], bits.row(n));
    if constexpr (kRotated) hadamard<Lanes::kLanes>(x[n], lane);
#pragma unroll
    for (const float number : x[n]) largest = fmaxf(largest, fabsf(number));
  }
  largest = fmaxf(largest_of_block(largest, sMax), kSmallestMax);
  const float scale = kLargestE4M3 / largest;
  // H x is sqrt(d) times too large, which codes do not see, as the scale is that of the largest.
  constexpr float kNorm = !kRotated         ? 1
                          : kHeadDim == 64  ? 0.125f
                          : kHeadDim == 128 ? 0.0883883476f
                                            : 0.0625f;
  if (threadIdx.x == 0) *t.gDescale = largest / kLargestE4M3 * kNorm;
#pragma unroll
  for (int n = 0; n < Lanes::kTimes; ++n) {
    if (bits.row(n) >= t.rows) break;
#pragma unroll
    for (int j = 0; j < Lanes::kEights; ++j) {
      const float* const e = x[n] + 8 * j;
      *reinterpret_cast<uint2*>(t.g8 + bits.place(n, j)) =
          make_uint2(pack4_e4m3(e[0] * scale, e[1] * scale, e[2] * scale, e[3] * scale),
                     pack4_e4m3(e[4] * scale, e[5] * scale, e[6] * scale, e[7] * scale));
    }
  }
}

// Q and K: as many blocks as fit, each with every gridDim.x-th tile of both.
template <class Pass, int kHeadDim, bool kRotated>
__global__ void __launch_bounds__(RowLanes<kHeadDim>::kThreads, RowLanes<kHeadDim>::kBlocks)
    quantise_tiles_kernel(RowsOf q, RowsOf k) {
  __shared__ TileMaxima<kHeadDim> sMax;
  const int tiles_q = static_cast<int>(q.heads) * q.tiles;
  const int tiles = tiles_q + static_cast<int>(k.heads) * k.tiles;
  const auto tile = [&](int i) {
    const RowsOf& t = i < tiles_q ? q : k;
    const int own = i < tiles_q ? i : i - tiles_q;
    return t.tile<kHeadDim>(own / t.tiles, own % t.tiles);
  };
  int i = static_cast<int>(blockIdx.x);
  TileOfRows next = tile(i);
  TileBits<kHeadDim> bits;
  bits.load(next);
#pragma unroll 1
  for (int parity = 0; i < tiles; parity ^= 1) {
    const TileOfRows own = next;
    i += static_cast<int>(gridDim.x);
    quantise_tile<kHeadDim, kRotated>(
        own, bits, sMax[parity], [](auto&, int) {},
        [&] {
          if (i < tiles) bits.load(next = tile(i));
        });
  }
}
//! [tiles]

// V: a block has 128 keys of a head, all columns, and transposes 64 of them at a time.
//! [transposed]
template <class Pass, int kHeadDim>
__global__ void __launch_bounds__(Pass::kThreads, kHeadDim == 256   ? 2
                                                  : kHeadDim == 128 ? 3
                                                                    : 4)
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
  uint4 bits[kPanels][4];  // not as floats, which would take twice the registers
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = key0 + group / 4 * 16 + e4m3_column(group % 4 * 4 + i);
      bits[panel][i] =
          key < seqlen_k ? *reinterpret_cast<const uint4*>(gV + (head * seqlen_k + key) * kHeadDim +
                                                           panel * kTransposedColumns + column)
                         : uint4{};
    }
  const auto eight = [&](int panel, int i) {
    return load_eight(reinterpret_cast<const __nv_bfloat16*>(&bits[panel][i]));
  };
  float largest = 0;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = largest_of(eight(panel, i), largest);
  largest = fmaxf(block_max(largest, sMax), kSmallestMax);
  if (threadIdx.x == 0) gDescale[head * tiles + tile] = largest / kLargestE4M3;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    const Eight four[4] = {eight(panel, 0), eight(panel, 1), eight(panel, 2), eight(panel, 3)};
    store_transposed(smem, four, kLargestE4M3 / largest, group, column);
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
  const float* gV;                   // as gK
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
  const int num_sms = args.backend == Backend::gpu ? gpu_info().num_sms : kEmulatedSms;
  const int64_t blocks = std::min<int64_t>(q.heads * q.tiles + k.heads * k.tiles,
                                           int64_t{num_sms} * RowLanes<kHeadDim>::kBlocks);
  args.phase("quantise");
  return launch_kernel(quantise_tiles_kernel<Pass, kHeadDim, kRotated>,
                       dim3(static_cast<unsigned>(blocks)), dim3(RowLanes<kHeadDim>::kThreads), 0,
                       args.stream, q, k);
}

template <bool kRotated, int kHeadDim>
Status quantise_tiles(const Arguments& args) {
  using Pass = QuantisePass;
  const Problem& p = args.problem;
  const Status status = quantise_q_and_k<Pass, kRotated, kHeadDim>(args);
  if (!status.ok()) return status;
  const int64_t blocks = p.batch * p.kv_heads * ceil_div(p.seqlen_k, kScaleRows);
  return launch_kernel(transpose_tiles_kernel<Pass, kHeadDim>, dim3(static_cast<unsigned>(blocks)),
                       dim3(Pass::kThreads), 0, args.stream, args.in<__nv_bfloat16>("v"),
                       static_cast<int>(p.seqlen_k), args.out<uint8_t>("v8"),
                       args.out<float>("v_descale"));
}
//! [launch_tiles]

}  // namespace ATTN_BACKEND::hopper
