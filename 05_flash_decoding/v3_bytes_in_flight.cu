// v3_bytes_in_flight: multi-stage cp.async pipeline per lane, without a barrier.
//
// parent    v2_split_kv
// change    Tiles are copied by cp.async to a buffer of kStages stages in shared memory,
//           kStages - 1 tiles ahead. Each lane copies exactly the chunks that it will read, so it
//           waits only for its own copies.
// why       Little's law: bytes in flight = bandwidth x latency. An SM's share of HBM needs some
//           23 KB in flight at all times. At d=128 the two blocks of v2 on an SM request 64 KB, but
//           each waits for all of its part, and has nothing in flight while it computes.
// expect    dram__bytes_read.sum.per_second rises, at most to the rate of HBM
// supports  fp16, bf16; head dims 64, 128, 256; 1 to 16 queries, any lengths, causal, windows, GQA
#include "attn/kernel.h"
#include "attn/span.h"
#include "ptx/cp_async.h"
#include "kernels/combine.h"
#include "kernels/splits.h"
#include "kernels/decode/rows.h"

namespace ATTN_BACKEND::v3_bytes_in_flight {
using namespace attn;
using namespace flash_decoding;
using namespace splits;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_, kRows = 1;
  static constexpr int kBlockN = 16;  // keys per tile of a warp
  static constexpr int kNumWarps = 4, kThreads = 32 * kNumWarps;
  static constexpr int kLanes = kHeadDim / 8;           // lanes per key, 16 bytes each
  static constexpr int kRowsPerLoad = 32 / kLanes;      // keys (rows of K) per load of a warp
  static constexpr int kKeys = kBlockN / kRowsPerLoad;  // keys per lane and tile
  // groups of lanes with their own (m, l) state
  static constexpr int kParts = kNumWarps * kRowsPerLoad;
  static constexpr int kStages = kHeadDim <= 128 ? 3 : 2;  // pipeline stages per warp
  static_assert(kHeadDim % 64 == 0 && kLanes <= 32, "a warp copies whole rows");
};

