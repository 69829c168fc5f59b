// b1_scalar: the backward pass of FlashAttention-1 as published, Algorithm 4 in fp32.
//
// parent    v1_scalar (its tiles and its loops)
// change    Recomputation. P is not stored: any tile of it is recomputed from Q, K and one number
//           per row, lse. K and V are in the outer loop, so dK and dV of a key tile stay on the
//           chip over all visits. dQ is accumulated in HBM.
// why       Chapter 01 keeps P, of size N^2, from the forward pass.
// expect    Memory linear in N. Five GEMMs instead of four; each visit loads and stores dQ.
// supports  fp32, fp16, bf16; head dims up to 128; any lengths, masks, GQA, dropout
// source    Dao et al. (arXiv 2205.14135), Algorithm 4; line numbers below are the paper's.
#include "attn/kernel.h"
#include "attn/philox.h"

namespace ATTN_BACKEND::b1_scalar {
using namespace attn;

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
  // sK, sV, sdK, sdV [block_n, d], sQ, sO, sdO [block_m, d], sP, sdS [block_m, block_n], lse and D.
  std::size_t bytes() const {
    return sizeof(float) * (std::size_t(4 * block_n + 3 * block_m) * stride +
                            std::size_t(2 * block_m) * (block_n + 1) + std::size_t(2 * block_m));
  }
};

// The KV tiles that at least one query of rows [row0, row0 + rows) sees. If there is none, the
// first tile is visited, fully masked, so that dQ = 0 is written.
struct KvBlockRange {
  int begin, end;
};
__device__ KvBlockRange kv_block_range(const Shape& shape, int row0, int rows, int block_n) {
  const int last = min(row0 + rows, shape.seqlen_q) - 1,
            causal_offset = shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, row0 + causal_offset - shape.window_left);
  const int end = min(shape.seqlen_k, last + causal_offset + shape.window_right + 1);
  if (end <= begin) return {0, 1};
  return {begin / block_n, ceil_div(end, block_n)};
}

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
                                          const Element* gO,   // [B, Hq, seqlen_q, d]
                                          const Element* gdO,  // [B, Hq, seqlen_q, d]
                                          const float* gLse,   // [B, Hq, seqlen_q]
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
  float* sO = sQ + block_m * stride;            // [block_m, d]
  float* sdO = sO + block_m * stride;           // [block_m, d]
  float* sP = sdO + block_m * stride;           // [block_m, block_n]: P after dropout
  float* sdS = sP + block_m * (block_n + 1);    // [block_m, block_n]
  float* sLse = sdS + block_m * (block_n + 1);  // [block_m]
  float* sD = sLse + block_m;                   // [block_m]: rowsum(dO . O)
  const int tid = threadIdx.x;
  const int64_t bh_kv = blockIdx.x, k0 = bh_kv * shape.seqlen_k;
  const int group = shape.heads / shape.kv_heads;
  const float kept = 1 - float(shape.dropped) / 256;  // shape.dropped: probability in 1/256

  for (int n_block = 0; n_block * block_n < shape.seqlen_k; ++n_block) {  // line 6
    const int key0 = n_block * block_n;
    __syncthreads();  // all threads have stored the previous dK and dV
    load_tile(sK, gK + k0 * d, key0, block_n, shape.seqlen_k, d, stride);  // line 7: load K_j, V_j
    load_tile(sV, gV + k0 * d, key0, block_n, shape.seqlen_k, d, stride);
    // Line 8: dK_j = dV_j = 0; sdV follows sdK in memory.
    for (int i = tid; i < 2 * block_n * stride; i += Config::kThreads) sdK[i] = 0;
    // query heads that share K_j
    for (int64_t bh = bh_kv * group; bh < (bh_kv + 1) * group; ++bh) {
      const int64_t q0 = bh * shape.seqlen_q;
      for (int row0 = 0; row0 < shape.seqlen_q; row0 += block_m) {  // line 9
        const KvBlockRange kv_range = kv_block_range(shape, row0, block_m, block_n);
        if (n_block < kv_range.begin || n_block >= kv_range.end) continue;
        const bool first = n_block == kv_range.begin, last = n_block + 1 == kv_range.end;
        __syncthreads();  // all threads have read P, dS and the previous rows
        load_tile(sQ, gQ + q0 * d, row0, block_m, shape.seqlen_q, d, stride);  // line 10
        load_tile(sO, gO + q0 * d, row0, block_m, shape.seqlen_q, d, stride);
        load_tile(sdO, gdO + q0 * d, row0, block_m, shape.seqlen_q, d, stride);
        __syncthreads();      // the rows, K and V are visible
        if (tid < block_m) {  // line 19: D = rowsum(dO . O), one thread per row
          float sum = 0;
          for (int x = 0; x < d; ++x) sum += sdO[tid * stride + x] * sO[tid * stride + x];
          sD[tid] = sum;
          const float lse = row0 + tid < shape.seqlen_q ? gLse[q0 + row0 + tid] : -INFINITY;
          sLse[tid] = lse == -INFINITY ? INFINITY : lse;  // fully masked row: P = 0
        }
        __syncthreads();  // D and lse are visible
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
  args.phase("attention_backward");
  return launch_kernel(attention_backward_kernel<Element>,
                       dim3(static_cast<unsigned>(p.batch * p.kv_heads)), dim3(Config::kThreads),
                       tiles.bytes(), args.stream, params.q, params.k, params.v, params.o,
                       params.dout, params.lse, params.dq, params.dk, params.dv,
                       args.out<float>("accum"), shape, tiles, p.seed);
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype, [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::b1_scalar
