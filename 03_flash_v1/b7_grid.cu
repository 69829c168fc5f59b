// b7_grid: one block per key tile; dQ by fp32 atomics.
//
// parent    b6_async
// change    Each key tile is a block of its own. Blocks share only dQ, to which they add atomically
//           (red). The preprocess kernel sets dQ to 0, and a postprocess kernel rounds it at the
//           end. The order of the additions is not defined, so the last bits of dQ differ from run
//           to run.
// why       One block per head leaves SMs idle; 16 key tiles of a head keep 16 SMs busy.
// expect    At B = 1 gpu__time_duration.sum falls with the number of tiles. With enough heads
//           little is lost.
// supports  fp16, bf16; head dims 32, 64, 128; any lengths, masks, GQA, dropout
// source    Later releases of FlashAttention-1 launched the backward pass like this.
#include "attn/kernel.h"
#include "attn/philox.h"
#include "kernels/backward_tiles.h"
#include "ptx/cp_async.h"
#include "ptx/mma.h"
#include "ptx/reduce_add.h"

namespace ATTN_BACKEND::b7_grid {
using namespace backward_tiles;  // swizzled_offset, kv_block_range, multiply, dot_kernel, ...

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_, kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kBlockM = kHeadDim == 128 ? 64 : 128, kBlockN = 128;  // B_r, B_c
  // Warps per GEMM, as rows x columns of its result.
  static constexpr int kScoreRows = kBlockM / 2, kScoreKeys = kBlockN / 4;  // S, dP: 2 x 4 warps
  static constexpr int kGradKeys = kBlockN / 4, kGradCols = kHeadDim / 2;   // dV, dK: 4 x 2 warps
  static constexpr int kWarpsN = kHeadDim == 32 ? 2 : 4;  // dQ: 2 x 4 warps, at d = 32 4 x 2
  static constexpr int kQueryRows = kBlockM * kWarpsN / kWarps, kQueryCols = kHeadDim / kWarpsN;
  static_assert(kQueryRows % 16 == 0 && kQueryCols % 16 == 0 && kGradCols % 16 == 0, "whole MMAs");
};

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];      // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];      // [kBlockN, d]
  alignas(128) Element sQ[2][Config::kBlockM * Config::kHeadDim];   // [kBlockM, d], two stages
  alignas(128) Element sdO[2][Config::kBlockM * Config::kHeadDim];  // [kBlockM, d], two stages
  alignas(128) Element sP[Config::kBlockM * Config::kBlockN];       // [kBlockM, kBlockN]
  alignas(128) Element sdS[Config::kBlockM * Config::kBlockN];      // [kBlockM, kBlockN]
  float sLse[2][Config::kBlockM], sD[2][Config::kBlockM];           // lse / log(2), D
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sdO, sP, sdS, sLse, sD)
};

// Issues cp.async of rows [row0, row0 + kRows) of a [rows, d] matrix; rows past the end become 0.
template <int kRows, class Config, class Element>
__device__ void load_tile_async(Element* tile, const Element* g, int row0, int rows) {
  constexpr int kVectors = Config::kHeadDim / 8;  // of 16 bytes, per row
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kVectors; i += Config::kThreads) {
    const int r = i / kVectors, c = i % kVectors * 8;
    const bool inside = row0 + r < rows;
    cp_async_16(tile + swizzled_offset<Config::kHeadDim>(r, c),
                inside ? g + int64_t{row0 + r} * Config::kHeadDim + c : g, inside ? 16 : 0);
  }
}

