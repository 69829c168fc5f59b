// Quantisation from bf16 to e4m3 with one scale per tile of 128 rows. A block holds a tile in
// registers, so it knows the maximum before it rounds: one pass, where a per-tensor scale needs
// two. The next tile's loads are in flight meanwhile.
//
//     q_descale [B Hq, tiles], k_descale and v_descale [B Hkv, tiles]
//
// Incoherent processing (kRotated): Q and K are multiplied by one orthogonal matrix, which leaves
// Q K^T unchanged. It is diag(+-1) H / sqrt(d), with the Hadamard matrix H: each number becomes a
// signed sum of its row, which spreads outliers.
#pragma once

#include "device/device.h"
#include "ptx/mma.h"
#include "kernels/hopper/tile_order.h"
#include "kernels/quantise.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

constexpr int kScaleRows = 128;  // rows per scale

// How a thread block reads a tile. Four lanes share a row: lane l holds the groups of eight columns
// that begin at 8 (l + 4 j), for j below d / 32.
//
//     lane of the row      0     1     2     3     0      1      2      3      0 ...
//     columns             0-7  8-15  16-23 24-31 32-39  40-47  48-55  56-63  64-71 ...
//
// One warp-wide load reads 64 bytes of each of 8 rows, 16 per lane; a store writes 32 bytes of
// codes per row: whole sectors. With two lanes per row it would write half sectors.
template <int kHeadDim>
struct RowLanes {
  // lanes per row; groups of eight per lane
  static constexpr int kLanes = 4, kEights = kHeadDim / 8 / kLanes;
  // A thread holds 32 or 64 elements of a tile as floats, and of the next tile in bf16. The blocks
  // of an SM may use 64 registers per thread at d=64, else 128: 64 KB are in flight.
  static constexpr int kThreads = kHeadDim == 256 ? 512 : 256;
  static constexpr int kBlocks = kHeadDim == 64 ? 4 : kHeadDim == 128 ? 2 : 1;
  static constexpr int kRowsPerPass = kThreads / kLanes, kTimes = kScaleRows / kRowsPerPass;
};

// The sign of column i: a bit of a hash, the same for all rows, heads and tensors.
//! [sign]
constexpr __host__ __device__ float random_sign(int column) {
  uint32_t x = static_cast<uint32_t>(column) * 0x9E3779B9u;
  x = (x ^ x >> 15) * 0x85EBCA6Bu;
  return (x ^ x >> 13) & 1 ? -1.0f : 1.0f;
}
//! [sign]
// The signs of all columns, as XOR masks for words of two bf16 numbers.
template <int kHeadDim>
struct alignas(16) ColumnSigns {
  uint32_t sPairs[kHeadDim / 2];
  __device__ __forceinline__ void find() {
    const int pair = static_cast<int>(threadIdx.x);
    if (pair < kHeadDim / 2)
      sPairs[pair] = (random_sign(2 * pair) < 0 ? 0x8000u : 0) |
                     (random_sign(2 * pair + 1) < 0 ? 0x80000000u : 0);
  }
  __device__ __forceinline__ uint4 flip(const uint4& eight, int column) const {
    const uint4 signs = *reinterpret_cast<const uint4*>(sPairs + column / 2);
    return make_uint4(eight.x ^ signs.x, eight.y ^ signs.y, eight.z ^ signs.z, eight.w ^ signs.w);
  }
};

//! [tiles]
struct TileOfRows {  // 128 rows of a head, or fewer at the end
  int row0, index;   // counted through all heads; 2^31 rows would be 275 GB
  int rows;
};
struct RowsOf {            // Q or K
  const __nv_bfloat16* g;  // [heads, rows, d]
  uint8_t* g8;
  float* gDescale;  // [heads, tiles]
  int64_t heads;
  int rows, tiles;  // per head
  __device__ TileOfRows tile(int index) const {
    const int head = index / tiles, row0 = index % tiles * kScaleRows;
    return {head * rows + row0, index, rows - row0};
  }
};

