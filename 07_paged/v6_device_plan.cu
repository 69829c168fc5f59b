// v6_device_plan: a kernel makes the plan, in closed form.
//
// parent    v5_balanced_plan
// change    All row blocks form one line, each with its price and its tiles, which is cut at equal
//           distances. The start of a row block on the line determines its work tiles and their
//           positions in the list: a prefix sum over the sequences, then divisions. One block plans
//           for the whole batch before the attention kernel, in the same graph. A block costs at
//           most one price (kPieceTiles) more than the mean; in v5 the bound is twice that.
// why       A host plan costs its computation and a copy, and the host must know the lengths. The
//           plan of v5 is a sequential walk, which threads cannot share.
// expect    no plan on the host; the phase "plan" takes microseconds, once for all layers of a
//           model
// supports  fp16, bf16; head dims 64, 128, 256; 1 to 16 queries, any lengths and page sizes,
//           causal, windows, GQA; up to 16384 sequences
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/line.h"
#include "kernels/work.h"
#include "kernels/splits.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::v6_device_plan {
using namespace attn;
using namespace paged;
using namespace plans;
using namespace splits;

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
  static_assert(kHeadDim % 64 == 0 && kLanes <= 32, "a warp copies whole rows");
  static_assert(kTile == tile_keys(kHeadDim), "plans count other tiles");
};

