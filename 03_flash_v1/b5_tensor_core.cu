// b5_tensor_core: all five GEMMs of the backward pass on tensor cores.
//
// parent    b4_score_mma
// change    mma.sync for dV, dK and dQ. dK and dV are accumulators over all visits of a key tile.
//           dV and dK read P and dS transposed, by ldmatrix.trans. dQ between visits is stored in
//           HBM in accumulator order, 16 bytes per thread and fragment.
// why       The three GEMMs on FP32 units bound the parent.
// expect    sm__inst_executed_pipe_fma.sum falls to nearly 0. The time falls, too.
// supports  fp16, bf16; head dims 32, 64, 128; any lengths, masks, GQA, dropout
#include "attn/kernel.h"
#include "attn/philox.h"
#include "kernels/backward_tiles.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::b5_tensor_core {
using namespace backward_tiles;  // swizzled_offset, load_tile, kv_block_range, dot_kernel, ...

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
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];   // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];   // [kBlockN, d]
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];   // [kBlockM, d]
  alignas(128) Element sdO[Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  alignas(128) Element sP[Config::kBlockM * Config::kBlockN];    // [kBlockM, kBlockN]
  alignas(128) Element sdS[Config::kBlockM * Config::kBlockN];   // [kBlockM, kBlockN]
  float sLse[Config::kBlockM], sD[Config::kBlockM];              // lse / log(2), D
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sdO, sP, sdS, sLse, sD)
};

