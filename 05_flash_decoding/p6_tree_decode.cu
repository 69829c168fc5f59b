// p6_tree_decode: the cache of a sequence on several ranks; partial results are merged.
//
// parent    v13_even_splits
// change    Each rank holds a part of every sequence's keys and runs the parent's kernel on it,
//           with O in fp32. O and lse are one message to every other rank (an all-gather). Every
//           rank merges the results, in the order of the ranks.
// why       A cache that does not fit on one GPU, and the read bandwidth of several. A message has
//           one row of O per query and head, independent of the cache's length.
// expect    time: that of the rank's keys, plus the latency of an all-gather
// supports  fp16, bf16; head dims 64, 128, 256; 1 to 16 queries, any lengths, causal, windows, GQA
// source    Shyam et al., "Tree Attention" (arXiv 2408.04093)
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/combine.h"
#include "kernels/decode/schedules.h"
#include "kernels/splits.h"
#include "kernels/decode/rows.h"
#include "kernels/all_reduce.h"
#include "kernels/merge.h"
#include "ranks/sharded.h"

namespace ATTN_BACKEND::p6_tree_decode {
using namespace attn;
using namespace flash_decoding;
using namespace splits;
using namespace ranks;
using namespace attn::ranks;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_, kRows = 16;
  static constexpr int kBlockN = 16;  // keys per tile of a warp
  static constexpr int kNumWarps = kHeadDim <= 128 ? 8 : 4, kThreads = 32 * kNumWarps;
  static constexpr int kTile = kNumWarps * kBlockN;       // keys per tile of the block
  static constexpr int kLanes = kHeadDim / 8;             // lanes per key, 16 bytes each
  static constexpr int kRowsPerLoad = 32 / kLanes;        // keys (rows of K) per load of a warp
  static constexpr int kParts = kNumWarps;                // partial results per row
  static constexpr int kStages = kHeadDim <= 64 ? 4 : 2;  // pipeline stages per warp
  static constexpr int kBlocksPerSm = 1;
  static_assert(kHeadDim % 64 == 0 && kLanes <= 32, "a warp copies whole rows");
};

template <class Element, class Config>
struct SharedStorage {
  alignas(16) Element sK[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  alignas(16) Element sV[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  alignas(16) Element sQ[Config::kRows][Config::kHeadDim];
  float sMax[Config::kParts][Config::kRows];  // in log2 units
  float sSum[Config::kParts][Config::kRows];
  bool last;  // this block arrived last and reduces the splits of the row block
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sMax, sSum, last)
};
// O of each warp, in the memory of K and V. The padding avoids bank conflicts: half a warp stores
// four rows of 8 floats at once, 8 bytes per lane, to all 32 banks.
template <class Config>
using OutputParts = float[Config::kParts][Config::kRows][Config::kHeadDim + 8];

// XOR swizzle: offset of element (row, col) in a tile [kBlockN, kHeadDim]. 16-byte chunks of a row
// are permuted so that the 8 rows of an ldmatrix phase hit disjoint banks.
template <int kHeadDim>
__device__ __forceinline__ int swizzled_offset(int row, int col) {
  return row * kHeadDim + ((col / 8) ^ (row % 8)) * 8 + col % 8;
}

// Issues cp.async of this lane's chunks of a tile; rows from `count` on become 0. `g`: the lane's
// chunk of the tile's first row. `chunk`: its first column.
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

// (3) S = Q K^T and (5) O += P V for the tile of this warp; fragments as in chapter 04.
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

// One warp reduces the partial results of a row. A lane owns four of each 128 columns and the
// weight of every 32nd partial result. `partial_index(n)`: index of partial result n.
template <class Config, class PlaceOf>
__device__ __forceinline__ void merge_row(const float* gOPartial, const float* gLsePartial,
                                          float* gO, float* gLse, int64_t row, int num_parts,
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
      store_part(gO + row * kHeadDim + 128 * c + 4 * lane_id, out[c], sum != 0 ? 1 / sum : 0);
  if (lane_id == 0) gLse[row] = sum != 0 ? kLn2 * (max + log2f(sum)) : -INFINITY;
}

template <class Element, class Config, class Schedule>
__global__ void __launch_bounds__(Config::kThreads)
    attention_kernel(const Element* gQ,     // [B, Hq, seqlen_q, d]
                     const Element* gK,     // [B, Hkv, seqlen_k, d]
                     const Element* gV,     // [B, Hkv, seqlen_k, d]
                     const int* gSeqused,   // [B]: valid keys per sequence
                     float* gO,             // [B, Hq, seqlen_q, d]: over this rank's keys
                     float* gLse,           // [B, Hq, seqlen_q]
                     float* gOPartial,      // [num_partials, kRows, d]
                     float* gLsePartial,    // [num_partials, kRows], in log2 units
                     unsigned* gSemaphore,  // [row blocks]: arrivals; 0 between launches
                     Shape shape, Schedule schedule, int row_tiles) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN, kRows = Config::kRows;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int quad_row = lane_id / 4, quad_col = lane_id % 4 * 2;  // position in an accumulator
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
    const int64_t kv =
        int64_t{rows.bh_kv} * shape.seqlen_k * kHeadDim + lane_id % Config::kLanes * 8;

