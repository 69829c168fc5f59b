// d3_int4_kv: int4 KV cache with zero points, two codes per byte.
//
// parent    d1_int8_kv
// change    The codes cover a token's minimum to its maximum; the value of code 8, the middle, is
//           stored next to the scale. It factors out of both sums: q . k = scale q . (code - 8) +
//           middle sum(q), with sum(q) known once Q is loaded; and in P V it adds one number per
//           row, accumulated alongside l. A word has eight codes, operands of two MMAs, with Q's
//           and O's columns in matching order.
// why       A symmetric scale wastes codes on the side that a token's numbers do not reach; with
//           sixteen codes that is too expensive.
// expect    dram__bytes_read.sum falls to half of d1's; sm__inst_executed.sum grows
// supports  --dtype int4, inputs in bf16; head dims 64, 128, 256; 1 to 16 queries, any lengths,
//           causal, windows, GQA
// source    QServe (arXiv 2405.04532), section 5.1
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/cache_tiles.h"
#include "kernels/codes.h"
#include "kernels/quantise_kv4.h"
#include "kernels/decode/rows.h"
#include "kernels/decode/schedules.h"
#include "kernels/decode/splits.h"

namespace ATTN_BACKEND::d3_int4_kv {
using namespace attn;
using namespace flash_decoding;
using namespace splits;

using Element = __nv_bfloat16;  // type of the inputs and of O
using Codes = Int4Codes;  // two 4-bit codes per byte

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_, kRows = 16, kRowBytes = kHeadDim / 2;
  static constexpr int kBlockN = 16;  // keys per tile of a warp
  static constexpr int kNumWarps = kHeadDim <= 128 ? 16 : 8, kThreads = 32 * kNumWarps;
  static constexpr int kTile = kNumWarps * kBlockN;  // keys per tile of the block
  static constexpr int kLanes = kRowBytes / 16;  // lanes per key, 16 bytes each
  static constexpr int kRowsPerLoad = 32 / kLanes;  // keys (rows of K) per load of a warp
  static constexpr int kParts = kNumWarps;                 // partial results per row
  static constexpr int kStages = kHeadDim <= 64 ? 8 : 4;  // pipeline stages per warp
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kQSteps = kHeadDim <= 64 ? kHeadDim / 16 : 1;  // fragments of Q in registers
  static_assert(kHeadDim % 64 == 0 && kLanes <= 32, "a warp copies whole rows");
};

template <class Config>
struct SharedStorage {
  alignas(16) uint8_t sK[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kRowBytes];
  alignas(16) uint8_t sV[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kRowBytes];
  // Padded to two keys: a 16-byte copy holds the descales of two keys and starts at an even key.
  alignas(16) uint2 sDescale[Config::kNumWarps][Config::kStages][Config::kBlockN + 2];
  alignas(16) __half sQ[Config::kRows][Config::kHeadDim];
  float sQScale[Config::kRows], sQSum[Config::kRows];  // per row of Q: its power of 2; its sum
  float sMax[Config::kParts][Config::kRows];  // in log2 units
  float sSum[Config::kParts][Config::kRows];
  bool last;  // this block arrived last and reduces the splits of the row block
  ATTN_MEMBERS(SharedStorage, sK, sV, sDescale, sQ, sQScale, sQSum, sMax, sSum, last)
};
// Partial O of the warps, in the space of K and V. A quarter warp stores 16 bytes per lane, of two
// rows, every second 16 bytes of each. Odd rows have these swapped, which avoids bank conflicts.
__device__ __forceinline__ int swizzled_column(int row, int col) { return col ^ row % 2 * 4; }
template <class Config>
using OutputParts = float[Config::kParts][Config::kRows][Config::kHeadDim];

// Issues cp.async of this lane's chunks of a tile; rows from `count` on become 0. `g`: the lane's
// chunk of the tile's first row. `chunk`: its number in the row.
//! [load]
template <class Config>
__device__ __forceinline__ void load_tile(uint8_t* tile, const uint8_t* g, int count) {
  const int key = threadIdx.x % 32 / Config::kLanes, chunk = threadIdx.x % Config::kLanes;
#pragma unroll
  for (int n = 0; n < Config::kBlockN; n += Config::kRowsPerLoad) {
    const int row = n + key;
    const bool inside = row < count;
    cp_async_16(tile + code_offset<Config::kRowBytes>(row, chunk),
                g + (inside ? row : 0) * Config::kRowBytes, inside ? 16 : 0);
  }
}
//! [load]