// Per-warp maxima of a tile, double-buffered: a warp that writes the next tile's has passed this
// tile's barrier, so no thread still reads the buffer that it overwrites.
template <int kHeadDim>
using TileMaxima = float[2][RowLanes<kHeadDim>::kThreads / 32];
template <int kWarps>
__device__ __forceinline__ float largest_of_block(float x, float (&sMax)[kWarps]) {
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  if (threadIdx.x % 32 == 0) sMax[threadIdx.x / 32] = x;
  __syncthreads();  // maxima of all warps are visible
#pragma unroll
  for (int w = 0; w < kWarps; ++w) x = fmaxf(x, sMax[w]);
  return x;
}

// Which elements of a tile lane 4 g + t of a warp holds, for each group of eight rows:
//
//     lanes per row               row              columns, for j below d / 32
//          4    as loaded         g                8 t to 8 t + 7, plus 32 j
//          8    after the MMAs    2 t, 2 t + 1     4 g to 4 g + 3, plus 32 j
template <int kHeadDim, int kLanes>
struct Places {
  static constexpr int kWide = 32 / kLanes, kParts = kHeadDim / 32;
  static constexpr int kRowsPerPass = RowLanes<kHeadDim>::kThreads / RowLanes<kHeadDim>::kLanes;
  static constexpr int kRows = kScaleRows * kLanes / RowLanes<kHeadDim>::kThreads;  // per thread
  static_assert(kLanes == 4 || kLanes == 8);
  __device__ static int row(int n) {
    const int thread = static_cast<int>(threadIdx.x);
    if constexpr (kLanes == 4) return thread / 4 + n * kRowsPerPass;
    return thread / 32 * 8 + 2 * (thread % 4) + n % 2 + n / 2 * kRowsPerPass;
  }
  __device__ static int column(int j) {
    return kWide * static_cast<int>(kLanes == 4 ? threadIdx.x % 4 : threadIdx.x % 32 / 4) + 32 * j;
  }
};

// As loaded: two elements per word.
template <int kHeadDim>
struct TileBits : Places<kHeadDim, 4> {
  using Own = Places<kHeadDim, 4>;
  uint4 eights[Own::kRows][Own::kParts];
  __device__ __forceinline__ void load(const __nv_bfloat16* g, const TileOfRows& t) {
#pragma unroll
    for (int n = 0; n < Own::kRows; ++n) {
      // Rows past the end repeat the last row, which does not change the maximum.
      const __nv_bfloat16* const source =
          g + int64_t{t.row0 + min(Own::row(n), t.rows - 1)} * kHeadDim;
#pragma unroll
      for (int j = 0; j < Own::kParts; ++j)
        eights[n][j] = *reinterpret_cast<const uint4*>(source + Own::column(j));
    }
  }
};

// As floats.
template <int kHeadDim, int kLanes>
struct TileNumbers : Places<kHeadDim, kLanes> {
  static constexpr int kCount = kHeadDim / kLanes;  // per row
  float x[Places<kHeadDim, kLanes>::kRows][kCount];
};
template <int kHeadDim>
__device__ __forceinline__ void unpack(const TileBits<kHeadDim>& bits,
                                       const ColumnSigns<kHeadDim>* signs,  // or null
                                       TileNumbers<kHeadDim, 4>& numbers) {
#pragma unroll
  for (int n = 0; n < bits.kRows; ++n)
#pragma unroll
    for (int j = 0; j < bits.kParts; ++j) {
      uint4 eight = bits.eights[n][j];
      if (signs != nullptr) eight = signs->flip(eight, bits.column(j));
      const Bf16x8 e = load_bf16x8(reinterpret_cast<const __nv_bfloat16*>(&eight));
#pragma unroll
      for (int i = 0; i < 8; ++i) numbers.x[n][8 * j + i] = e.x[i];
    }
}

