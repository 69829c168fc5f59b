// v5_packed_rows: PackGQA, the rows of a K/V head fill the M dimension of an MMA.
//
// parent    v4_gqa
// change    Up to 16 rows, the queries of all heads of a group, go through tensor cores, as in
//           chapter 04. CUDA cores only compute the softmax. ldmatrix reads 8 rows at once, so
//           tiles are swizzled, and data that other lanes copied, so __syncwarp follows the wait.
// why       An MMA has 16 rows and takes the same time for 1 as for 16.
// expect    time flat in the group size; sm__inst_executed.sum falls by the group size
// supports  fp16, bf16; head dims 64, 128, 256; 1 to 16 queries, any lengths, causal, windows, GQA
// source    PackGQA in FlashAttention-3
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/combine.h"
#include "kernels/splits.h"
#include "kernels/decode/rows.h"

namespace ATTN_BACKEND::v5_packed_rows {
using namespace attn;
using namespace flash_decoding;
using namespace splits;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_, kRows = 16;
  static constexpr int kBlockN = 16;  // keys per tile of a warp
  static constexpr int kNumWarps = 4, kThreads = 32 * kNumWarps;
  static constexpr int kLanes = kHeadDim / 8;              // lanes per key, 16 bytes each
  static constexpr int kRowsPerLoad = 32 / kLanes;         // keys (rows of K) per load of a warp
  static constexpr int kParts = kNumWarps;                 // partial results per row
  static constexpr int kStages = kHeadDim <= 128 ? 3 : 2;  // pipeline stages per warp
  static_assert(kHeadDim % 64 == 0 && kLanes <= 32, "a warp copies whole rows");
};

