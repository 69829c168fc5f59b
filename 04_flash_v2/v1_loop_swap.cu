// v1_loop_swap: Q in the outer loop, K and V in the inner loop.
//
// parent    03_flash_v1/v10_exp2
// change    A block takes a query tile and loops over all its visible keys, 64 per visit (parent:
//           256). O, m and l stay on the chip: no workspace, no special first or last visit. Only
//           the epilogue adds up l over the lanes of a row and divides O by it. The warps still
//           split the keys and exchange partial O, as in chapter 03. Dropout returns in
//           v12_features.
// why       With K and V in the outer loop, O, m and l round-trip through HBM at each visit.
// expect    HBM bytes: O and its state between visits are gone (dram__bytes_read.sum). L2 bytes: K
//           and V once per 128 queries, Q and O once (lts__t_bytes.sum). Time rises all the same:
//           with 64 keys per visit the warps exchange partial O four times as often per key.
// supports  fp16, bf16; head dims 32, 64, 128; any lengths, masks, GQA; softmax_scale >= 1e-37
// source    FlashAttention-2 (arXiv 2307.08691), sections 3.1 and 3.2
#include "attn/kernel.h"
#include "emulator/warp_access.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"

namespace ATTN_BACKEND::v1_loop_swap {
using namespace attn;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  // warps along the queries and along the keys of a tile
  static constexpr int kWarpsM = 4, kWarpsN = 2;
  static constexpr int kGroupThreads = 32 * kWarpsN;          // threads that share kGroupRows rows
  static constexpr int kTiles = 2, kGroupRows = 16 * kTiles;  // kTiles: 16-row MMA tiles per warp
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kBlockM = kGroupRows * kWarpsM, kBlockN = 64;  // B_r, B_c
  static constexpr int kWarpKeys = kBlockN / kWarpsN;                 // keys per warp
  static constexpr int kSlice = kHeadDim / kWarpsN;  // columns of O that a warp adds and stores
  static_assert(kWarpKeys % 16 == 0 && kSlice % 16 == 0, "warps own whole MMAs");
  static_assert(kWarpsN == 2, "one other warp");
};

// XOR swizzle: offset of element (row, col) of a tile [rows, kHeadDim]. The 16-byte chunks of a row
// are permuted so that the 8 rows that ldmatrix reads at once lie in disjoint banks. Rows of 4
// chunks (d = 32) share the 32 banks in pairs, so their permutation changes every second row.
//! [swizzle]
template <int kHeadDim>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  constexpr int kChunks = kHeadDim / 8;  // 4, 8 or 16 per row
  const int phase = kChunks >= 8 ? row % 8 : row / 2 % 4;
  return row * kHeadDim + ((col / 8) ^ phase) * 8 + col % 8;
}
template <int kHeadDim>
constexpr bool free_of_conflicts() {
  for (int col = 0; col < kHeadDim; col += 16)
    // Arguments: the byte offset that lane l supplies, and the number of 8 x 8 matrices.
    if (ldmatrix_access(  // Q and V
            [=](int l) { return 2 * swizzled_offset<kHeadDim>(l % 16, col + l / 16 * 8); }, 4)
                .conflicts() > 0 ||
        ldmatrix_access(  // K
            [=](int l) {
              return 2 * swizzled_offset<kHeadDim>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8);
            },
            4)
                .conflicts() > 0)
      return false;
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<128>());
//! [swizzle]

// Finite initial row maximum: avoids (-inf) - (-inf) = NaN.
constexpr float kLowest = -3.4028234e38f;

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  float sMax[Config::kWarpsN][Config::kBlockM];                 // row maximum over each warp's keys
  float sSum[Config::kWarpsN][Config::kBlockM];
  // Partial O: sO[group][owner] is the slice that the group's other warp sends to warp `owner`.
  float sO[Config::kWarpsM][Config::kWarpsN][Config::kGroupRows * Config::kSlice];
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sMax, sSum, sO)
};

// Swizzled offset of elements (row, col) and (row, col + 1) of a slice of sO. The 4 lanes of a row
// store 32 contiguous bytes; from slices of 32 columns on, rows with equal col are spread over the
// banks.
template <class Config>
__device__ int exchange_offset(int row, int col) {
  return row * Config::kSlice + ((col / 8) ^ (row % (Config::kSlice / 8))) * 8 + col % 8;
}