// (3) S = Q K^T of a warp's tile, and (5) O += P V, both on codes minus 8. After ldmatrix a lane
// has eight codes of one key. Q's columns are in the same order, so these are the lane's part of B
// for 32 columns of K. After the transposing ldmatrix its word has columns 4g to 4g + 3 of V for
// two keys. So O's columns come in four tiles of eight, each with every fourth column of 32.
//! [mma]
template <class Config>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kBlockN / 8][4],
                                       const uint32_t (&q)[Config::kQSteps][4],
                                       const __half* sQ, const uint8_t* sK) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int chunk = 0; chunk < Config::kHeadDim / 32; chunk += 2) {
    uint32_t words[4], b[4], loaded[4], more[4];
    ldmatrix_x4(words, sK + code_offset<Config::kRowBytes>(lane_id % 16, chunk + lane_id / 16));
#pragma unroll
    for (int next = 0; next < 2; ++next) {  // this chunk and the next: two k-steps each
      const int step = 2 * (chunk + next);
      const uint32_t(&a0)[4] = q_of<Config>(loaded, q, sQ, step);
      const uint32_t(&a1)[4] = q_of<Config>(more, q, sQ, step + 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // keys 0 to 7, 8 to 15
        Codes::pairs_of(words[2 * next + i], b);
        mma_m16n8k16<__half>(s[i], a0, {b[0], b[1]}, s[i]);
        mma_m16n8k16<__half>(s[i], a1, {b[2], b[3]}, s[i]);
      }
    }
  }
}
template <class Config>
__device__ __forceinline__ void gemm_pv(float (&o)[Config::kHeadDim / 8][4],
                                       const float (&p)[Config::kBlockN / 8][4],
                                       const uint8_t* sV) {
  const int lane_id = threadIdx.x % 32;
  const uint32_t a[4] = {pack2<__half>(p[0][0], p[0][1]), pack2<__half>(p[0][2], p[0][3]),
                         pack2<__half>(p[1][0], p[1][1]), pack2<__half>(p[1][2], p[1][3])};
#pragma unroll
  for (int n = 0; n < Config::kHeadDim / 32; n += 2) {
    uint32_t words[4], low[4], high[4];  // keys 0 to 7, keys 8 to 15
    ldmatrix_x4_trans(words, sV + code_offset<Config::kRowBytes>(lane_id % 16, n + lane_id / 16));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Codes::pairs_of(words[2 * i], low);
      Codes::pairs_of(words[2 * i + 1], high);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        mma_m16n8k16<__half>(o[4 * (n + i) + c], a, {low[c], high[c]}, o[4 * (n + i) + c]);
    }
  }
}
//! [mma]

// One warp reduces the partial results of a row. A lane owns four of each 128 columns and the
// weight of every 32nd partial result. `partial_index(n)`: index of partial result n.
//! [merge_row]
template <class Config, class PlaceOf>
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

