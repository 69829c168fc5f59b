// v12_more_rows: up to 64 rows per thread block.
//
// parent    v11_shared_p
// change    Up to four MMAs of 16 rows share each fragment of K and V. Q stays in shared memory.
// why       Several queries per sequence times the heads of a group exceed 16 rows, and each
//           further row tile reads K and V again. With O split by columns the registers suffice.
// expect    time flat up to 64 rows; dram__bytes_read.sum is that of reading K and V once
// supports  fp16, bf16; head dims 64, 128, 256; 1 to 16 queries, any lengths, causal, windows, GQA
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/combine.h"
#include "kernels/row_tiles.h"
#include "kernels/decode/runs.h"
#include "kernels/splits.h"
#include "kernels/decode/rows.h"

namespace ATTN_BACKEND::v12_more_rows {
using namespace attn;
using namespace flash_decoding;
using namespace splits;

template <int kHeadDim_, int kRowTiles_>
struct Config {
  static constexpr int kRowTiles = kRowTiles_;  // 16-row MMA tiles
  static constexpr int kHeadDim = kHeadDim_, kRows = 16 * kRowTiles;
  static constexpr int kBlockN = 16;  // keys per tile of a warp
  // d=64: 8 warps would own 8 columns each, less than the 16 of an ldmatrix.x4. d=256: two stages
  // of 8 warps exceed shared memory.
  static constexpr int kNumWarps = kHeadDim == 128 ? 8 : 4, kThreads = 32 * kNumWarps;
  static constexpr int kTile = kNumWarps * kBlockN;       // keys per tile of the block
  static constexpr int kLanes = kHeadDim / 8;             // lanes per key, 16 bytes each
  static constexpr int kRowsPerLoad = 32 / kLanes;        // keys (rows of K) per load of a warp
  static constexpr int kColumns = kHeadDim / kNumWarps;   // columns of O per warp
  static constexpr int kStages = kHeadDim <= 64 ? 4 : 2;  // pipeline stages per warp
  static constexpr int kBlocksPerSm = 1;
  static_assert(kHeadDim % 64 == 0 && kLanes <= 32, "a warp copies whole rows");
};

template <class Element, class Config>
struct SharedStorage {
  alignas(16) Element sK[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  alignas(16) Element sV[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  alignas(16) Element sQ[Config::kRows][Config::kHeadDim];
  // padding: 8 rows of an ldmatrix phase hit disjoint banks
  alignas(16) Element sP[Config::kRows][Config::kTile + 8];
  float sMax[Config::kNumWarps][Config::kRows];  // in log2 units
  float sSum[Config::kNumWarps][Config::kRows];
  bool last;  // this block arrived last and reduces the splits of the row block
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sP, sMax, sSum, last)
};
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

// (3) S = Q K^T for the keys of this warp, and (5) O += P V for its columns, over all keys.
//! [mma]
template <class Element, class Config>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kRowTiles][Config::kBlockN / 8][4],
                                        const Element* sQ, const Element* sK) {
  const int lane_id = threadIdx.x % 32, row = lane_id / 16 * 8 + lane_id % 8;
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step)
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; n += 2) {
      uint32_t a[4], b[4];
      ldmatrix_x4(
          b, sK + swizzled_offset<Config::kHeadDim>(8 * n + row, 16 * step + lane_id / 8 % 2 * 8));
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        ldmatrix_x4(a, sQ + swizzled_offset<Config::kHeadDim>(16 * m + lane_id % 16,
                                                              16 * step + lane_id / 16 * 8));
        mma_m16n8k16<Element>(s[m][n], a, {b[0], b[1]}, s[m][n]);
        mma_m16n8k16<Element>(s[m][n + 1], a, {b[2], b[3]}, s[m][n + 1]);
      }
    }
}
template <class Element, class Config, class RowTile>
__device__ __forceinline__ void gemm_pv(RowTile (&row_tile)[Config::kRowTiles],
                                        SharedStorage<Element, Config>& smem, int stage,
                                        int warps_with_keys) {
  const int lane_id = threadIdx.x % 32, col = threadIdx.x / 32 * Config::kColumns;
#pragma unroll
  for (int k = 0; k < Config::kNumWarps; ++k) {  // warp k's keys
    if (k >= warps_with_keys) break;
    uint32_t a[Config::kRowTiles][4], b[4];
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m)
      ldmatrix_x4(a[m], &smem.sP[16 * m + lane_id % 16][Config::kBlockN * k + lane_id / 16 * 8]);
#pragma unroll
    for (int n = 0; n < Config::kColumns / 8; n += 2) {
      ldmatrix_x4_trans(
          b, &smem.sV[k][stage][0][0] +
                 swizzled_offset<Config::kHeadDim>(lane_id % 16, col + 8 * n + lane_id / 16 * 8));
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        mma_m16n8k16<Element>(row_tile[m].o[n], a[m], {b[0], b[1]}, row_tile[m].o[n]);
        mma_m16n8k16<Element>(row_tile[m].o[n + 1], a[m], {b[2], b[3]}, row_tile[m].o[n + 1]);
      }
    }
  }
}
//! [mma]