// Issues cp.async of rows [row0, row0 + kRows) of a [rows, d] matrix; rows past the end become 0.
// `tid` is one of the kThreads threads that share the work.
template <int kRows, int kThreads, class Config, class Element>
__device__ void load_tile(Element* tile, const Element* g, int row0, int rows, int tid) {
  constexpr int kChunks = Config::kHeadDim / 8;  // of 16 bytes, per row
#pragma unroll
  for (int i = tid; i < kRows * kChunks; i += kThreads) {
    const int r = i / kChunks, c = i % kChunks * 8;
    const bool inside = row0 + r < rows;
    cp_async_16(tile + swizzled_offset<Config::kHeadDim>(r, c),
                inside ? g + int64_t{row0 + r} * Config::kHeadDim + c : g, inside ? 16 : 0);
  }
}

// The KV blocks with a key visible to at least one query of rows [row0, row0 + rows).
struct KvBlockRange {
  int begin, end;
};
__device__ KvBlockRange kv_block_range(const Shape& shape, int row0, int rows, int block_n) {
  const int last = min(row0 + rows, shape.seqlen_q) - 1,
            causal_offset = shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, row0 + causal_offset - shape.window_left);
  const int end = min(shape.seqlen_k, last + causal_offset + shape.window_right + 1);
  if (end <= begin) return {0, 0};  // all rows are fully masked: O = 0, lse = -inf
  return {begin / block_n, ceil_div(end, block_n)};
}

__device__ __forceinline__ float quad_max(float x) {  // over the 4 lanes that share a row
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// (3) S = Q K^T for 32 rows and the keys of this warp.
//! [scores]
template <class Config, class Element>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kTiles][Config::kWarpKeys / 8][4],
                                        const Element* sQ, const Element* sK) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Config::kHeadDim; k += 16) {
    uint32_t a[Config::kTiles][4], b[4];
#pragma unroll
    for (int m = 0; m < Config::kTiles; ++m)
      ldmatrix_x4(a[m], sQ + swizzled_offset<Config::kHeadDim>(16 * m + lane_id % 16,
                                                               k + lane_id / 16 * 8));
#pragma unroll
    for (int n = 0; n < Config::kWarpKeys / 8; n += 2) {  // two MMAs of 8 keys per ldmatrix
      ldmatrix_x4(b, sK + swizzled_offset<Config::kHeadDim>(8 * n + lane_id / 16 * 8 + lane_id % 8,
                                                            k + lane_id / 8 % 2 * 8));
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        mma_m16n8k16<Element>(s[m][n], a[m], {b[0], b[1]}, s[m][n]);
        mma_m16n8k16<Element>(s[m][n + 1], a[m], {b[2], b[3]}, s[m][n + 1]);
      }
    }
  }
}
//! [scores]