template <class Config, class Schedule>
__global__ void __launch_bounds__(Config::kThreads) attention_kernel(
    const Element* gQ,      // [B, Hq, seqlen_q, d]
    const uint8_t* gK,  // [B, Hkv, seqlen_k, d / 2], two codes per byte
    const uint8_t* gV,  // [B, Hkv, seqlen_k, d / 2], two codes per byte
    const uint2* gDescale,  // [B, Hkv, padded]: of the key (x), of the value (y)
    const int* gSeqused,  // [B]: valid keys per sequence
    Element* gO,            // [B, Hq, seqlen_q, d]
    float* gLse,            // [B, Hq, seqlen_q]
    float* gOPartial,  // [num_partials, kRows, d]
    float* gLsePartial,  // [num_partials, kRows], in log2 units
    unsigned* gSemaphore,  // [row blocks]: arrivals; 0 between launches
    Shape shape, Schedule schedule, int row_tiles) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN, kRows = Config::kRows;
  auto& smem = dynamic_shared<SharedStorage<Config>>();
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
        int64_t{rows.bh_kv} * shape.seqlen_k * Config::kRowBytes + lane_id % Config::kLanes * 16;

    const int64_t descales = int64_t{rows.bh_kv} * padded_keys(shape.seqlen_k);  // first one

    // (1) Load Q, once per work tile. Rows past the last become 0.
    load_q<Config, Codes>(&smem.sQ[0][0], smem.sQScale, smem.sQSum, gQ + rows.first * kHeadDim,
                          rows.count);
    float o[kHeadDim / 8][4] = {};  // unnormalised
    // max in log2 units; sum over this lane's keys
    float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
    float row_zero[2] = {};  // what V's zero points add to every column of O
    const KvRange kv_range[2] = {
        keys_of_query(shape, seqlen_k, (rows.row0 + quad_row) % shape.seqlen_q),
        keys_of_query(shape, seqlen_k, (rows.row0 + quad_row + 8) % shape.seqlen_q)};

    // (2) Issue K_j and V_j, kStages - 1 tiles ahead. Past the last tile the cp.async groups are
    // empty.
    //! [pipeline]
    constexpr int kStages = Config::kStages, kStep = Config::kNumWarps * kBlockN;
    const int first = keys.begin + warp_id * kBlockN;
    const auto load_kv = [&](int key0, int stage) {
      if (key0 < keys.end) {
        const int64_t from = kv + int64_t{key0} * Config::kRowBytes;
        load_tile<Config>(&smem.sK[warp_id][stage][0][0], gK + from, keys.end - key0);
        load_tile<Config>(&smem.sV[warp_id][stage][0][0], gV + from, keys.end - key0);
        // the lane's two keys; some are outside the tile
        const int even = key0 / 2 * 2 + 2 * lane_id;
        if (lane_id <= kBlockN / 2)
          cp_async_16(&smem.sDescale[warp_id][stage][2 * lane_id],
                      gDescale + descales + (even < keys.end ? even : 0), even < keys.end ? 16 : 0);
      }
      cp_async_commit();
    };
    for (int n = 0; n < kStages - 1; ++n) load_kv(first + n * kStep, n);
    __syncthreads();  // Q of all warps is visible
    uint32_t q[Config::kQSteps][4];  // A operands of Q K^T, if registers suffice
