// b2_tuned: the warps share out P and dS; P stays in registers.
//
// parent    b1_kv_parallel
// idea      The scores are computed transposed, S^T = K Q^T, so that P^T and dS^T, rounded, are operands of dV = P^T dO
//           and dK = dS^T Q where they stand. Half of the warps own P and dV, the other half dS and dK, of the same
//           keys: a pair meets once a tile, at a barrier of its own, when P changes hands. Through shared memory goes
//           dS alone, for dQ. One barrier of the block a tile instead of two; a fifth less traffic of shared memory;
//           and the exponentials of one half run beside the products of the other.
// expect    l1tex__data_pipe_lsu_wavefronts_mem_shared.sum falls by a fifth, stalls at barriers
//           (smsp__average_warps_issue_stalled_barrier_per_issue_active) by half.
// supports  fp16, bf16; head dims 32, 64, 96, 128, 192, 256; any lengths, masks, GQA, dropout; no negative scale
#include <algorithm>

#include "attn/kernel.h"
#include "attn/philox.h"
#include "emulator/warp_access.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"
#include "ptx/reduce_add.h"

namespace ATTN_BACKEND::b2_tuned {
using namespace attn;

//! [tiles]
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kWarpKeys_, int kStages_, int kBuffers_, int kBlocksPerSm_,
          bool kRotate_>
struct Tile {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_;  // d, B_r, B_c
  static constexpr int kWarpKeys = kWarpKeys_, kPairs = kBlockN / kWarpKeys;          // pairs of warps share their keys
  static constexpr int kNumWarps = 2 * kPairs, kThreads = 32 * kNumWarps;
  static constexpr int kStages = kStages_;    // of Q and dO: 2 is one tile ahead
  static constexpr int kBuffers = kBuffers_;  // of dS: 1 needs a second barrier a tile
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr bool kRotate = kRotate_;  // blocks begin at different rows
  static constexpr int kKeyTiles = kWarpKeys / 16, kRowSteps = kBlockM / 16;
  // dQ: warps along the rows and along the columns.
  static constexpr int kQueryWarpsM = kBlockM / 32 > 0 && kHeadDim * (kBlockM / 32) / kNumWarps % 16 == 0 ? kBlockM / 32
                                                                                                       : kBlockM / 16;
  static constexpr int kQueryRows = kBlockM / kQueryWarpsM, kQueryCols = kHeadDim * kQueryWarpsM / kNumWarps;
  static constexpr int kFragments = kQueryRows / 16 * (kQueryCols / 8);  // of dQ, a thread
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kSpan = kHeadDim % 64 == 0 ? 8 : 4;  // pieces of 16 bytes that a row exchanges
  static constexpr int kCopyRows = kThreads / kSpan;        // rows that the block copies at once, of kSpan pieces
  static_assert(kWarpKeys % 16 == 0 && kBlockM % 16 == 0, "warps own whole products");
  static_assert(kQueryRows % 16 == 0 && kQueryCols % 16 == 0 && kQueryCols > 0, "warps own whole products of dQ");
  static_assert(kCopyRows % 8 == 0, "every row of a thread has the same exchange");
  static_assert(kPairs <= 15, "a barrier a pair");
};
template <int kHeadDim>
struct Config;
//                             d    M    N   keys a warp, stages, buffers of dS, blocks an SM, rotate
template <> struct Config<32> : Tile<32, 128, 128, 32, 2, 2, 1, true> {};
template <> struct Config<64> : Tile<64, 128, 128, 32, 2, 2, 1, true> {};
template <> struct Config<96> : Tile<96, 64, 128, 32, 2, 2, 1, true> {};
template <> struct Config<128> : Tile<128, 64, 128, 32, 2, 2, 1, true> {};
template <> struct Config<192> : Tile<192, 64, 64, 16, 2, 2, 1, true> {};
template <> struct Config<256> : Tile<256, 64, 64, 16, 2, 1, 1, true> {};
//! [tiles]

// Place of element (row, col) of a tile with rows of kWidth elements: pieces of 16 bytes are exchanged among kSpan
// neighbours, so that those of 8 rows in one column lie in 8 groups of 4 banks.
//! [swizzle]
template <int kWidth>
__host__ __device__ constexpr int place(int row, int col) {
  const int turn = kWidth % 64 == 0 ? row % 8 : row / 2 % 4;
  return row * kWidth + ((col / 8) ^ turn) * 8 + col % 8;
}
// The byte offset `cols` columns further in the same row, from an even column of pieces: see v7_tuned.
template <int kWidth>
__host__ __device__ constexpr int along_row(int offset, int cols) {
  constexpr int kSpan = kWidth % 64 == 0 ? 8 : 4;
  return (offset ^ (2 * (cols % (8 * kSpan)))) + cols / (8 * kSpan) * (16 * kSpan);
}
template <int kWidth>
constexpr bool free_of_conflicts() {
  for (int col = 0; col < kWidth; col += 16) {
    const auto rows = [=](int l) { return 2 * place<kWidth>(l % 16, col + l / 16 * 8); };
    const auto cols = [=](int l) { return 2 * place<kWidth>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8); };
    const auto pairs = [=](int l) { return 2 * place<kWidth>(l / 4, col + 2 * (l % 4)); };
    if (ldmatrix_access(rows, 4).conflicts() + ldmatrix_access(cols, 4).conflicts() +
            shared_access(pairs, 4).conflicts() > 0)
      return false;
    for (int l = 0; l < 32; ++l)  // along_row gives the very same addresses
      if (along_row<kWidth>(2 * place<kWidth>(l % 16, l / 16 * 8), col) != rows(l)) return false;
  }
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<96>() &&
              free_of_conflicts<128>() && free_of_conflicts<192>() && free_of_conflicts<256>());