// (5) O += P V for 32 rows over the keys of this warp, kSlice columns from `col0` on. Two
// neighbouring accumulators of S, rounded and packed in pairs, are one A fragment.
//! [output]
template <class Config, class Element>
__device__ __forceinline__ void gemm_pv(
    float (&o)[Config::kTiles][Config::kSlice / 8][4],
    const uint32_t (&p)[Config::kTiles][Config::kWarpKeys / 8][2], const Element* sV, int col0) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Config::kWarpKeys / 8; k += 2) {  // 16 keys per MMA
#pragma unroll
    for (int n = 0; n < Config::kSlice / 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, sV + swizzled_offset<Config::kHeadDim>(8 * k + lane_id % 16,
                                                                  col0 + 8 * n + lane_id / 16 * 8));
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        const uint32_t a[4] = {p[m][k][0], p[m][k][1], p[m][k + 1][0], p[m][k + 1][1]};
        mma_m16n8k16<Element>(o[m][n], a, {b[0], b[1]}, o[m][n]);
        mma_m16n8k16<Element>(o[m][n + 1], a, {b[2], b[3]}, o[m][n + 1]);
      }
    }
  }
}
//! [output]

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    attention_kernel(const Element* gQ,  // [B, Hq, seqlen_q, d]
                     const Element* gK,  // [B, Hkv, seqlen_k, d]
                     const Element* gV,  // [B, Hkv, seqlen_k, d]
                     Element* gO,        // [B, Hq, seqlen_q, d]
                     float* gLse,        // [B, Hq, seqlen_q]
                     Shape shape, int num_m_blocks, int num_heads) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kWarpsN = Config::kWarpsN, kWarpKeys = Config::kWarpKeys, kSlice = Config::kSlice;
  constexpr int kTiles = Config::kTiles, kGroupRows = Config::kGroupRows;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int lane_id = threadIdx.x % 32, warp_m = threadIdx.x / 32 / kWarpsN,
            warp_n = threadIdx.x / 32 % kWarpsN;
  const int quad_row = lane_id / 4, quad_col = 2 * (lane_id % 4);  // position in an accumulator
  // Longest query tiles first (LPT order: longest processing time first), across all heads.
  const int row0 = (num_m_blocks - 1 - blockIdx.x / num_heads) * kBlockM;
  const int64_t bh = blockIdx.x % num_heads, bh_kv = bh / (shape.heads / shape.kv_heads);
  const int64_t q0 = bh * shape.seqlen_q;  // first row of this head
  const Element* q = gQ + q0 * kHeadDim;
  const Element* k = gK + bh_kv * shape.seqlen_k * kHeadDim;
  const Element* v = gV + bh_kv * shape.seqlen_k * kHeadDim;
  const int causal_offset = shape.seqlen_k - shape.seqlen_q;
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
  // Group: kWarpsN warps that share kGroupRows rows and a named barrier.
  constexpr int kThreads = Config::kThreads;
  const int group_row = kGroupRows * warp_m, group_row0 = row0 + group_row;
  Element* const group_q = smem.sQ + group_row * kHeadDim;  // [kGroupRows, d]
  const auto group_sync = [&] { named_barrier_sync(1 + warp_m, Config::kGroupThreads); };
  // Row r (0 or 1) of this lane in accumulator tile m.
  const auto local_row = [&](int m, int r) { return group_row + 16 * m + 8 * r + quad_row; };
  const auto row = [&](int m, int r) { return row0 + local_row(m, r); };
  const KvBlockRange kv_range = kv_block_range(shape, row0, kBlockM, kBlockN);

  // (1) Issue the copy of Q_i, which stays in shared memory.
  if (kv_range.begin < kv_range.end)
    load_tile<kBlockM, kThreads, Config>(smem.sQ, q, row0, shape.seqlen_q, threadIdx.x);
  float o[kTiles][kSlice / 8][4] = {};  // this warp's slice of columns, unnormalised
  // row_max over both warps' keys; row_sum over this lane's keys
  float row_max[kTiles][2], row_sum[kTiles][2] = {};
  for (int m = 0; m < kTiles; ++m) row_max[m][0] = row_max[m][1] = kLowest;

  for (int n_block = kv_range.begin; n_block < kv_range.end; ++n_block) {
    // (2) Load K_j and V_j.
    __syncthreads();  // all warps have read the previous K and V
    load_tile<kBlockN, kThreads, Config>(smem.sK, k, n_block * kBlockN, shape.seqlen_k,
                                         threadIdx.x);
    load_tile<kBlockN, kThreads, Config>(smem.sV, v, n_block * kBlockN, shape.seqlen_k,
                                         threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // K, V and Q are visible

    // (3) S = Q K^T, -inf where masked.
    const int key0 = n_block * kBlockN + warp_n * kWarpKeys;
    // rightmost key visible to the first row under a causal mask
    const int diagonal = group_row0 + causal_offset;
    // Fully masked: the keys start after the last row's range or end before the first row's.
    const bool none = key0 >= min(shape.seqlen_k, diagonal + kGroupRows + shape.window_right) ||
                      key0 + kWarpKeys <= diagonal - shape.window_left;
    float s[kTiles][kWarpKeys / 8][4] = {};
    if (!none) gemm_qk<Config>(s, group_q, smem.sK + warp_n * kWarpKeys * kHeadDim);
    // Mask only tiles that a mask boundary crosses: keys not visible to every row.
    if (key0 < diagonal + kGroupRows - 1 - shape.window_left ||
        key0 + kWarpKeys > min(shape.seqlen_k, diagonal + shape.window_right + 1)) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = key0 + 8 * n + quad_col + i % 2,
                      row_diagonal = row(m, i / 2) + causal_offset;
            if (key < row_diagonal - shape.window_left || key > row_diagonal + shape.window_right ||
                key >= shape.seqlen_k)
              s[m][n][i] = -INFINITY;
          }
    }

    // (4) Online softmax: row maximum of this warp's keys, then of both warps and the old state.
    //! [softmax]
    float old_max[kTiles][2];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        old_max[m][r] = row_max[m][r];
        float& max = row_max[m][r] = -INFINITY;
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
          max = fmaxf(max, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
        max = fmaxf(quad_max(max) * softmax_scale_log2, kLowest);
        if (quad_col == 0) smem.sMax[warp_n][local_row(m, r)] = max;
      }
    group_sync();  // the maxima of both warps are visible
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& max = row_max[m][r];
        max = fmaxf(old_max[m][r], fmaxf(max, smem.sMax[1 - warp_n][local_row(m, r)]));
        //! [ex04a]
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& p = s[m][n][2 * r + c];
            p = exp2f(fmaf(p, softmax_scale_log2, -max));
            sum += p;
          }
        const float rescale = exp2f(old_max[m][r] - max);
        row_sum[m][r] = row_sum[m][r] * rescale + sum;