template <class Element, class Config, bool kDropout>
__global__ void __launch_bounds__(Config::kThreads)
    attention_backward_kernel(const Element* gQ,   // [B, Hq, seqlen_q, d]
                              const Element* gK,   // [B, Hkv, seqlen_k, d]
                              const Element* gV,   // [B, Hkv, seqlen_k, d]
                              const Element* gdO,  // [B, Hq, seqlen_q, d]
                              const float* gLse,   // [B, Hq, seqlen_q]
                              const float* gD,     // [B, Hq, seqlen_q]
                              Element* gdQ,        // [B, Hq, seqlen_q, d]
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

  for (int n_block = 0; n_block * kBlockN < shape.seqlen_k; ++n_block) {
    const int key0 = n_block * kBlockN;
    // Visits: all query tiles that see a key of this tile, of all query heads that share it.
    const auto next_visit = [&](int visit) {
      for (; visit < group * num_m_blocks; ++visit) {
        const int row0 = visit % num_m_blocks * kBlockM;
        const KvBlockRange kv_range = kv_block_range(shape, row0, kBlockM, kBlockN);
        if (kv_range.begin <= n_block && n_block < kv_range.end) break;
      }
      return visit;
    };
    const auto load_rows = [&](int visit) {
      const int64_t q0 = (bh_kv * group + visit / num_m_blocks) * shape.seqlen_q;
      const int row0 = visit % num_m_blocks * kBlockM;
      load_tile<kBlockM, Config>(smem.sQ, gQ + q0 * kHeadDim, row0, shape.seqlen_q);
      load_tile<kBlockM, Config>(smem.sdO, gdO + q0 * kHeadDim, row0, shape.seqlen_q);
      if (tid >= kBlockM) return;
      const bool inside = row0 + tid < shape.seqlen_q;
      const float lse = inside ? gLse[q0 + row0 + tid] : -INFINITY;
      smem.sLse[tid] = lse == -INFINITY ? INFINITY : lse * kLog2e;  // fully masked row: P = 0
      smem.sD[tid] = inside ? gD[q0 + row0 + tid] : 0;
    };

    // (1) is dot_kernel, which has computed D. (2) Load K_j and V_j.
    __syncthreads();  // all warps have read the previous K and V
    load_tile<kBlockN, Config>(smem.sK, gK + k0 * kHeadDim, key0, shape.seqlen_k);
    load_tile<kBlockN, Config>(smem.sV, gV + k0 * kHeadDim, key0, shape.seqlen_k);
    float dk[Config::kGradKeys / 16][Config::kGradCols / 8][4] = {};
    float dv[Config::kGradKeys / 16][Config::kGradCols / 8][4] = {};

    for (int visit = next_visit(0); visit < group * num_m_blocks; visit = next_visit(visit + 1)) {
      const int m_block = visit % num_m_blocks, row0 = m_block * kBlockM;
      const int64_t bh = bh_kv * group + visit / num_m_blocks, q0 = bh * shape.seqlen_q;
      const KvBlockRange kv_range = kv_block_range(shape, row0, kBlockM, kBlockN);
      const bool first = n_block == kv_range.begin, last = n_block + 1 == kv_range.end;
      constexpr int kTiles = Config::kScoreRows / 16;
      __syncthreads();  // all threads have read P, dS and the previous rows
      load_rows(visit);
      __syncthreads();  // the rows, K and V are visible

      // (3) S = Q K^T, dP = dO V^T
      float s[kTiles][Config::kScoreKeys / 8][4] = {}, dp[kTiles][Config::kScoreKeys / 8][4] = {};
      multiply<kHeadDim, false, true, kHeadDim, kHeadDim>(s, smem.sQ, score_row, smem.sK,
                                                          score_key);
      multiply<kHeadDim, false, true, kHeadDim, kHeadDim>(dp, smem.sdO, score_row, smem.sV,
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
          const float lse_log2 = smem.sLse[row], row_dot = smem.sD[row];
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
                if (bits.byte(score_key % 64 / 4 + 2 * n + c) <
                    static_cast<uint32_t>(shape.dropped))
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
      __syncthreads();  // P and dS of all warps are visible

      // (5) dV += P^T dO, dK += dS^T Q
      multiply<kBlockM, true, false, kBlockN, kHeadDim>(dv, smem.sP, grad_key, smem.sdO, grad_col);
      multiply<kBlockM, true, false, kBlockN, kHeadDim>(dk, smem.sdS, grad_key, smem.sQ, grad_col);

      // (6) dQ += dS K: only this thread reads and writes these elements, on every visit
      //! [dq]
      constexpr int kTilesN = Config::kQueryCols / 8,
                    kFragments = Config::kQueryRows / 16 * kTilesN;
      auto* const accum =
          gAccum + (bh * num_m_blocks + m_block) * kFragments * Config::kThreads + tid;
      float dq[Config::kQueryRows / 16][kTilesN][4] = {};
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const float4 before = first ? float4{} : accum[f * Config::kThreads];
        float(&to)[4] = dq[f / kTilesN][f % kTilesN];
        to[0] = before.x, to[1] = before.y, to[2] = before.z, to[3] = before.w;
      }
      multiply<kBlockN, false, false, kBlockN, kHeadDim>(dq, smem.sdS, query_row, smem.sK,
                                                         query_col);
      Element* const to = gdQ + query_col + quad_col;
      const float scale = shape.softmax_scale;
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const float(&from)[4] = dq[f / kTilesN][f % kTilesN];
        if (!last) accum[f * Config::kThreads] = make_float4(from[0], from[1], from[2], from[3]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = row0 + query_row + f / kTilesN * 16 + 8 * r + quad_row;
          if (last && row < shape.seqlen_q)
            *reinterpret_cast<uint32_t*>(to + (q0 + row) * kHeadDim + f % kTilesN * 8) =
                pack2<Element>(from[2 * r] * scale, from[2 * r + 1] * scale);
        }
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
}

template <class Element, class Config, bool kDropout>
Status launch(const Arguments& args) {
  const BackwardParams<Element> params(args);
  const Problem& p = args.problem;
  const int64_t rows = p.batch * p.heads * p.seqlen_q;
  args.phase("dot");
  const dim3 dots(static_cast<unsigned>(ceil_div(rows, int64_t{8})));  // one warp per row
  // nullptr and 0: no accumulator to zero, because the first visit of a row starts its dQ at 0.
  const Status status =
      launch_kernel(dot_kernel<Element>, dots, dim3(256), 0, args.stream, params.o, params.dout,
                    args.out<float>("dot"), nullptr, rows, static_cast<int>(p.head_dim), 0);
  if (!status.ok()) return status;
  args.phase("attention_backward");
  return launch_kernel(attention_backward_kernel<Element, Config, kDropout>,
                       dim3(static_cast<unsigned>(p.batch * p.kv_heads)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, params.q, params.k,
                       params.v, params.dout, params.lse, args.in<float>("dot"), params.dq,
                       params.dk, params.dv, args.out<float4>("accum"), shape_of(p), p.seed);
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

}  // namespace ATTN_BACKEND::b5_tensor_core