//! [swizzle]

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];                    // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];                    // [kBlockN, d]
  alignas(128) Element sQ[Config::kStages][Config::kBlockM * Config::kHeadDim];   // [kBlockM, d]
  alignas(128) Element sdO[Config::kStages][Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  alignas(128) Element sdS[Config::kBuffers][Config::kBlockN * Config::kBlockM];  // dS^T: [kBlockN, kBlockM]
  alignas(128) uint4 sP[Config::kPairs][Config::kKeyTiles * Config::kRowSteps][32];  // operands, as lanes hold them
  alignas(16) float sRow[Config::kStages][2][Config::kBlockM];  // of a row: lse / log(2), and D
};

// Starts to copy kRows rows, of which `rows` exist; the others become 0. `g` is this thread's first piece of them, of
// row tid / kSpan and piece tid % kSpan.
template <int kRows, class Config, class Element>
__device__ __forceinline__ void load_tile(Element* tile, const Element* g, int rows) {
  constexpr int kSpan = Config::kSpan, kCopyRows = Config::kCopyRows, kHeadDim = Config::kHeadDim;
  const int row = threadIdx.x / kSpan;
  Element* const to = tile + place<kHeadDim>(row, threadIdx.x % kSpan * 8);
#pragma unroll
  for (int r = 0; r < kRows; r += kCopyRows) {
    if (r + kCopyRows > kRows && row + r >= kRows) break;
#pragma unroll
    for (int c = 0; c < kHeadDim; c += 8 * kSpan) {
      const bool inside = row + r < rows;
      cp_async_16(to + r * kHeadDim + c, g + (inside ? r : -row) * kHeadDim + c, inside ? 16 : 0);
    }
  }
}

