// Shared by the backward steps: memory layouts, query ranges of a key tile, copies, the MMA loops,
// and the preprocess and postprocess kernels. The step files have the division among warps, the
// barriers, and the arithmetic between the MMAs.
#pragma once

#include <algorithm>

#include "attn/kernel.h"
#include "attn/philox.h"
#include "emulator/warp_access.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::backward_tiles {
using namespace attn;

// A query tile and a key tile, and how the warps divide dQ and the copies.
//! [tile]
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kNumWarps_>
struct Tile {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_;  // d, B_r, B_c
  static constexpr int kNumWarps = kNumWarps_, kThreads = 32 * kNumWarps;
  static constexpr int kRowBytes = 2 * kHeadDim, kRowSteps = kBlockM / 16;
  // dQ: warps along the rows and along the columns; 16-byte fragments per thread.
  static constexpr int kRowPairs = kBlockM / 32;
  static constexpr int kQueryWarpsM =
      kRowPairs > 0 && kHeadDim* kRowPairs / kNumWarps % 16 == 0 ? kRowPairs : kBlockM / 16;
  static constexpr int kQueryRows = kBlockM / kQueryWarpsM;
  static constexpr int kQueryCols = kHeadDim * kQueryWarpsM / kNumWarps;
  static constexpr int kFragments = kQueryRows / 16 * (kQueryCols / 8);
  // Copies: 16-byte chunks that the swizzle permutes, and rows that the block copies at once.
  static constexpr int kSwizzleChunks = kHeadDim % 64 == 0 ? 8 : 4,
                       kCopyRows = kThreads / kSwizzleChunks;
  static_assert(kBlockM % 16 == 0 && kBlockN % 16 == 0, "warps own whole MMAs");
  static_assert(kQueryRows % 16 == 0 && kQueryCols % 16 == 0 && kQueryCols > 0,
                "warps own whole MMAs of dQ");
  static_assert(kCopyRows % 8 == 0, "every row that a thread copies has the same phase");
};
//! [tile]

// XOR swizzle: offset of element (row, col) of a tile with rows of kWidth elements. The 16-byte
// chunks of a row are permuted so that the 8 rows that ldmatrix reads at once lie in disjoint
// banks.
//! [swizzle]
template <int kWidth>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  const int phase = kWidth % 64 == 0 ? row % 8 : row / 2 % 4;
  return row * kWidth + ((col / 8) ^ phase) * 8 + col % 8;
}
// Byte offset `cols` columns further along the row: XOR within a span of kSwizzleChunks chunks,
// addition from span to span. Valid for an `offset` in chunk column 0, and in column 1 if `cols` is
// a multiple of 16.
template <int kWidth>
__host__ __device__ constexpr int swizzle_advance(int offset, int cols) {
  constexpr int kSwizzleChunks = kWidth % 64 == 0 ? 8 : 4;
  return (offset ^ (2 * (cols % (8 * kSwizzleChunks)))) +
         cols / (8 * kSwizzleChunks) * (16 * kSwizzleChunks);
}
template <int kWidth>
constexpr bool free_of_conflicts() {
  for (int col = 0; col < kWidth; col += 16) {
    const auto rows = [=](int l) { return 2 * swizzled_offset<kWidth>(l % 16, col + l / 16 * 8); };
    const auto cols = [=](int l) {
      return 2 * swizzled_offset<kWidth>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8);
    };
    const auto fragments = [=](int l) {
      return 2 * swizzled_offset<kWidth>(l / 4, col + 2 * (l % 4));
    };
    if (ldmatrix_access(rows, 4).conflicts() + ldmatrix_access(cols, 4).conflicts() +
            shared_access(fragments, 4).conflicts() >
        0)
      return false;
    for (int l = 0; l < 32; ++l)  // swizzle_advance gives the same addresses
      if (swizzle_advance<kWidth>(2 * swizzled_offset<kWidth>(l % 16, l / 16 * 8), col) != rows(l))
        return false;
  }
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<96>() &&
              free_of_conflicts<128>() && free_of_conflicts<192>() && free_of_conflicts<256>());
