// b3_constant_tiles: 16-bit tiles of compile-time size, XOR-swizzled; dK and dV in registers.
//
// parent    b2_saved_dot
// change    Tiles keep the type of the inputs, P and dS are rounded to it, and 16-byte chunks are
//           swizzled. Sizes are compile-time constants, 128 keys per tile. A thread holds its
//           elements of dK and dV in registers over all visits. The GEMMs still run in fp32.
// why       Tensor cores need 16-bit operands and unrolled loops; this step prepares them.
// expect    Fewer, larger visits: lts__t_sectors_op_read.sum falls.
//           sm__inst_executed_pipe_fma.sum does not.
// supports  fp16, bf16; head dims 32, 64, 128; any lengths, masks, GQA, dropout
#include "attn/kernel.h"
#include "attn/philox.h"
#include "kernels/backward_tiles.h"

namespace ATTN_BACKEND::b3_constant_tiles {
using namespace backward_tiles;  // swizzled_offset, load_tile, kv_block_range, dot_kernel, ...

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_, kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kBlockM = kHeadDim == 128 ? 64 : 128, kBlockN = 128;  // B_r, B_c
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
                              float4* gAccum,      // [B, Hq, seqlen_q, d]: dQ between visits
                              Shape shape, uint64_t seed) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int tid = threadIdx.x;
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

    // (2) Load K_j, V_j. D, phase (1), comes from dot_kernel.
    __syncthreads();  // all warps have read the previous K and V
    load_tile<kBlockN, Config>(smem.sK, gK + k0 * kHeadDim, key0, shape.seqlen_k);
    load_tile<kBlockN, Config>(smem.sV, gV + k0 * kHeadDim, key0, shape.seqlen_k);
    // elements tid, tid + kThreads, ...
    constexpr int kElements = kBlockN * kHeadDim / Config::kThreads;
    float dk[kElements] = {}, dv[kElements] = {};

    for (int visit = next_visit(0); visit < group * num_m_blocks; visit = next_visit(visit + 1)) {
      const int m_block = visit % num_m_blocks, row0 = m_block * kBlockM;
      const int64_t bh = bh_kv * group + visit / num_m_blocks, q0 = bh * shape.seqlen_q;
      const KvBlockRange kv_range = kv_block_range(shape, row0, kBlockM, kBlockN);
      const bool first = n_block == kv_range.begin, last = n_block + 1 == kv_range.end;
      __syncthreads();  // all threads have read P, dS and the previous rows
      load_rows(visit);
      __syncthreads();  // the rows, K and V are visible

      //! [recompute]
      for (int i = tid; i < kBlockM * kBlockN; i += Config::kThreads) {
        const int row = i / kBlockN, key = i % kBlockN, idx = swizzled_offset<kBlockN>(row, key);
        const int diagonal = row0 + row + causal_offset;
        const bool visible = key0 + key >= diagonal - shape.window_left &&
                             key0 + key <= diagonal + shape.window_right &&
                             key0 + key < shape.seqlen_k;
        float score = 0, dp = 0;
        for (int x = 0; x < kHeadDim; ++x) {  // (3) S = Q K^T, dP = dO V^T
          const int of_row = swizzled_offset<kHeadDim>(row, x),
                    of_key = swizzled_offset<kHeadDim>(key, x);
          score += to_float(smem.sQ[of_row]) * to_float(smem.sK[of_key]);
          dp += to_float(smem.sdO[of_row]) * to_float(smem.sV[of_key]);
        }
        // (4) P = exp(scale S - lse), dS = P (dP - D)
        const float p = visible ? exp2f(fmaf(score, softmax_scale_log2, -smem.sLse[row])) : 0;
        float z = inverse_keep;
        if constexpr (kDropout)
          if (!dropout_keeps(seed, bh, row0 + row, key0 + key, shape.dropped)) z = 0;
        smem.sdS[idx] = from_float<Element>(p * (dp * z - smem.sD[row]));
        smem.sP[idx] = from_float<Element>(z == 0 ? 0 : p);  // dV gets the factor at the end
      }
      //! [recompute]
      __syncthreads();  // P and dS of all warps are visible

      // (5) dV += P^T dO, dK += dS^T Q
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        // kThreads is a multiple of kHeadDim, so all elements of a thread are in one column.
        const int key = (tid + i * Config::kThreads) / kHeadDim, col = tid % kHeadDim;
#pragma unroll 1  // not unrolled: with the loop around it, kElements * kBlockM copies
        for (int row = 0; row < kBlockM; ++row) {
          const int idx = swizzled_offset<kBlockN>(row, key);
          dv[i] += to_float(smem.sP[idx]) * to_float(smem.sdO[swizzled_offset<kHeadDim>(row, col)]);
          dk[i] += to_float(smem.sdS[idx]) * to_float(smem.sQ[swizzled_offset<kHeadDim>(row, col)]);
        }
      }

      // (6) dQ += dS K: only this thread reads and writes these elements, on every visit
      //! [dq]
      float* const accum = &gAccum->x;  // single floats here; b5_tensor_core reads float4
      for (int i = tid; i < kBlockM * kHeadDim; i += Config::kThreads) {
        const int row = i / kHeadDim, col = i % kHeadDim;
        if (row0 + row >= shape.seqlen_q) continue;
        const int64_t idx = (q0 + row0 + row) * kHeadDim + col;
        float dq = first ? 0 : accum[idx];
        for (int key = 0; key < kBlockN; ++key)
          dq += to_float(smem.sdS[swizzled_offset<kBlockN>(row, key)]) *
                to_float(smem.sK[swizzled_offset<kHeadDim>(key, col)]);
        if (last)
          gdQ[idx] = from_float<Element>(dq * shape.softmax_scale);
        else
          accum[idx] = dq;
      }
      //! [dq]
    }

    // (7) Store dK_j, dV_j.
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int key = key0 + (tid + i * Config::kThreads) / kHeadDim;
      const int64_t idx = (k0 + key) * kHeadDim + tid % kHeadDim;
      if (key >= shape.seqlen_k) continue;
      gdK[idx] = from_float<Element>(dk[i] * shape.softmax_scale);
      gdV[idx] = from_float<Element>(dv[i] * inverse_keep);
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

}  // namespace ATTN_BACKEND::b3_constant_tiles