// Blocks of rows: some row of [begin, end) sees a key of [key0, key0 + keys), and every row of [plain_begin, plain_end)
// sees all of them.
//! [ranges]
struct BlockRanges {
  int begin, plain_begin, plain_end, end;
};
__device__ BlockRanges blocks_that_see(const Shape& shape, int key0, int keys, int block_m) {
  const int last = min(key0 + keys, shape.seqlen_k) - 1, shift = shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, key0 - shift - shape.window_right);  // the first row that sees the first key ...
  const int end = min(shape.seqlen_q, last - shift + shape.window_left + 1);  // ... to the last that sees the last
  if (end <= begin) return {0, 0, 0, 0};  // dK = dV = 0 for all
  const int all_begin = max(0, last - shift - shape.window_right);  // the first row that sees the last key ...
  const int all_end = min(shape.seqlen_q, key0 - shift + shape.window_left + 1);  // ... to the last that sees the first
  BlockRanges seen{begin / block_m, ceil_div(all_begin, block_m), 0, ceil_div(end, block_m)};
  // Rows behind the last have P = 0, so that a block which they cut is plain all the same; keys are another matter.
  seen.plain_end = all_end == shape.seqlen_q ? seen.end : max(0, all_end) / block_m;
  if (key0 + keys > shape.seqlen_k) seen.plain_end = 0;
  seen.plain_begin = min(seen.plain_begin, seen.end);
  seen.plain_end = max(seen.plain_begin, seen.plain_end);
  return seen;
}
//! [ranges]

// (3) C = A B^T for the keys of this warp and all rows of the tile: K Q^T or V dO^T. `a`, `b`: this lane's piece in the
// first 16 columns. Fragments are loaded one product ahead.
//! [scores]
template <class Element, class Config>
__device__ __forceinline__ void scores(float (&c)[Config::kKeyTiles][Config::kBlockM / 8][4], const char* sA, int a,
                                       const char* sB, int b) {
  constexpr int kHeadDim = Config::kHeadDim, kPairs = Config::kBlockM / 16, kSteps = kHeadDim / 16 * kPairs;
  uint32_t ra[2][Config::kKeyTiles][4], rb[2][4];
  const auto load_a = [&](int step) {
#pragma unroll
    for (int m = 0; m < Config::kKeyTiles; ++m)
      ldmatrix_x4(ra[step % 2][m], sA + along_row<kHeadDim>(a, 16 * step) + 16 * m * Config::kRowBytes);
  };
  const auto load_b = [&](int i) {
    ldmatrix_x4(rb[i % 2], sB + along_row<kHeadDim>(b, i / kPairs * 16) + i % kPairs * 16 * Config::kRowBytes);
  };
  load_a(0);
  load_b(0);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    if (16 * step + 16 < kHeadDim) load_a(step + 1);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int i = step * kPairs + n;
      if (i + 1 < kSteps) load_b(i + 1);
#pragma unroll
      for (int m = 0; m < Config::kKeyTiles; ++m) {
        mma_m16n8k16<Element>(c[m][2 * n], ra[step % 2][m], {rb[i % 2][0], rb[i % 2][1]}, c[m][2 * n]);
        mma_m16n8k16<Element>(c[m][2 * n + 1], ra[step % 2][m], {rb[i % 2][2], rb[i % 2][3]}, c[m][2 * n + 1]);
      }
    }
  }
}
//! [scores]

// (5) C += A B with A in registers: P^T dO or dS^T Q.
//! [gradient]
template <class Element, class Config>
__device__ __forceinline__ void gradient(float (&c)[Config::kKeyTiles][Config::kHeadDim / 8][4],
                                         const uint32_t (&a)[Config::kKeyTiles][Config::kRowSteps][4], const char* sB,
                                         int b) {
  constexpr int kHeadDim = Config::kHeadDim, kPairs = kHeadDim / 16, kSteps = Config::kRowSteps * kPairs;
  uint32_t rb[2][4];
  const auto load_b = [&](int i) {
    ldmatrix_x4_trans(rb[i % 2], sB + along_row<kHeadDim>(b, i % kPairs * 16) + i / kPairs * 16 * Config::kRowBytes);
  };
  load_b(0);
#pragma unroll
  for (int k = 0; k < Config::kRowSteps; ++k)
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int i = k * kPairs + n;
      if (i + 1 < kSteps) load_b(i + 1);
#pragma unroll
      for (int m = 0; m < Config::kKeyTiles; ++m) {
        mma_m16n8k16<Element>(c[m][2 * n], a[m][k], {rb[i % 2][0], rb[i % 2][1]}, c[m][2 * n]);
        mma_m16n8k16<Element>(c[m][2 * n + 1], a[m][k], {rb[i % 2][2], rb[i % 2][3]}, c[m][2 * n + 1]);
      }
    }
}
//! [gradient]