//! [swizzle]

// Memory layout of sequences. Packed: [tokens, H, d], cu_seqlens[b] is the first token of sequence
// b. Otherwise the pointers are null.
struct Packing {
  const int *cu_seqlens_q, *cu_seqlens_k;  // [B + 1]
  int q_stride, kv_stride;                 // elements from one row to the next
  int num_tiles;  // query tiles per head, in `rows` and `accum`: each sequence starts a new one
  int num_m_blocks, num_n_blocks;  // of the longest sequence
  int num_slices;                  // of `accum`, added up by convert_kernel
  int64_t slice_tiles;             // tiles per slice
};
template <class Config>
Packing packing_of(const Arguments& args, int num_slices = 1) {
  const Problem& p = args.problem;
  const int num_m_blocks = static_cast<int>(ceil_div(p.seqlen_q, Config::kBlockM));
  const int num_tiles =
      p.varlen() ? static_cast<int>(p.tokens_q() / Config::kBlockM + p.batch) : num_m_blocks;
  return {args.in_or_null<int>("cu_seqlens_q"),
          args.in_or_null<int>("cu_seqlens_k"),
          static_cast<int>(p.head_dim * (p.varlen() ? p.heads : 1)),
          static_cast<int>(p.head_dim * (p.varlen() ? p.kv_heads : 1)),
          num_tiles,
          num_m_blocks,
          static_cast<int>(ceil_div(p.seqlen_k, Config::kBlockN)),
          num_slices,
          (p.varlen() ? 1 : p.batch) * p.heads * num_tiles};
}
// One query head of a sequence.
//! [sequence]
struct Sequence {
  int64_t q, kv, lse, tile;  // offset of its first row: in Q, in K and V, in lse; its first tile
  int seqlen_q, seqlen_k;
};
__device__ __forceinline__ Sequence sequence_of(const Shape& shape, const Packing& packing,
                                                int64_t bh, int head_dim, int block_m) {
  const int64_t b = bh / shape.heads, hq = bh % shape.heads;
  const int64_t hkv = hq / (shape.heads / shape.kv_heads);
  if (packing.cu_seqlens_q == nullptr)
    return {bh * shape.seqlen_q * head_dim,
            (b * shape.kv_heads + hkv) * shape.seqlen_k * head_dim,
            bh * shape.seqlen_q,
            bh * packing.num_tiles,
            shape.seqlen_q,
            shape.seqlen_k};
  const int64_t q = packing.cu_seqlens_q[b], k = packing.cu_seqlens_k[b];
  return {q * packing.q_stride + hq * head_dim,
          k * packing.kv_stride + hkv * head_dim,
          hq * shape.tokens_q + q,
          hq * packing.num_tiles + q / block_m + b,  // upper bound of the tiles before
          static_cast<int>(packing.cu_seqlens_q[b + 1] - q),
          static_cast<int>(packing.cu_seqlens_k[b + 1] - k)};
}
//! [sequence]

// Query tiles: in [begin, end) at least one key of [key0, key0 + keys) is visible to some row; in
// [unmasked_begin, unmasked_end) all of these keys are visible to every row.
//! [ranges]
struct KvBlockRange {
  int begin, unmasked_begin, unmasked_end, end;
};
__device__ __forceinline__ KvBlockRange q_block_range(const Shape& shape, int seqlen_q,
                                                      int seqlen_k, int key0, int keys,
                                                      int block_m) {
  const int last = min(key0 + keys, seqlen_k) - 1, causal_offset = seqlen_k - seqlen_q;
  // Rows with a visible key: from the first that sees the first key to the last that sees the last.
  const int begin = max(0, key0 - causal_offset - shape.window_right);
  const int end = min(seqlen_q, last - causal_offset + shape.window_left + 1);
  if (end <= begin) return {0, 0, 0, 0};  // no row: dK = dV = 0
  // Rows that see all keys: from the first that sees the last key to the last that sees the first.
  const int all_begin = max(0, last - causal_offset - shape.window_right);
  const int all_end = min(seqlen_q, key0 - causal_offset + shape.window_left + 1);
  KvBlockRange kv_range{begin / block_m, ceil_div(all_begin, block_m), 0, ceil_div(end, block_m)};
  // Rows past the end have P = 0 and need no mask; keys past the end do.
  kv_range.unmasked_end = all_end == seqlen_q ? kv_range.end : max(0, all_end) / block_m;
  if (key0 + keys > seqlen_k) kv_range.unmasked_end = 0;
  kv_range.unmasked_begin = min(kv_range.unmasked_begin, kv_range.end);
  kv_range.unmasked_end = max(kv_range.unmasked_begin, kv_range.unmasked_end);
  return kv_range;
}
//! [ranges]

