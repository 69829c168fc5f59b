// d1_int8_kv: int8 KV cache, one scale per key and per value.
//
// parent    05_flash_decoding/v13_even_splits
// change    The cache holds int8 codes. They become fp16 between ldmatrix and the MMA, in
//           registers. The scale of a key multiplies its score. The logarithm of a value's scale
//           is added to the score before the row max is taken, so P is weight times scale; l
//           accumulates P divided by the scale.
// why       A decode step is bound by the bytes of K and V: half the bytes, half the time. A
//           value's scale as a factor of P would overflow or underflow fp16. As part of the
//           exponent, P is 1 where weight times scale is largest.
// expect    dram__bytes_read.sum and gpu__time_duration.sum fall by half; sm__inst_executed.sum
//           grows by the conversions
// supports  --dtype int8, inputs in bf16; head dims 64, 128, 256; 1 to 16 queries, any lengths,
//           causal, windows, GQA
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/global_flag.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/cache_tiles.h"
#include "kernels/codes.h"
#include "kernels/quantise_kv.h"
#include "kernels/decode/rows.h"
#include "kernels/decode/schedules.h"
#include "kernels/decode/splits.h"

namespace ATTN_BACKEND::d1_int8_kv {
using namespace attn;
using namespace flash_decoding;
using namespace splits;

using Element = __nv_bfloat16;  // type of the inputs and of O

template <int kHeadDim_, class Codes_>
struct Config {
  using Codes = Codes_;  // one code per byte
  static constexpr int kHeadDim = kHeadDim_, kRows = 16;
  static constexpr int kBlockN = 16;  // keys per tile of a warp
  static constexpr int kNumWarps = kHeadDim <= 128 ? 16 : 8, kThreads = 32 * kNumWarps;
  static constexpr int kTile = kNumWarps * kBlockN;  // keys per tile of the block
  static constexpr int kLanes = kHeadDim / 16;  // lanes per key, 16 bytes each
  static constexpr int kRowsPerLoad = 32 / kLanes;  // keys (rows of K) per load of a warp
  static constexpr int kParts = kNumWarps;                 // partial results per row
  static constexpr int kStages = kHeadDim <= 64 ? 4 : 2;  // pipeline stages per warp
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kQSteps = kHeadDim <= 64 ? kHeadDim / 16 : 1;  // fragments of Q in registers
  static_assert(kHeadDim % 64 == 0 && kLanes <= 32, "a warp copies whole rows");
};

template <class Config>
struct SharedStorage {
  alignas(16) uint8_t sK[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  alignas(16) uint8_t sV[Config::kNumWarps][Config::kStages][Config::kBlockN][Config::kHeadDim];
  // Padded to two keys: a 16-byte copy holds the descales of two keys and starts at an even key.
  alignas(16) float2 sDescale[Config::kNumWarps][Config::kStages][Config::kBlockN + 2];
  alignas(16) __half sQ[Config::kRows][Config::kHeadDim];
  // per row of Q: the power of 2 that it was divided by; its sum, which other steps read
  float sQScale[Config::kRows], sQSum[Config::kRows];
  float sMax[Config::kParts][Config::kRows];  // in log2 units
  float sSum[Config::kParts][Config::kRows];
  bool last;  // this block arrived last and reduces the splits of the row block
  ATTN_MEMBERS(SharedStorage, sK, sV, sDescale, sQ, sQScale, sQSum, sMax, sSum, last)
};
// Partial O of the warps, in the space of K and V. Eight lanes store 16 bytes each at a time, in
// two rows that would use the same 16 banks. So odd rows have the halves of 32 columns swapped.
__device__ __forceinline__ int swizzled_column(int row, int col) { return col ^ row % 2 * 16; }
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
    cp_async_16(tile + code_offset<Config::kHeadDim>(row, chunk),
                g + (inside ? row : 0) * Config::kHeadDim, inside ? 16 : 0);
  }
}
//! [load]