template <class Element, class Config, bool kDropout>
__global__ void __launch_bounds__(Config::kThreads)
    attention_backward_kernel(const Element* gQ,   // [B, Hq, seqlen_q, d]
                              const Element* gK,   // [B, Hkv, seqlen_k, d]
                              const Element* gV,   // [B, Hkv, seqlen_k, d]
                              const Element* gdO,  // [B, Hq, seqlen_q, d]
                              const float* gLse,   // [B, Hq, seqlen_q]
                              const float* gD,     // [B, Hq, seqlen_q]
                              Element* gdK,        // [B, Hkv, seqlen_k, d]
                              Element* gdV,        // [B, Hkv, seqlen_k, d]
                              float4* gAccum,      // [B, Hq, num_m_blocks, fragments, threads]: dQ
                              Shape shape, uint64_t seed) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int tid = threadIdx.x;
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int quad_row = lane_id / 4, quad_col = 2 * (lane_id % 4);  // position in an accumulator
  // This warp's tile of each GEMM.
  const int score_row = warp_id / 4 * Config::kScoreRows,
            score_key = warp_id % 4 * Config::kScoreKeys;
  const int grad_key = warp_id / 2 * Config::kGradKeys, grad_col = warp_id % 2 * Config::kGradCols;
  const int query_row = warp_id / Config::kWarpsN * Config::kQueryRows;
  const int query_col = warp_id % Config::kWarpsN * Config::kQueryCols;
  // q0, k0: index of a head's first row in Q, and in K and V. row0, key0: first row and first key
  // of a tile, counted within the head.
  const int64_t bh_kv = blockIdx.x, k0 = bh_kv * shape.seqlen_k;
  const int group = shape.heads / shape.kv_heads, causal_offset = shape.seqlen_k - shape.seqlen_q;
  const int num_m_blocks = ceil_div(shape.seqlen_q, kBlockM);
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
  const float inverse_keep = kDropout ? 1 / (1 - float(shape.dropped) / 256) : 1;

  const int n_block = blockIdx.y, key0 = n_block * kBlockN;
  // Visits: all query tiles that see a key of this tile, of all query heads that share it.
  const auto next_visit = [&](int visit) {
    for (; visit < group * num_m_blocks; ++visit) {
      const int row0 = visit % num_m_blocks * kBlockM;
      const KvBlockRange kv_range = kv_block_range(shape, row0, kBlockM, kBlockN);
      if (kv_range.begin <= n_block && n_block < kv_range.end) break;
    }
    return visit;
  };
  // lse and D of row `tid` of the next visit, loaded during the MMAs
  float next_lse = 0, next_dot = 0;
  const auto load_rows = [&](int visit, int stage) {
    const int64_t q0 = (bh_kv * group + visit / num_m_blocks) * shape.seqlen_q;
    const int row0 = visit % num_m_blocks * kBlockM;
    load_tile_async<kBlockM, Config>(smem.sQ[stage], gQ + q0 * kHeadDim, row0, shape.seqlen_q);
    load_tile_async<kBlockM, Config>(smem.sdO[stage], gdO + q0 * kHeadDim, row0, shape.seqlen_q);
    if (tid >= kBlockM) return;
    const bool inside = row0 + tid < shape.seqlen_q;
    next_lse = inside ? gLse[q0 + row0 + tid] : -INFINITY;
    next_dot = inside ? gD[q0 + row0 + tid] : 0;
  };
  const auto store_lse_and_dot = [&](int stage) {
    if (tid >= kBlockM) return;
    // fully masked row: P = 0
    smem.sLse[stage][tid] = next_lse == -INFINITY ? INFINITY : next_lse * kLog2e;
    smem.sD[stage][tid] = next_dot;
  };

  // (2) Issue K_j, V_j and the first rows.
  int visit = next_visit(0), stage = 0;
  if (visit < group * num_m_blocks) {  // else these keys are masked for all rows
    load_tile_async<kBlockN, Config>(smem.sK, gK + k0 * kHeadDim, key0, shape.seqlen_k);
    load_tile_async<kBlockN, Config>(smem.sV, gV + k0 * kHeadDim, key0, shape.seqlen_k);
    load_rows(visit, stage);
  }
  cp_async_commit();
  store_lse_and_dot(stage);
  float dk[Config::kGradKeys / 16][Config::kGradCols / 8][4] = {};
  float dv[Config::kGradKeys / 16][Config::kGradCols / 8][4] = {};

  for (int following; visit < group * num_m_blocks; visit = following, stage ^= 1) {
    const int m_block = visit % num_m_blocks, row0 = m_block * kBlockM;
    const int64_t bh = bh_kv * group + visit / num_m_blocks;
    constexpr int kTiles = Config::kScoreRows / 16;
    cp_async_wait<0>();
    __syncthreads();  // the rows are visible; all warps have read P, dS and the other stage
    following = next_visit(visit + 1);
    if (following < group * num_m_blocks) load_rows(following, stage ^ 1);
    cp_async_commit();

    // (3) S = Q K^T, dP = dO V^T
    float s[kTiles][Config::kScoreKeys / 8][4] = {}, dp[kTiles][Config::kScoreKeys / 8][4] = {};
    multiply<kHeadDim, false, true, kHeadDim, kHeadDim>(s, smem.sQ[stage], score_row, smem.sK,
                                                        score_key);
    multiply<kHeadDim, false, true, kHeadDim, kHeadDim>(dp, smem.sdO[stage], score_row, smem.sV,
                                                        score_key);

    // (4) P = exp(scale S - lse), dS = P (dP - D)
    //! [recompute]
    // rightmost key visible to the first row under a causal mask
    const int diagonal = row0 + score_row + causal_offset;
    if (key0 + score_key < diagonal + Config::kScoreRows - 1 - shape.window_left ||
        key0 + score_key + Config::kScoreKeys >
            min(shape.seqlen_k, diagonal + shape.window_right + 1)) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int n = 0; n < Config::kScoreKeys / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = key0 + score_key + 8 * n + quad_col + i % 2;
            // rightmost key visible to this row under a causal mask
            const int row_diagonal = diagonal + 16 * m + 8 * (i / 2) + quad_row;
            if (key < row_diagonal - shape.window_left ||
                key > row_diagonal + shape.window_right || key >= shape.seqlen_k)
              s[m][n][i] = -INFINITY;
          }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = score_row + 16 * m + 8 * r + quad_row;
        const float lse_log2 = smem.sLse[stage][row], row_dot = smem.sD[stage][row];
        // Dropout: a call gives 16 bytes for this row and 64 keys, one for each key of this
        // lane: 2 of every 8. Those of this warp's keys start at byte score_key % 64 / 4. A byte
        // below shape.dropped (in 1/256) drops its element.
        PhiloxBits bits{};
        if constexpr (kDropout)
          bits = dropout_bits(seed, bh, row0 + row, (key0 + score_key) / 64, lane_id % 4);