// (6) dQ = dS K for the rows from `row0` and the columns from `col0` on, from dS^T. `a`, `b`: this lane's piece in the
// first 16 rows or columns of the first 16 keys.
//! [dq]
template <class Element, class Config>
__device__ __forceinline__ void query_gradient(float (&c)[Config::kQueryRows / 16][Config::kQueryCols / 8][4],
                                               const char* sdS, int a, int row0, const char* sK, int b,
                                               int col0) {
  constexpr int kTiles = Config::kQueryRows / 16, kPairs = Config::kQueryCols / 16;
  constexpr int kSteps = Config::kBlockN / 16;
  uint32_t ra[2][kTiles][4], rb[2][kPairs][4];
  const auto load = [&](int step) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
      ldmatrix_x4_trans(ra[step % 2][m], sdS + along_row<Config::kBlockM>(a, row0 + 16 * m) + step * 32 * Config::kBlockM);
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
      ldmatrix_x4_trans(rb[step % 2][n],
                        sK + along_row<Config::kHeadDim>(b, col0 + 16 * n) + step * 16 * Config::kRowBytes);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) load(step + 1);
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const auto& pair = rb[step % 2][n];
        mma_m16n8k16<Element>(c[m][2 * n], ra[step % 2][m], {pair[0], pair[1]}, c[m][2 * n]);
        mma_m16n8k16<Element>(c[m][2 * n + 1], ra[step % 2][m], {pair[2], pair[3]}, c[m][2 * n + 1]);
      }
  }
}
//! [dq]

// (1) Of the rows of a tile: lse in base 2, D = rowsum(dO . O), and 0 where dQ is to be added up.
//! [dot]
template <class Element, class Config>
__global__ void __launch_bounds__(256)
    dot_kernel(const Element* gO,    // [B, Hq, seqlen_q, d]
               const Element* gdO,   // [B, Hq, seqlen_q, d]
               const float* gLse,    // [B, Hq, seqlen_q]
               float* gRow,          // [B, Hq, num_m_blocks, 2, kBlockM]: lse / log(2), D
               float4* gAccum,       // [B, Hq, num_m_blocks, fragments, threads]
               Shape shape, int num_m_blocks) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM;
  constexpr int kLanes = kHeadDim % 128 == 0 ? kHeadDim / 8 : kHeadDim % 64 == 0 ? 8 : 4;  // of a row
  const int64_t tile = blockIdx.x, bh = tile / num_m_blocks;
  const int row0 = static_cast<int>(tile % num_m_blocks) * kBlockM;
  float4* const accum = gAccum + tile * (kBlockM * kHeadDim / 4);
  for (int i = threadIdx.x; i < kBlockM * kHeadDim / 4; i += 256) accum[i] = float4{};
  for (int r = threadIdx.x / kLanes; r < kBlockM; r += 256 / kLanes) {
    const bool inside = row0 + r < shape.seqlen_q;
    const int64_t row = bh * shape.seqlen_q + row0 + r;
    float sum = 0;
    if (inside)
#pragma unroll
      for (int c = threadIdx.x % kLanes * 8; c < kHeadDim; c += kLanes * 8) {
        const uint4 o = *reinterpret_cast<const uint4*>(gO + row * kHeadDim + c);
        const uint4 d_o = *reinterpret_cast<const uint4*>(gdO + row * kHeadDim + c);
        const uint32_t a[4] = {o.x, o.y, o.z, o.w}, b[4] = {d_o.x, d_o.y, d_o.z, d_o.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += unpack<Element>(a[i / 2], i % 2) * unpack<Element>(b[i / 2], i % 2);
      }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (threadIdx.x % kLanes == 0) {
      const float lse = inside ? gLse[row] : -INFINITY;
      gRow[tile * (2 * kBlockM) + r] = lse == -INFINITY ? INFINITY : lse * 1.44269504f;  // P = 0: nothing is seen
      gRow[tile * (2 * kBlockM) + kBlockM + r] = sum;
    }
  }
}
//! [dot]

