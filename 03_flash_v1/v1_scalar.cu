// v1_scalar: FlashAttention-1 as published, Algorithm 1 line by line, in fp32.
//
// parent    02_online_softmax/v7_attention_row
// change    Tiling. A tile of K and V stays in shared memory while all tiles of Q stream past it.
//           Each visit (one tile of Q, one tile of K and V) loads the state of its rows (O, l, m)
//           from HBM, merges the tile into it and stores it again.
// why       The parent loads all of K and V once per query; here once per head.
// expect    No tensor of size N^2 in memory. Each tile of keys loads Q once and moves O twice, so
//           larger tiles move fewer bytes, as N^2 d^2 / M (ncu: lts__t_bytes.sum).
// supports  fp32, fp16, bf16; head dims up to 128; any lengths, masks, GQA, dropout
// source    Dao et al. (arXiv 2205.14135), Algorithm 1; line numbers below are the paper's.
#include "attn/kernel.h"
#include "attn/philox.h"
#include "kernels/scalar_tiles.h"

namespace ATTN_BACKEND::v1_scalar {
using namespace attn;

struct Config {
  static constexpr int kThreads = 256;
};

//! [maxsum]
// Online softmax state of a set of scores: maximum m and sum l of exp(score - m).
struct SoftmaxState {
  float max = kNothing, sum = 0;
  // Finite initial row maximum: avoids (-inf) - (-inf) = NaN.
  static constexpr float kNothing = -3.4028234e38f;
};
// The state of the union of two disjoint sets.
__device__ __forceinline__ SoftmaxState merge(SoftmaxState a, SoftmaxState b) {
  const float max = fmaxf(a.max, b.max);
  return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
}
//! [maxsum]

// The KV tiles that at least one query of rows [row0, row0 + rows) sees. If there is none, the
// first tile is visited, fully masked, so that O = 0 and lse = -inf are written.
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

template <class Element>
__global__ void attention_kernel(const Element* gQ,     // [B, Hq, seqlen_q, d]
                                 const Element* gK,     // [B, Hkv, seqlen_k, d]
                                 const Element* gV,     // [B, Hkv, seqlen_k, d]
                                 Element* gO,           // [B, Hq, seqlen_q, d]
                                 float* gLse,           // [B, Hq, seqlen_q]
                                 float* gAccum,         // [B, Hq, seqlen_q, d]: O between visits
                                 SoftmaxState* gState,  // [B, Hq, seqlen_q]: m and l between visits
                                 Shape shape, ScalarTiles tiles, uint64_t seed) {
  const int d = shape.head_dim, block_m = tiles.block_m, block_n = tiles.block_n;
  const int stride = tiles.stride;             // floats per row
  float* sK = &dynamic_shared<float>();        // [block_n, d]
  float* sV = sK + block_n * stride;           // [block_n, d]
  float* sQ = sV + block_n * stride;           // [block_m, d]
  float* sO = sQ + block_m * stride;           // [block_m, d]
  float* sS = sO + block_m * stride;           // [block_m, block_n]: S, then P
  float* sOld = sS + block_m * (block_n + 1);  // [block_m]: the old O is multiplied by it
  const int tid = threadIdx.x;
  const int64_t bh = blockIdx.x;
  const int64_t bh_kv = bh / (shape.heads / shape.kv_heads);
  const int64_t q0 = bh * shape.seqlen_q;  // first row of this head
  const Element* q = gQ + q0 * d;
  const Element* k = gK + bh_kv * shape.seqlen_k * shape.head_dim;  // [seqlen_k, d]
  const Element* v = gV + bh_kv * shape.seqlen_k * shape.head_dim;  // [seqlen_k, d]
  const int causal_offset = shape.seqlen_k - shape.seqlen_q;
  const float kept = 1 - float(shape.dropped) / 256;  // shape.dropped: probability in 1/256

  for (int n_block = 0; n_block * block_n < shape.seqlen_k; ++n_block) {  // line 5
    const int key0 = n_block * block_n;
    __syncthreads();  // all warps have read the previous K and V
    for (int i = tid; i < block_n * d; i += Config::kThreads) {  // line 6: load K_j, V_j
      const int key = i / d, col = i % d;
      const bool inside = key0 + key < shape.seqlen_k;
      sK[key * stride + col] = inside ? to_float(k[int64_t{key0 + key} * d + col]) : 0;
      sV[key * stride + col] = inside ? to_float(v[int64_t{key0 + key} * d + col]) : 0;
    }
    for (int row0 = 0; row0 < shape.seqlen_q; row0 += block_m) {  // line 7
      const KvBlockRange kv_range = kv_block_range(shape, row0, block_m, block_n);
      if (n_block < kv_range.begin || n_block >= kv_range.end) continue;
      const bool first = n_block == kv_range.begin, last = n_block + 1 == kv_range.end;
      __syncthreads();  // K and V are visible; all threads have read the previous rows
      for (int i = tid; i < block_m * d; i += Config::kThreads) {  // line 8: load Q_i, O_i
        const int row = i / d, col = i % d;
        const bool inside = row0 + row < shape.seqlen_q;
        sQ[row * stride + col] = inside ? to_float(q[int64_t{row0 + row} * d + col]) : 0;
        sO[row * stride + col] = inside && !first ? gAccum[(q0 + row0 + row) * d + col] : 0;
      }
      __syncthreads();                                                   // Q and O are visible
      for (int i = tid; i < block_m * block_n; i += Config::kThreads) {  // line 9: S = scale Q K^T
        const int row = i / block_n, key = i % block_n;
        const int diagonal = row0 + row + causal_offset;
        float score = 0;
        for (int x = 0; x < d; ++x) score += sQ[row * stride + x] * sK[key * stride + x];
        const bool visible = key0 + key >= diagonal - shape.window_left &&
                             key0 + key <= diagonal + shape.window_right &&
                             key0 + key < shape.seqlen_k;
        sS[row * (block_n + 1) + key] = visible ? score * shape.softmax_scale : -INFINITY;
      }
      __syncthreads();                                     // S is visible
      if (tid < block_m && row0 + tid < shape.seqlen_q) {  // lines 10, 11, 13: one thread per row
        const int row = tid;
        float* s = sS + row * (block_n + 1);
        //! [ex03a]
        SoftmaxState tile, state;
        for (int key = 0; key < block_n; ++key) tile.max = fmaxf(tile.max, s[key]);
        for (int key = 0; key < block_n; ++key) tile.sum += __expf(s[key] - tile.max);
        if (!first) state = gState[q0 + row0 + row];
        const SoftmaxState now = merge(state, tile);
        // Line 12: one factor for the old O, one exponential per P, both divided by the new sum.
        const float inverse_sum = now.sum != 0 ? 1 / now.sum : 0;
        sOld[row] = state.sum * __expf(state.max - now.max) * inverse_sum;
        for (int key = 0; key < block_n; ++key) {
          float p = __expf(s[key] - now.max) * inverse_sum;
          if (shape.dropped > 0)
            p = dropout_keeps(seed, bh, row0 + row, key0 + key, shape.dropped) ? p / kept : 0;
          s[key] = p;
        }
        //! [ex03a]
        gState[q0 + row0 + row] = now;
        if (last) gLse[q0 + row0 + row] = now.sum != 0 ? now.max + logf(now.sum) : -INFINITY;
      }
      __syncthreads();                                             // P and the factors are visible
      for (int i = tid; i < block_m * d; i += Config::kThreads) {  // line 12: O_i
        const int row = i / d, col = i % d;
        if (row0 + row >= shape.seqlen_q) continue;
        const int64_t idx = (q0 + row0 + row) * d + col;
        float o = sOld[row] * sO[row * stride + col];
        for (int key = 0; key < block_n; ++key)
          o += sS[row * (block_n + 1) + key] * sV[key * stride + col];
        if (last)
          gO[idx] = from_float<Element>(o);
        else
          gAccum[idx] = o;
      }
    }
  }
}

template <class Element>
Status launch(const Arguments& args, int floats) {
  const ForwardParams<Element> params(args);
  const Problem& p = args.problem;
  const ScalarTiles tiles(floats, static_cast<int>(p.head_dim));  // line 1
  args.phase("attention");
  return launch_kernel(attention_kernel<Element>, dim3(static_cast<unsigned>(p.batch * p.heads)),
                       dim3(Config::kThreads), tiles.bytes(), args.stream, params.q, params.k,
                       params.v, params.o, params.lse, args.out<float>("accum"),
                       args.out<SoftmaxState>("state"), shape_of(p), tiles, p.seed);
}

Status launch(const Arguments& args, int floats) {
  return dispatch_dtype(args.problem.dtype,
                        [&]<class Element>() { return launch<Element>(args, floats); });
}
// The same kernel with M = 16 Ki, 8 Ki and 32 Ki floats, to measure how tile sizes affect traffic.
// 16 Ki floats take at most 84 KB with S, which fits in a block's shared memory from sm_80 on.
Status launch(const Arguments& args) { return launch(args, 16 * 1024); }
Status launch_half(const Arguments& args) { return launch(args, 8 * 1024); }
Status launch_double(const Arguments& args) { return launch(args, 32 * 1024); }

}  // namespace ATTN_BACKEND::v1_scalar