template <class Element, class Config>
struct SharedStorage {
  alignas(16) Element sK[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  alignas(16) Element sV[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  float sO[Config::kParts][Config::kRows][Config::kHeadDim];
  float sMax[Config::kParts][Config::kRows];  // in log2 units
  float sSum[Config::kParts][Config::kRows];
  ATTN_MEMBERS(SharedStorage, sK, sV, sO, sMax, sSum)
};
template <class Config>
using SplitWeights = float[Config::kRows][kMaxSplits];

// Issues cp.async of this lane's chunks of a tile; rows from `count` on become 0. `g` and `tile`:
// the lane's chunk of the tile's first row.
//! [load]
template <class Config, class Element>
__device__ __forceinline__ void load_tile(Element* tile, const Element* g, int count) {
  const int key = threadIdx.x % 32 / Config::kLanes;
#pragma unroll
  for (int n = 0; n < Config::kKeys; ++n) {
    const int row = n * Config::kRowsPerLoad + key;
    const bool inside = row < count;
    cp_async_16(tile + row * Config::kHeadDim, g + (inside ? row : 0) * Config::kHeadDim,
                inside ? 16 : 0);
  }
}
template <class Config, class Element>
__device__ __forceinline__ void read_tile(uint4 (&r)[Config::kKeys], const Element* tile) {
  const int key = threadIdx.x % 32 / Config::kLanes;
#pragma unroll
  for (int n = 0; n < Config::kKeys; ++n)
    r[n] =
        *reinterpret_cast<const uint4*>(tile + (n * Config::kRowsPerLoad + key) * Config::kHeadDim);
}
//! [load]

// Scores of one row with this lane's keys, in log2 units, reduced over the lanes of a key.
template <class Element, class Config>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kKeys], const float (&q)[8],
                                        const uint4 (&k)[Config::kKeys]) {
#pragma unroll
  for (int n = 0; n < Config::kKeys; ++n) {
    s[n] = dot<Element>(q, k[n]);
#pragma unroll
    for (int distance = 1; distance < Config::kLanes; distance *= 2)
      s[n] += __shfl_xor_sync(~0u, s[n], distance);
  }
}

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
  const int key = lane_id / Config::kLanes, chunk = lane_id % Config::kLanes * 8;
  const int part = warp_id * Config::kRowsPerLoad + key;
  const Rows rows = rows_of(shape, blockIdx.x, kRows);
  const int seqlen_k = gSeqused[rows.bh_kv / shape.kv_heads];
  const int split = blockIdx.y, num_splits = gridDim.y;
  const KvRange keys = part_of(visible_keys(shape, seqlen_k, rows), split, num_splits, kBlockN);
  const int64_t kv = int64_t{rows.bh_kv} * shape.seqlen_k * kHeadDim + chunk;

  // (1) Load Q, which stays in registers.
  float q[kRows][8], o[kRows][8] = {};        // O is unnormalised
  float row_max[kRows], row_sum[kRows] = {};  // max in log2 units; sum over this lane's keys
  KvRange kv_range[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = min(r, rows.count - 1);  // rows past the last repeat it, and are not stored
    const uint4 chunk_of_q =
        *reinterpret_cast<const uint4*>(gQ + (rows.first + row) * kHeadDim + chunk);
    const uint32_t pairs[4] = {chunk_of_q.x, chunk_of_q.y, chunk_of_q.z, chunk_of_q.w};
    for (int i = 0; i < 8; ++i)
      q[r][i] = unpack<Element>(pairs[i / 2], i % 2) * (shape.softmax_scale * kLog2e);
    kv_range[r] = keys_of_query(shape, seqlen_k, (rows.row0 + row) % shape.seqlen_q);
    row_max[r] = kLowest;
  }

  // (2) Issue K_j and V_j, kStages - 1 tiles ahead. Past the last tile the cp.async groups are
  // empty.
  //! [pipeline]
  constexpr int kStages = Config::kStages, kStep = Config::kNumWarps * kBlockN;
  const int first = keys.begin + warp_id * kBlockN;
  const auto load_kv = [&](int key0, int stage) {
    if (key0 < keys.end) {
      const int64_t from = kv + int64_t{key0} * kHeadDim;
      load_tile<Config>(&smem.sK[warp_id][stage][0][chunk], gK + from, keys.end - key0);
      load_tile<Config>(&smem.sV[warp_id][stage][0][chunk], gV + from, keys.end - key0);
    }
    cp_async_commit();
  };
  for (int n = 0; n < kStages - 1; ++n) load_kv(first + n * kStep, n);
  int stage = 0;
  for (int key0 = first; key0 < keys.end; key0 += kStep, stage = (stage + 1) % kStages) {
    ATTN_SPAN("next K and V, wait")
    // refill the stage that this lane read last; no other lane reads its chunks
    load_kv(key0 + (kStages - 1) * kStep, (stage + kStages - 1) % kStages);
    cp_async_wait<kStages - 1>();
    ATTN_SPAN_END("next K and V, wait")
    uint4 k[Config::kKeys], v[Config::kKeys];
    read_tile<Config>(k, &smem.sK[warp_id][stage][0][chunk]);
    read_tile<Config>(v, &smem.sV[warp_id][stage][0][chunk]);
    //! [pipeline]
    ATTN_SPAN("QK, softmax, PV")
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // (3) S = q K^T.
      float s[Config::kKeys];
      gemm_qk<Element, Config>(s, q[r], k);
      // (4) Mask and online softmax.
      //! [softmax]
      float max = row_max[r];
#pragma unroll
      for (int n = 0; n < Config::kKeys; ++n) {
        const int j = key0 + n * Config::kRowsPerLoad + key;
        if (j < kv_range[r].begin || j >= kv_range[r].end) s[n] = -INFINITY;
        max = fmaxf(max, s[n]);
      }
      const float rescale = exp2f(row_max[r] - max);
      row_max[r] = max;
      row_sum[r] *= rescale;
#pragma unroll
      for (int i = 0; i < 8; ++i) o[r][i] *= rescale;
        //! [softmax]
        // (5) O += P V
#pragma unroll
      for (int n = 0; n < Config::kKeys; ++n) {
        const float p = exp2f(s[n] - max);
        row_sum[r] += p;
        add<Element>(o[r], p, v[n]);
      }
    }
  }

  // (6) Reduce across the groups of lanes of all warps.
  ATTN_SPAN("merge")
  //! [merge]
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < 8; ++i) smem.sO[part][r][chunk + i] = o[r][i];
    if (chunk == 0) smem.sMax[part][r] = row_max[r], smem.sSum[part][r] = row_sum[r];
  }
  __syncthreads();  // m, l and O of all warps are visible
  for (int idx = threadIdx.x; idx < rows.count * kHeadDim; idx += Config::kThreads) {
    const int r = idx / kHeadDim, col = idx % kHeadDim;
    float max = kLowest, sum = 0, out = 0;
    for (int n = 0; n < Config::kParts; ++n) max = fmaxf(max, smem.sMax[n][r]);
    for (int n = 0; n < Config::kParts; ++n) {
      const float weight = exp2f(smem.sMax[n][r] - max);
      sum += weight * smem.sSum[n][r];
      out += weight * smem.sO[n][r][col];
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

}  // namespace ATTN_BACKEND::v3_bytes_in_flight