template <class Element, class Config, bool kDropout>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_backward_kernel(const Element* gQ,   // [B, Hq, seqlen_q, d]
                              const Element* gK,   // [B, Hkv, seqlen_k, d]
                              const Element* gV,   // [B, Hkv, seqlen_k, d]
                              const Element* gdO,  // [B, Hq, seqlen_q, d]
                              const float* gRow,   // [B, Hq, num_m_blocks, 2, kBlockM]
                              Element* gdK,        // [B, Hkv, seqlen_k, d]
                              Element* gdV,        // [B, Hkv, seqlen_k, d]
                              float4* gAccum,      // [B, Hq, num_m_blocks, fragments, threads]: dQ
                              Shape shape, uint64_t seed, int num_m_blocks, int num_n_blocks, int num_kv_heads,
                              int section) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kKeyTiles = Config::kKeyTiles, kRowSteps = Config::kRowSteps, kSpan = Config::kSpan;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int quad_row = lane_id / 4, quad_col = 2 * (lane_id % 4);  // place in an accumulator
  // A pair of warps has the same keys. The first of them owns P and dV, the second dS and dK.
  const int pair = warp_id % Config::kPairs, warp_key = pair * Config::kWarpKeys;
  const bool owns_p = warp_id < Config::kPairs;
  // Heads come in sections. In one, the keys that a causal mask leaves the most rows begin first, those of all heads.
  const int first_head = blockIdx.x / (section * num_n_blocks) * section;
  const int heads = min(section, num_kv_heads - first_head), turn = blockIdx.x - first_head * num_n_blocks;
  const int n_block = turn / heads, key0 = n_block * kBlockN;
  const int64_t bh_kv = first_head + turn % heads, k0 = bh_kv * shape.seqlen_k;
  const int group = shape.heads / shape.kv_heads, shift = shape.seqlen_k - shape.seqlen_q;
  const float softmax_scale_log2 = shape.softmax_scale * 1.44269504f;  // log2(e)
  const float inverse_kept = kDropout ? 1 / (1 - float(shape.dropped) / 256) : 1;

  // The visits: of each head that shares these keys, the blocks of rows that see one of them.
  const BlockRanges seen = blocks_that_see(shape, key0, kBlockN, kBlockM);
  const int blocks = seen.end - seen.begin, visits = group * blocks;
  // Blocks of the same head begin at different rows, so that they seldom add to the same rows of dQ at once.
  const int first_block = seen.begin + (Config::kRotate && blocks > 0 ? n_block * 4 % blocks : 0);
  struct Visit {
    int64_t bh;
    int m_block;
  };
  const auto advance = [&](Visit& visit) {
    if (++visit.m_block == seen.end) visit.m_block = seen.begin;
    if (visit.m_block == first_block) ++visit.bh;
  };
  const int piece = threadIdx.x / kSpan * kHeadDim + threadIdx.x % kSpan * 8;  // this thread's first of every tile
  const auto load_rows = [&](const Visit& visit, int stage) {
    const int64_t row = visit.bh * shape.seqlen_q + visit.m_block * kBlockM;
    const int rows = shape.seqlen_q - visit.m_block * kBlockM;
    load_tile<kBlockM, Config>(smem.sQ[stage], gQ + row * kHeadDim + piece, rows);
    load_tile<kBlockM, Config>(smem.sdO[stage], gdO + row * kHeadDim + piece, rows);
    const float* const numbers = gRow + (visit.bh * num_m_blocks + visit.m_block) * (2 * kBlockM);
    if (threadIdx.x < kBlockM / 2) cp_async_16(&smem.sRow[stage][0][0] + 4 * threadIdx.x, numbers + 4 * threadIdx.x);
  };

  // (2) load K_j, V_j and the first rows
  Visit visit{bh_kv * group, first_block}, next = visit;
  load_tile<kBlockN, Config>(smem.sK, gK + (k0 + key0) * kHeadDim + piece, shape.seqlen_k - key0);
  load_tile<kBlockN, Config>(smem.sV, gV + (k0 + key0) * kHeadDim + piece, shape.seqlen_k - key0);
  for (int stage = 0; stage < Config::kStages; ++stage) {
    if (stage < visits) load_rows(next, stage), advance(next);
    cp_async_commit();
  }
  float grad[kKeyTiles][kHeadDim / 8][4] = {};  // dV or dK
  // This lane's pieces: of a row and of a column of operands, and of dS^T.
  const int by_rows = 2 * place<kHeadDim>(lane_id % 16, lane_id / 16 * 8);
  const int by_cols = 2 * place<kHeadDim>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2 * 8);
  const int ds_load = 2 * place<kBlockM>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2 * 8);
  const int ds_store = 2 * (warp_key * kBlockM + place<kBlockM>(quad_row, quad_col));
  const int query_row = warp_id % Config::kQueryWarpsM * Config::kQueryRows;
  const int query_col = warp_id / Config::kQueryWarpsM * Config::kQueryCols;
  const char* const sKeys = reinterpret_cast<const char*>(owns_p ? smem.sK : smem.sV) + warp_key * Config::kRowBytes;
  cp_async_wait<Config::kStages - 1>();
  __syncthreads();  // K, V and the first rows are there

  for (int i = 0; i < visits; ++i, advance(visit)) {
    const int stage = i % Config::kStages;
    const char* const sQ = reinterpret_cast<const char*>(smem.sQ[stage]);
    const char* const sdO = reinterpret_cast<const char*>(smem.sdO[stage]);
    char* const sdS = reinterpret_cast<char*>(smem.sdS[i % Config::kBuffers]);
    // (3) S^T = K Q^T or dP^T = V dO^T
    float s[kKeyTiles][kBlockM / 8][4] = {};
    scores<Element, Config>(s, sKeys, by_rows, owns_p ? sQ : sdO, by_cols);

    // (4) P = exp(scale S - lse), dS = P (dP - D), as operands
    //! [recompute]
    uint32_t operand[kKeyTiles][kRowSteps][4];
    const float* const numbers = smem.sRow[stage][owns_p ? 0 : 1] + quad_col;
    if (owns_p) {
      if (visit.m_block < seen.plain_begin || visit.m_block >= seen.plain_end) {
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
          for (int n = 0; n < kBlockM / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int key = key0 + warp_key + 16 * m + 8 * (e / 2) + quad_row;
              const int own = visit.m_block * kBlockM + 8 * n + quad_col + e % 2 + shift;
              if (key < own - shape.window_left || key > own + shape.window_right || key >= shape.seqlen_k)
                s[m][n][e] = -INFINITY;
            }
      }
#pragma unroll
      for (int k = 0; k < kRowSteps; ++k)
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
          uint32_t(&p)[4] = operand[m][k];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float2 lse_log2 = *reinterpret_cast<const float2*>(numbers + 16 * k + 8 * (e / 2));
            const float* const x = s[m][2 * k + e / 2] + 2 * (e % 2);
            p[e] = pack2<Element>(exp2f(fmaf(x[0], softmax_scale_log2, -lse_log2.x)),
                                  exp2f(fmaf(x[1], softmax_scale_log2, -lse_log2.y)));
          }
          smem.sP[pair][m * kRowSteps + k][lane_id] = uint4{p[0], p[1], p[2], p[3]};
        }
      named_barrier_arrive(1 + pair, 64);  // the other warp may take P
    } else {
      named_barrier_sync(1 + pair, 64);  // P is there
#pragma unroll
      for (int k = 0; k < kRowSteps; ++k)
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
          const uint4 four = smem.sP[pair][m * kRowSteps + k][lane_id];
          const uint32_t p[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float2 row_dot = *reinterpret_cast<const float2*>(numbers + 16 * k + 8 * (e / 2));
            const float* const x = s[m][2 * k + e / 2] + 2 * (e % 2);
            operand[m][k][e] = pack2<Element>(unpack<Element>(p[e], 0) * (x[0] - row_dot.x),
                                              unpack<Element>(p[e], 1) * (x[1] - row_dot.y));
            *reinterpret_cast<uint32_t*>(sdS + along_row<kBlockM>(ds_store, 16 * k + 8 * (e / 2)) +
                                         (16 * m + 8 * (e % 2)) * 2 * kBlockM) = operand[m][k][e];
          }
        }
    }
    //! [recompute]

    // (5) dV += P^T dO or dK += dS^T Q
    gradient<Element, Config>(grad, operand, owns_p ? sdO : sQ, by_rows);
    if constexpr (Config::kStages > 1) cp_async_wait<Config::kStages - 2>();
    __syncthreads();  // dS and the next rows are there; all are done with these rows, and with dQ of the tile before
    if (i + Config::kStages < visits) load_rows(next, stage), advance(next);
    cp_async_commit();

    // (6) dQ += dS K
    float dq[Config::kQueryRows / 16][Config::kQueryCols / 8][4] = {};
    query_gradient<Element, Config>(dq, sdS, ds_load, query_row, reinterpret_cast<const char*>(smem.sK), by_rows,
                                    query_col);
    float4* const accum = gAccum + (visit.bh * num_m_blocks + visit.m_block) * (kBlockM * kHeadDim / 4) + threadIdx.x;