// One warp reduces the partial results of a row. A lane owns four of each 128 columns and the
// weight of every 32nd partial result. `partial_index(n)`: index of partial result n.
//! [merge_row]
template <class Element, class Config, class PlaceOf>
__device__ __forceinline__ void merge_row(const float* gOPartial, const float* gLsePartial,
                                          Element* gO, float* gLse, int64_t row, int num_parts,
                                          PlaceOf partial_index) {
  constexpr int kHeadDim = Config::kHeadDim, kAtOnce = 8;  // partial results in flight
  constexpr int kOwn = ceil_div(kHeadDim, 128);            // groups of four columns per lane
  const int lane_id = threadIdx.x % 32;
  const bool owner = 4 * lane_id < kHeadDim;  // at d=64 half of the lanes own no columns
  float4 parts[kAtOnce][kOwn] = {};
  const auto load = [&](int n0) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int c = 0; c < kOwn; ++c)
        if (owner && n0 + i < num_parts)
          parts[i][c] = *reinterpret_cast<const float4*>(
              gOPartial + partial_index(n0 + i) * kHeadDim + 128 * c + 4 * lane_id);
  };
  load(0);
  float max = kLowest, sum = 0, weight = 0, out[kOwn][4] = {};
  for (int n = lane_id; n < num_parts; n += 32) max = fmaxf(max, gLsePartial[partial_index(n)]);
  for (int distance = 16; distance > 0; distance /= 2)
    max = fmaxf(max, __shfl_xor_sync(~0u, max, distance));
  for (int n0 = 0; n0 < num_parts; n0 += kAtOnce) {
    if (n0 > 0) load(n0);
    if (n0 % 32 == 0) {
      const int n = n0 + lane_id;
      weight = n < num_parts ? exp2f(gLsePartial[partial_index(n)] - max) : 0;
      sum += weight;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float of_part = __shfl_sync(~0u, weight, n0 % 32 + i);
      if (n0 + i >= num_parts) continue;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) add_scaled(out[c], of_part, parts[i][c]);
    }
  }
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
#pragma unroll
  for (int c = 0; c < kOwn; ++c)
    if (owner)
      store_row_part(gO + row * kHeadDim + 128 * c + 4 * lane_id, out[c], sum != 0 ? 1 / sum : 0);
  if (lane_id == 0) gLse[row] = sum != 0 ? kLn2 * (max + log2f(sum)) : -INFINITY;
}
//! [merge_row]

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    attention_kernel(const Element* gQ,     // [B, Hq, seqlen_q, d]
                     const Element* gK,     // [B, Hkv, seqlen_k, d]
                     const Element* gV,     // [B, Hkv, seqlen_k, d]
                     const int* gSeqused,   // [B]: valid keys per sequence
                     Element* gO,           // [B, Hq, seqlen_q, d]
                     float* gLse,           // [B, Hq, seqlen_q]
                     float* gOPartial,      // [blocks, 2, kRows, d]
                     float* gLsePartial,    // [blocks, 2, kRows], in log2 units
                     unsigned* gSemaphore,  // [row blocks]: arrivals; 0 between launches
                     Shape shape, int batch, int row_tiles) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN, kRows = Config::kRows;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int quad_row = lane_id / 4, quad_col = lane_id % 4 * 2;  // position in an accumulator
  const int num_row_blocks = shape.kv_heads * row_tiles;  // per sequence; row_tiles: per K/V head
  StreamKUnit run = run_of(shape, gSeqused, batch, num_row_blocks, Config::kTile);
  while (run.begin < run.end) {
    // Work tile: KV tiles [tile, tile + count) of a row block; split `split` of its `num_splits`.
    const auto [seqlen_k, row_block, tile, count, tiles, first_block, num_splits, split] =
        next_work_tile(run, shape, gSeqused, num_row_blocks, Config::kTile);
    const Rows rows = rows_of(shape, row_block, kRows);
    const KvRange all = keys_of_sequence(shape, seqlen_k);
    const KvRange keys{all.begin + tile * Config::kTile,
                       min(all.end, all.begin + (tile + count) * Config::kTile)};
    const int64_t kv =
        int64_t{rows.bh_kv} * shape.seqlen_k * kHeadDim + lane_id % Config::kLanes * 8;

    // (1) Load Q, once per work tile. Rows past the last become 0.
    //! [load_q]
    for (int idx = threadIdx.x; idx < kRows * Config::kLanes; idx += Config::kThreads) {
      const int row = idx / Config::kLanes, col = idx % Config::kLanes * 8;
      const bool inside = row < rows.count;
      cp_async_16(&smem.sQ[0][0] + swizzled_offset<kHeadDim>(row, col),
                  gQ + (rows.first + (inside ? row : 0)) * kHeadDim + col, inside ? 16 : 0);
    }
    cp_async_commit();
    //! [load_q]
    const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
    struct RowTile {                          // state of this thread for 16 rows
      float o[Config::kColumns / 8][4] = {};  // unnormalised
      // max in log2 units; sum over this lane's keys
      float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
      KvRange kv_range[2];
    } row_tile[Config::kRowTiles];
#pragma unroll
    for (int r = 0; r < kRows / 8; ++r)
      row_tile[r / 2].kv_range[r % 2] =
          keys_of_query(shape, seqlen_k, (rows.row0 + quad_row + 8 * r) % shape.seqlen_q);

    // (2) Issue K_j and V_j, kStages - 1 tiles ahead. Past the last tile the cp.async groups are
    // empty.
    //! [pipeline]
    constexpr int kStages = Config::kStages, kStep = Config::kNumWarps * kBlockN;
    const int first = warp_id * kBlockN;  // this warp's first key in a tile
    const auto load_kv = [&](int key0, int stage) {
      if (key0 < keys.end) {
        const int64_t from = kv + int64_t{key0} * kHeadDim;
        load_tile<Config>(&smem.sK[warp_id][stage][0][0], gK + from, keys.end - key0);
        load_tile<Config>(&smem.sV[warp_id][stage][0][0], gV + from, keys.end - key0);
      }
      cp_async_commit();
    };
    for (int n = 0; n < kStages - 1; ++n) load_kv(keys.begin + first + n * kStep, n);
    int stage = 0;
    for (int key0 = keys.begin; key0 < keys.end; key0 += kStep, stage = (stage + 1) % kStages) {
      cp_async_wait<kStages - 2>();
      __syncthreads();  // Q and this tile are visible; all warps have read the previous tile
      load_kv(key0 + first + (kStages - 1) * kStep, (stage + kStages - 1) % kStages);
      //! [pipeline]
      // (3) S = Q K^T.
      float s_of[Config::kRowTiles][kBlockN / 8][4] = {};
      if (key0 + first < keys.end) {  // this warp has keys in the tile
        gemm_qk<Element, Config>(s_of, &smem.sQ[0][0], &smem.sK[warp_id][stage][0][0]);
      }
      // (4) Mask; online softmax: row maxima over each warp's keys, then over all warps.
      //! [softmax]
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        auto& s = s_of[m];
        auto& [o, row_max, row_sum, kv_range] = row_tile[m];
        float max[2] = {row_max[0], row_max[1]};
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int j = key0 + first + 8 * n + quad_col + i % 2;
            s[n][i] = j < kv_range[i / 2].begin || j >= kv_range[i / 2].end
                          ? -INFINITY
                          : s[n][i] * softmax_scale_log2;
            max[i / 2] = fmaxf(max[i / 2], s[n][i]);
          }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          max[r] = quad_max(max[r]);
          if (lane_id % 4 == 0) smem.sMax[warp_id][16 * m + quad_row + 8 * r] = max[r];
        }
      }
      __syncthreads();  // the maxima of all warps are visible
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        auto& s = s_of[m];
        auto& [o, row_max, row_sum, kv_range] = row_tile[m];
        float max[2] = {row_max[0], row_max[1]};
        float rescale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          for (int n = 0; n < Config::kNumWarps; ++n)
            max[r] = fmaxf(max[r], smem.sMax[n][16 * m + quad_row + 8 * r]);
          rescale[r] = exp2f(row_max[r] - max[r]);
          row_max[r] = max[r];
          row_sum[r] *= rescale[r];
        }
