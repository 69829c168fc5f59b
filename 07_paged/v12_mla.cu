// v12_mla: multi-head latent attention; one K/V head for all query heads, V is a part of K.
//
// parent    05_flash_decoding/v11_shared_p
// change    The cache holds one latent vector of 512 elements and a RoPE part of 64 per token. The
//           projections to keys and values are absorbed into Q and O. So all query heads share one
//           key of 576 elements, whose first 512 are its value; one tile serves as K and V. The
//           heads are the rows, and each warp owns columns of O. Blocks with the other rows of a
//           sequence (a team) process the same work tile at the same time and find K in L2.
// why       A token takes 1152 bytes instead of 81920 with 128 separate heads.
// expect    dram__bytes_read.sum of 1152 bytes per token; time rises with every 16 heads
// supports  fp16, bf16; head dim 576 (512 of V), one K/V head; 1 to 16 queries, any lengths and
//           page sizes, causal, windows
// source    DeepSeek-AI, DeepSeek-V2 (arXiv 2405.04434), section 2.1
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/work.h"
#include "kernels/splits.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::v12_mla {
using namespace attn;
using namespace paged;
using namespace plans;
using namespace splits;

struct Config {
  static constexpr int kHeadDim = kLatentDim, kRows = 16;
  static constexpr int kOutDim = kLatentValues;  // the first columns of K are V
  static constexpr int kBlockN = 16;             // keys per tile of a warp
  static constexpr int kNumWarps = 4, kThreads = 32 * kNumWarps;
  static constexpr int kTile = kNumWarps * kBlockN;     // keys per tile of the block
  static constexpr int kLanes = kHeadDim / 8;           // 16-byte chunks per row
  static constexpr int kColumns = kOutDim / kNumWarps;  // columns of O per warp
  static constexpr int kStages = 2;                     // pipeline stages
  static_assert(kHeadDim % 64 == 0 && kBlockN % 4 == 0, "a warp copies whole rows");
  static_assert(kTile == tile_keys(kHeadDim), "plans count other tiles");
};