#pragma unroll
    for (int f = 0; f < Config::kFragments; ++f) {
      const auto& x = dq[f / (Config::kQueryCols / 8)][f % (Config::kQueryCols / 8)];
      reduce_add(accum + f * Config::kThreads, make_float4(x[0], x[1], x[2], x[3]));
    }
    if constexpr (Config::kStages == 1 || Config::kBuffers == 1) {
      cp_async_wait<Config::kStages - 1>();
      __syncthreads();  // all are done with dS; with one stage: the next rows are there
    }
  }

  // (7) store dK_j, dV_j through the rows of K or V that were this warp's
  cp_async_wait<0>();
  __syncthreads();  // all are done with K
  char* const sGrad = const_cast<char*>(sKeys);
  const float factor = owns_p ? inverse_kept : shape.softmax_scale;
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        *reinterpret_cast<uint32_t*>(sGrad + along_row<kHeadDim>(2 * place<kHeadDim>(quad_row, quad_col), 8 * n) +
                                     (16 * m + 8 * r) * Config::kRowBytes) =
            pack2<Element>(grad[m][n][2 * r] * factor, grad[m][n][2 * r + 1] * factor);
  __syncwarp();  // all of the warp's rows are there
  Element* const g = owns_p ? gdV : gdK;
#pragma unroll
  for (int r = lane_id / kSpan; r < Config::kWarpKeys; r += 32 / kSpan)
