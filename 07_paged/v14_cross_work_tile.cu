// v14_cross_work_tile: K/V loads of the next work tile overlap with the end of this one.
//
// parent    v5_balanced_plan
// change    The KV tiles of a warp form one list across work tiles, so its copy pipeline does not
//           drain at the end of a work tile. Q of the next work tile is loaded during the merge
//           across warps. For this merge a warp stores its O in the stage that has just become
//           free, because the other stages already hold tiles of the next work tile.
// why       At the end of a work tile of v5 no copies are in flight: warps synchronise, merge,
//           store, and only then look up the next pages, one latency after the other. With short
//           sequences this happens every few microseconds.
// expect    dram__throughput rises for batches of very short sequences
// supports  fp16, bf16; head dims 64, 128, 256; 1 to 16 queries, any lengths and page sizes,
//           causal, windows, GQA
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/work.h"
#include "kernels/splits.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::v14_cross_work_tile {
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
  static constexpr bool kQStays = kHeadDim <= 128;        // in registers, except at d=256: too few
  static_assert(kHeadDim % 64 == 0 && kLanes <= 32, "a warp copies whole rows");
  static_assert(kTile == tile_keys(kHeadDim), "plans count other tiles");
};

template <class Element, class Config>
struct SharedStorage {
  // K, then V, per stage and warp; a free stage holds the warp's part of O.
  alignas(16) Element sKV[Config::kNumWarps][Config::kStages][2][Config::kBlockN][Config::kHeadDim];
  alignas(16) Element sQ[Config::kRows][Config::kHeadDim];
  float sMax[Config::kParts][Config::kRows];  // in log2 units
  float sSum[Config::kParts][Config::kRows];
  int sStage[Config::kParts];  // stage that holds a warp's part of O
  bool last;                   // this block arrived last and reduces the parts of the row block
  ATTN_MEMBERS(SharedStorage, sKV, sQ, sMax, sSum, sStage, last)
};
// A warp's part of O [kRows, d] in fp32 has the size of a stage. XOR swizzle of chunks of eight
// floats: half a warp stores eight columns of four rows at once, and hits all 32 banks.
__device__ __forceinline__ int part_offset(int row, int col) { return col ^ row % 4 * 8; }

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

// A block's list of work tiles; `piece` is one of them. Each lane of a warp holds one of 32
// entries, so the next entry comes by shuffles, not by dependent loads.
//! [next_pieces]
struct PlannedTile {
  WorkTile work;
  int seqlen_k;  // of its sequence
};
struct Pieces {
  const WorkTile* gWork;
  const int* gSeqused;
  int num_row_blocks, end;  // row blocks per sequence; end of the block's work tiles
  int first = -32;          // work tile of lane 0; none yet
  PlannedTile lane_tile = {};