template <class Element, class Config>
struct SharedStorage {
  alignas(16) Element sK[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  alignas(16) Element sQ[Config::kRows][Config::kHeadDim];
  // padding: 8 rows of an ldmatrix phase hit disjoint banks
  alignas(16) Element sP[Config::kRows][Config::kTile + 8];
  float sMax[Config::kNumWarps][Config::kRows];  // in log2 units
  float sSum[Config::kNumWarps][Config::kRows];
  bool last;  // this block arrived last and reduces the parts of the row block
  ATTN_MEMBERS(SharedStorage, sK, sQ, sP, sMax, sSum, last)
};
// XOR swizzle: offset of element (row, col) in a tile [kBlockN, kHeadDim]. 16-byte chunks of a row
// are permuted so that the 8 rows of an ldmatrix phase hit disjoint banks.
//! [swizzle]
template <int kHeadDim>
__device__ __forceinline__ int swizzled_offset(int row, int col) {
  return row * kHeadDim + ((col / 8) ^ (row % 8)) * 8 + col % 8;
}
//! [swizzle]

// Slot of a key: its index in the pool, counted in tokens, below 2^31.
struct Pages {
  const int* gTable;  // [max_pages]: the sequence's row of the page table
  int page_size;
};
__device__ __forceinline__ int slot_of(const Pages& pages, int key) {
  return pages.gTable[key / pages.page_size] * pages.page_size + key % pages.page_size;
}

// Issues cp.async of this lane's chunks of a KV tile; rows from `count` on become 0. `slot`: in
// each lane, the slot of the tile's key `lane_id % kBlockN`. `chunk`: the first column of the
// lane's chunk.
//! [load]
template <class Config, class Element>
__device__ __forceinline__ void load_tile(Element* tile, const Element* gK, int slot, int count) {
  const int key = threadIdx.x % 32 / 8, chunk = threadIdx.x % 8 * 8;
#pragma unroll
  for (int n = 0; n < Config::kBlockN; n += 4) {  // 8 lanes copy 128 contiguous bytes of a row
    const int row = n + key, bytes = row < count ? 16 : 0;
    Element* const to = tile + swizzled_offset<Config::kHeadDim>(row, chunk);
    const Element* const from =
        gK + int64_t{__shfl_sync(~0u, slot, row)} * Config::kHeadDim + chunk;
#pragma unroll
    for (int col = 0; col < Config::kHeadDim; col += 64) cp_async_16(to + col, from + col, bytes);
  }
}
//! [load]

// (3) S = Q K^T for the keys of this warp, and (5) O += P V for its columns, over all keys.
//! [mma]
template <class Element, class Config>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kBlockN / 8][4], const Element* sQ,
                                        const Element* sK) {
  const int lane_id = threadIdx.x % 32, row = lane_id / 16 * 8 + lane_id % 8;
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step)
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; n += 2) {
      uint32_t a[4], b[4];  // all of Q would not fit into registers
      ldmatrix_x4(
          a, sQ + swizzled_offset<Config::kHeadDim>(lane_id % 16, 16 * step + lane_id / 16 * 8));
      ldmatrix_x4(
          b, sK + swizzled_offset<Config::kHeadDim>(8 * n + row, 16 * step + lane_id / 8 % 2 * 8));
      mma_m16n8k16<Element>(s[n], a, {b[0], b[1]}, s[n]);
      mma_m16n8k16<Element>(s[n + 1], a, {b[2], b[3]}, s[n + 1]);
    }
}
template <class Element, class Config>
__device__ __forceinline__ void gemm_pv(float (&o)[Config::kColumns / 8][4],
                                        SharedStorage<Element, Config>& smem, int stage,
                                        int warps_with_keys) {
  const int lane_id = threadIdx.x % 32, col = threadIdx.x / 32 * Config::kColumns;
#pragma unroll
  for (int k = 0; k < Config::kNumWarps; ++k) {  // warp k's keys
    if (k >= warps_with_keys) break;
    uint32_t a[4], b[4];
    ldmatrix_x4(a, &smem.sP[lane_id % 16][Config::kBlockN * k + lane_id / 16 * 8]);
#pragma unroll
    for (int n = 0; n < Config::kColumns / 8; n += 2) {
      ldmatrix_x4_trans(
          b, &smem.sK[k][stage][0][0] +
                 swizzled_offset<Config::kHeadDim>(lane_id % 16, col + 8 * n + lane_id / 16 * 8));
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
  constexpr int kHeadDim = Config::kOutDim, kAtOnce = 4;  // partial results in flight
  constexpr int kOwn = ceil_div(kHeadDim, 128);           // groups of four columns per lane
  const int lane_id = threadIdx.x % 32;
  float4 parts[kAtOnce][kOwn] = {};
  const auto load = [&](int n0) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int c = 0; c < kOwn; ++c)
        if (n0 + i < num_parts)
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
    store_row_part(gO + row * kHeadDim + 128 * c + 4 * lane_id, out[c], sum != 0 ? 1 / sum : 0);
  if (lane_id == 0) gLse[row] = sum != 0 ? kLn2 * (max + log2f(sum)) : -INFINITY;
}
//! [merge_row]

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    attention_kernel(const Element* gQ,      // [B, Hq, seqlen_q, 576]
                     const Element* gK,      // [num_pages, page_size, 576]
                     const int* gTable,      // [B, max_pages]: page table
                     const int* gSeqused,    // [B]: valid keys per sequence
                     const WorkTile* gWork,  // [work tiles] of all teams
                     const int* gWorkBegin,  // [teams + 1]: the first work tile of each team
                     Element* gO,            // [B, Hq, seqlen_q, 512]
                     float* gLse,            // [B, Hq, seqlen_q]
                     float* gOPartial,       // [parts, row_tiles, kRows, 512]
                     float* gLsePartial,     // [parts, row_tiles, kRows], in log2 units
                     unsigned* gSemaphore,   // [row blocks]: arrivals; 0 between launches
                     Shape shape, int row_tiles, int page_size, int max_pages) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN, kRows = Config::kRows;
  constexpr int kOutDim = Config::kOutDim;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int quad_row = lane_id / 4, quad_col = lane_id % 4 * 2;  // position in an accumulator
  //! [teams]
  // A team is the row_tiles blocks of one sequence: the same keys, one row tile per block.
  const int team = blockIdx.x / row_tiles, row_tile_id = blockIdx.x % row_tiles;
  for (int piece = gWorkBegin[team]; piece < gWorkBegin[team + 1]; ++piece) {
    // Work tile: KV tiles [tile, tile + count) of sequence b; part `split` of `num_splits`.
    const auto [b, tile, count, split, num_splits, first_part] = gWork[piece];
    const int seqlen_k = gSeqused[b], row_block = b * row_tiles + row_tile_id;
    //! [teams]
    const Rows rows = rows_of(shape, row_block, kRows);
    const KvRange all = keys_of_sequence(shape, seqlen_k);
    const KvRange keys{all.begin + tile * Config::kTile,
                       min(all.end, all.begin + (tile + count) * Config::kTile)};
    const Pages pages{gTable + int64_t{b} * max_pages, page_size};
    const auto partial_index = [&](int n, int row) {  // index of partial result n
      return (int64_t{first_part + n} * row_tiles + row_tile_id) * kRows + row;
    };

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
    float o[Config::kColumns / 8][4] = {};  // unnormalised
    // max in log2 units; sum over this lane's keys
    float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
    const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
    const KvRange kv_range[2] = {
        keys_of_query(shape, seqlen_k, (rows.row0 + quad_row) % shape.seqlen_q),
        keys_of_query(shape, seqlen_k, (rows.row0 + quad_row + 8) % shape.seqlen_q)};

    // (2) Issue K_j, which contains V_j, kStages - 1 tiles ahead. Past the last tile the cp.async
    // groups are empty.
    //! [pipeline]
    constexpr int kStages = Config::kStages, kStep = Config::kNumWarps * kBlockN;
    const int first = warp_id * kBlockN;  // this warp's first key in a tile
    // Slot of this lane's key of the tile at key0; past the end, that of the last key.
    const auto look_up = [&](int key0) {
      return key0 < keys.end ? slot_of(pages, min(key0 + lane_id % kBlockN, keys.end - 1)) : 0;
    };
    int slot = look_up(keys.begin + first);  // of the tile that is loaded next
    const auto load_kv = [&](int key0, int stage) {
      const int ahead = look_up(key0 + kStep);
      if (key0 < keys.end)
        load_tile<Config>(&smem.sK[warp_id][stage][0][0], gK, slot, keys.end - key0);
      cp_async_commit();
      slot = ahead;
    };
    for (int n = 0; n < kStages - 1; ++n) load_kv(keys.begin + first + n * kStep, n);
    int stage = 0;
    for (int key0 = keys.begin; key0 < keys.end; key0 += kStep, stage = (stage + 1) % kStages) {
      cp_async_wait<kStages - 2>();
      __syncthreads();  // Q and this tile are visible; all warps have read the previous tile
      load_kv(key0 + first + (kStages - 1) * kStep, (stage + kStages - 1) % kStages);
      //! [pipeline]
      // (3) S = Q K^T.
      float s[kBlockN / 8][4] = {};
      if (key0 + first < keys.end) {  // this warp has keys in the tile
        gemm_qk<Element, Config>(s, &smem.sQ[0][0], &smem.sK[warp_id][stage][0][0]);
      }
      // (4) Mask; online softmax: row maxima over each warp's keys, then over all warps.
      //! [softmax]
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
        if (lane_id % 4 == 0) smem.sMax[warp_id][quad_row + 8 * r] = max[r];
      }
      __syncthreads();  // the maxima of all warps are visible
      float rescale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        for (int n = 0; n < Config::kNumWarps; ++n)
          max[r] = fmaxf(max[r], smem.sMax[n][quad_row + 8 * r]);
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
          *reinterpret_cast<uint32_t*>(&smem.sP[quad_row + 8 * r][first + 8 * n + quad_col]) =
              pack2<Element>(s[n][2 * r], s[n][2 * r + 1]);
      __syncthreads();  // P of all warps is visible
      //! [softmax]
      // (5) O += P V
      gemm_pv<Element, Config>(o, smem, stage, ceil_div(keys.end - key0, kBlockN));
    }

    // (6) Add the row sums of all warps.
    //! [merge]
    cp_async_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row_sum[r]);
      if (lane_id % 4 == 0) smem.sSum[warp_id][quad_row + 8 * r] = sum;
    }
    __syncthreads();  // the sums are visible
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = quad_row + 8 * r, col = warp_id * Config::kColumns + quad_col;
      if (row >= rows.count) continue;
      float sum = 0;
      for (int n = 0; n < Config::kNumWarps; ++n) sum += smem.sSum[n][row];
      //! [merge]
      // (7) O = O / l of this work tile; (8) store O and lse, -inf if no key is visible.
      const float factor = sum != 0 ? 1 / sum : 0;
      const float lse = sum != 0 ? row_max[r] + log2f(sum) : -INFINITY;
      const int64_t to = num_splits == 1 ? rows.first + row : partial_index(split, row);
#pragma unroll
      for (int n = 0; n < Config::kColumns / 8; ++n) {
        const float o0 = o[n][2 * r] * factor, o1 = o[n][2 * r + 1] * factor;
        const int64_t idx = to * kOutDim + col + 8 * n;
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
                                 [&](int n) { return partial_index(n, r); });
    if (threadIdx.x == 0) gSemaphore[row_block] = 0;  // reset for the next launch
    //! [arrive]
  }
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const PagedParams<Element> params(args);
  const Problem& p = args.problem;
  const int64_t row_tiles = ceil_div(p.heads * p.seqlen_q, Config::kRows);
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(row_tiles * teams(p, Config::kRows))),
                       dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream,
                       params.q, params.k, params.page_table, params.seqused_k,
                       args.in<WorkTile>("work"), args.in<int>("work_begin"), params.o, params.lse,
                       params.o_partial, params.lse_partial, params.arrived, shape_of(p),
                       static_cast<int>(row_tiles), static_cast<int>(page_size_of(p)),
                       static_cast<int>(max_pages_of(p)));
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype,
                        [&]<class Element>() { return launch<Element, Config>(args); });
}

}  // namespace ATTN_BACKEND::v12_mla
