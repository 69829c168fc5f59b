// v15_wgmma: 64 rows per block with wgmma. Presumes chapter 06.
//
// parent    v13_even_splits
// change    One warpgroup processes up to 64 rows of a K/V head with wgmma, which takes 64 rows.
//           Each warp owns 16 of them and all keys of a tile, so nothing is reduced across warps.
//           Tiles are stored as panels of 64 columns, 128 bytes per row.
// why       Several queries times the heads of a group can be more than the 16 rows of mma.sync.
//           wgmma takes the same time for 1 row as for 64.
// expect    gpu__time_duration.sum is the same for 1 to 64 rows; up to 32 rows it is longer than
//           that of v13, because a single warpgroup runs on an SM
// supports  fp16, bf16; head dims 64, 128, 256; 1 to 16 queries, any lengths, causal, windows, GQA
#include <algorithm>
#include <type_traits>

#include "device/device.h"
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "ptx/mma.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "kernels/combine.h"
#include "kernels/decode/schedules.h"
#include "kernels/splits.h"
#include "kernels/decode/rows.h"

namespace ATTN_BACKEND::v15_wgmma {
using namespace attn;
using namespace flash_decoding;
using namespace splits;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_, kRows = 64;
  static constexpr int kBlockN = 64, kTile = kBlockN;             // keys per tile
  static constexpr int kNumWarps = 4, kThreads = 32 * kNumWarps;  // one warpgroup
  static constexpr int kLanes = kHeadDim / 8;                     // lanes per key, 16 bytes each
  static constexpr int kRowsPerLoad = kThreads / kLanes;          // rows per load of the block
  static constexpr int kStages = kHeadDim == 64 ? 8 : kHeadDim == 128 ? 6 : 3;  // pipeline stages
  static constexpr int kBlocksPerSm = 1;
};

// Tiles are stored as panels of 64 columns, [d / 64][rows, 64], as in chapter 06.
template <class Element, class Config>
struct SharedStorage {
  alignas(1024) Element sK[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sV[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sQ[Config::kRows * Config::kHeadDim];
  bool last;  // this block arrived last and reduces the splits of the row block
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, last)
};
// 128-byte swizzle: offset of element (row, col) in a tile of 64 rows.
//! [swizzle]
__device__ __forceinline__ int swizzled_offset(int row, int col) {
  return (col / 64 * 64 + row) * 64 + ((col / 8) ^ row) % 8 * 8 + col % 8;
}
//! [swizzle]

// Issues cp.async of this thread's chunks of 64 rows; rows from `count` on become 0. `g`: the
// thread's chunk of the tile's first row. `chunk`: its first column.
//! [load]
template <class Config, class Element>
__device__ __forceinline__ void load_tile(Element* tile, const Element* g, int count) {
  const int key = threadIdx.x / Config::kLanes, chunk = threadIdx.x % Config::kLanes * 8;
#pragma unroll
  for (int n = 0; n < Config::kBlockN; n += Config::kRowsPerLoad) {
    const int row = n + key;
    cp_async_16(tile + swizzled_offset(row, chunk), g + row * Config::kHeadDim,
                row < count ? 16 : 0);
  }
}
//! [load]

// (3) S = Q K^T and (5) O += P V for 64 rows and 64 keys: issue and commit, no wait.
//! [mma]
template <class Element, class Config>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kBlockN / 8][4], const Element* sQ,
                                        const Element* sK) {
  const SmemDescriptor q = smem_descriptor(sQ), k = smem_descriptor(sK);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {  // 64 columns per panel
    const int idx = step / 4 * 64 * 128 + step % 4 * 32;      // offset in bytes
    wgmma<Element, false>(s, q + idx, k + idx, step > 0);
  }
  wgmma_commit();
}
template <class Element, class Config>
__device__ __forceinline__ void gemm_pv(float (&o)[Config::kHeadDim / 8][4],
                                        const uint32_t (&p)[Config::kBlockN / 16][4],
                                        const Element* sV) {
  const SmemDescriptor v = smem_descriptor(sV, 64 * 128);  // panels of 64 rows of 128 bytes
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Config::kBlockN / 16; ++k)  // 16 keys: 16 rows of 128 bytes
    wgmma<Element, true>(o, p[k], v + 16 * 128 * k, true);
  wgmma_commit();
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

