// v7_tuned: tiles for each head dim, and fewer instructions beside the products.
//
// parent    v6_causal_skip
// idea      Nothing new about attention. Tiles and warps for each head dim come from a sweep (sweep.cu). With 32 rows a
//           warp each fragment of K and V feeds two products. Addresses are one offset a lane and constants: a swizzle
//           is an XOR, so a step along a row is one too. Tiles that are not cut are copied without comparing. O is
//           rescaled only where a maximum has grown by more than 2^8: until then P is at most 256, and l and O agree.
//           O leaves through shared memory, 16 bytes a lane. Heads run in sections whose K and V stay in L2.
// expect    smsp__inst_executed.sum falls by a third; the tensor pipe is busy for more of the time
//           (sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active).
// supports  fp16, bf16; head dims 32, 64, 96, 128, 192, 256; any lengths, masks, GQA, dropout; no negative scale
#include <algorithm>

#include "attn/kernel.h"
#include "attn/philox.h"
#include "emulator/warp_access.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::v7_tuned {
using namespace attn;

//! [tiles]
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kNumWarps_, bool kKeepQ_, int kStages_, int kBlocksPerSm_>
struct Tile {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_;  // d, B_r, B_c
  static constexpr int kNumWarps = kNumWarps_, kThreads = 32 * kNumWarps;
  static constexpr bool kKeepQ = kKeepQ_;   // fragments of Q in registers: not read again for each block of keys
  static constexpr int kStages = kStages_;  // 1: K and V each on their way during the other product; 2: both, one block
                                            // of keys ahead, with one barrier a block instead of two
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kWarpRows = kBlockM / kNumWarps, kTiles = kWarpRows / 16;  // products of 16 rows by a warp
  static constexpr int kSlack = 8;  // log2 of how far a maximum may grow before O is rescaled
  static constexpr int kRowBytes = 2 * kHeadDim, kStageBytes = kBlockN * kRowBytes;
  static constexpr int kSpan = kHeadDim % 64 == 0 ? 8 : 4;  // pieces of 16 bytes that a row exchanges
  static constexpr int kCopyRows = kThreads / kSpan;        // rows that the block copies at once, of kSpan pieces
  static_assert(kWarpRows % 16 == 0 && kBlockN % 16 == 0, "warps own whole products");
  static_assert(kBlockM % kCopyRows == 0 && kBlockN % kCopyRows == 0, "no thread copies less than another");
};
template <int kHeadDim>
struct Config;
//                              d    M    N  warps keep Q, stages, blocks an SM
template <> struct Config<32> : Tile<32, 128, 64, 4, true, 2, 2> {};
template <> struct Config<64> : Tile<64, 128, 64, 4, true, 2, 2> {};
template <> struct Config<96> : Tile<96, 128, 64, 4, false, 2, 2> {};
template <> struct Config<128> : Tile<128, 128, 64, 4, false, 2, 2> {};
template <> struct Config<192> : Tile<192, 64, 64, 4, false, 1, 2> {};
template <> struct Config<256> : Tile<256, 64, 64, 4, false, 1, 2> {};
//! [tiles]

// Place of element (row, col) of a tile [rows, kHeadDim]: pieces of 16 bytes are exchanged among kSpan neighbours, so
// that those of 8 rows in one column lie in 8 groups of 4 banks. Rows of 32 and 96 elements begin in two banks by turns.
//! [swizzle]
template <int kHeadDim>
__host__ __device__ constexpr int place(int row, int col) {
  const int turn = kHeadDim % 64 == 0 ? row % 8 : row / 2 % 4;
  return row * kHeadDim + ((col / 8) ^ turn) * 8 + col % 8;
}
// The byte offset `cols` columns further in the same row, from an even column of pieces: bits 4 to 6 of the start of a
// row are 0 (bits 4 and 5 where kSpan is 4), so that a piece changes place by an XOR, and kSpan pieces by a sum.
template <int kSpan>
__host__ __device__ constexpr int along_row(int offset, int cols) {
  return (offset ^ (2 * (cols % (8 * kSpan)))) + cols / (8 * kSpan) * (16 * kSpan);
}
//! [swizzle]
//! [proof]
template <int kHeadDim>
constexpr bool free_of_conflicts() {
  constexpr int kSpan = kHeadDim % 64 == 0 ? 8 : 4;
  for (int col = 0; col < kHeadDim; col += 16) {
    const auto q_or_v = [=](int l) { return 2 * place<kHeadDim>(l % 16, col + l / 16 * 8); };
    const auto k = [=](int l) { return 2 * place<kHeadDim>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8); };
    const auto o = [=](int l) { return 2 * place<kHeadDim>(l / 4, col + 2 * (l % 4)); };
    if (ldmatrix_access(q_or_v, 4).conflicts() + ldmatrix_access(k, 4).conflicts() + shared_access(o, 4).conflicts() > 0)
      return false;
    for (int l = 0; l < 32; ++l)  // along_row gives the very same addresses
      if (along_row<kSpan>(2 * place<kHeadDim>(l % 16, l / 16 * 8), col) != q_or_v(l)) return false;
  }
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<96>() &&
              free_of_conflicts<128>() && free_of_conflicts<192>() && free_of_conflicts<256>());