    // (1) Load Q, once per work tile. Rows past the last become 0.
    for (int idx = threadIdx.x; idx < kRows * Config::kLanes; idx += Config::kThreads) {
      const int row = idx / Config::kLanes, col = idx % Config::kLanes * 8;
      const bool inside = row < rows.count;
      cp_async_16(&smem.sQ[0][0] + swizzled_offset<kHeadDim>(row, col),
                  gQ + (rows.first + (inside ? row : 0)) * kHeadDim + col, inside ? 16 : 0);
    }
    cp_async_commit();
    float o[kHeadDim / 8][4] = {};  // unnormalised
    // max in log2 units; sum over this lane's keys
    float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
    const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
    const KvRange kv_range[2] = {
        keys_of_query(shape, seqlen_k, (rows.row0 + quad_row) % shape.seqlen_q),
        keys_of_query(shape, seqlen_k, (rows.row0 + quad_row + 8) % shape.seqlen_q)};

    // (2) Issue K_j and V_j, kStages - 1 tiles ahead. Past the last tile the cp.async groups are
    // empty.
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
    cp_async_wait<kStages - 1>();  // Q, committed first, has arrived
    __syncthreads();               // Q is visible
    uint32_t q[kHeadDim / 16][4];  // A fragments of Q K^T
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step)
      ldmatrix_x4(q[step], &smem.sQ[0][0] + swizzled_offset<kHeadDim>(
                                                lane_id % 16, 16 * step + lane_id / 16 * 8));
    int stage = 0;
    for (int key0 = first; key0 < keys.end; key0 += kStep, stage = (stage + 1) % kStages) {
      __syncwarp();  // all lanes have read the previous tile, whose stage is refilled
      load_kv(key0 + (kStages - 1) * kStep, (stage + kStages - 1) % kStages);
      cp_async_wait<kStages - 1>();
      __syncwarp();  // this tile's copies of all lanes are visible
      // (3) S = Q K^T.
      float s[kBlockN / 8][4] = {};
      gemm_qk<Element, Config>(s, q, &smem.sK[warp_id][stage][0][0]);
      // (4) Mask and online softmax.
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
      // (5) O += P V
      gemm_pv<Element, Config>(o, s, &smem.sV[warp_id][stage][0][0]);
    }

    // (6) Reduce across warps.
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
    __syncthreads();                       // m, l and O of all warps are visible
    constexpr int kChunks = kHeadDim / 4;  // chunks per row, of four columns
    for (int idx = threadIdx.x; idx < rows.count * kChunks; idx += Config::kThreads) {
      const int r = idx / kChunks, col = idx % kChunks * 4;
      float max = kLowest, sum = 0, out[4] = {};
#pragma unroll
      for (int n = 0; n < Config::kParts; ++n) max = fmaxf(max, smem.sMax[n][r]);
#pragma unroll
      for (int n = 0; n < Config::kParts; ++n) {
        const float weight = exp2f(smem.sMax[n][r] - max);
        sum += weight * smem.sSum[n][r];
        add_scaled(out, weight, *reinterpret_cast<const float4*>(&sO[n][r][col]));
      }
      // (7) O = O / l of this split; (8) store O and lse, -inf if no key is visible.
      const float factor = sum != 0 ? 1 / sum : 0;
      const float lse = sum != 0 ? max + log2f(sum) : -INFINITY;
      if (num_splits == 1) {
        store_part(gO + (rows.first + r) * kHeadDim + col, out, factor);
        if (col == 0) gLse[rows.first + r] = kLn2 * lse;
        continue;
      }
      const int64_t to = Schedule::slot(segment, split) * kRows + r;  // row of the partial result
      *reinterpret_cast<float4*>(gOPartial + to * kHeadDim + col) =
          make_float4(out[0] * factor, out[1] * factor, out[2] * factor, out[3] * factor);
      if (col == 0) gLsePartial[to] = lse;
    }

    // (9) The last block to arrive reduces.
    __syncthreads();  // the partial result is stored; all threads have read sO
    if (num_splits == 1) continue;
    if (threadIdx.x == 0) smem.last = flag_add(&gSemaphore[row_block], 1) == num_splits - 1u;
    __syncthreads();  // `last` is visible, and the other blocks' results, which thread 0 acquired
    if (!smem.last) continue;
    for (int r = warp_id; r < rows.count; r += Config::kNumWarps)
      merge_row<Config>(gOPartial, gLsePartial, gO, gLse, rows.first + r, num_splits,
                        [&](int n) { return Schedule::slot(segment, n) * kRows + r; });
    if (threadIdx.x == 0) gSemaphore[row_block] = 0;  // reset for the next launch
  }
}