// H x, without the factor 1 / sqrt(d): log2(d) rounds, one per bit of the column index. In each
// round the two elements whose columns differ in that bit become their sum and difference. The
// rounds of four bits are one product D = A B with the 16 x 16 matrix H: B has 16 columns of 8 rows
// of the tile, in bf16 words as loaded.
//
//     bit of the column       0        1        2          3, 4            5, 6, 7
//     B, k: as read         bit 0     other   bit 3      bits 1, 2        other MMAs
//     D, r: as written      bit 3     MMAs    bit 0      bits 1, 2
//
// So in lane 4 g + t, t is bits 3 and 4 before the product, and g is bits 2 to 4 after it. The
// rounds of bit 1 and of bits 5 and up stay within a lane.
//! [hadamard]
template <int kHeadDim>
struct Rotation {  // in shared memory, to save registers
  ColumnSigns<kHeadDim> signs;
  alignas(16) uint32_t sA[32][4];  // A operand per lane
  __device__ __forceinline__ void find() {
    signs.find();
    if (threadIdx.x >= 32) return;
    const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int to = 4 * g + i % 2, from = 8 * t + i / 2 * 4;  // columns of r and of an even k
      const uint32_t even = __popc(to & from) % 2, odd = __popc(to & (from + 1)) % 2;
      // -1 if the number of common bits is odd
      sA[threadIdx.x][i] = 0x3F803F80u ^ even << 15 ^ odd << 31;
    }
  }
};
template <int kHeadDim>
__device__ __forceinline__ void add_sixteens(const TileBits<kHeadDim>& bits,
                                             const Rotation<kHeadDim>& rotation,
                                             TileNumbers<kHeadDim, 8>& sums) {
  const uint4 words = *reinterpret_cast<const uint4*>(rotation.sA[threadIdx.x % 32]);
  const uint32_t a[4] = {words.x, words.y, words.z, words.w};
  constexpr float kZero[4] = {};
#pragma unroll
  for (int n = 0; n < bits.kRows; ++n)
#pragma unroll
    for (int j = 0; j < bits.kParts; ++j) {
      const uint4 e = rotation.signs.flip(bits.eights[n][j], bits.column(j));
      const uint32_t b[2][2] = {{e.x, e.z}, {e.y, e.w}};
#pragma unroll
      for (int bit1 = 0; bit1 < 2; ++bit1) {
        float d[4];
        mma_m16n8k16<__nv_bfloat16>(d, a, b[bit1], kZero);
        const int i = 4 * j + 2 * bit1;
        sums.x[2 * n][i] = d[0], sums.x[2 * n][i + 1] = d[2];
        sums.x[2 * n + 1][i] = d[1], sums.x[2 * n + 1][i + 1] = d[3];
      }
    }
}
template <int kCount>
__device__ __forceinline__ void add_and_subtract(float (&x)[kCount], int apart) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if ((i & apart) == 0) {
      const float a = x[i], b = x[i + apart];
      x[i] = a + b, x[i + apart] = a - b;
    }
}
template <int kHeadDim>
__device__ __forceinline__ void add_the_rest(TileNumbers<kHeadDim, 8>& sums) {
#pragma unroll
  for (auto& row : sums.x)
#pragma unroll
    for (int apart = 2; apart < sums.kCount; apart *= 2)  // bits 1, 5, 6, 7
      add_and_subtract(row, apart);
}
//! [hadamard]

// Quantises the tile `t`: its absolute maximum maps to 448. The stored descale includes `norm`.
template <int kHeadDim, int kLanes>
__device__ __forceinline__ void quantise_tile(uint8_t* g8, float* gDescale, const TileOfRows& t,
                                              const TileNumbers<kHeadDim, kLanes>& numbers,
                                              float (&sMax)[RowLanes<kHeadDim>::kThreads / 32],
                                              float norm) {
  float largest = 0;
#pragma unroll
  for (const auto& row : numbers.x)
#pragma unroll
    for (const float number : row) largest = fmaxf(largest, fabsf(number));
  largest = fmaxf(largest_of_block(largest, sMax), kSmallestMax);
  const float scale = kLargestE4M3 / largest;
  if (threadIdx.x == 0) gDescale[t.index] = largest / kLargestE4M3 * norm;
#pragma unroll
  for (int n = 0; n < numbers.kRows; ++n) {
    if (numbers.row(n) >= t.rows) break;
#pragma unroll
    for (int j = 0; j < numbers.kParts; ++j) {
      uint32_t codes[numbers.kWide / 4];
#pragma unroll
      for (int i = 0; i < numbers.kWide / 4; ++i) {
        const float* const e = numbers.x[n] + numbers.kWide * j + 4 * i;
        codes[i] = pack4_e4m3(e[0] * scale, e[1] * scale, e[2] * scale, e[3] * scale);
      }
      uint8_t* const target = g8 + int64_t{t.row0 + numbers.row(n)} * kHeadDim + numbers.column(j);
      if constexpr (kLanes == 4)
        *reinterpret_cast<uint2*>(target) = make_uint2(codes[0], codes[1]);
      else
        *reinterpret_cast<uint32_t*>(target) = codes[0];
    }
  }
}
// H x is sqrt(d) times too large. Codes are unaffected, because the scale follows the maximum.
template <int kHeadDim>
constexpr float kHadamardNorm = kHeadDim == 64    ? 0.125f
                                : kHeadDim == 128 ? 0.0883883476f
                                                  : 0.0625f;