//! [proof]

// Stands for -inf where nothing was seen. It is finite, so that differences are numbers.
constexpr float kNothing = -3.4028234e38f;

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kStages][Config::kBlockN * Config::kHeadDim];  // [kBlockN, d] each
  alignas(128) Element sV[Config::kStages][Config::kBlockN * Config::kHeadDim];  // [kBlockN, d] each
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];                   // [kBlockM, d]
  int64_t first_row;  // of the head in O and lse: needed at the end alone, when no register is free to keep it
};

// Starts to copy kRows rows, of which `rows` exist; the others become 0. `g` is this thread's first piece of them, of
// row tid / kSpan and piece tid % kSpan; the rest lies at constant distances.
//! [copy]
template <int kRows, class Config, class Element>
__device__ __forceinline__ void load_tile(Element* tile, const Element* g, int rows) {
  constexpr int kSpan = Config::kSpan, kCopyRows = Config::kCopyRows, kHeadDim = Config::kHeadDim;
  const int row = threadIdx.x / kSpan;
  Element* const to = tile + place<kHeadDim>(row, threadIdx.x % kSpan * 8);
  const auto copy = [&](auto cut) {
#pragma unroll
    for (int r = 0; r < kRows; r += kCopyRows)
#pragma unroll
      for (int c = 0; c < kHeadDim; c += 8 * kSpan) {
        const bool inside = !cut.value || row + r < rows;
        cp_async_16(to + r * kHeadDim + c, g + (inside ? r : -row) * kHeadDim + c, inside ? 16 : 0);
      }
  };
  if (rows >= kRows)
    copy(std::false_type{});
  else
    copy(std::true_type{});
}
//! [copy]

// Blocks of keys: some row of [row0, row0 + rows) sees something of [begin, end), and every row sees all of
// [plain_begin, plain_end).
//! [ranges]
struct BlockRanges {
  int begin, plain_begin, plain_end, end;
};
__device__ BlockRanges blocks_seen(const Shape& shape, int row0, int rows, int block_n) {
  const int last = min(row0 + rows, shape.seqlen_q) - 1, shift = shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, row0 + shift - shape.window_left);
  const int end = min(shape.seqlen_k, last + shift + shape.window_right + 1);
  if (end <= begin) return {0, 0, 0, 0};  // O = 0 and lse = -inf for all
  const int all_begin = max(0, last + shift - shape.window_left);  // what the last row sees first ...
  const int all_end = min(shape.seqlen_k, row0 + shift + shape.window_right + 1);  // ... and the first row last
  BlockRanges seen{begin / block_n, ceil_div(all_begin, block_n), all_end / block_n, ceil_div(end, block_n)};
  seen.plain_begin = min(seen.plain_begin, seen.end);
  seen.plain_end = max(seen.plain_begin, seen.plain_end);
  return seen;
}
//! [ranges]