// Issues cp.async of kRows rows; rows from `rows` on become 0. `g`: this thread's first 16-byte
// chunk, row tid / kSwizzleChunks and chunk tid % kSwizzleChunks; `step`: row stride.
template <int kRows, class Config, class Element>
__device__ __forceinline__ void load_tile(Element* tile, const Element* g, int step, int rows) {
  constexpr int kSwizzleChunks = Config::kSwizzleChunks, kCopyRows = Config::kCopyRows,
                kHeadDim = Config::kHeadDim;
  const int row = threadIdx.x / kSwizzleChunks;
  Element* const to = tile + swizzled_offset<kHeadDim>(row, threadIdx.x % kSwizzleChunks * 8);
#pragma unroll
  for (int r = 0; r < kRows; r += kCopyRows) {
    if (r + kCopyRows > kRows && row + r >= kRows) break;
#pragma unroll
    for (int c = 0; c < kHeadDim; c += 8 * kSwizzleChunks) {
      const bool inside = row + r < rows;
      // outside: 0 bytes are read, from the valid address of row 0
      cp_async_16(to + r * kHeadDim + c, g + (inside ? r : -row) * step + c, inside ? 16 : 0);
    }
  }
}

// The MMA loops. `a`, `b`: this lane's byte offset in the first 16 rows and columns. Fragments are
// loaded one MMA ahead.
//
// C += A B^T. Both have rows of kK elements in shared memory. kAhead: A fragments loaded ahead, 0
// where registers are few and other warps hide the latency.
//! [multiply]
template <class Element, int kK, int kAhead = 1, int kTilesM, int kTilesN>
__device__ __forceinline__ void multiply_abt(float (&c)[kTilesM][kTilesN][4], const char* sA, int a,
                                             const char* sB, int b) {
  constexpr int kLoads = kTilesN / 2, kSteps = kK / 16 * kLoads;  // each load of B feeds two MMAs
  uint32_t ra[1 + kAhead][kTilesM][4], rb[2][4];
  const auto load_a = [&](int step) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m)
      ldmatrix_x4(ra[step % (1 + kAhead)][m],
                  sA + swizzle_advance<kK>(a, 16 * step) + 16 * m * 2 * kK);
  };
  const auto load_b = [&](int i) {
    ldmatrix_x4(rb[i % 2], sB + swizzle_advance<kK>(b, i / kLoads * 16) + i % kLoads * 16 * 2 * kK);
  };
  load_a(0);
  load_b(0);
#pragma unroll
  for (int step = 0; step < kK / 16; ++step) {
    if (kAhead == 0 && step > 0) load_a(step);
    if (kAhead > 0 && 16 * step + 16 < kK) load_a(step + 1);
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int i = step * kLoads + n;
      if (i + 1 < kSteps) load_b(i + 1);
      const uint32_t(&now)[4] = rb[i % 2];
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        const uint32_t(&am)[4] = ra[step % (1 + kAhead)][m];
        mma_m16n8k16<Element>(c[m][2 * n], am, {now[0], now[1]}, c[m][2 * n]);
        mma_m16n8k16<Element>(c[m][2 * n + 1], am, {now[2], now[3]}, c[m][2 * n + 1]);
      }
    }
  }
}