// Q and K: as many blocks as fit on the GPU; each takes every gridDim.x-th tile of both.
template <class Pass, int kHeadDim, bool kRotated>
__global__ void __launch_bounds__(RowLanes<kHeadDim>::kThreads, RowLanes<kHeadDim>::kBlocks)
    quantise_tiles_kernel(RowsOf q, RowsOf k) {
  __shared__ TileMaxima<kHeadDim> sMax;
  __shared__ Rotation<kHeadDim> rotation;
  const int tiles_q = static_cast<int>(q.heads) * q.tiles;
  const int tiles = tiles_q + static_cast<int>(k.heads) * k.tiles;
  const auto tile = [&](int i) {
    const RowsOf& t = i < tiles_q ? q : k;
    return t.tile(i < tiles_q ? i : i - tiles_q);
  };
  if constexpr (kRotated) {
    rotation.find();
    __syncthreads();  // signs and A are visible
  }
  int i = static_cast<int>(blockIdx.x);
  TileOfRows next = tile(i);
  TileBits<kHeadDim> bits;
  bits.load(i < tiles_q ? q.g : k.g, next);
#pragma unroll 1
  for (int parity = 0; i < tiles; parity ^= 1) {
    const TileOfRows current = next;
    uint8_t* const g8 = i < tiles_q ? q.g8 : k.g8;
    float* const gDescale = i < tiles_q ? q.gDescale : k.gDescale;
    TileNumbers<kHeadDim, kRotated ? 8 : 4> numbers;
    if constexpr (kRotated)
      add_sixteens(bits, rotation, numbers);
    else
      unpack<kHeadDim>(bits, nullptr, numbers);
    i += static_cast<int>(gridDim.x);
    if (i < tiles) bits.load(i < tiles_q ? q.g : k.g, next = tile(i));
    if constexpr (kRotated) {
      add_the_rest(numbers);
      for (auto& row : numbers.x)
#pragma unroll
        for (float& number : row) number = finite_or_nan(number);
    }
    quantise_tile(g8, gDescale, current, numbers, sMax[parity],
                  kRotated ? kHadamardNorm<kHeadDim> : 1);
  }
}
//! [tiles]

// V: a block handles 128 keys of a head, all columns, and transposes 64 of them at a time.
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
  uint4 bits[kPanels][4];  // as bf16: floats would take twice the registers
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
    return load_bf16x8(reinterpret_cast<const __nv_bfloat16*>(&bits[panel][i]));
  };
  float largest = 0;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = largest_of(eight(panel, i), largest);
  largest = fmaxf(block_max(largest, sMax), kSmallestV);
  if (threadIdx.x == 0) gDescale[head * tiles + tile] = largest / kLargestE4M3;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    const Bf16x8 four[4] = {eight(panel, 0), eight(panel, 1), eight(panel, 2), eight(panel, 3)};
    store_transposed(smem, four, kLargestE4M3 / largest, group, column);
    __syncthreads();  // all codes are visible
    write_transposed(smem, gV8 + (head * kHeadDim + panel * kTransposedColumns) * padded, padded,
                     key0);
    __syncthreads();  // the codes are no longer read
  }
}
//! [transposed]

// Q and K: one scale per tile.
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
struct TileDescales : RowDescales {  // plus V
  const float* gV;                   // as gK
  TileDescales(const Arguments& args) : RowDescales(args), gV(args.out<float>("v_descale")) {}
  __device__ float v(int head, int key) const { return gV[head * tiles_k + key / kScaleRows]; }
};

// Q or K, read from `given`.
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