template <class Element, class Config, class Schedule>
Status attend(const DecodeShard& shard, const Schedule& schedule, int64_t blocks, Stream stream) {
  const Problem& p = shard.local;
  Shape shape = shape_of(p);
  shape.window_left = shard.window_left, shape.window_right = shard.window_right;
  const auto at = [&]<class T>(const char* name, T*) {
    return static_cast<T*>(shard.rank.buffer(name));
  };
  Element* const element = nullptr;
  float *const number = nullptr, *const part = at("part", number);
  return launch_kernel(
      attention_kernel<Element, Config, Schedule>, dim3(static_cast<unsigned>(blocks)),
      dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), stream, at("q", element),
      at("k", element), at("v", element), static_cast<int*>(shard.rank.buffer("seqused_k")), part,
      part + shard.rows() * p.head_dim, at("o_partial", number), at("lse_partial", number),
      static_cast<unsigned*>(shard.rank.buffer("arrived")), shape, schedule,
      static_cast<int>(ceil_div(p.group() * p.seqlen_q, Config::kRows)));
}
template <class Element, class Config>
Status attend(const DecodeShard& shard, Stream stream) {
  const Problem& p = shard.local;
  const int num_sms =
      shard.rank.device().backend == Backend::gpu ? gpu_info().num_sms : kEmulatedSms;
  const EvenSplits even = even_splits(p, Config::kRows, Config::kTile, num_sms);
  if (splits_evenly(p, even))
    return attend<Element, Config>(
        shard, Even{static_cast<int>(even.share), static_cast<int>(even.splits)}, even.blocks,
        stream);
  return attend<Element, Config>(shard, Runs{static_cast<int>(p.batch)},
                                 std::min(kMaxRuns, num_sms * Config::kBlocksPerSm), stream);
}
template <int kHeadDim, class Element>
Status merge(const DecodeShard& shard, Stream stream) {
  return launch_kernel(merge_parts_kernel<Element, kHeadDim>,
                       dim3(static_cast<unsigned>(shard.rows())), dim3(kHeadDim / 4), 0, stream,
                       static_cast<Element*>(shard.rank.buffer("o")),
                       static_cast<float*>(shard.rank.buffer("lse")),
                       static_cast<const float*>(shard.rank.buffer("parts")), shard.rank.world(),
                       static_cast<int>(shard.rows()));
}