// C += A B, A in registers. Rows of B are as long as those of C.
template <class Element, int kTilesM, int kTilesN, int kSteps>
__device__ __forceinline__ void multiply_ab(float (&c)[kTilesM][kTilesN][4],
                                            const uint32_t (&a)[kTilesM][kSteps][4], const char* sB,
                                            int b) {
  constexpr int kWidth = 8 * kTilesN, kLoads = kTilesN / 2;
  uint32_t rb[2][4];
  const auto load_b = [&](int i) {
    ldmatrix_x4_trans(
        rb[i % 2], sB + swizzle_advance<kWidth>(b, i % kLoads * 16) + i / kLoads * 16 * 2 * kWidth);
  };
  load_b(0);
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int i = k * kLoads + n;
      if (i + 1 < kSteps * kLoads) load_b(i + 1);
      const uint32_t(&now)[4] = rb[i % 2];
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        mma_m16n8k16<Element>(c[m][2 * n], a[m][k], {now[0], now[1]}, c[m][2 * n]);
        mma_m16n8k16<Element>(c[m][2 * n + 1], a[m][k], {now[2], now[3]}, c[m][2 * n + 1]);
      }
    }
}

// C += A B, both in shared memory: rows of A from row0 on, columns of B from col0 on. A is stored
// as is, or as its transpose [kK, rows]. kWidthA, kWidthB: lengths of stored rows.
template <class Element, int kK, bool kTransposedA, int kWidthA, int kWidthB, int kTilesM,
          int kTilesN>
__device__ __forceinline__ void multiply_ab(float (&c)[kTilesM][kTilesN][4], const char* sA, int a,
                                            int row0, const char* sB, int b, int col0) {
  constexpr int kLoads = kTilesN / 2, kSteps = kK / 16;
  uint32_t ra[2][kTilesM][4], rb[2][kLoads][4];
  const auto load = [&](int step) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m)
      if constexpr (kTransposedA)
        ldmatrix_x4_trans(ra[step % 2][m], sA + swizzle_advance<kWidthA>(a, row0 + 16 * m) +
                                               step * 16 * 2 * kWidthA);
      else
        ldmatrix_x4(ra[step % 2][m],
                    sA + swizzle_advance<kWidthA>(a, 16 * step) + (row0 + 16 * m) * 2 * kWidthA);
#pragma unroll
    for (int n = 0; n < kLoads; ++n)
      ldmatrix_x4_trans(rb[step % 2][n],
                        sB + swizzle_advance<kWidthB>(b, col0 + 16 * n) + step * 16 * 2 * kWidthB);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) load(step + 1);
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const uint32_t(&now)[4] = rb[step % 2][n];
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        mma_m16n8k16<Element>(c[m][2 * n], ra[step % 2][m], {now[0], now[1]}, c[m][2 * n]);
        mma_m16n8k16<Element>(c[m][2 * n + 1], ra[step % 2][m], {now[2], now[3]}, c[m][2 * n + 1]);
      }
    }
  }
}
//! [multiply]