#pragma unroll
        for (int n = 0; n < Config::kScoreKeys / 8; ++n) {
          float p[2], ds[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int i = 2 * r + c;
            p[c] = exp2f(fmaf(s[m][n][i], softmax_scale_log2, -lse_log2));
            float z = inverse_keep;
            if constexpr (kDropout)
              if (bits.byte(score_key % 64 / 4 + 2 * n + c) < static_cast<uint32_t>(shape.dropped))
                z = 0;
            ds[c] = p[c] * (dp[m][n][i] * z - row_dot);
            if (z == 0) p[c] = 0;  // dV gets the factor at the end, so that a P of 1 stays 1
          }
          const int idx = swizzled_offset<kBlockN>(row, score_key + 8 * n + quad_col);
          *reinterpret_cast<uint32_t*>(smem.sP + idx) = pack2<Element>(p[0], p[1]);
          *reinterpret_cast<uint32_t*>(smem.sdS + idx) = pack2<Element>(ds[0], ds[1]);
        }
      }
    //! [recompute]
    store_lse_and_dot(stage ^ 1);
    __syncthreads();  // P and dS of all warps are visible

    // (5) dV += P^T dO, dK += dS^T Q
    multiply<kBlockM, true, false, kBlockN, kHeadDim>(dv, smem.sP, grad_key, smem.sdO[stage],
                                                      grad_col);
    multiply<kBlockM, true, false, kBlockN, kHeadDim>(dk, smem.sdS, grad_key, smem.sQ[stage],
                                                      grad_col);

    // (6) dQ += dS K
    //! [dq]
    constexpr int kTilesN = Config::kQueryCols / 8, kFragments = Config::kQueryRows / 16 * kTilesN;
    auto* const accum =
        gAccum + (bh * num_m_blocks + m_block) * kFragments * Config::kThreads + tid;
    float dq[Config::kQueryRows / 16][kTilesN][4] = {};
    multiply<kBlockN, false, false, kBlockN, kHeadDim>(dq, smem.sdS, query_row, smem.sK, query_col);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const float(&from)[4] = dq[f / kTilesN][f % kTilesN];
      reduce_add(accum + f * Config::kThreads, make_float4(from[0], from[1], from[2], from[3]));
    }
    //! [dq]
  }

  // (7) Store dK_j, dV_j.