template <class Element, class Config>
struct SharedStorage {
  alignas(16) Element sK[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  alignas(16) Element sV[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  alignas(16) Element sQ[Config::kRows][Config::kHeadDim];
  float sMax[Config::kParts][Config::kRows];  // in log2 units
  float sSum[Config::kParts][Config::kRows];
  bool last;  // this block arrived last and reduces the parts of the row block
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sMax, sSum, last)
};
// O of each warp, in the memory of K and V. The padding avoids bank conflicts: half a warp stores
// four rows of 8 floats at once, 8 bytes per lane, to all 32 banks.
template <class Config>
using OutputParts = float[Config::kParts][Config::kRows][Config::kHeadDim + 8];

// XOR swizzle: offset of element (row, col) in a tile [kBlockN, kHeadDim]. 16-byte chunks of a row
// are permuted so that the 8 rows of an ldmatrix phase hit disjoint banks.
//! [swizzle]
template <int kHeadDim>
__device__ __forceinline__ int swizzled_offset(int row, int col) {
  return row * kHeadDim + ((col / 8) ^ (row % 8)) * 8 + col % 8;
}
//! [swizzle]

// Slot of a key: its index in the pool, counted in tokens, below 2^31. slot * elements per token
// can exceed 2^31, so offsets are 64-bit.
//! [slot]
struct Pages {
  const int* gTable;  // [max_pages]: the sequence's row of the page table
  int page_size;
};
__device__ __forceinline__ int slot_of(const Pages& pages, int key) {
  return pages.gTable[key / pages.page_size] * pages.page_size + key % pages.page_size;
}
//! [slot]

// Issues cp.async of this lane's chunks of a KV tile; rows from `count` on become 0. `gK`, `gV`:
// the lane's chunk of the pool's first token; `token`: elements per token. `slot`: in each lane,
// the slot of the tile's key `lane_id % kBlockN`. `chunk`: the first column of the lane's chunk.
//! [load]
template <class Config, class Element>
__device__ __forceinline__ void load_tile(Element* sK, Element* sV, const Element* gK,
                                          const Element* gV, int token, int slot, int count) {
  const int key = threadIdx.x % 32 / Config::kLanes, chunk = threadIdx.x % Config::kLanes * 8;
#pragma unroll
  for (int n = 0; n < Config::kBlockN; n += Config::kRowsPerLoad) {
    const int row = n + key, bytes = row < count ? 16 : 0;
    const int to = swizzled_offset<Config::kHeadDim>(row, chunk);
    const int64_t from = int64_t{__shfl_sync(~0u, slot, row)} * token;
    cp_async_16(sK + to, gK + from, bytes);
    cp_async_16(sV + to, gV + from, bytes);
  }
}
//! [load]

// (3) S = Q K^T of a warp's tile, and (5) O += P V; fragments as in chapter 04.
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

// Planning kernel, one block. `together` neighbouring row blocks form a group and are cut at the
// same tiles; a sequence has `heads` groups. The line consists of groups and is cut for `blocks`
// blocks; row block k of each group is processed by blocks [k * blocks, (k + 1) * blocks). A prefix
// sum over the costs of the sequences gives the starts; then kLanes lanes per group go through its
// work tiles. From one work tile to the next the index of the group or of the block increases, so
// their sum is the position in the list. Where a block ends together with a group, one position
// stays unused.
//! [plan]
constexpr int kPlanThreads = 1024, kLanes = 4;  // kLanes: lanes per group
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    plan_kernel(const int* gSeqused,  // [B]: valid keys per sequence
                WorkTile* gWork,      // [blocks + row blocks]: work tiles of all blocks
                int* gWorkRange,      // [blocks, 2]: first work tile and end of each block
                Shape shape, int batch, int heads, int tile_keys, int blocks, int together) {
  auto& sCost = dynamic_shared<int[32]>();  // per warp
  int* const sStart = sCost + 32;           // [B]: start of each sequence on the line
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const auto cost_of = [&](int b) { return kPieceTiles + tiles_of(shape, gSeqused[b], tile_keys); };
  int total = 0;
  for (int b0 = 0; b0 < batch; b0 += kThreads) {
    const int b = b0 + threadIdx.x, cost = b < batch ? heads * cost_of(b) : 0, sum = sum_up(cost);
    if (lane_id == 31) sCost[warp_id] = sum;
    __syncthreads();  // the sums of all warps are visible
    const int warps = sum_up(sCost[lane_id]), to_warp = __shfl_sync(~0u, warps, warp_id);
    if (b < batch) sStart[b] = total + to_warp - sCost[warp_id] + sum - cost;
    total += __shfl_sync(~0u, warps, 31);
    __syncthreads();  // all threads have read the sums
  }
  for (int n = threadIdx.x; n < 2 * blocks * together; n += kThreads) gWorkRange[n] = 0;
  __syncthreads();  // sStart is visible; ranges are empty
  const int length = ceil_div(total, blocks);
  const int groups = batch * heads;
  for (int n = threadIdx.x / kLanes; n < groups; n += kThreads / kLanes) {  // group n
    const int cost = cost_of(n / heads), start = sStart[n / heads] + n % heads * cost;
    for (int part = threadIdx.x % kLanes;; part += kLanes) {
      WorkTile work = piece_on_line(n, start, cost - kPieceTiles, length, part);
      if (part >= work.num_parts) break;
      const int block = work.first_part + part;
      // Is this the first or the last work tile of its block? It is if the last tile before the
      // group, or the first one after it, belongs to another block.
      const bool first = part > 0 || start == 0 || (start - 1) / length < block;
      const bool last = part + 1 < work.num_parts || n + 1 == groups ||
                        (start + cost + kPieceTiles) / length > block;
      for (int k = 0; k < together; ++k) {  // row block k of the group has its own blocks
        const int idx = k * (groups + blocks) + n + block;
        work.row_block = n * together + k;
        gWork[idx] = work;
        work.first_part += blocks;
        if (first) gWorkRange[2 * (k * blocks + block)] = idx;
        if (last) gWorkRange[2 * (k * blocks + block) + 1] = idx + 1;
      }
    }
  }
}
//! [plan]

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    attention_kernel(const Element* gQ,      // [B, Hq, seqlen_q, d]
                     const Element* gK,      // [num_pages, page_size, Hkv, d]
                     const Element* gV,      // [num_pages, page_size, Hkv, d]
                     const int* gTable,      // [B, max_pages]: page table
                     const int* gSeqused,    // [B]: valid keys per sequence
                     const WorkTile* gWork,  // work tiles of all blocks
                     const int* gWorkRange,  // [blocks, 2]: first work tile and end of each block
                     Element* gO,            // [B, Hq, seqlen_q, d]
                     float* gLse,            // [B, Hq, seqlen_q]
                     float* gOPartial,       // [parts, kRows, d]
                     float* gLsePartial,     // [parts, kRows], in log2 units
                     unsigned* gSemaphore,   // [row blocks]: arrivals; 0 between launches
                     Shape shape, int row_tiles, int page_size, int max_pages) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN, kRows = Config::kRows;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int quad_row = lane_id / 4, quad_col = lane_id % 4 * 2;  // position in an accumulator
  for (int piece = gWorkRange[2 * blockIdx.x]; piece < gWorkRange[2 * blockIdx.x + 1]; ++piece) {
    // Work tile: KV tiles [tile, tile + count) of a row block; part `split` of `num_splits`.
    const auto [row_block, tile, count, split, num_splits, first_block] = gWork[piece];
    const int seqlen_k = gSeqused[row_block / (shape.kv_heads * row_tiles)];
    const Rows rows = rows_of(shape, row_block, kRows);
    const KvRange all = keys_of_sequence(shape, seqlen_k);
    const KvRange keys{all.begin + tile * Config::kTile,
                       min(all.end, all.begin + (tile + count) * Config::kTile)};
    const Pages pages{gTable + int64_t{rows.bh_kv / shape.kv_heads} * max_pages, page_size};
    const int token = shape.kv_heads * kHeadDim;  // elements per token
    const int kv = rows.bh_kv % shape.kv_heads * kHeadDim + lane_id % Config::kLanes * 8;

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
    constexpr int kStages = Config::kStages, kStep = Config::kNumWarps * kBlockN;
    const int first = keys.begin + warp_id * kBlockN;
    // Slot of this lane's key of the tile at key0; past the end, that of the last key.
    const auto look_up = [&](int key0) {
      return key0 < keys.end ? slot_of(pages, min(key0 + lane_id % kBlockN, keys.end - 1)) : 0;
    };
    int slot = look_up(first);  // of the tile that is loaded next
    const auto load_kv = [&](int key0, int stage) {
      const int ahead = look_up(key0 + kStep);
      if (key0 < keys.end)
        load_tile<Config>(&smem.sK[warp_id][stage][0][0], &smem.sV[warp_id][stage][0][0], gK + kv,
                          gV + kv, token, slot, keys.end - key0);
      cp_async_commit();
      slot = ahead;
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
      //! [merge]
      // (7) O = O / l of this work tile; (8) store O and lse, -inf if no key is visible.
      const float factor = sum != 0 ? 1 / sum : 0;
      const float lse = sum != 0 ? max + log2f(sum) : -INFINITY;
      if (num_splits == 1) {
        store_row_part(gO + (rows.first + r) * kHeadDim + col, out, factor);
        if (col == 0) gLse[rows.first + r] = kLn2 * lse;
        continue;
      }
      const int64_t to = place_on_line(first_block, split) * kRows + r;
      *reinterpret_cast<float4*>(gOPartial + to * kHeadDim + col) =
          make_float4(out[0] * factor, out[1] * factor, out[2] * factor, out[3] * factor);
      if (col == 0) gLsePartial[to] = lse;
    }

    // (9) The last block to arrive reduces.
    //! [arrive]
    __syncthreads();  // the partial result is stored; all threads have read sO
    if (num_splits == 1) continue;
    if (threadIdx.x == 0) smem.last = flag_add(&gSemaphore[row_block], 1) == num_splits - 1u;
    __syncthreads();  // `last` is visible, and the other blocks' results, which thread 0 acquired
    if (!smem.last) continue;
    for (int r = warp_id; r < rows.count; r += Config::kNumWarps)
      merge_row<Element, Config>(gOPartial, gLsePartial, gO, gLse, rows.first + r, num_splits,
                                 [&](int n) { return place_on_line(first_block, n) * kRows + r; });
    if (threadIdx.x == 0) gSemaphore[row_block] = 0;  // reset for the next launch
    //! [arrive]
  }
}