template <class Element, class Config>
struct SharedStorage {
  alignas(16) Element sK[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  alignas(16) Element sV[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  float sMax[Config::kParts][Config::kRows];  // in log2 units
  float sSum[Config::kParts][Config::kRows];
  ATTN_MEMBERS(SharedStorage, sK, sV, sMax, sSum)
};
// O of each warp, in the memory of K and V. The padding avoids bank conflicts: half a warp stores
// four rows of 8 floats at once, 8 bytes per lane, to all 32 banks.
template <class Config>
using OutputParts = float[Config::kParts][Config::kRows][Config::kHeadDim + 8];
template <class Config>
using SplitWeights = float[Config::kRows][kMaxSplits];

// XOR swizzle: offset of element (row, col) in a tile [kBlockN, kHeadDim]. 16-byte chunks of a row
// are permuted so that the 8 rows of an ldmatrix phase hit disjoint banks.
//! [swizzle]
template <int kHeadDim>
__device__ __forceinline__ int swizzled_offset(int row, int col) {
  return row * kHeadDim + ((col / 8) ^ (row % 8)) * 8 + col % 8;
}
//! [swizzle]

// Issues cp.async of this lane's chunks of a tile; rows from `count` on become 0. `g`: the lane's
// chunk of the tile's first row. `chunk`: its first column.
//! [load]
template <class Config, class Element>
__device__ __forceinline__ void load_tile(Element* tile, const Element* g, int count) {
  const int key = threadIdx.x % 32 / Config::kLanes, chunk = threadIdx.x % Config::kLanes * 8;
#pragma unroll
  for (int n = 0; n < Config::kBlockN; n += Config::kRowsPerLoad) {
    const int row = n + key;
    const bool inside = row < count;
    cp_async_16(tile + swizzled_offset<Config::kHeadDim>(row, chunk),
                g + (inside ? row : 0) * Config::kHeadDim, inside ? 16 : 0);
  }
}
//! [load]

// (3) S = Q K^T and (5) O += P V for the tile of this warp; fragments as in chapter 04.
//! [mma]
template <class Element, class Config>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kBlockN / 8][4],
                                        const uint32_t (&q)[Config::kHeadDim / 16][4],
                                        const Element* sK) {
  const int lane_id = threadIdx.x % 32, row = lane_id / 16 * 8 + lane_id % 8;
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step)
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(
          b, sK + swizzled_offset<Config::kHeadDim>(8 * n + row, 16 * step + lane_id / 8 % 2 * 8));
      mma_m16n8k16<Element>(s[n], q[step], {b[0], b[1]}, s[n]);
      mma_m16n8k16<Element>(s[n + 1], q[step], {b[2], b[3]}, s[n + 1]);
    }
}
template <class Element, class Config>
__device__ __forceinline__ void gemm_pv(float (&o)[Config::kHeadDim / 8][4],
                                        const float (&p)[Config::kBlockN / 8][4],
                                        const Element* sV) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Config::kBlockN / 16; ++k) {
    const float(&low)[4] = p[2 * k], (&high)[4] = p[2 * k + 1];
    const uint32_t a[4] = {pack2<Element>(low[0], low[1]), pack2<Element>(low[2], low[3]),
                           pack2<Element>(high[0], high[1]), pack2<Element>(high[2], high[3])};
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, sV + swizzled_offset<Config::kHeadDim>(16 * k + lane_id % 16,
                                                                  8 * n + lane_id / 16 * 8));
      mma_m16n8k16<Element>(o[n], a, {b[0], b[1]}, o[n]);
      mma_m16n8k16<Element>(o[n + 1], a, {b[2], b[3]}, o[n + 1]);
    }
  }
}
//! [mma]

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    attention_kernel(const Element* gQ,    // [B, Hq, seqlen_q, d]
                     const Element* gK,    // [B, Hkv, seqlen_k, d]
                     const Element* gV,    // [B, Hkv, seqlen_k, d]
                     const int* gSeqused,  // [B]: valid keys per sequence
                     float* gOPartial,     // [B, Hq, seqlen_q, num_splits, d]
                     float* gLsePartial,   // [B, Hq, seqlen_q, num_splits], in log2 units
                     Shape shape) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN, kRows = Config::kRows;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int quad_row = lane_id / 4, quad_col = lane_id % 4 * 2;  // position in an accumulator
  const Rows rows = rows_of(shape, blockIdx.x, kRows);
  const int seqlen_k = gSeqused[rows.bh_kv / shape.kv_heads];
  const int split = blockIdx.y, num_splits = gridDim.y;
  const KvRange keys = part_of(visible_keys(shape, seqlen_k, rows), split, num_splits, kBlockN);
  const int64_t kv = int64_t{rows.bh_kv} * shape.seqlen_k * kHeadDim + lane_id % Config::kLanes * 8;

  //! [ex05b]
  // (1) Load the A fragments of Q, which stay in registers. Rows past the last are 0.
  uint32_t q[kHeadDim / 16][4];
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = quad_row + i % 2 * 8, col = 16 * step + i / 2 * 8 + quad_col;
      q[step][i] =
          row < rows.count
              ? *reinterpret_cast<const uint32_t*>(gQ + (rows.first + row) * kHeadDim + col)
              : 0;
    }
  float o[kHeadDim / 8][4] = {};  // unnormalised
  // max in log2 units; sum over this lane's keys
  float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
  const KvRange kv_range[2] = {
      keys_of_query(shape, seqlen_k, (rows.row0 + quad_row) % shape.seqlen_q),
      keys_of_query(shape, seqlen_k, (rows.row0 + quad_row + 8) % shape.seqlen_q)};
  //! [ex05b]

  // (2) Issue K_j and V_j, kStages - 1 tiles ahead. Past the last tile the cp.async groups are
  // empty.
  //! [pipeline]
  constexpr int kStages = Config::kStages, kStep = Config::kNumWarps * kBlockN;
  const int first = keys.begin + warp_id * kBlockN;
  const auto load_kv = [&](int key0, int stage) {
    if (key0 < keys.end) {
      const int64_t from = kv + int64_t{key0} * kHeadDim;
      load_tile<Config>(&smem.sK[warp_id][stage][0][0], gK + from, keys.end - key0);
      load_tile<Config>(&smem.sV[warp_id][stage][0][0], gV + from, keys.end - key0);
    }
    cp_async_commit();
  };
  for (int n = 0; n < kStages - 1; ++n) load_kv(first + n * kStep, n);
  int stage = 0;
  for (int key0 = first; key0 < keys.end; key0 += kStep, stage = (stage + 1) % kStages) {
    __syncwarp();  // all lanes have read the previous tile, whose stage is refilled
    load_kv(key0 + (kStages - 1) * kStep, (stage + kStages - 1) % kStages);
    cp_async_wait<kStages - 1>();
    __syncwarp();  // this tile's copies of all lanes are visible
    //! [pipeline]
    // (3) S = Q K^T.
    float s[kBlockN / 8][4] = {};
    gemm_qk<Element, Config>(s, q, &smem.sK[warp_id][stage][0][0]);
    // (4) Mask and online softmax.
    //! [softmax]
    float max[2] = {row_max[0], row_max[1]};
#pragma unroll
    for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = key0 + 8 * n + quad_col + i % 2;
        s[n][i] = j < kv_range[i / 2].begin || j >= kv_range[i / 2].end
                      ? -INFINITY
                      : s[n][i] * softmax_scale_log2;
        max[i / 2] = fmaxf(max[i / 2], s[n][i]);
      }
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = quad_max(max[r]);
      rescale[r] = exp2f(row_max[r] - max[r]);
      row_max[r] = max[r];
      row_sum[r] *= rescale[r];
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] *= rescale[i / 2];
#pragma unroll
    for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = exp2f(s[n][i] - max[i / 2]);
        row_sum[i / 2] += s[n][i];
      }
    //! [softmax]
    // (5) O += P V
    gemm_pv<Element, Config>(o, s, &smem.sV[warp_id][stage][0][0]);
  }

  // (6) Reduce across warps.
  //! [merge]
  auto& sO = reinterpret_cast<OutputParts<Config>&>(smem);
  static_assert(sizeof sO <= sizeof smem.sK + sizeof smem.sV, "the parts lie where K and V were");
  cp_async_wait<0>();
  __syncthreads();  // all warps have read K and V
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = quad_row + 8 * r;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
      *reinterpret_cast<float2*>(&sO[warp_id][row][8 * n + quad_col]) =
          make_float2(o[n][2 * r], o[n][2 * r + 1]);
    const float sum = quad_sum(row_sum[r]);
    if (lane_id % 4 == 0) smem.sMax[warp_id][row] = row_max[r], smem.sSum[warp_id][row] = sum;
  }
  __syncthreads();  // m, l and O of all warps are visible
  for (int idx = threadIdx.x; idx < rows.count * kHeadDim; idx += Config::kThreads) {
    const int r = idx / kHeadDim, col = idx % kHeadDim;
    float max = kLowest, sum = 0, out = 0;
    for (int n = 0; n < Config::kParts; ++n) max = fmaxf(max, smem.sMax[n][r]);
    for (int n = 0; n < Config::kParts; ++n) {
      const float weight = exp2f(smem.sMax[n][r] - max);
      sum += weight * smem.sSum[n][r];
      out += weight * sO[n][r][col];
    }
    //! [merge]
    // (7) O = O / l of this split; (8) store O and lse, -inf if no key is visible.
    const int64_t to = (rows.first + r) * num_splits + split;
    gOPartial[to * kHeadDim + col] = sum != 0 ? out / sum : 0;
    if (col == 0) gLsePartial[to] = sum != 0 ? max + log2f(sum) : -INFINITY;
  }
}

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    combine_kernel(const float* gOPartial,    // [B, Hq, seqlen_q, num_splits, d]
                   const float* gLsePartial,  // [B, Hq, seqlen_q, num_splits], in log2 units
                   Element* gO,               // [B, Hq, seqlen_q, d]
                   float* gLse,               // [B, Hq, seqlen_q]
                   Shape shape, int num_splits) {
  auto& sWeight = dynamic_shared<SplitWeights<Config>>();
  const Rows rows = rows_of(shape, blockIdx.x, Config::kRows);
  combine<Element, Config::kHeadDim, Config::kThreads>(
      &sWeight[0][0], gOPartial, gLsePartial, gO, gLse, rows, num_splits,
      [&](int r, int n) { return (rows.first + r) * num_splits + n; });
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const DecodeParams<Element> params(args);
  const Problem& p = args.problem;
  const int64_t num_splits = splits_that_fill(p, Config::kRows);
  args.phase("attention");
  const Status status = launch_kernel(
      attention_kernel<Element, Config>,
      dim3(static_cast<unsigned>(row_blocks(p, Config::kRows)), static_cast<unsigned>(num_splits)),
      dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream, params.q,
      params.k, params.v, params.seqused_k, params.o_partial, params.lse_partial, shape_of(p));
  if (!status.ok()) return status;
  args.phase("combine");
  return launch_kernel(
      combine_kernel<Element, Config>, dim3(static_cast<unsigned>(row_blocks(p, Config::kRows))),
      dim3(Config::kThreads), sizeof(SplitWeights<Config>), args.stream, params.o_partial,
      params.lse_partial, params.o, params.lse, shape_of(p), static_cast<int>(num_splits));
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 64: return launch<Element, Config<64>>(args);
      case 128: return launch<Element, Config<128>>(args);
      case 256: return launch<Element, Config<256>>(args);
    }
    return Status::unsupported("only head dims 64, 128 and 256");
  });
}

}  // namespace ATTN_BACKEND::v5_packed_rows