#pragma unroll
    for (int c = lane_id % kSpan * 8; c < kHeadDim; c += 8 * kSpan)
      if (key0 + warp_key + r < shape.seqlen_k)
        *reinterpret_cast<uint4*>(g + (k0 + key0 + warp_key + r) * kHeadDim + c) =
            *reinterpret_cast<const uint4*>(sGrad + 2 * place<kHeadDim>(r, c));
}

// (8) dQ, rounded: the same threads and fragments as in the product.
//! [convert]
template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    convert_kernel(const float4* gAccum,  // [B, Hq, num_m_blocks, fragments, threads]
                   Element* gdQ,          // [B, Hq, seqlen_q, d]
                   Shape shape, int num_m_blocks) {
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int64_t bh = blockIdx.x / num_m_blocks;
  constexpr int kTilesN = Config::kQueryCols / 8;
  const int row0 = blockIdx.x % num_m_blocks * Config::kBlockM + warp_id % Config::kQueryWarpsM * Config::kQueryRows;
  const int col0 = warp_id / Config::kQueryWarpsM * Config::kQueryCols + 2 * (lane_id % 4);
#pragma unroll
  for (int f = 0; f < Config::kFragments; ++f) {
    const float4 x = gAccum[(int64_t{blockIdx.x} * Config::kFragments + f) * Config::kThreads + threadIdx.x];
    const int row = row0 + f / kTilesN * 16 + lane_id / 4;
    Element* const dq = gdQ + (bh * shape.seqlen_q + row) * Config::kHeadDim + col0 + f % kTilesN * 8;
    const float scale = shape.softmax_scale;
    if (row < shape.seqlen_q) *reinterpret_cast<uint32_t*>(dq) = pack2<Element>(x.x * scale, x.y * scale);
    if (row + 8 < shape.seqlen_q)
      *reinterpret_cast<uint32_t*>(dq + 8 * Config::kHeadDim) = pack2<Element>(x.z * scale, x.w * scale);
  }
}
//! [convert]