  // Work tile n < end. From call to call n must not decrease. All lanes of a warp must call it.
  __device__ __forceinline__ PlannedTile at(int n) {
    if (n - first >= 32) {
      first = n;
      lane_tile.work = gWork[min(n + static_cast<int>(threadIdx.x % 32), end - 1)];
      lane_tile.seqlen_k = gSeqused[lane_tile.work.row_block / num_row_blocks];
    }
    const auto of_lane = [&](int x) { return __shfl_sync(~0u, x, n - first); };
    const WorkTile& w = lane_tile.work;
    return {{of_lane(w.row_block), of_lane(w.tile), of_lane(w.count), of_lane(w.part),
             of_lane(w.num_parts), of_lane(w.first_part)},
            of_lane(lane_tile.seqlen_k)};
  }
};
template <class Config>
__device__ __forceinline__ KvRange keys_of(const Shape& shape, const PlannedTile& piece) {
  const KvRange all = keys_of_sequence(shape, piece.seqlen_k);
  const auto [row_block, tile, count, part, num_parts, first_part] = piece.work;
  return {all.begin + tile * Config::kTile,
          min(all.end, all.begin + (tile + count) * Config::kTile)};
}
//! [next_pieces]

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

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const Element* gQ,      // [B, Hq, seqlen_q, d]
                     const Element* gK,      // [num_pages, page_size, Hkv, d]
                     const Element* gV,      // [num_pages, page_size, Hkv, d]
                     const int* gTable,      // [B, max_pages]: page table
                     const int* gSeqused,    // [B]: valid keys per sequence
                     const WorkTile* gWork,  // [work tiles] of all blocks
                     const int* gWorkBegin,  // [blocks + 1]: the first work tile of each block
                     Element* gO,            // [B, Hq, seqlen_q, d]
                     float* gLse,            // [B, Hq, seqlen_q]
                     float* gOPartial,       // [parts, kRows, d]
                     float* gLsePartial,     // [parts, kRows], in log2 units
                     unsigned* gSemaphore,   // [row blocks]: arrivals; 0 between launches
                     Shape shape, int row_tiles, int page_size, int max_pages) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN, kRows = Config::kRows;
  constexpr int kStages = Config::kStages, kStep = Config::kTile;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int quad_row = lane_id / 4, quad_col = lane_id % 4 * 2;  // position in an accumulator
  const int begin = gWorkBegin[blockIdx.x], end = gWorkBegin[blockIdx.x + 1];
  if (begin == end) return;
  const int token = shape.kv_heads * kHeadDim;  // elements per token
  const int num_row_blocks = shape.kv_heads * row_tiles;  // per sequence; row_tiles: per K/V head
  Pieces pieces{gWork, gSeqused, num_row_blocks, end};

  // (1) Load Q of a work tile through registers. Rows past the last become 0.
  //! [load_q]
  constexpr int kChunksOfQ = kRows * Config::kLanes;
  uint4 q_chunks[ceil_div(kChunksOfQ, Config::kThreads)];
  const auto each_chunk_of_q = [&](auto body) {
#pragma unroll
    for (int i = 0; i < ceil_div(kChunksOfQ, Config::kThreads); ++i) {
      const int idx = threadIdx.x + i * Config::kThreads;
      if (idx < kChunksOfQ) body(q_chunks[i], idx / Config::kLanes, idx % Config::kLanes * 8);
    }
  };
  const auto fetch_q = [&](const Rows& rows) {
    each_chunk_of_q([&](uint4& chunk, int row, int col) {
      chunk = make_uint4(0, 0, 0, 0);
      if (row < rows.count)
        chunk = *reinterpret_cast<const uint4*>(gQ + (rows.first + row) * kHeadDim + col);
    });
  };
  const auto put_q = [&] {
    each_chunk_of_q([&](const uint4& chunk, int row, int col) {
      *reinterpret_cast<uint4*>(&smem.sQ[0][0] + swizzled_offset<kHeadDim>(row, col)) = chunk;
    });
  };
  //! [load_q]

  // (2) Issue K_j and V_j, kStages - 1 tiles ahead, across work tiles. `next`: the tile that this
  // warp loads next. Past the last tile the cp.async groups are empty.
  //! [pipeline]
  struct {
    Pieces pieces;
    int piece, key0;
    KvRange keys;
    Pages pages;
    int kv, slot;  // offset of the lane's chunk in a token; slot of its key
  } next{pieces, begin, 0, {}, {nullptr, page_size}, 0, 0};
  const auto find_piece = [&]() {  // the first work tile in which this warp has a KV tile
    for (; next.piece < end; ++next.piece) {
      const PlannedTile piece = next.pieces.at(next.piece);
      next.keys = keys_of<Config>(shape, piece);
      next.key0 = next.keys.begin + warp_id * kBlockN;
      const int bh_kv = piece.work.row_block / row_tiles;
      next.pages.gTable = gTable + int64_t{bh_kv / shape.kv_heads} * max_pages;
      next.kv = bh_kv % shape.kv_heads * kHeadDim + lane_id % Config::kLanes * 8;
      if (next.key0 < next.keys.end) return;
    }
  };
  const auto look_up = [&]() {  // past the end, the last key
    if (next.piece < end)
      next.slot = slot_of(next.pages, min(next.key0 + lane_id % kBlockN, next.keys.end - 1));
  };
  const auto load_kv = [&](int stage) {
    if (next.piece < end) {
      const int kv = next.kv, slot = next.slot, count = next.keys.end - next.key0;
      next.key0 += kStep;
      if (next.key0 >= next.keys.end) ++next.piece, find_piece();
      look_up();  // issued before the copies: behind them its load would have to wait
      auto& sKV = smem.sKV[warp_id][stage];
      load_tile<Config>(&sKV[0][0][0], &sKV[1][0][0], gK + kv, gV + kv, token, slot, count);
    }
    cp_async_commit();
  };
  fetch_q(rows_of(shape, pieces.at(begin).work.row_block, kRows));
  find_piece();
  look_up();
  for (int stage = 0; stage < kStages - 1; ++stage) load_kv(stage);
  put_q();
  __syncthreads();  // Q is visible
  int stage = 0;
  for (int piece_id = begin; piece_id < end; ++piece_id) {
    const PlannedTile piece = pieces.at(piece_id);
    // Work tile: KV tiles [tile, tile + count) of a row block; part `split` of `num_splits`.
    const auto [row_block, tile, count, split, num_splits, first_part] = piece.work;
    const Rows rows = rows_of(shape, row_block, kRows);
    const KvRange keys = keys_of<Config>(shape, piece);
    float o[kHeadDim / 8][4] = {};  // unnormalised
    // max in log2 units; sum over this lane's keys
    float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
    const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
    const int query = rows.row0 + quad_row;
    const KvRange kv_range[2] = {
        keys_of_query(shape, piece.seqlen_k, query % shape.seqlen_q),
        keys_of_query(shape, piece.seqlen_k, (query + 8) % shape.seqlen_q)};
    uint32_t q[kHeadDim / 16][4];  // A fragments of Q K^T
    const auto read_q = [&] {
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step)
        ldmatrix_x4(q[step], &smem.sQ[0][0] + swizzled_offset<kHeadDim>(
                                                  lane_id % 16, 16 * step + lane_id / 16 * 8));
    };
    if constexpr (Config::kQStays) read_q();
    for (int key0 = keys.begin + warp_id * kBlockN; key0 < keys.end;
         key0 += kStep, stage = (stage + 1) % kStages) {
      __syncwarp();  // all lanes have read the previous tile, whose stage is refilled
      load_kv((stage + kStages - 1) % kStages);
      cp_async_wait<kStages - 1>();
      __syncwarp();  // this tile's copies of all lanes are visible
      const auto& sKV = smem.sKV[warp_id][stage];
      if constexpr (!Config::kQStays) read_q();
      //! [pipeline]
      // (3) S = Q K^T.
      float s[kBlockN / 8][4] = {};
      gemm_qk<Element, Config>(s, q, &sKV[0][0][0]);
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
      gemm_pv<Element, Config>(o, s, &sKV[1][0][0]);
    }

    // (6) Reduce across warps, while Q of the next work tile is loaded.
    //! [merge]
    const bool more = piece_id + 1 < end;
    if (more) fetch_q(rows_of(shape, pieces.at(piece_id + 1).work.row_block, kRows));
    const auto part_of = [&](int warp, int in_stage) {
      return reinterpret_cast<float*>(&smem.sKV[warp][in_stage][0][0][0]);
    };
    const int free_stage = (stage + kStages - 1) % kStages;
    static_assert(sizeof smem.sKV[0][0] == sizeof(float[kRows][kHeadDim]), "a part fills a stage");
    __syncwarp();  // all lanes have read the tile in this stage
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = quad_row + 8 * r;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
        *reinterpret_cast<float2*>(part_of(warp_id, free_stage) + row * kHeadDim +
                                   part_offset(row, 8 * n + quad_col)) =
            make_float2(o[n][2 * r], o[n][2 * r + 1]);
      const float sum = quad_sum(row_sum[r]);
      if (lane_id % 4 == 0) smem.sMax[warp_id][row] = row_max[r], smem.sSum[warp_id][row] = sum;
    }
    if (lane_id == 0) smem.sStage[warp_id] = free_stage;
    __syncthreads();  // m, l and O of all warps are visible; all warps have read Q
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
        add_scaled(out, weight,
                   *reinterpret_cast<const float4*>(part_of(n, smem.sStage[n]) + r * kHeadDim +
                                                    part_offset(r, col)));
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
      const int64_t to = int64_t{first_part + split} * kRows + r;
      *reinterpret_cast<float4*>(gOPartial + to * kHeadDim + col) =
          make_float4(out[0] * factor, out[1] * factor, out[2] * factor, out[3] * factor);
      if (col == 0) gLsePartial[to] = lse;
    }

    // (9) The last block to arrive reduces.
    //! [arrive]
    if (more) put_q();
    // the partial result and Q are stored; the warps' parts of O may be overwritten
    __syncthreads();
    if (num_splits == 1) continue;
    if (threadIdx.x == 0) smem.last = flag_add(&gSemaphore[row_block], 1) == num_splits - 1u;
    __syncthreads();  // `last` is visible, and the other blocks' results, which thread 0 acquired
    if (!smem.last) continue;
    for (int r = warp_id; r < rows.count; r += Config::kNumWarps)
      merge_row<Element, Config>(gOPartial, gLsePartial, gO, gLse, rows.first + r, num_splits,
                                 [&](int n) { return int64_t{first_part + n} * kRows + r; });
    if (threadIdx.x == 0) gSemaphore[row_block] = 0;  // reset for the next launch
    //! [arrive]
  }
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const PagedParams<Element> params(args);
  const Problem& p = args.problem;
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(planned_blocks(p))), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, params.q, params.k,
                       params.v, params.page_table, params.seqused_k, args.in<WorkTile>("work"),
                       args.in<int>("work_begin"), params.o, params.lse, params.o_partial,
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

}  // namespace ATTN_BACKEND::v14_cross_work_tile
