// v13_mla_wgmma: latent attention with wgmma, 64 rows per block.
//
// parent    v12_mla
// change    Two warpgroups own 256 columns of O each. The first one computes S, which has only 64
//           columns, and softmax; meanwhile the second one copies the next tile. P and the rescale
//           factors go through shared memory. Then both multiply P by their columns of V, the
//           panels of K read as MN-major. O is rescaled lazily, as in chapter 04, because both
//           warpgroups wait for the rescale.
// why       128 heads are two row tiles instead of eight, so K is read twice from L2 instead of
//           eight times. O of 64 rows and 512 columns takes 128 KB, half of an SM's registers.
// expect    16 heads: the bandwidth of HBM, although 48 of 64 rows are empty. 128 heads: the tensor
//           pipe is busy except during softmax, which nothing overlaps
// supports  fp16, bf16; head dim 576 (512 of V), one K/V head; 1 to 16 queries, any lengths and
//           page sizes, causal, windows; scales from 1e-37
// source    FlashMLA, for the split of O by columns
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "ptx/mma.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "kernels/work.h"
#include "kernels/splits.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::v13_mla_wgmma {
using namespace attn;
using namespace paged;
using namespace plans;
using namespace splits;

struct Config {
  static constexpr int kHeadDim = kLatentDim, kRows = kWgmmaRows;
  static constexpr int kOutDim = kLatentValues;                   // the first columns of K are V
  static constexpr int kBlockN = 64, kTile = kBlockN;             // keys per tile
  static constexpr int kNumWarps = 8, kThreads = 32 * kNumWarps;  // two warpgroups
  static constexpr int kLanes = kHeadDim / 8;                     // 16-byte chunks per row
  static constexpr int kColumns = kOutDim / 2;                    // columns of O per warpgroup
  static constexpr int kStages = 2;                               // pipeline stages
  static_assert(kTile == tile_keys(kHeadDim), "plans count other tiles");
};

constexpr float kRescaleThreshold = 8;  // log2 units: P <= 2^8

