// A work tile of v5_balanced_plan for a block of four warps, as v11_mixed processes it between
// prefill tiles. Rows may belong to ragged batches.
#pragma once

#include <algorithm>

#include "attn/kernel.h"
#include "kernels/work.h"
#include "kernels/prefill_tiles.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::decoding {
using namespace attn;
using namespace paged;
using namespace plans;

template <int kHeadDim_>
struct DecodeConfig {
  static constexpr int kHeadDim = kHeadDim_, kRows = 16;
  static constexpr int kBlockN = 16;  // keys per tile of a warp
  static constexpr int kNumWarps = 4, kThreads = 32 * kNumWarps;
  static constexpr int kTile = kNumWarps * kBlockN;  // keys per tile of the block
  static constexpr int kLanes = kHeadDim / 8;        // lanes per key, 16 bytes each
  static constexpr int kRowsPerLoad = 32 / kLanes;   // keys per load of a warp
  static constexpr int kParts = kNumWarps;           // partial results per row
  // Stages of K and V per warp: as many as leave room for a second block on the SM.
  static constexpr int kStages = kHeadDim == 64 ? 4 : kHeadDim == 128 ? 3 : 1;
  // 16-column fragments of Q that stay in registers; none at d=256, for lack of registers.
  static constexpr int kQSteps = kHeadDim <= 128 ? kHeadDim / 16 : 0;
  static_assert(kTile == kMixedTileKeys, "plans count other tiles");
};