__device__ __forceinline__ float quad_max(float x) {  // over the 4 lanes that share a row
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// (3) S = Q K^T for the rows of this warp. `q`, `k`: byte offsets of this lane's piece in the first 16 columns. Fragments
// are loaded one product ahead.
//! [scores]
template <class Config>
__device__ __forceinline__ void load_q(uint32_t (&a)[Config::kTiles][4], const char* sQ, int q, int col) {
#pragma unroll
  for (int m = 0; m < Config::kTiles; ++m)
    ldmatrix_x4(a[m], sQ + along_row<Config::kSpan>(q, col) + 16 * m * Config::kRowBytes);
}
template <class Element, class Config, int kKept>
__device__ __forceinline__ void scores(float (&s)[Config::kTiles][Config::kBlockN / 8][4],
                                       uint32_t (&kept)[kKept][Config::kTiles][4], const char* sQ, const char* sK,
                                       int q, int k) {
  constexpr int kPairs = Config::kBlockN / 16, kSteps = Config::kHeadDim / 16 * kPairs;  // two products of 8 keys at once
  uint32_t b[2][4];
  const auto load_k = [&](int i) {
    ldmatrix_x4(b[i % 2], sK + along_row<Config::kSpan>(k, i / kPairs * 16) + i % kPairs * 16 * Config::kRowBytes);
  };
  if constexpr (!Config::kKeepQ) load_q<Config>(kept[0], sQ, q, 0);
  load_k(0);
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {
    if (!Config::kKeepQ && 16 * step + 16 < Config::kHeadDim)
      load_q<Config>(kept[(step + 1) % kKept], sQ, q, 16 * step + 16);
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; n += 2) {
      const int i = step * kPairs + n / 2;
      if (i + 1 < kSteps) load_k(i + 1);
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        mma_m16n8k16<Element>(s[m][n], kept[step % kKept][m], {b[i % 2][0], b[i % 2][1]}, s[m][n]);
        mma_m16n8k16<Element>(s[m][n + 1], kept[step % kKept][m], {b[i % 2][2], b[i % 2][3]}, s[m][n + 1]);
      }
    }
  }
}
//! [scores]

// (5) O += P V for the rows of this warp. `probabilities(pair, a)` makes the operand of 16 keys: one step ahead, so that its
// exponentials run beside the products. `v`: byte offset of this lane's piece in the first 16 columns.
//! [output]
template <class Element, class Config, class Probabilities>
__device__ __forceinline__ void output(float (&o)[Config::kTiles][Config::kHeadDim / 8][4], Probabilities probabilities,
                                       const char* sV, int v) {
  constexpr int kPairs = Config::kHeadDim / 16, kSteps = Config::kBlockN / 16 * kPairs;
  uint32_t a[2][Config::kTiles][4], b[2][4];
  const auto load_v = [&](int i) {
    ldmatrix_x4_trans(b[i % 2], sV + along_row<Config::kSpan>(v, i % kPairs * 16) + i / kPairs * 16 * Config::kRowBytes);
  };
  load_v(0);
  probabilities(0, a[0]);
#pragma unroll
  for (int k = 0; k < Config::kBlockN / 16; ++k) {
    if (k + 1 < Config::kBlockN / 16) probabilities(k + 1, a[(k + 1) % 2]);
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 8; n += 2) {
      const int i = k * kPairs + n / 2;
      if (i + 1 < kSteps) load_v(i + 1);
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        mma_m16n8k16<Element>(o[m][n], a[k % 2][m], {b[i % 2][0], b[i % 2][1]}, o[m][n]);
        mma_m16n8k16<Element>(o[m][n + 1], a[k % 2][m], {b[i % 2][2], b[i % 2][3]}, o[m][n + 1]);
      }
    }
  }
}
//! [output]

// Sets to 0 what dropout drops of row `row`, half `r` of the accumulators: 16 bytes of Philox for 64 keys.
template <class Config>
__device__ __forceinline__ void drop(float (&s)[Config::kBlockN / 8][4], int r, uint64_t seed, int64_t bh, int row,
                                     int key0, int dropped) {
#pragma unroll
  for (int first = 0; first < Config::kBlockN; first += 64) {
    const PhiloxBits bits = dropout_bits(seed, bh, row, (key0 + first) / 64, threadIdx.x % 4);
    const int skipped = Config::kBlockN % 64 == 0 ? 0 : key0 % 64 / 4;  // bytes of the keys before
#pragma unroll
    for (int i = 0; i < 16 && first + i * 4 < Config::kBlockN; ++i)
      if (bits.byte(skipped + i) < static_cast<uint32_t>(dropped)) s[first / 8 + i / 2][2 * r + i % 2] = 0;
  }
}