// Tiles are stored as panels of 64 columns, [columns / 64][rows, 64], as in chapter 06.
template <class Element, class Config>
struct SharedStorage {
  alignas(1024) Element sK[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sQ[Config::kRows * Config::kHeadDim];
  alignas(1024) Element sP[Config::kRows * Config::kBlockN];
  float sRescale[Config::kRows];  // rescale factor of O before P V of a tile
  float sMax[Config::kRows];      // in log2 units
  float sSum[Config::kRows];
  bool last;  // this block arrived last and reduces the parts of the row block
  ATTN_MEMBERS(SharedStorage, sK, sQ, sP, sRescale, sMax, sSum, last)
};
// Swizzled offset of element (row, col) in a tile of 64 rows.
//! [swizzle]
__device__ __forceinline__ int swizzled_offset(int row, int col) {
  return (col / 64 * 64 + row) * 64 + ((col / 8) ^ row) % 8 * 8 + col % 8;
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

// Warp w copies keys 16 i + 4 w + j (i, j < 4); lane l looks up that of i = l % 16 / 4, j = l % 4.
__device__ __forceinline__ int key_of_lane() {
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32 % 4;
  return lane_id % 16 / 4 * 16 + 4 * warp_id + lane_id % 4;
}
// Issues cp.async of this thread's chunks of a KV tile; rows from `count` on become 0. Called by
// one warpgroup. `slot`: of key key_of_lane() of the tile.
//! [load]
template <class Config, class Element>
__device__ __forceinline__ void load_tile(Element* tile, const Element* gK, int slot, int count) {
  const int lane_id = threadIdx.x % 32, key = threadIdx.x / 32 % 4 * 4 + lane_id / 8;
#pragma unroll
  for (int n = 0; n < Config::kBlockN; n += 16) {  // 8 lanes copy 128 contiguous bytes of a row
    const int row = n + key, bytes = row < count ? 16 : 0, chunk = lane_id % 8 * 8;
    Element* const to = tile + swizzled_offset(row, chunk);
    const Element* const from =
        gK + int64_t{__shfl_sync(~0u, slot, n / 4 + lane_id / 8)} * Config::kHeadDim + chunk;
#pragma unroll
    for (int col = 0; col < Config::kHeadDim; col += 64)
      cp_async_16(to + col * 64, from + col, bytes);
  }
}
//! [load]

// (3) S = Q K^T, by one warpgroup, and (5) O += P V, by both, each its columns.
//! [mma]
template <class Element, class Config>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kBlockN / 8][4], const Element* sQ,
                                        const Element* sK) {
  const SmemDescriptor q = smem_descriptor(sQ), k = smem_descriptor(sK);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {  // 64 columns per panel
    const int idx = step / 4 * 64 * 128 + step % 4 * 32;      // in bytes
    wgmma<Element, false>(s, q + idx, k + idx, step > 0);
  }
  wgmma_commit();
  wgmma_wait<0>(s);
}
template <class Element, class Config>
__device__ __forceinline__ void gemm_pv(float (&o)[Config::kColumns / 8][4], const Element* sP,
                                        const Element* sV) {
  const SmemDescriptor p = smem_descriptor(sP), v = smem_descriptor(sV, 64 * 128);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Config::kBlockN / 16; ++k)  // 16 keys are 16 rows of 128 bytes
    wgmma<Element, true>(o, p + 32 * k, v + 16 * 128 * k, true);
  wgmma_commit();
  wgmma_wait<0>(o);
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
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32, warpgroup_id = warp_id / 4;
  const int quad_row = 16 * (warp_id % 4) + lane_id / 4, quad_col = lane_id % 4 * 2;
  //! [teams]
  // A team is the row_tiles blocks of one sequence: the same keys, one row tile per block.
  const int team = blockIdx.x / row_tiles, row_tile_id = blockIdx.x % row_tiles;
  for (int piece = gWorkBegin[team]; piece < gWorkBegin[team + 1]; ++piece) {
    // A work tile's row_block is here the sequence, b. KV tiles [tile, tile + count), one split.
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
      cp_async_16(smem.sQ + swizzled_offset(row, col),
                  gQ + (rows.first + (inside ? row : 0)) * kHeadDim + col, inside ? 16 : 0);
    }
    cp_async_commit();
    //! [load_q]
    const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
    float o[Config::kColumns / 8][4] = {};  // unnormalised
    // row_max: the reference, which may lag the row max (log2 units); row_sum: of this lane's keys
    float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
    const KvRange kv_range[2] = {
        keys_of_query(shape, seqlen_k, (rows.row0 + quad_row) % shape.seqlen_q),
        keys_of_query(shape, seqlen_k, (rows.row0 + quad_row + 8) % shape.seqlen_q)};

    // (2) Issue K_j, which contains V_j, one tile ahead, by the second warpgroup.
    //! [pipeline]
    // Slot of this lane's key of the tile at key0; past the end, that of the last key.
    const auto look_up = [&](int key0) {
      return key0 < keys.end ? slot_of(pages, min(key0 + key_of_lane(), keys.end - 1)) : 0;
    };
    int slot = warpgroup_id == 1 ? look_up(keys.begin) : 0;  // of the tile that is loaded next
    const auto load_kv = [&](int key0, int stage) {
      const int ahead = look_up(key0 + kBlockN);
      if (key0 < keys.end) load_tile<Config>(smem.sK[stage], gK, slot, keys.end - key0);
      cp_async_commit();
      slot = ahead;
    };
    if (warpgroup_id == 1) load_kv(keys.begin, 0);
    int stage = 0;
    for (int key0 = keys.begin; key0 < keys.end; key0 += kBlockN, stage ^= 1) {
      cp_async_wait<0>();
      // make this thread's copies visible to the async proxy, through which wgmma reads
      fence_proxy_async();
      __syncthreads();  // Q and the tile are visible; P V of the previous tile is complete
      if (warpgroup_id == 1) load_kv(key0 + kBlockN, stage ^ 1);
      //! [pipeline]
      if (warpgroup_id == 0) {
        // (3) S = Q K^T
        float s[kBlockN / 8][4];
        gemm_qk<Element, Config>(s, smem.sQ, smem.sK[stage]);
        // (4) Online softmax; -inf where masked, in tiles that contain masked keys.
        //! [softmax]
        if (key0 < max(kv_range[0].begin, kv_range[1].begin) ||
            key0 + kBlockN > min(kv_range[0].end, kv_range[1].end)) {
#pragma unroll
          for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              if (const int j = key0 + 8 * n + quad_col + i % 2;
                  j < kv_range[i / 2].begin || j >= kv_range[i / 2].end)
                s[n][i] = -INFINITY;
        }
        float max[2] = {s[0][0], s[0][2]};  // unscaled
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) max[i / 2] = fmaxf(max[i / 2], s[n][i]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          max[r] = quad_max(max[r]) * softmax_scale_log2;
          if (max[r] <= row_max[r] + kRescaleThreshold) max[r] = row_max[r];
          const float rescale = exp2f(row_max[r] - max[r]);
          row_max[r] = max[r];
          row_sum[r] *= rescale;
          if (quad_col == 0) smem.sRescale[quad_row + 8 * r] = rescale;
        }
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            s[n][i] = exp2f(fmaf(s[n][i], softmax_scale_log2, -max[i / 2]));
            row_sum[i / 2] += s[n][i];
          }
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            *reinterpret_cast<uint32_t*>(smem.sP +
                                         swizzled_offset(quad_row + 8 * r, 8 * n + quad_col)) =
                pack2<Element>(s[n][2 * r], s[n][2 * r + 1]);
        fence_proxy_async();  // make P visible to the async proxy
      }
      __syncthreads();  // P and the rescale factors are visible
      const float rescale[2] = {smem.sRescale[quad_row], smem.sRescale[quad_row + 8]};
      if (__any_sync(~0u, rescale[0] < 1 || rescale[1] < 1)) {  // rare after the first tiles
#pragma unroll
        for (int n = 0; n < Config::kColumns / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[n][i] *= rescale[i / 2];
      }
      //! [softmax]
      // (5) O += P V
      gemm_pv<Element, Config>(o, smem.sP, smem.sK[stage] + warpgroup_id * Config::kColumns * 64);
    }

    // (6) Both warpgroups read the row sums.
    //! [merge]
    cp_async_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row_sum[r]);
      if (warpgroup_id == 0 && quad_col == 0)
        smem.sMax[quad_row + 8 * r] = row_max[r], smem.sSum[quad_row + 8 * r] = sum;
    }
    __syncthreads();  // the sums are visible
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = quad_row + 8 * r, col = warpgroup_id * Config::kColumns + quad_col;
      if (row >= rows.count) continue;
      const float sum = smem.sSum[row];
      //! [merge]
      // (7) O = O / l of this work tile; (8) store O and lse, -inf if no key is visible.
      const float factor = sum != 0 ? 1 / sum : 0;
      const float lse = sum != 0 ? smem.sMax[row] + log2f(sum) : -INFINITY;
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

}  // namespace ATTN_BACKEND::v13_mla_wgmma