#pragma unroll
  for (int m = 0; m < Config::kGradKeys / 16; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = key0 + grad_key + 16 * m + 8 * r + quad_row;
      if (key >= shape.seqlen_k) continue;
#pragma unroll
      for (int n = 0; n < Config::kGradCols / 8; ++n) {
        const int64_t idx = (k0 + key) * kHeadDim + grad_col + 8 * n + quad_col;
        *reinterpret_cast<uint32_t*>(gdV + idx) =
            pack2<Element>(dv[m][n][2 * r] * inverse_keep, dv[m][n][2 * r + 1] * inverse_keep);
        *reinterpret_cast<uint32_t*>(gdK + idx) = pack2<Element>(
            dk[m][n][2 * r] * shape.softmax_scale, dk[m][n][2 * r + 1] * shape.softmax_scale);
      }
    }
}

template <class Element, class Config, bool kDropout>
Status launch(const Arguments& args) {
  const BackwardParams<Element> params(args);
  const Problem& p = args.problem;
  const int64_t rows = p.batch * p.heads * p.seqlen_q;
  const int64_t m_blocks = p.batch * p.heads * ceil_div(p.seqlen_q, int64_t{Config::kBlockM});
  args.phase("dot");
  const dim3 dots(static_cast<unsigned>(ceil_div(rows, int64_t{8})));  // one warp per row
  Status status =
      launch_kernel(dot_kernel<Element>, dots, dim3(256), 0, args.stream, params.o, params.dout,
                    args.out<float>("dot"), args.out<float4>("accum"), rows,
                    static_cast<int>(p.head_dim), m_blocks * Config::kBlockM * p.head_dim / 4);
  if (!status.ok()) return status;
  args.phase("attention_backward");
  status =
      launch_kernel(attention_backward_kernel<Element, Config, kDropout>,
                    dim3(static_cast<unsigned>(p.batch * p.kv_heads),
                         static_cast<unsigned>(ceil_div(p.seqlen_k, int64_t{Config::kBlockN}))),
                    dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream,
                    params.q, params.k, params.v, params.dout, params.lse, args.in<float>("dot"),
                    params.dk, params.dv, args.out<float4>("accum"), shape_of(p), p.seed);
  if (!status.ok()) return status;
  args.phase("convert");
  return launch_kernel(convert_kernel<Element, Config>, dim3(static_cast<unsigned>(m_blocks)),
                       dim3(Config::kThreads), 0, args.stream, args.in<float4>("accum"), params.dq,
                       shape_of(p));
}

template <class Element, int kHeadDim>
Status launch(const Arguments& args) {
  return args.problem.dropout > 0 ? launch<Element, Config<kHeadDim>, true>(args)
                                  : launch<Element, Config<kHeadDim>, false>(args);
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 32: return launch<Element, 32>(args);
      case 64: return launch<Element, 64>(args);
      case 128: return launch<Element, 128>(args);
    }
    return Status::unsupported("head dims 32, 64 and 128 only");
  });
}

}  // namespace ATTN_BACKEND::b7_grid