template <class Element, class Config, bool kDropout>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_kernel(const Element* gQ,  // [B, Hq, seqlen_q, d]
                     const Element* gK,  // [B, Hkv, seqlen_k, d]
                     const Element* gV,  // [B, Hkv, seqlen_k, d]
                     Element* gO,        // [B, Hq, seqlen_q, d]
                     float* gLse,        // [B, Hq, seqlen_q]
                     Shape shape, uint64_t seed, int num_m_blocks, int num_heads, int section) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTiles = Config::kTiles, kWarpRows = Config::kWarpRows, kSpan = Config::kSpan, kStages = Config::kStages;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int quad_row = lane_id / 4, quad_col = 2 * (lane_id % 4);  // place in an accumulator
  // Heads come in sections. In one, the tiles of queries with the most keys begin first, those of all its heads.
  const int first_head = blockIdx.x / (section * num_m_blocks) * section;
  const int heads = min(section, num_heads - first_head), turn = blockIdx.x - first_head * num_m_blocks;
  const int m_block = num_m_blocks - 1 - turn / heads;
  const int64_t bh = first_head + turn % heads, bh_kv = bh / (shape.heads / shape.kv_heads);
  const int64_t q0 = bh * shape.seqlen_q;  // first row of this head
  const int shift = shape.seqlen_k - shape.seqlen_q;
  const float softmax_scale_log2 = shape.softmax_scale * 1.44269504f;  // log2(e)
  const int row0 = m_block * kBlockM, warp_row0 = row0 + kWarpRows * warp_id;
  // Row of this thread: its half r of the accumulators of tile m.
  const auto row = [&](int m, int r) { return warp_row0 + 16 * m + 8 * r + quad_row; };
  const BlockRanges seen = blocks_seen(shape, row0, kBlockM, kBlockN);
  // This thread's first piece of every tile that it copies, and this lane's of every ldmatrix.
  const int piece = threadIdx.x / kSpan * kHeadDim + threadIdx.x % kSpan * 8;
  const Element* const q = gQ + (q0 + row0) * kHeadDim + piece;
  const Element* const k = gK + bh_kv * shape.seqlen_k * kHeadDim + piece;
  const Element* const v = gV + bh_kv * shape.seqlen_k * kHeadDim + piece;
  const char* const sQ = reinterpret_cast<const char*>(smem.sQ);
  const char* const sK = reinterpret_cast<const char*>(smem.sK);
  const char* const sV = reinterpret_cast<const char*>(smem.sV);
  const int v_lane = 2 * place<kHeadDim>(lane_id % 16, lane_id / 16 * 8);
  const int q_lane = v_lane + kWarpRows * warp_id * Config::kRowBytes;
  const int k_lane = 2 * place<kHeadDim>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2 * 8);
  const auto load_k_or_v = [&](auto& tiles, const Element* g, int n_block) {
    load_tile<kBlockN, Config>(tiles[n_block % kStages], g + int64_t{n_block} * (kBlockN * kHeadDim),
                               shape.seqlen_k - n_block * kBlockN);
  };

  if (threadIdx.x == 0) smem.first_row = q0;
  // (1) load Q_i, which stays, and the first K_j (of two stages: and V_j)
  uint32_t kept[Config::kKeepQ ? kHeadDim / 16 : 2][kTiles][4];  // fragments of Q: all, or two at a time
  if (seen.begin < seen.end) {
    load_tile<kBlockM, Config>(smem.sQ, q, shape.seqlen_q - row0);
    if (Config::kKeepQ) cp_async_commit();
    load_k_or_v(smem.sK, k, seen.begin);
    if (kStages == 2) load_k_or_v(smem.sV, v, seen.begin);
    cp_async_commit();
  }
  if (Config::kKeepQ) cp_async_wait<1>();
  __syncthreads();  // first_row is there, and of kept fragments all threads' Q
  if constexpr (Config::kKeepQ) {
    if (seen.begin < seen.end) {
#pragma unroll
      for (int col = 0; col < kHeadDim; col += 16) load_q<Config>(kept[col / 16], sQ, q_lane, col);
    }
  }
  float o[kTiles][kHeadDim / 8][4] = {};              // not divided by l yet
  float row_max[kTiles][2], row_sum[kTiles][2] = {};  // times c: to base 2; of this lane's keys
  for (int m = 0; m < kTiles; ++m) row_max[m][0] = row_max[m][1] = kNothing;

  // One block of keys. `masked` is a type, so that the plain body has no trace of a mask.
  const auto visit = [&](int n_block, auto masked) {
    const int key0 = n_block * kBlockN, stage = n_block % kStages * Config::kStageBytes;
    // Of a block with a mask a warp may see nothing.
    const bool idle = masked.value && (key0 > warp_row0 + kWarpRows - 1 + shift + shape.window_right ||
                                       key0 + kBlockN <= warp_row0 + shift - shape.window_left);
    // (2) V_j is on its way during Q K^T, or K_j+1 and V_j+1 all the time. Of the groups of copies only the newest one
    // is ever under way, so that every wait is for all of them.
    cp_async_wait<0>();
    __syncthreads();  // K_j (and V_j) of all threads is there; all are done with V_j-1 (and K_j-1)
    if (kStages == 1) {
      load_k_or_v(smem.sV, v, n_block);
    } else if (n_block + 1 < seen.end) {
      load_k_or_v(smem.sK, k, n_block + 1);
      load_k_or_v(smem.sV, v, n_block + 1);
    }
    cp_async_commit();

    // (3) S = Q K^T, -inf where a query does not see a key.
    float s[kTiles][kBlockN / 8][4] = {};
    if (!idle) {
      scores<Element, Config>(s, kept, sQ, sK, q_lane, k_lane + stage);
      if constexpr (masked.value) {
        // Positions from this lane's first key and row; what a row sees shifts with it.
        const auto hide = [&](auto hidden) {
#pragma unroll
          for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i)
                if (hidden(8 * n + i % 2, 16 * m + 8 * (i / 2))) s[m][n][i] = -INFINITY;
        };
        const int own = row(0, 0) + shift - key0 - quad_col;
        const int first = own - shape.window_left, last = own + shape.window_right;
        hide([&](int key, int below) { return (key - below < first) | (key - below > last); });
        if (const int keys = shape.seqlen_k - key0 - quad_col; key0 + kBlockN > shape.seqlen_k)
          hide([&](int key, int) { return key >= keys; });
      }
    }

    if (kStages == 1) {  // K_j+1 is on its way during softmax and P V
      cp_async_wait<0>();
      __syncthreads();  // V_j of all threads is there; all are done with K_j
      if (n_block + 1 < seen.end) load_k_or_v(smem.sK, k, n_block + 1);
      cp_async_commit();
    }
    if (idle) return;

    // (4) softmax, all of it in the quad of lanes that share a row.
    //! [softmax]
    float max[kTiles][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max[m][r] = fmaxf(s[m][0][2 * r], s[m][0][2 * r + 1]);
#pragma unroll
        for (int n = 1; n < kBlockN / 8; ++n)
          max[m][r] = fmaxf(max[m][r], fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
        max[m][r] = fmaxf(row_max[m][r], quad_max(max[m][r]) * softmax_scale_log2);
        grown = grown || max[m][r] > row_max[m][r] + Config::kSlack;
      }
    if (__any_sync(~0u, grown)) {  // of the warp: rare after the first blocks
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float rescale = exp2f(row_max[m][r] - max[m][r]);
          row_max[m][r] = max[m][r];
          row_sum[m][r] *= rescale;
#pragma unroll
          for (int n = 0; n < kHeadDim / 8; ++n) o[m][n][2 * r] *= rescale, o[m][n][2 * r + 1] *= rescale;
        }
    }
    // Two neighbouring accumulators of the first product, rounded in pairs, are an operand of the second.
    const auto exponentials = [&](int m, int pair) {
#pragma unroll
      for (int n = 2 * pair; n < 2 * pair + 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[m][n][i] = exp2f(fmaf(s[m][n][i], softmax_scale_log2, -row_max[m][i / 2]));
          row_sum[m][i / 2] += s[m][n][i];
        }
    };
    if constexpr (kDropout) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int pair = 0; pair < kBlockN / 16; ++pair) exponentials(m, pair);
        for (int r = 0; r < 2; ++r)  // the sum keeps what O loses
          drop<Config>(s[m], r, seed, bh, row(m, r), key0, shape.dropped);
      }
    }
    const auto probabilities = [&](int pair, uint32_t (&a)[kTiles][4]) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if constexpr (!kDropout) exponentials(m, pair);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[m][i] = pack2<Element>(s[m][2 * pair + i / 2][2 * (i % 2)], s[m][2 * pair + i / 2][2 * (i % 2) + 1]);
      }
    };
    //! [softmax]

    // (5) O += P V
    output<Element, Config>(o, probabilities, sV, v_lane + stage);
  };
  for (int n_block = seen.begin; n_block < seen.end; ++n_block)
    if (n_block >= seen.plain_begin && n_block < seen.plain_end)
      visit(n_block, std::false_type{});
    else  // left edge of the window; diagonal, right edge, last keys
      visit(n_block, std::true_type{});

  // (7) O = O / l, once; (8) store O, through the rows of sQ that this warp alone reads, and lse
  //! [finish]
  char* const sO = reinterpret_cast<char*>(smem.sQ + kWarpRows * warp_id * kHeadDim);  // [kWarpRows, d]
  const int64_t first_row = smem.first_row;
  const float inverse_kept = kDropout ? 1 / (1 - float(shape.dropped) / 256) : 1;
  const int o_lane = 2 * place<kHeadDim>(quad_row, quad_col);
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row_sum[m][r]);
      const float factor = sum > 0 ? inverse_kept / sum : 0;  // a row that sees nothing: O = 0
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
        *reinterpret_cast<uint32_t*>(sO + along_row<kSpan>(o_lane, 8 * n) + (16 * m + 8 * r) * Config::kRowBytes) =
            pack2<Element>(o[m][n][2 * r] * factor, o[m][n][2 * r + 1] * factor);
      if (quad_col == 0 && row(m, r) < shape.seqlen_q)
        gLse[first_row + row(m, r)] = sum > 0 ? 0.693147181f * row_max[m][r] + logf(sum) : -INFINITY;
    }
  __syncwarp();  // all of the warp's rows are there