// Stores a warp's part of dK or dV, columns from col0 on, through shared memory that no warp reads
// any more. `g`: its first row; rows from `rows` on are not stored; `step`: row stride.
//! [store]
template <class Element, class Config, int kTilesM, int kTilesN>
__device__ __forceinline__ void store_gradient(Element* g, int step, int rows,
                                               const float (&grad)[kTilesM][kTilesN][4],
                                               float factor, char* sRows, int col0 = 0) {
  constexpr int kHeadDim = Config::kHeadDim, kSwizzleChunks = Config::kSwizzleChunks;
  const int lane_id = threadIdx.x % 32;
  const int lane_offset = 2 * swizzled_offset<kHeadDim>(lane_id / 4, 2 * (lane_id % 4));
#pragma unroll
  for (int m = 0; m < kTilesM; ++m)
#pragma unroll
    for (int n = 0; n < kTilesN; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        *reinterpret_cast<uint32_t*>(sRows + swizzle_advance<kHeadDim>(lane_offset, col0 + 8 * n) +
                                     (16 * m + 8 * r) * Config::kRowBytes) =
            pack2<Element>(grad[m][n][2 * r] * factor, grad[m][n][2 * r + 1] * factor);
  __syncwarp();  // all rows of the warp are visible
#pragma unroll
  for (int r = lane_id / kSwizzleChunks; r < 16 * kTilesM; r += 32 / kSwizzleChunks)
#pragma unroll
    for (int c = lane_id % kSwizzleChunks * 8; c < 8 * kTilesN; c += 8 * kSwizzleChunks)
      if (r < rows)
        *reinterpret_cast<uint4*>(g + int64_t{r} * step + col0 + c) =
            *reinterpret_cast<const uint4*>(sRows + 2 * swizzled_offset<kHeadDim>(r, col0 + c));
}
//! [store]

// Softcap: P of a score, and the factor of dP - D in dS, P times the derivative of the softcap.
//! [features]
struct Factors {
  float p, ds;
};
__device__ __forceinline__ Factors capped(float s, float lse_log2, const Shape& shape) {
  if (s == -INFINITY) return {0, 0};
  if (shape.softcap == 0) {
    const float p = exp2f(fmaf(s, shape.softmax_scale * kLog2e, -lse_log2));
    return {p, p};
  }
  // tanh y = 1 - 2 / (e^2y + 1) cancels near 0: use the Taylor series there. The derivative is
  // 1 - tanh^2.
  const float y = s * (shape.softmax_scale / shape.softcap), y2 = y * y;
  const float series = y * fmaf(y2, fmaf(y2, fmaf(y2, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1);
  const float half = __fdividef(1, exp2f(2 * kLog2e * y) + 1);
  const float tanh_y = fabsf(y) < 0.25f ? series : fmaf(-2, half, 1);
  const float p = exp2f(fmaf(shape.softcap * kLog2e, tanh_y, -lse_log2));
  return {p, p * (4 * half * (1 - half))};
}
// Dropout: the bytes of rows `row` and row + 1, per 16 keys of this lane, in accumulator order. The
// lanes of two neighbouring keys need the same two calls of Philox: each makes one of them.
template <int kKeyTiles>
__device__ __forceinline__ void draw(uint32_t (&bytes)[2][kKeyTiles], uint64_t seed, int64_t bh,
                                     int row, int key) {
  const int odd = threadIdx.x / 4 % 2;
  const PhiloxBits bits = dropout_bits(seed, bh, row + odd, key / 64, threadIdx.x % 32 / 8);
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m) {
    uint32_t word = bits.word[m];
#pragma unroll
    for (int w = 1; w + m < 4; ++w)
      if (key % 64 / 16 == w) word = bits.word[w + m];
    const uint32_t other = __shfl_xor_sync(~0u, word, 4);
    bytes[0][m] = (odd ? other : word) >> 8 * odd;
    bytes[1][m] = (odd ? word : other) >> 8 * odd;
  }
}
//! [features]

// (1) Preprocess: lse in log2 units and D = rowsum(dO . O), per row; zeroes the dQ accumulator.
//! [dot]
template <class Element, class Config>
__global__ void __launch_bounds__(256)
    dot_kernel(const Element* gO,   // [B, Hq, seqlen_q, d]
               const Element* gdO,  // [B, Hq, seqlen_q, d]
               const float* gLse,   // [B, Hq, seqlen_q]
               float* gRows,        // [tiles, 2, kBlockM]: lse / log(2), D
               float4* gAccum,      // [slices, tiles, fragments, threads]
               Shape shape, Packing packing) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM;
  constexpr int kLanes = kHeadDim % 128 == 0  ? kHeadDim / 8
                         : kHeadDim % 64 == 0 ? 8
                                              : 4;  // lanes per row
  const int m_block = blockIdx.x % packing.num_m_blocks, row0 = m_block * kBlockM;
  const Sequence seq =
      sequence_of(shape, packing, blockIdx.x / packing.num_m_blocks, kHeadDim, kBlockM);
  if (row0 >= seq.seqlen_q) return;  // the batch has longer sequences
  const int64_t tile = seq.tile + m_block;
  for (int slice = 0; slice < packing.num_slices; ++slice) {
    float4* const accum = gAccum + (slice * packing.slice_tiles + tile) * (kBlockM * kHeadDim / 4);
    for (int i = threadIdx.x; i < kBlockM * kHeadDim / 4; i += 256) accum[i] = float4{};
  }
  for (int r = threadIdx.x / kLanes; r < kBlockM; r += 256 / kLanes) {
    const bool inside = row0 + r < seq.seqlen_q;
    const int64_t row = seq.q + int64_t{row0 + r} * packing.q_stride;
    float sum = 0;
    if (inside)
#pragma unroll
      for (int c = threadIdx.x % kLanes * 8; c < kHeadDim; c += kLanes * 8) {
        const uint4 o = *reinterpret_cast<const uint4*>(gO + row + c);
        const uint4 d_o = *reinterpret_cast<const uint4*>(gdO + row + c);
        const uint32_t a[4] = {o.x, o.y, o.z, o.w}, b[4] = {d_o.x, d_o.y, d_o.z, d_o.w};
#pragma unroll
        for (int i = 0; i < 8; ++i)
          sum += unpack<Element>(a[i / 2], i % 2) * unpack<Element>(b[i / 2], i % 2);
      }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (threadIdx.x % kLanes == 0) {
      const float lse = inside ? gLse[seq.lse + row0 + r] : -INFINITY;
      gRows[tile * (2 * kBlockM) + r] =
          lse == -INFINITY ? INFINITY : lse * kLog2e;  // fully masked row: P = 0
      gRows[tile * (2 * kBlockM) + kBlockM + r] = sum;
    }
  }
}
//! [dot]

// (8) Postprocess: rounds dQ; thread and fragment indices are those of the MMAs.
//! [convert]
template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    convert_kernel(const float4* gAccum,  // [slices, tiles, fragments, threads]
                   Element* gdQ,          // [B, Hq, seqlen_q, d]
                   Shape shape, Packing packing) {
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int m_block = blockIdx.x % packing.num_m_blocks;
  const Sequence seq = sequence_of(shape, packing, blockIdx.x / packing.num_m_blocks,
                                   Config::kHeadDim, Config::kBlockM);
  if (m_block * Config::kBlockM >= seq.seqlen_q) return;  // the batch has longer sequences
  constexpr int kTilesN = Config::kQueryCols / 8;
  const int row0 = m_block * Config::kBlockM + warp_id % Config::kQueryWarpsM * Config::kQueryRows;
  const int col0 = warp_id / Config::kQueryWarpsM * Config::kQueryCols + 2 * (lane_id % 4);
  float4 sums[Config::kFragments] = {};
  for (int slice = 0; slice < packing.num_slices; ++slice) {
    const int64_t tile = slice * packing.slice_tiles + seq.tile + m_block;
#pragma unroll
    for (int f = 0; f < Config::kFragments; ++f) {
      const float4 x = sums[f],
                   y = gAccum[(tile * Config::kFragments + f) * Config::kThreads + threadIdx.x];
      sums[f] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
  }
#pragma unroll
  for (int f = 0; f < Config::kFragments; ++f) {
    const float4 x = sums[f];
    const int row = row0 + f / kTilesN * 16 + lane_id / 4;
    Element* const dq = gdQ + seq.q + int64_t{row} * packing.q_stride + col0 + f % kTilesN * 8;
    const float scale = shape.softmax_scale;
    if (row < seq.seqlen_q)
      *reinterpret_cast<uint32_t*>(dq) = pack2<Element>(x.x * scale, x.y * scale);
    if (row + 8 < seq.seqlen_q)
      *reinterpret_cast<uint32_t*>(dq + 8 * packing.q_stride) =
          pack2<Element>(x.z * scale, x.w * scale);
  }
}
//! [convert]

}  // namespace ATTN_BACKEND::backward_tiles