template <class Element, class Config, class Schedule>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_kernel(const Element* gQ,     // [B, Hq, seqlen_q, d]
                     const Element* gK,     // [B, Hkv, seqlen_k, d]
                     const Element* gV,     // [B, Hkv, seqlen_k, d]
                     const int* gSeqused,   // [B]: valid keys per sequence
                     Element* gO,           // [B, Hq, seqlen_q, d]
                     float* gLse,           // [B, Hq, seqlen_q]
                     float* gOPartial,      // [num_partials, kRows, d]
                     float* gLsePartial,    // [num_partials, kRows], in log2 units
                     unsigned* gSemaphore,  // [row blocks]: arrivals; 0 between launches
                     Shape shape, Schedule schedule, int row_tiles) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN, kRows = Config::kRows;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  // this lane's first row and column
  const int quad_row = 16 * warp_id + lane_id / 4, quad_col = lane_id % 4 * 2;
  const int num_row_blocks = shape.kv_heads * row_tiles;  // per sequence; row_tiles: per K/V head
  schedule.begin(shape, gSeqused, num_row_blocks, Config::kTile);
  for (StreamKTile segment;
       schedule.next(segment, shape, gSeqused, num_row_blocks, Config::kTile);) {
    // Work tile: KV tiles [tile, tile + count) of a row block; split `split` of its `num_splits`.
    const auto [seqlen_k, row_block, tile, count, tiles, first_block, num_splits, split] = segment;
    const Rows rows = rows_of(shape, row_block, kRows);
    const KvRange all = keys_of_sequence(shape, seqlen_k);
    const KvRange keys{all.begin + tile * Config::kTile,
                       min(all.end, all.begin + (tile + count) * Config::kTile)};
    const int chunk = threadIdx.x % Config::kLanes * 8;
    const int64_t kv = int64_t{rows.bh_kv} * shape.seqlen_k * kHeadDim + chunk;

    // (1) Load Q, once per work tile. Rows past the last become 0.
    //! [load_q]
    load_tile<Config>(smem.sQ, gQ + rows.first * kHeadDim + chunk, rows.count);
    cp_async_commit();
    //! [load_q]
    float o[kHeadDim / 8][4] = {};  // unnormalised
    // max in log2 units; sum over this lane's keys
    float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
    const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
    const KvRange kv_range[2] = {
        keys_of_query(shape, seqlen_k, (rows.row0 + quad_row) % shape.seqlen_q),
        keys_of_query(shape, seqlen_k, (rows.row0 + quad_row + 8) % shape.seqlen_q)};

    // (2) Issue K_j and V_j, kStages - 1 tiles ahead. Past the last tile the cp.async groups are
    // empty.
    //! [pipeline]
    constexpr int kStages = Config::kStages;
    const auto load_kv = [&](int key0, int stage) {
      if (key0 < keys.end) {
        const int64_t from = kv + int64_t{key0} * kHeadDim;
        load_tile<Config>(smem.sK[stage], gK + from, keys.end - key0);
        load_tile<Config>(smem.sV[stage], gV + from, keys.end - key0);
      }
      cp_async_commit();
    };
    for (int n = 0; n < kStages - 1; ++n) load_kv(keys.begin + n * kBlockN, n);
    // Waits for all copies of this block except the newest `pending` groups.
    const auto consumer_wait = [&](auto pending) {
      cp_async_wait<pending.value>();
      fence_proxy_async();  // this thread's copies are visible to wgmma (async proxy)
      __syncthreads();      // Q and the tile are visible; P V of the previous tile is complete
    };
    //! [pipeline]
    // (3) S = Q K^T; in the loop, of the next tile together with P V of this tile.
    float s[kBlockN / 8][4];
    if (keys.begin < keys.end) {
      consumer_wait(std::integral_constant<int, kStages - 2>());  // Q and the first tile
      gemm_qk<Element, Config>(s, smem.sQ, smem.sK[0]);
      wgmma_wait<0>(s);
    }
    int stage = 0;
    for (int key0 = keys.begin; key0 < keys.end; key0 += kBlockN) {
      // (4) Mask and online softmax. Warps without rows skip both.
      //! [softmax]
      uint32_t p[kBlockN / 16][4] = {};
      if (16 * warp_id < rows.count) {
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
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            p[n / 2][n % 2 * 2 + r] = pack2<Element>(s[n][2 * r], s[n][2 * r + 1]);
      }
      //! [softmax]
      // (5) O += P V
      const int next = (stage + 1) % kStages;
      if (key0 + kBlockN < keys.end) {
        consumer_wait(std::integral_constant<int, kStages - 3>());  // the next tile
        load_kv(key0 + (kStages - 1) * kBlockN, (stage + kStages - 1) % kStages);
        gemm_qk<Element, Config>(s, smem.sQ, smem.sK[next]);
        gemm_pv<Element, Config>(o, p, smem.sV[stage]);
        wgmma_wait<0>(s, o);
      } else {
        gemm_pv<Element, Config>(o, p, smem.sV[stage]);
        wgmma_wait<0>(o);
      }
      stage = next;
    }

    // (7) O = O / l of this split; (8) store O and lse, -inf if no key is visible.
    //! [store]
    cp_async_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = quad_row + 8 * r;
      const float sum = quad_sum(row_sum[r]);
      if (row >= rows.count) continue;
      const float factor = sum != 0 ? 1 / sum : 0;
      const float lse = sum != 0 ? row_max[r] + log2f(sum) : -INFINITY;
      const int64_t to =
          num_splits == 1 ? rows.first + row : Schedule::slot(segment, split) * kRows + row;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        const float o0 = o[n][2 * r] * factor, o1 = o[n][2 * r + 1] * factor;
        const int64_t idx = to * kHeadDim + 8 * n + quad_col;
        if (num_splits == 1)
          *reinterpret_cast<uint32_t*>(gO + idx) = pack2<Element>(o0, o1);
        else
          *reinterpret_cast<float2*>(gOPartial + idx) = make_float2(o0, o1);
      }
      if (quad_col == 0)
        (num_splits == 1 ? gLse : gLsePartial)[to] = num_splits == 1 ? kLn2 * lse : lse;
    }
    //! [store]

    // (9) The last block to arrive reduces.
    //! [arrive]
    __syncthreads();  // the partial result is stored; Q is no longer read
    if (num_splits == 1) continue;
    if (threadIdx.x == 0) smem.last = flag_add(&gSemaphore[row_block], 1) == num_splits - 1u;
    __syncthreads();  // `last` is visible, and the other blocks' results, which thread 0 acquired
    if (!smem.last) continue;
    for (int r = warp_id; r < rows.count; r += Config::kNumWarps)
      merge_row<Element, Config>(gOPartial, gLsePartial, gO, gLse, rows.first + r, num_splits,
                                 [&](int n) { return Schedule::slot(segment, n) * kRows + r; });
    if (threadIdx.x == 0) gSemaphore[row_block] = 0;  // reset for the next launch
    //! [arrive]
  }
}

template <class Element, class Config, class Schedule>
Status launch(const Arguments& args, const Schedule& schedule, int64_t blocks) {
  const DecodeParams<Element> params(args);
  const Problem& p = args.problem;
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config, Schedule>,
                       dim3(static_cast<unsigned>(blocks)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, params.q, params.k,
                       params.v, params.seqused_k, params.o, params.lse, params.o_partial,
                       params.lse_partial, params.arrived, shape_of(p), schedule,
                       static_cast<int>(ceil_div(p.group() * p.seqlen_q, Config::kRows)));
}

//! [choice]
template <class Element, class Config>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int num_sms = args.backend == Backend::gpu ? gpu_info().num_sms : kEmulatedSms;
  const EvenSplits even = even_splits(p, Config::kRows, Config::kTile, num_sms);
  if (splits_evenly(p, even))
    return launch<Element, Config>(
        args, Even{static_cast<int>(even.share), static_cast<int>(even.splits)}, even.blocks);
  return launch<Element, Config>(args, Runs{static_cast<int>(p.batch)},
                                 std::min(kMaxRuns, num_sms * Config::kBlocksPerSm));
}
//! [choice]

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

}  // namespace ATTN_BACKEND::v15_wgmma