//! [exchange]
int64_t part_bytes(const DecodeShard& s) { return 4 * part_floats(s.rows(), s.local.head_dim); }

void prepare(const DecodeShard& s) {
  const int64_t partials = int64_t{kMaxRuns} * 2 * kMmaRows;
  s.rank.allocate("o_partial", partials * s.local.head_dim * 4);
  s.rank.allocate("lse_partial", partials * 4);
  s.rank.allocate("arrived", row_blocks(s.local, kMmaRows) * 4, true);
  s.rank.allocate("part", part_bytes(s));  // O [rows, d], then lse [rows]
  s.rank.allocate("parts", s.rank.world() * part_bytes(s));
  s.rank.allocate("max", s.rows() * 4);  // of lse, for the all-reduce
}
template <class Element, int kHeadDim>
void run(const DecodeShard& s) {
  s.rank.compute("attention",
                 [s](Stream stream) { return attend<Element, Config<kHeadDim>>(s, stream); });
  std::vector<Message> messages;
  auto* const parts = static_cast<std::byte*>(s.rank.buffer("parts"));
  for (int peer = 0; peer < s.rank.world(); ++peer) {
    messages.push_back(send_to(peer, s.rank.buffer("part"), part_bytes(s)));
    messages.push_back(receive_from(peer, parts + peer * part_bytes(s), part_bytes(s)));
  }
  s.rank.wait(s.rank.exchange("all-gather of O and lse", messages));
  s.rank.compute("merge", [s](Stream stream) { return merge<kHeadDim, Element>(s, stream); });
}
//! [exchange]

// The same with two all-reduces. The second one sends 2 (w - 1) / w partial results per rank, the
// all-gather w - 1.
template <class Element, int kHeadDim>
void run_all_reduce(const DecodeShard& s) {
  const int rows = static_cast<int>(s.rows());
  auto* const part = static_cast<float*>(s.rank.buffer("part"));
  auto* const max = static_cast<float*>(s.rank.buffer("max"));
  auto* const o = static_cast<Element*>(s.rank.buffer("o"));
  auto* const lse = static_cast<float*>(s.rank.buffer("lse"));
  const dim3 grid(static_cast<unsigned>(rows)), block(kHeadDim / 4);
  s.rank.compute("attention", [=](Stream stream) {
    if (Status status = attend<Element, Config<kHeadDim>>(s, stream); !status.ok()) return status;
    return launch_kernel(copy_lse_kernel, dim3(static_cast<unsigned>(ceil_div(rows, 128))),
                         dim3(128), 0, stream, max, part + s.rows() * kHeadDim, rows);
  });
  s.rank.all_reduce("all-reduce of the largest lse", max, rows, Reduction::max);
  s.rank.compute("weigh", [=](Stream stream) {
    return launch_kernel(weigh_kernel, grid, block, 0, stream, part, max, rows, kHeadDim);
  });
  s.rank.all_reduce("all-reduce of O and weights", part, s.rows() * (kHeadDim + 1), Reduction::sum);
  s.rank.compute("divide", [=](Stream stream) {
    return launch_kernel(divide_kernel<Element>, grid, block, 0, stream, o, lse, part, max, rows,
                         kHeadDim);
  });
}

template <class Element, int kHeadDim>
Status launch(const Arguments& args) {
  const auto given = args.problem.own.find("collective");
  const bool reduces = given != args.problem.own.end() && given->second[0] == 1;
  return run_decode(
      args, {prepare, reduces ? run_all_reduce<Element, kHeadDim> : run<Element, kHeadDim>});
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

}  // namespace ATTN_BACKEND::p6_tree_decode