// Key heads of a section: so many that their Q, dO and sums of dQ take half of the L2 of an H200 (50 MB).
//! [section]
#ifndef ATTN_SWEEP  // sweep_backward.cu tries others
constexpr int64_t kSectionBytes = 24 << 20;
#endif
int64_t heads_of_section(const Problem& p) {
  const int64_t bytes = p.group() * p.seqlen_q * p.head_dim * (2 + 2 + 4);
  return std::min(p.kv_heads * p.batch, std::max<int64_t>(1, kSectionBytes / bytes));
}
//! [section]

template <class Element, class Config, bool kDropout>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int num_m_blocks = static_cast<int>(ceil_div(p.seqlen_q, Config::kBlockM));
  const int num_n_blocks = static_cast<int>(ceil_div(p.seqlen_k, Config::kBlockN));
  const int num_heads = static_cast<int>(p.batch * p.heads), num_kv_heads = static_cast<int>(p.batch * p.kv_heads);
  args.phase("dot");
  Status status = launch_kernel(dot_kernel<Element, Config>, dim3(static_cast<unsigned>(num_m_blocks * num_heads)),
                                dim3(256), 0, args.stream, args.in<Element>("o"), args.in<Element>("do"),
                                args.in<float>("lse"), args.out<float>("rows"), args.out<float4>("accum"),
                                shape_of(p), num_m_blocks);
  if (!status.ok()) return status;
  args.phase("attention_backward");
  status = launch_kernel(attention_backward_kernel<Element, Config, kDropout>,
                         dim3(static_cast<unsigned>(num_n_blocks * num_kv_heads)), dim3(Config::kThreads),
                         sizeof(SharedStorage<Element, Config>), args.stream, args.in<Element>("q"),
                         args.in<Element>("k"), args.in<Element>("v"), args.in<Element>("do"),
                         args.in<float>("rows"), args.out<Element>("dk"), args.out<Element>("dv"),
                         args.out<float4>("accum"), shape_of(p), p.seed, num_m_blocks, num_n_blocks, num_kv_heads,
                         static_cast<int>(heads_of_section(p)));
  if (!status.ok()) return status;
  args.phase("convert");
  return launch_kernel(convert_kernel<Element, Config>, dim3(static_cast<unsigned>(num_m_blocks * num_heads)),
                       dim3(Config::kThreads), 0, args.stream, args.in<float4>("accum"), args.out<Element>("dq"),
                       shape_of(p), num_m_blocks);
}

#ifndef ATTN_SWEEP  // sweep_backward.cu has its own tiles
template <class Element, int kHeadDim>
Status launch(const Arguments& args) {
  return launch<Element, Config<kHeadDim>, false>(args);
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 32: return launch<Element, 32>(args);
      case 64: return launch<Element, 64>(args);
      case 96: return launch<Element, 96>(args);
      case 128: return launch<Element, 128>(args);
      case 192: return launch<Element, 192>(args);
      case 256: return launch<Element, 256>(args);
    }
    return Status::unsupported("head dims 32, 64, 96, 128, 192 and 256 alone");
  });
}
#endif

}  // namespace ATTN_BACKEND::b2_tuned