template <class Element, class Config>
struct DecodeStorage {
  int ticket;  // member of the calling kernel
  alignas(128) Element sK[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  alignas(128) Element sV[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  alignas(128) Element sQ[Config::kRows][Config::kHeadDim];
  float sMax[Config::kParts][Config::kRows];  // in log2 units
  float sSum[Config::kParts][Config::kRows];
  bool last;  // this block arrived last and reduces the parts of the row block
  ATTN_MEMBERS(DecodeStorage, ticket, sK, sV, sQ, sMax, sSum, last)
};
// O of each warp, in the memory of K, V and Q. The padding avoids bank conflicts: half a warp
// stores four rows of 8 floats at once, 8 bytes per lane, to all 32 banks.
template <class Config>
using OutputParts = float[Config::kParts][Config::kRows][Config::kHeadDim + 8];

// Issues cp.async of this lane's chunks of a KV tile; rows from `count` on become 0. `gK`, `gV`:
// the lane's chunk of the pool's first token; `token`: elements per token. `slot`: in each lane,
// the slot of the tile's key `lane_id % kBlockN`.
template <class Config, class Element>
__device__ __forceinline__ void load_keys(Element* sK, Element* sV, const Element* gK,
                                          const Element* gV, int token, int slot, int count) {
  const int key = thread_index() % 32 / Config::kLanes, chunk = thread_index() % Config::kLanes * 8;
#pragma unroll
  for (int n = 0; n < Config::kBlockN; n += Config::kRowsPerLoad) {
    const int row = n + key, bytes = row < count ? 16 : 0;
    const int to = swizzled_offset<Config::kHeadDim>(row, chunk);
    const int64_t from = int64_t{__shfl_sync(~0u, slot, row)} * token;
    cp_async_16(sK + to, gK + from, bytes);
    cp_async_16(sV + to, gV + from, bytes);
  }
}

// S = Q K^T of a warp's tile, and O += P V; fragments as in chapter 04.
template <class Config, class Element>
__device__ __forceinline__ void load_q_step(uint32_t (&a)[4], const Element* sQ, int step) {
  const int lane_id = thread_index() % 32;
  ldmatrix_x4(a,
              sQ + swizzled_offset<Config::kHeadDim>(lane_id % 16, 16 * step + lane_id / 16 * 8));
}
template <class Element, class Config, int kCount>
__device__ __forceinline__ void scores_of_keys(float (&s)[Config::kBlockN / 8][4],
                                               uint32_t (&q)[kCount][4], const Element* sQ,
                                               const Element* sK) {
  const int lane_id = thread_index() % 32, row = lane_id / 16 * 8 + lane_id % 8;
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {
    uint32_t loaded[4];
    if (step >= Config::kQSteps) load_q_step<Config>(loaded, sQ, step);
    const auto& a = step < Config::kQSteps ? q[step % kCount] : loaded;
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(
          b, sK + swizzled_offset<Config::kHeadDim>(8 * n + row, 16 * step + lane_id / 8 % 2 * 8));
      mma_m16n8k16<Element>(s[n], a, {b[0], b[1]}, s[n]);
      mma_m16n8k16<Element>(s[n + 1], a, {b[2], b[3]}, s[n + 1]);
    }
  }
}
template <class Element, class Config>
__device__ __forceinline__ void output_of_keys(float (&o)[Config::kHeadDim / 8][4],
                                               const float (&p)[Config::kBlockN / 8][4],
                                               const Element* sV) {
  const int lane_id = thread_index() % 32;
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

// Rows of one sequence and K/V head: row r is query r % seqlen_q of query head r / seqlen_q of the
// group. Offsets into Q and O, and into lse.
struct GroupRows {
  Sequence first_head;
  int64_t head_q, head_lse;  // elements from one head to the next
  int q_stride;              // and from one query to the next, in Q and O
  __device__ __forceinline__ int64_t q(int r) const {
    const int n = first_head.seqlen_q;
    return first_head.q + r / n * head_q + int64_t{r % n} * q_stride;
  }
  __device__ __forceinline__ int64_t lse(int r) const {
    const int n = first_head.seqlen_q;
    return first_head.lse + r / n * head_lse + r % n;
  }
};
__device__ __forceinline__ GroupRows rows_of_group(const Shape& shape, const int* cu_seqlens_q,
                                                   const int* gSeqused, int b, int hkv,
                                                   int q_stride) {
  const Sequence s =
      sequence_of(shape, cu_seqlens_q, gSeqused, b, hkv * (shape.heads / shape.kv_heads));
  const bool ragged = cu_seqlens_q != nullptr;
  return {s, ragged ? shape.head_dim : int64_t{s.seqlen_q} * shape.head_dim,
          ragged ? shape.tokens_q : s.seqlen_q, q_stride};
}

// One warp reduces the partial results of a row. A lane owns four of each 128 columns and the
// weight of every 32nd partial result. `partial_index(n)`: index of partial result n.
template <class Element, class Config, class PlaceOf>
__device__ __forceinline__ void merge_parts_of_row(const float* gOPartial, const float* gLsePartial,
                                                   Element* gO, float* gLse, int num_parts,
                                                   PlaceOf partial_index) {
  const int lane_id = thread_index() % 32;
  float max = kLowest, sum = 0;
  for (int n = lane_id; n < num_parts; n += 32) max = fmaxf(max, gLsePartial[partial_index(n)]);
  for (int distance = 16; distance > 0; distance /= 2)
    max = fmaxf(max, __shfl_xor_sync(~0u, max, distance));
  for (int n = lane_id; n < num_parts; n += 32) sum += exp2f(gLsePartial[partial_index(n)] - max);
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  for (int col = 4 * lane_id; col < Config::kHeadDim; col += 128) {
    float out[4] = {};
#pragma unroll 8
    for (int n = 0; n < num_parts; ++n)
      add_scaled(
          out, exp2f(gLsePartial[partial_index(n)] - max),
          *reinterpret_cast<const float4*>(gOPartial + partial_index(n) * Config::kHeadDim + col));
    store_row_part(gO + col, out, sum != 0 ? 1 / sum : 0);
  }
  if (lane_id == 0) *gLse = sum != 0 ? kLn2 * (max + log2f(sum)) : -INFINITY;
}

// Inputs and outputs of a work tile: the kernel's arguments.
template <class Element>
struct DecodeTensors {
  const Element *gQ, *gK, *gV;
  Element* gO;
  float *gLse, *gOPartial, *gLsePartial;
  unsigned* gSemaphore;  // [row blocks]: arrivals; 0 between launches
};

// One work tile. Called by all threads of a block. `smem` is free before the call, and after it
// once the caller has passed a barrier.
template <class Element, class Config>
__device__ __forceinline__ void decode_piece(DecodeStorage<Element, Config>& smem,
                                             const MixedWork& work, const GroupRows& group,
                                             Shape shape, const int* gPages, int page_size,
                                             const DecodeTensors<Element>& g) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN, kRows = Config::kRows;
  const int warp_id = thread_index() / 32, lane_id = thread_index() % 32;
  const int quad_row = lane_id / 4, quad_col = lane_id % 4 * 2;  // position in an accumulator
  const int seqlen_k = group.first_head.seqlen_k, row0 = work.row0;
  shape.seqlen_q = group.first_head.seqlen_q;
  const int count = min(kRows, shape.heads / shape.kv_heads * shape.seqlen_q - row0);
  const KvRange all = keys_of_sequence(shape, seqlen_k);
  const KvRange keys{all.begin + work.tile * Config::kTile,
                     min(all.end, all.begin + (work.tile + work.count) * Config::kTile)};
  const int token = shape.kv_heads * kHeadDim;  // elements per token
  const int kv = work.head * kHeadDim + lane_id % Config::kLanes * 8;

  // (1) Load Q, once per work tile. Rows past the last become 0.
  for (int idx = thread_index(); idx < kRows * Config::kLanes; idx += Config::kThreads) {
    const int row = idx / Config::kLanes, col = idx % Config::kLanes * 8;
    const bool inside = row < count;
    cp_async_16(&smem.sQ[0][0] + swizzled_offset<kHeadDim>(row, col),
                g.gQ + group.q(row0 + (inside ? row : 0)) + col, inside ? 16 : 0);
  }
  cp_async_commit();
  float o[kHeadDim / 8][4] = {};  // unnormalised
  // max in log2 units; sum over this lane's keys
  float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
  const KvRange kv_range[2] = {
      keys_of_query(shape, seqlen_k, (row0 + quad_row) % shape.seqlen_q),
      keys_of_query(shape, seqlen_k, (row0 + quad_row + 8) % shape.seqlen_q)};

  // (2) Issue K_j and V_j, kStages - 1 tiles ahead; look up their slots one tile earlier.
  constexpr int kStages = Config::kStages, kStep = Config::kTile;
  const int first = keys.begin + warp_id * kBlockN;
  const auto look_up = [&](int key0) {
    const int key = min(key0 + lane_id % kBlockN, keys.end - 1);
    return key0 < keys.end ? gPages[key / page_size] * page_size + key % page_size : 0;
  };
  int slot = look_up(first);  // of the tile that is loaded next
  const auto load_kv = [&](int key0, int stage) {
    const int ahead = look_up(key0 + kStep);
    if (key0 < keys.end)
      load_keys<Config>(&smem.sK[warp_id][stage][0][0], &smem.sV[warp_id][stage][0][0], g.gK + kv,
                        g.gV + kv, token, slot, keys.end - key0);
    cp_async_commit();
    slot = ahead;
  };
  for (int n = 0; n < kStages - 1; ++n) load_kv(first + n * kStep, n);
  cp_async_wait<kStages - 1>();
  __syncthreads();                                   // Q is visible
  uint32_t q[std::max(1, Config::kQSteps)][4] = {};  // A fragments of Q K^T
#pragma unroll
  for (int step = 0; step < Config::kQSteps; ++step)
    load_q_step<Config>(q[step], &smem.sQ[0][0], step);
  int stage = 0;
  for (int key0 = first; key0 < keys.end; key0 += kStep, stage = (stage + 1) % kStages) {
    __syncwarp();  // all lanes have read the previous tile, whose stage is refilled
    load_kv(key0 + (kStages - 1) * kStep, (stage + kStages - 1) % kStages);
    cp_async_wait<kStages - 1>();
    __syncwarp();  // this tile's copies of all lanes are visible
    // (3) S = Q K^T, -inf where masked.
    float s[kBlockN / 8][4] = {};
    scores_of_keys<Element, Config>(s, q, &smem.sQ[0][0], &smem.sK[warp_id][stage][0][0]);
    // (4) Online softmax.
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
    output_of_keys<Element, Config>(o, s, &smem.sV[warp_id][stage][0][0]);
  }

  // (6) Reduce across warps.
  auto& sO = reinterpret_cast<OutputParts<Config>&>(smem.sK);
  static_assert(sizeof sO <= sizeof smem.sK + sizeof smem.sV + sizeof smem.sQ,
                "the parts lie where K, V and Q were");
  cp_async_wait<0>();
  __syncthreads();  // all warps have read K, V and Q
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
  for (int idx = thread_index(); idx < count * kChunks; idx += Config::kThreads) {
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
    // (7) O = O / l of this work tile; (8) store O and lse, -inf if no key is visible.
    const float factor = sum != 0 ? 1 / sum : 0;
    const float lse = sum != 0 ? max + log2f(sum) : -INFINITY;
    if (work.num_parts == 1) {
      store_row_part(g.gO + group.q(row0 + r) + col, out, factor);
      if (col == 0) g.gLse[group.lse(row0 + r)] = kLn2 * lse;
      continue;
    }
    const int64_t to = int64_t{work.first_part + work.part} * kRows + r;
    *reinterpret_cast<float4*>(g.gOPartial + to * kHeadDim + col) =
        make_float4(out[0] * factor, out[1] * factor, out[2] * factor, out[3] * factor);
    if (col == 0) g.gLsePartial[to] = lse;
  }

  // (9) The last block to arrive reduces.
  if (work.num_parts == 1) return;
  __syncthreads();  // the partial result is stored
  if (thread_index() == 0)
    smem.last = flag_add(&g.gSemaphore[work.row_block], 1) == work.num_parts - 1u;
  __syncthreads();  // `last` is visible and, through thread 0, the other blocks' results
  if (!smem.last) return;
  for (int r = warp_id; r < count; r += Config::kNumWarps)
    merge_parts_of_row<Element, Config>(
        g.gOPartial, g.gLsePartial, g.gO + group.q(row0 + r), g.gLse + group.lse(row0 + r),
        work.num_parts, [&](int n) { return int64_t{work.first_part + n} * kRows + r; });
  if (thread_index() == 0) g.gSemaphore[work.row_block] = 0;  // reset for the next launch
}

}  // namespace ATTN_BACKEND::decoding