#pragma unroll
    for (int step = 0; step < Config::kQSteps; ++step)
      load_q_step<Config>(q[step], &smem.sQ[0][0], step);
    const float scale_log2[2] = {shape.softmax_scale * kLog2e * smem.sQScale[quad_row],
                                 shape.softmax_scale * kLog2e * smem.sQScale[quad_row + 8]};
    const float q_sum[2] = {smem.sQSum[quad_row], smem.sQSum[quad_row + 8]};
    int stage = 0;
    for (int key0 = first; key0 < keys.end; key0 += kStep, stage = (stage + 1) % kStages) {
      __syncwarp();  // all lanes have read the previous tile, whose stage is refilled
      load_kv(key0 + (kStages - 1) * kStep, (stage + kStages - 1) % kStages);
      cp_async_wait<kStages - 1>();
      __syncwarp();  // this tile's copies of all lanes are visible
      //! [pipeline]
      // (3) S = Q K^T.
      float s[kBlockN / 8][4] = {};
      gemm_qk<Config>(s, q, &smem.sQ[0][0], &smem.sK[warp_id][stage][0][0]);
      // (4) Mask and online softmax. P includes V's descale, whose log2 is added to the score; l
      // divides it out. Past the last key descales are 0.
      //! [softmax]
      float max[2] = {row_max[0], row_max[1]};
      // 1 / V's scales; zero points in units of codes
      float inverse[kBlockN / 8][2], zero[kBlockN / 8][2];
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = key0 + 8 * n + quad_col + i % 2;
          const uint2 descale = smem.sDescale[warp_id][stage][j - key0 / 2 * 2];
          const Affine of_k = affine_of(descale.x), of_v = affine_of(descale.y);
          if (i < 2) {
            inverse[n][i] = of_v.scale > 0 ? __fdividef(1, of_v.scale) : 0;
            zero[n][i] = of_v.scale > 0 ? of_v.middle * inverse[n][i] : 0;
          }
          s[n][i] = j < kv_range[i / 2].begin || j >= kv_range[i / 2].end
                        ? -INFINITY
                        : fmaf(fmaf(s[n][i], of_k.scale, q_sum[i / 2] * of_k.middle),
                               scale_log2[i / 2], __log2f(of_v.scale));
          max[i / 2] = fmaxf(max[i / 2], s[n][i]);
        }
      float rescale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max[r] = quad_max(max[r]);
        rescale[r] = exp2f(row_max[r] - max[r]);
        row_max[r] = max[r];
        row_sum[r] *= rescale[r], row_zero[r] *= rescale[r];
      }
      if (__any_sync(~0u, rescale[0] < 1 || rescale[1] < 1)) {  // rare after the first tiles
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[n][i] *= rescale[i / 2];
      }
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[n][i] = exp2f(s[n][i] - max[i / 2]);
          row_sum[i / 2] = fmaf(s[n][i], inverse[n][i % 2], row_sum[i / 2]);
          row_zero[i / 2] = fmaf(s[n][i], zero[n][i % 2], row_zero[i / 2]);
        }
      //! [softmax]
      // (5) O += P V
      gemm_pv<Config>(o, s, &smem.sV[warp_id][stage][0][0]);
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
      const float z = quad_sum(row_zero[r]);
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n += 4)  // every fourth column of 32, and the next ones
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int col = swizzled_column(row, 8 * n + 4 * quad_col + 4 * i);
          *reinterpret_cast<float4*>(&sO[warp_id][row][col]) =
              make_float4(o[n][2 * r + i] + z, o[n + 1][2 * r + i] + z, o[n + 2][2 * r + i] + z,
                          o[n + 3][2 * r + i] + z);
        }
      const float sum = quad_sum(row_sum[r]);
      if (lane_id % 4 == 0) smem.sMax[warp_id][row] = row_max[r], smem.sSum[warp_id][row] = sum;
    }
    __syncthreads();  // m, l and O of all warps are visible
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
                   *reinterpret_cast<const float4*>(&sO[n][r][swizzled_column(r, col)]));
      }
      //! [merge]
      // (7) O = O / l of this split; (8) store O and lse, -inf if no key is visible.
      const float factor = sum != 0 ? 1 / sum : 0;
      const float lse = sum != 0 ? max + log2f(sum) : -INFINITY;
      if (num_splits == 1) {
        store_row_part(gO + (rows.first + r) * kHeadDim + col, out, factor);
        if (col == 0) gLse[rows.first + r] = kLn2 * lse;
        continue;
      }
      const int64_t to = Schedule::slot(segment, split) * kRows + r;  // row of the partial result
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
      merge_row<Config>(gOPartial, gLsePartial, gO, gLse, rows.first + r, num_splits,
                                 [&](int n) { return Schedule::slot(segment, n) * kRows + r; });
    if (threadIdx.x == 0) gSemaphore[row_block] = 0;  // reset for the next launch
    //! [arrive]
  }
}

template <class Config, class Schedule>
Status launch(const Arguments& args, const Schedule& schedule, int64_t blocks) {
  const DecodeParams<Element> params(args);
  const Problem& p = args.problem;
  args.phase("attention");
  return launch_kernel(attention_kernel<Config, Schedule>, dim3(static_cast<unsigned>(blocks)),
                       dim3(Config::kThreads), sizeof(SharedStorage<Config>), args.stream, params.q,
                       args.out<uint8_t>("k8"), args.out<uint8_t>("v8"), args.out<uint2>("descale"),
                       params.seqused_k, params.o, params.lse, params.o_partial, params.lse_partial,
                       params.arrived, shape_of(p), schedule,
                       static_cast<int>(ceil_div(p.group() * p.seqlen_q, Config::kRows)));
}

//! [choice]
template <class Config>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int num_sms = args.backend == Backend::gpu ? gpu_info().num_sms : kEmulatedSms;
  const EvenSplits even = even_splits(p, Config::kRows, Config::kTile, num_sms);
  if (splits_evenly(p, even))
    return launch<Config>(
        args, Even{static_cast<int>(even.share), static_cast<int>(even.splits)}, even.blocks);
  return launch<Config>(args, Runs{static_cast<int>(p.batch)},
                                 std::min(kMaxRuns, num_sms * Config::kBlocksPerSm));
}
//! [choice]

Status launch(const Arguments& args) {
  switch (args.problem.head_dim) {
    case 64: return launch<Config<64>>(args);
    case 128: return launch<Config<128>>(args);
    case 256: return launch<Config<256>>(args);
  }
  return Status::unsupported("only head dims 64, 128 and 256");
}

// Fills the cache, once.
Status prepare(const Arguments& args) { return quantise_cache4<Codes>(args); }

}  // namespace ATTN_BACKEND::d3_int4_kv