#pragma unroll
        for (int n = 0; n < Config::kColumns / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[n][i] *= rescale[i / 2];
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            s[n][i] = exp2f(s[n][i] - max[i / 2]);
            row_sum[i / 2] += s[n][i];
          }
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            *reinterpret_cast<uint32_t*>(
                &smem.sP[16 * m + quad_row + 8 * r][first + 8 * n + quad_col]) =
                pack2<Element>(s[n][2 * r], s[n][2 * r + 1]);
      }
      __syncthreads();  // P of all warps is visible
      //! [softmax]
      // (5) O += P V
      gemm_pv<Element, Config>(row_tile, smem, stage, ceil_div(keys.end - key0, kBlockN));
    }

    // (6) Add the row sums of all warps.
    //! [merge]
    cp_async_wait<0>();
#pragma unroll
    for (int r = 0; r < kRows / 8; ++r) {
      const float sum = quad_sum(row_tile[r / 2].row_sum[r % 2]);
      if (lane_id % 4 == 0) smem.sSum[warp_id][quad_row + 8 * r] = sum;
    }
    __syncthreads();  // the sums of all warps are visible
#pragma unroll
    for (int r = 0; r < kRows / 8; ++r) {
      const auto& o = row_tile[r / 2].o;
      const int row = quad_row + 8 * r, col = warp_id * Config::kColumns + quad_col;
      if (row >= rows.count) continue;
      float sum = 0;
      for (int n = 0; n < Config::kNumWarps; ++n) sum += smem.sSum[n][row];
      //! [merge]
      // (7) O = O / l of this split; (8) store O and lse, -inf if no key is visible.
      const float factor = sum != 0 ? 1 / sum : 0;
      const float lse = sum != 0 ? row_tile[r / 2].row_max[r % 2] + log2f(sum) : -INFINITY;
      const int64_t to =
          num_splits == 1 ? rows.first + row : partial_of(first_block, split) * kRows + row;
#pragma unroll
      for (int n = 0; n < Config::kColumns / 8; ++n) {
        const float o0 = o[n][r % 2 * 2] * factor, o1 = o[n][r % 2 * 2 + 1] * factor;
        const int64_t idx = to * kHeadDim + col + 8 * n;
        if (num_splits == 1)
          *reinterpret_cast<uint32_t*>(gO + idx) = pack2<Element>(o0, o1);
        else
          *reinterpret_cast<float2*>(gOPartial + idx) = make_float2(o0, o1);
      }
      if (col > 0) continue;
      (num_splits == 1 ? gLse : gLsePartial)[to] = num_splits == 1 ? kLn2 * lse : lse;
    }

    // (9) The last block to arrive reduces.
    //! [arrive]
    __syncthreads();  // the partial result is stored; all threads have read sSum
    if (num_splits == 1) continue;
    if (threadIdx.x == 0) smem.last = flag_add(&gSemaphore[row_block], 1) == num_splits - 1u;
    __syncthreads();  // `last` is visible, and the other blocks' results, which thread 0 acquired
    if (!smem.last) continue;
    for (int r = warp_id; r < rows.count; r += Config::kNumWarps)
      merge_row<Element, Config>(gOPartial, gLsePartial, gO, gLse, rows.first + r, num_splits,
                                 [&](int n) { return partial_of(first_block, n) * kRows + r; });
    if (threadIdx.x == 0) gSemaphore[row_block] = 0;  // reset for the next launch
    //! [arrive]
  }
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const DecodeParams<Element> params(args);
  const Problem& p = args.problem;
  const int num_sms = args.backend == Backend::gpu ? gpu_info().num_sms : kEmulatedSms;
  args.phase("attention");
  return launch_kernel(
      attention_kernel<Element, Config>,
      dim3(static_cast<unsigned>(std::min(kMaxRuns, num_sms * Config::kBlocksPerSm))),
      dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream, params.q,
      params.k, params.v, params.seqused_k, params.o, params.lse, params.o_partial,
      params.lse_partial, params.arrived, shape_of(p), static_cast<int>(p.batch),
      static_cast<int>(ceil_div(p.group() * p.seqlen_q, Config::kRows)));
}

template <class Element, int kHeadDim>
Status launch(const Arguments& args) {
  switch (row_tiles_of_a_block(args.problem)) {
    case 1: return launch<Element, Config<kHeadDim, 1>>(args);
    case 2: return launch<Element, Config<kHeadDim, 2>>(args);
  }
  return launch<Element, Config<kHeadDim, 4>>(args);
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 64: return launch<Element, 64>(args);
      case 128: return launch<Element, 128>(args);
      case 256: return launch<Element, 256>(args);
    }
    return Status::unsupported("only head dims 64, 128 and 256");
  });
}

}  // namespace ATTN_BACKEND::v12_more_rows
