// b2_saved_dot: D once per row, in a preprocess kernel.
//
// parent    b1_scalar
// change    A preprocess kernel computes D = rowsum(dO . O). The loops over heads and rows become
//           one loop over visits, which skips query tiles that see no key of this tile.
// why       D depends on the row only, but line 19 recomputes it at every visit.
// expect    A visit loads two row tiles (Q, dO) instead of three: lts__t_sectors_op_read.sum falls.
// supports  fp32, fp16, bf16; head dims up to 128; any lengths, masks, GQA, dropout
// source    The preprocess kernel of FlashAttention-2 (arXiv 2307.08691, Algorithm 2).
#include "attn/kernel.h"
#include "attn/philox.h"
#include "kernels/backward_tiles.h"

namespace ATTN_BACKEND::b2_saved_dot {
using namespace backward_tiles;

struct Config {
  static constexpr int kThreads = 256;
  static constexpr int kFloats = 16 * 1024;  // M
};

// Tile sizes as in the forward pass.
struct Tiles {
  // B_r, B_c; row stride in floats, odd so that a column hits all banks.
  int block_m, block_n, stride;
  Tiles(int floats, int d) : block_n(floats / (4 * d)) {
    if (block_n < 1) block_n = 1;
    block_m = block_n < d ? block_n : d;
    stride = d + 1;
  }
  // sK, sV, sdK, sdV [block_n, d], sQ, sdO [block_m, d], sP, sdS [block_m, block_n], lse and D.
  std::size_t bytes() const {
    return sizeof(float) * (std::size_t(4 * block_n + 2 * block_m) * stride +
                            std::size_t(2 * block_m) * (block_n + 1) + std::size_t(2 * block_m));
  }
};

// Copies rows [row0, row0 + count) of a [rows, d] matrix; rows past the end become 0.
template <class Element>
__device__ void load_tile(float* tile, const Element* g, int row0, int count, int rows, int d,
                          int stride) {
  for (int i = threadIdx.x; i < count * d; i += Config::kThreads) {
    const int row = i / d, col = i % d;
    tile[row * stride + col] = row0 + row < rows ? to_float(g[int64_t{row0 + row} * d + col]) : 0;
  }
}

template <class Element>
__global__ void attention_backward_kernel(const Element* gQ,   // [B, Hq, seqlen_q, d]
                                          const Element* gK,   // [B, Hkv, seqlen_k, d]
                                          const Element* gV,   // [B, Hkv, seqlen_k, d]
                                          const Element* gdO,  // [B, Hq, seqlen_q, d]
                                          const float* gLse,   // [B, Hq, seqlen_q]
                                          const float* gD,     // [B, Hq, seqlen_q]
                                          Element* gdQ,        // [B, Hq, seqlen_q, d]
                                          Element* gdK,        // [B, Hkv, seqlen_k, d]
                                          Element* gdV,        // [B, Hkv, seqlen_k, d]
                                          float* gAccum,  // [B, Hq, seqlen_q, d]: dQ between visits
                                          Shape shape, Tiles tiles, uint64_t seed) {
  const int d = shape.head_dim, stride = tiles.stride, block_m = tiles.block_m,
            block_n = tiles.block_n;
  float* sK = &dynamic_shared<float>();         // [block_n, d]
  float* sV = sK + block_n * stride;            // [block_n, d]
  float* sdK = sV + block_n * stride;           // [block_n, d]
  float* sdV = sdK + block_n * stride;          // [block_n, d]
  float* sQ = sdV + block_n * stride;           // [block_m, d]
  float* sdO = sQ + block_m * stride;           // [block_m, d]
  float* sP = sdO + block_m * stride;           // [block_m, block_n]: P after dropout
  float* sdS = sP + block_m * (block_n + 1);    // [block_m, block_n]
  float* sLse = sdS + block_m * (block_n + 1);  // [block_m]
  float* sD = sLse + block_m;                   // [block_m]: rowsum(dO . O)
  const int tid = threadIdx.x;
  // q0, k0: index of a head's first row in Q, and in K and V. row0, key0: first row and first key
  // of a tile, counted within the head.
  const int64_t bh_kv = blockIdx.x, k0 = bh_kv * shape.seqlen_k;
  const int group = shape.heads / shape.kv_heads;
  const int num_m_blocks = ceil_div(shape.seqlen_q, block_m);
  const float kept = 1 - float(shape.dropped) / 256;  // shape.dropped: probability in 1/256

  for (int n_block = 0; n_block * block_n < shape.seqlen_k; ++n_block) {  // line 6
    const int key0 = n_block * block_n;
    // Visits: all query tiles that see a key of this tile, of all query heads that share it.
    const auto next_visit = [&](int visit) {
      for (; visit < group * num_m_blocks; ++visit) {
        const int row0 = visit % num_m_blocks * block_m;
        const KvBlockRange kv_range = kv_block_range(shape, row0, block_m, block_n);
        if (kv_range.begin <= n_block && n_block < kv_range.end) break;
      }
      return visit;
    };
    const auto load_rows = [&](int visit) {
      const int64_t q0 = (bh_kv * group + visit / num_m_blocks) * shape.seqlen_q;
      const int row0 = visit % num_m_blocks * block_m;
      load_tile(sQ, gQ + q0 * d, row0, block_m, shape.seqlen_q, d, stride);
      load_tile(sdO, gdO + q0 * d, row0, block_m, shape.seqlen_q, d, stride);
      if (tid >= block_m) return;
      const bool inside = row0 + tid < shape.seqlen_q;
      const float lse = inside ? gLse[q0 + row0 + tid] : -INFINITY;
      sLse[tid] = lse == -INFINITY ? INFINITY : lse;  // fully masked row: P = 0
      sD[tid] = inside ? gD[q0 + row0 + tid] : 0;
    };
    __syncthreads();  // all warps have read the previous K and V
    load_tile(sK, gK + k0 * d, key0, block_n, shape.seqlen_k, d, stride);  // line 7: load K_j, V_j
    load_tile(sV, gV + k0 * d, key0, block_n, shape.seqlen_k, d, stride);
    // Line 8: dK_j = dV_j = 0; sdV follows sdK in memory.
    for (int i = tid; i < 2 * block_n * stride; i += Config::kThreads) sdK[i] = 0;
    for (int visit = next_visit(0); visit < group * num_m_blocks; visit = next_visit(visit + 1)) {
      const int m_block = visit % num_m_blocks, row0 = m_block * block_m;
      const int64_t bh = bh_kv * group + visit / num_m_blocks, q0 = bh * shape.seqlen_q;
      const KvBlockRange kv_range = kv_block_range(shape, row0, block_m, block_n);
      const bool first = n_block == kv_range.begin, last = n_block + 1 == kv_range.end;
      __syncthreads();  // all threads have read P, dS and the previous rows
      load_rows(visit);
      __syncthreads();  // the rows, K and V are visible
      //! [recompute]
      for (int i = tid; i < block_m * block_n; i += Config::kThreads) {
        const int row = i / block_n, key = i % block_n, idx = row * (block_n + 1) + key;
        const int diagonal = row0 + row + shape.seqlen_k - shape.seqlen_q;
        const bool visible = key0 + key >= diagonal - shape.window_left &&
                             key0 + key <= diagonal + shape.window_right &&
                             key0 + key < shape.seqlen_k;
        float score = 0, dp = 0;
        for (int x = 0; x < d; ++x) {
          score += sQ[row * stride + x] * sK[key * stride + x];  // lines 11, 12: S = scale Q K^T
          dp += sdO[row * stride + x] * sV[key * stride + x];    // line 17: dP = dO V^T
        }
        // Line 13: P from lse; the paper uses l and m.
        const float p = visible ? __expf(score * shape.softmax_scale - sLse[row]) : 0;
        float z = 1;  // line 14: recompute the dropout mask
        if (shape.dropped > 0)
          z = dropout_keeps(seed, bh, row0 + row, key0 + key, shape.dropped) ? 1 / kept : 0;
        sP[idx] = p * z;                    // line 15
        sdS[idx] = p * (dp * z - sD[row]);  // lines 18 and 20
      }
      //! [recompute]
      __syncthreads();  // P and dS of all warps are visible
      for (int i = tid; i < block_n * d; i += Config::kThreads) {
        const int key = i / d, col = i % d;
        float dv = 0, dk = 0;
        for (int row = 0; row < block_m; ++row) {
          dv += sP[row * (block_n + 1) + key] * sdO[row * stride + col];  // line 16: dV += P^T dO
          dk += sdS[row * (block_n + 1) + key] * sQ[row * stride + col];  // line 22: dK += dS^T Q
        }
        sdV[key * stride + col] += dv;
        sdK[key * stride + col] += dk;
      }
      // Line 21: dQ += scale dS K, in HBM.
      for (int i = tid; i < block_m * d; i += Config::kThreads) {
        const int row = i / d, col = i % d;
        if (row0 + row >= shape.seqlen_q) continue;
        const int64_t idx = (q0 + row0 + row) * d + col;
        float dq = 0;
        for (int key = 0; key < block_n; ++key)
          dq += sdS[row * (block_n + 1) + key] * sK[key * stride + col];
        dq = dq * shape.softmax_scale + (first ? 0 : gAccum[idx]);
        if (last)
          gdQ[idx] = from_float<Element>(dq);
        else
          gAccum[idx] = dq;
      }
    }
    __syncthreads();                                             // dK and dV are complete
    for (int i = tid; i < block_n * d; i += Config::kThreads) {  // line 24: store dK_j, dV_j
      const int key = i / d, col = i % d;
      if (key0 + key >= shape.seqlen_k) continue;
      gdK[(k0 + key0 + key) * d + col] =
          from_float<Element>(sdK[key * stride + col] * shape.softmax_scale);
      gdV[(k0 + key0 + key) * d + col] = from_float<Element>(sdV[key * stride + col]);
    }
  }
}

template <class Element>
Status launch(const Arguments& args) {
  const BackwardParams<Element> params(args);
  const Problem& p = args.problem;
  const Shape shape = shape_of(p);
  const Tiles tiles(Config::kFloats, shape.head_dim);
  const int64_t rows = p.batch * p.heads * p.seqlen_q;
  args.phase("dot");
  const dim3 dots(static_cast<unsigned>(ceil_div(rows, int64_t{8})));  // one warp per row
  // nullptr and 0: no accumulator to zero, because the first visit of a row starts its dQ at 0.
  const Status status =
      launch_kernel(dot_kernel<Element>, dots, dim3(256), 0, args.stream, params.o, params.dout,
                    args.out<float>("dot"), nullptr, rows, static_cast<int>(p.head_dim), 0);
  if (!status.ok()) return status;
  args.phase("attention_backward");
  return launch_kernel(attention_backward_kernel<Element>,
                       dim3(static_cast<unsigned>(p.batch * p.kv_heads)), dim3(Config::kThreads),
                       tiles.bytes(), args.stream, params.q, params.k, params.v, params.dout,
                       params.lse, args.in<float>("dot"), params.dq, params.dk, params.dv,
                       args.out<float>("accum"), shape, tiles, p.seed);
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype, [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::b2_saved_dot