// (3) S = Q K^T of a warp's tile, and (5) O += P V. After ldmatrix a lane has four codes of one
// key. Q's columns are in the same order, so these are the lane's part of B for 16 columns of K.
// After the transposing ldmatrix its word has columns 2g and 2g + 1 of V for two keys, one for each
// of two MMAs. So O's columns come in two tiles of eight: the even and the odd ones of sixteen.
// `in_storage_order` converts codes (0 1) and (2 3) of a word to fp16, `crosswise` (0 2) and (1 3).
//! [mma]
template <class Config>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kBlockN / 8][4],
                                       const uint32_t (&q)[Config::kQSteps][4],
                                       const __half* sQ, const uint8_t* sK) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; step += 2) {
    uint32_t words[4], b[2], loaded[4];
    ldmatrix_x4(words, sK + code_offset<Config::kHeadDim>(lane_id % 16, step + lane_id / 16));
#pragma unroll
    for (int next = 0; next < 2; ++next) {  // this k-step and the next
      const uint32_t(&a)[4] = q_of<Config>(loaded, q, sQ, step + next);
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // keys 0 to 7, 8 to 15
        Config::Codes::in_storage_order(words[2 * next + i], b);
        mma_m16n8k16<__half>(s[i], a, b, s[i]);
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
  for (int n = 0; n < Config::kHeadDim / 16; n += 2) {
    uint32_t words[4], low[2], high[2];  // keys 0 to 7, keys 8 to 15
    ldmatrix_x4_trans(words, sV + code_offset<Config::kHeadDim>(lane_id % 16, n + lane_id / 16));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Config::Codes::crosswise(words[2 * i], low);
      Config::Codes::crosswise(words[2 * i + 1], high);
      mma_m16n8k16<__half>(o[2 * (n + i)], a, {low[0], high[0]}, o[2 * (n + i)]);
      mma_m16n8k16<__half>(o[2 * (n + i) + 1], a, {low[1], high[1]}, o[2 * (n + i) + 1]);
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
    const Element* gQ,       // [B, Hq, seqlen_q, d]
    const uint8_t* gK,       // [B, Hkv, seqlen_k, d], codes
    const uint8_t* gV,       // [B, Hkv, seqlen_k, d], codes
    const float2* gDescale,  // [B, Hkv, padded]: of the key (x), of the value (y)
    const int* gSeqused,  // [B]: valid keys per sequence
    Element* gO,             // [B, Hq, seqlen_q, d]
    float* gLse,             // [B, Hq, seqlen_q]
    float* gOPartial,  // [num_partials, kRows, d]
    float* gLsePartial,  // [num_partials, kRows], in log2 units
    unsigned* gSemaphore,  // [row blocks]: arrivals; 0 between launches
    Shape shape, Schedule schedule, int row_tiles) {
  using Codes = typename Config::Codes;
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
        int64_t{rows.bh_kv} * shape.seqlen_k * kHeadDim + lane_id % Config::kLanes * 16;

    const int64_t descales = int64_t{rows.bh_kv} * padded_keys(shape.seqlen_k);  // first one

    // (1) Load Q, once per work tile. Rows past the last become 0.
    load_q<Config, Codes>(&smem.sQ[0][0], smem.sQScale, smem.sQSum, gQ + rows.first * kHeadDim,
                          rows.count);
    float o[kHeadDim / 8][4] = {};  // unnormalised
    // max in log2 units; sum over this lane's keys
    float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
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
        const int64_t from = kv + int64_t{key0} * kHeadDim;
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
      float max[2] = {row_max[0], row_max[1]}, inverse[kBlockN / 8][2];  // 1 / V's descales
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = key0 + 8 * n + quad_col + i % 2;
          const float2 descale = smem.sDescale[warp_id][stage][j - key0 / 2 * 2];
          if (i < 2) inverse[n][i] = descale.y > 0 ? __fdividef(1, descale.y) : 0;
          s[n][i] = j < kv_range[i / 2].begin || j >= kv_range[i / 2].end
                        ? -INFINITY
                        : fmaf(s[n][i] * descale.x, scale_log2[i / 2], __log2f(descale.y));
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
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n += 2)  // even columns of sixteen, odd columns
        *reinterpret_cast<float4*>(&sO[warp_id][row][swizzled_column(row, 8 * n + 2 * quad_col)]) =
            make_float4(o[n][2 * r], o[n + 1][2 * r], o[n][2 * r + 1], o[n + 1][2 * r + 1]);
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
                       args.out<uint8_t>("k8"), args.out<uint8_t>("v8"),
                       args.out<float2>("descale"), params.seqused_k, params.o, params.lse,
                       params.o_partial, params.lse_partial, params.arrived, shape_of(p), schedule,
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

//! [attend]
template <class Codes>
Status attend_to(const Arguments& args) {
  switch (args.problem.head_dim) {
    case 64: return launch<Config<64, Codes>>(args);
    case 128: return launch<Config<128, Codes>>(args);
    case 256: return launch<Config<256, Codes>>(args);
  }
  return Status::unsupported("only head dims 64, 128 and 256");
}
Status launch(const Arguments& args) { return attend_to<Int8Codes>(args); }
// For d2_fp8_kv.
Status attend(const Arguments& args, Fp8Codes) { return attend_to<Fp8Codes>(args); }
//! [attend]

// Fills the cache, once.
Status prepare(const Arguments& args) { return quantise_cache<Int8Codes>(args); }

}  // namespace ATTN_BACKEND::d1_int8_kv