#pragma unroll
  for (int i = 0; i < kWarpRows; i += 32 / kSpan) {
    const int r = i + lane_id / kSpan;
    if (warp_row0 + r >= shape.seqlen_q) break;
#pragma unroll
    for (int c = lane_id % kSpan * 8; c < kHeadDim; c += 8 * kSpan)
      *reinterpret_cast<uint4*>(gO + (first_row + warp_row0 + r) * kHeadDim + c) =
          *reinterpret_cast<const uint4*>(sO + 2 * place<kHeadDim>(r, c));
  }
  //! [finish]
}

// Heads of a section: so many that their K and V take half of the L2 of an H200 (50 MB), or one group that shares them.
//! [section]
int64_t heads_of_section(const Problem& p) {
  const int64_t kv_bytes = 2 * p.seqlen_k * p.head_dim * 2;
  return std::min(p.heads * p.batch, std::max<int64_t>(1, (24 << 20) / kv_bytes) * p.group());
}
//! [section]

template <class Element, class Config, bool kDropout>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int64_t num_m_blocks = ceil_div(p.seqlen_q, Config::kBlockM);
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config, kDropout>,
                       dim3(static_cast<unsigned>(num_m_blocks * p.heads * p.batch)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, args.in<Element>("q"),
                       args.in<Element>("k"), args.in<Element>("v"), args.out<Element>("o"),
                       args.out<float>("lse"), shape_of(p), p.seed, static_cast<int>(num_m_blocks),
                       static_cast<int>(p.heads * p.batch), static_cast<int>(heads_of_section(p)));
}

#ifndef ATTN_SWEEP  // sweep.cu has its own tiles
template <class Element, int kHeadDim>
Status launch(const Arguments& args) {
  return args.problem.dropout > 0 ? launch<Element, Config<kHeadDim>, true>(args)
                                  : launch<Element, Config<kHeadDim>, false>(args);
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

}  // namespace ATTN_BACKEND::v7_tuned