#pragma unroll
        for (int n = 0; n < kSlice / 8; ++n)
          o[m][n][2 * r] *= rescale, o[m][n][2 * r + 1] *= rescale;
        //! [ex04a]
      }
    //! [softmax]
    uint32_t p[kTiles][kWarpKeys / 8][2];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kWarpKeys / 8; ++n)
        p[m][n][0] = pack2<Element>(s[m][n][0], s[m][n][1]),
        p[m][n][1] = pack2<Element>(s[m][n][2], s[m][n][3]);

    // (5) P V over this warp's keys: first the slice of the other warp, (6) sent through sO.
    //! [exchange]
    const Element* const v_tile = smem.sV + warp_n * kWarpKeys * kHeadDim;
    {
      float theirs[kTiles][kSlice / 8][4] = {};
      if (!none) gemm_pv<Config>(theirs, p, v_tile, (1 - warp_n) * kSlice);
      float* const to = smem.sO[warp_m][1 - warp_n];
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int n = 0; n < kSlice / 8; ++n)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            *reinterpret_cast<float2*>(
                to + exchange_offset<Config>(16 * m + 8 * r + quad_row, 8 * n + quad_col)) =
                make_float2(theirs[m][n][2 * r], theirs[m][n][2 * r + 1]);
    }
    if (!none) gemm_pv<Config>(o, p, v_tile, warp_n * kSlice);
    group_sync();  // partial O of the other warp is visible
    const float* const from = smem.sO[warp_m][warp_n];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int n = 0; n < kSlice / 8; ++n) {
          const float2 part = *reinterpret_cast<const float2*>(
              from + exchange_offset<Config>(16 * m + 8 * r + quad_row, 8 * n + quad_col));
          o[m][n][2 * r] += part.x, o[m][n][2 * r + 1] += part.y;
        }
    //! [exchange]
  }

  // (7) O = O / l, once; (8) store O and lse.
  //! [finish]
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[m][r] = quad_sum(row_sum[m][r]);
      if (quad_col == 0) smem.sSum[warp_n][local_row(m, r)] = row_sum[m][r];
    }
  group_sync();  // the sums of both warps are visible
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row(m, r) >= shape.seqlen_q) continue;
      const float sum = smem.sSum[0][local_row(m, r)] + smem.sSum[1][local_row(m, r)];
      const float factor = sum != 0 ? 1 / sum : 0;  // fully masked row: O = 0
      const int64_t idx = (q0 + row(m, r)) * kHeadDim + warp_n * kSlice + quad_col;
#pragma unroll
      for (int n = 0; n < kSlice / 8; ++n)
        *reinterpret_cast<uint32_t*>(gO + idx + 8 * n) =
            pack2<Element>(o[m][n][2 * r] * factor, o[m][n][2 * r + 1] * factor);
      if (warp_n == 0 && quad_col == 0)
        gLse[q0 + row(m, r)] = sum != 0 ? kLn2 * row_max[m][r] + logf(sum) : -INFINITY;
    }
  //! [finish]
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int64_t num_m_blocks = ceil_div(p.seqlen_q, Config::kBlockM), num_heads = p.heads * p.batch;
  // The cost model only asks for B_r, B_c, heads per section, blocks per SM, rows masked together.
  if (args.report_tiling({Config::kBlockM, Config::kBlockN, num_heads, 1, Config::kGroupRows}))
    return Status::success();
  const ForwardParams<Element> params(args);
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(num_m_blocks * num_heads)),
                       dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream,
                       params.q, params.k, params.v, params.o, params.lse, shape_of(p),
                       static_cast<int>(num_m_blocks), static_cast<int>(num_heads));
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 32: return launch<Element, Config<32>>(args);
      case 64: return launch<Element, Config<64>>(args);
      case 128: return launch<Element, Config<128>>(args);
    }
    return Status::unsupported("only head dims 32, 64 and 128");
  });
}

}  // namespace ATTN_BACKEND::v1_loop_swap