// A model would launch this once per decode iteration, and the next kernel once per layer.
Status plan(const Arguments& args) {
  const Problem& p = args.problem;
  const int together = in_step(p, planned_blocks(p));
  args.phase("plan");
  return launch_kernel(
      plan_kernel<kPlanThreads>, dim3(1), dim3(kPlanThreads),
      static_cast<std::size_t>(32 + p.batch) * sizeof(int), args.stream, args.in<int>("seqused_k"),
      args.out<WorkTile>("work"), args.out<int>("work_range"), shape_of(p),
      static_cast<int>(p.batch), static_cast<int>(row_blocks(p, kMmaRows) / p.batch / together),
      tile_keys(p.head_dim), static_cast<int>(planned_blocks(p) / together), together);
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const PagedParams<Element> params(args);
  const Problem& p = args.problem;
  if (const Status planned = plan(args); !planned.ok()) return planned;
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(planned_blocks(p))), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, params.q, params.k,
                       params.v, params.page_table, params.seqused_k, args.in<WorkTile>("work"),
                       args.in<int>("work_range"), params.o, params.lse, params.o_partial,
                       params.lse_partial, params.arrived, shape_of(p),
                       static_cast<int>(ceil_div(p.group() * p.seqlen_q, Config::kRows)),
                       static_cast<int>(page_size_of(p)), static_cast<int>(max_pages_of(p)));
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

}  // namespace ATTN_BACKEND::v6_device_plan
