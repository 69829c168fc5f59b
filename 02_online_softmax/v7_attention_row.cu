// v7_attention_row: online softmax with a row of O in the state.
//
// parent    v2_online
// change    The state becomes (m, l, o): o is the sum of exp(score - m) * value, a row of d
//           elements. One pass over K and V computes the attention of one query, and no score is
//           stored.
// why       The recurrence rescales any sum of exp(x - m) terms, scalar or vector. Chapter 03 does
//           the same for tiles of queries.
// expect    Memory does not grow with seqlen_q * seqlen_k. Each query reads all of K and V:
//           the bytes of L2 (lts__t_bytes.sum) grow with seqlen_q.
// supports  fp32, fp16, bf16; head dims up to 256; any lengths, masks, GQA
// source    Rabe and Staats 2021 (arXiv 2112.05682), section 2
#include "attn/kernel.h"

namespace ATTN_BACKEND::v7_attention_row {
using namespace attn;

struct Config {
  static constexpr int kThreads = 128, kWarps = kThreads / 32;
  static constexpr int kMaxHeadDim = 256;
  static constexpr int kColumns = kMaxHeadDim / 32;  // per lane: columns lane_id + 32 n of d
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

struct SharedStorage {
  SoftmaxState partial[Config::kWarps];  // one state per warp
  float o[Config::kWarps][Config::kMaxHeadDim];  // partial O of each warp, [kWarps, d]
  ATTN_MEMBERS(SharedStorage, partial, o)
};

__device__ float warp_sum(float value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

template <class Element>
__global__ void attention_kernel(const Element* gQ,  // [B, Hq, seqlen_q, d]
                                 const Element* gK,  // [B, Hkv, seqlen_k, d]
                                 const Element* gV,  // [B, Hkv, seqlen_k, d]
                                 Element* gO,        // [B, Hq, seqlen_q, d]
                                 float* gLse,        // [B, Hq, seqlen_q]
                                 Shape shape) {
  auto& smem = dynamic_shared<SharedStorage>();
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int64_t bh = blockIdx.x / shape.seqlen_q;
  const int row = blockIdx.x % shape.seqlen_q;
  const int64_t bh_kv = bh / (shape.heads / shape.kv_heads);
  const Element* q = gQ + (bh * shape.seqlen_q + row) * shape.head_dim;     // [d]
  const Element* k = gK + bh_kv * shape.seqlen_k * shape.head_dim;          // [seqlen_k, d]
  const Element* v = gV + bh_kv * shape.seqlen_k * shape.head_dim;          // [seqlen_k, d]
  // Visible keys: [begin, end). Bottom-right alignment: the last query's diagonal is the last key.
  const int diagonal = row + shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, diagonal - shape.window_left);
  const int end = min(shape.seqlen_k, diagonal + shape.window_right + 1);

  float rQ[Config::kColumns], rO[Config::kColumns];
#pragma unroll
  for (int n = 0; n < Config::kColumns; ++n) {
    const int col = lane_id + 32 * n;
    rQ[n] = col < shape.head_dim ? to_float(q[col]) * shape.softmax_scale : 0;
    rO[n] = 0;
  }

  // (1) one pass over K and V, one key per warp at a time.
  //! [recurrence]
  SoftmaxState state;
  for (int j = begin + warp_id; j < end; j += Config::kWarps) {
    float score = 0;
#pragma unroll
    for (int n = 0; n < Config::kColumns; ++n) {
      const int col = lane_id + 32 * n;
      if (col < shape.head_dim) score += rQ[n] * to_float(k[int64_t{j} * shape.head_dim + col]);
    }
    score = warp_sum(score);
    const SoftmaxState now = merge(state, {score, 1});
    const float rescale = __expf(state.max - now.max), weight = __expf(score - now.max);
#pragma unroll
    for (int n = 0; n < Config::kColumns; ++n) {
      const int col = lane_id + 32 * n;
      if (col < shape.head_dim)
        rO[n] = rO[n] * rescale + weight * to_float(v[int64_t{j} * shape.head_dim + col]);
    }
    state = now;
  }
  //! [recurrence]

  // (2) merge the (m, l, o) states of the warps.
  //! [ex02c]
  if (lane_id == 0) smem.partial[warp_id] = state;
#pragma unroll
  for (int n = 0; n < Config::kColumns; ++n) smem.o[warp_id][lane_id + 32 * n] = rO[n];
  __syncthreads();  // states and parts of O of all warps are stored
  SoftmaxState all;
  for (int w = 0; w < Config::kWarps; ++w) all = merge(all, smem.partial[w]);
  //! [ex02c]
  // Fully masked row: O = 0, lse = -inf.
  const float inverse_sum = all.sum != 0 ? 1 / all.sum : 0;
  for (int col = threadIdx.x; col < shape.head_dim; col += Config::kThreads) {
    float sum = 0;
    for (int w = 0; w < Config::kWarps; ++w)
      sum += __expf(smem.partial[w].max - all.max) * smem.o[w][col];
    gO[(bh * shape.seqlen_q + row) * shape.head_dim + col] = from_float<Element>(sum * inverse_sum);
  }
  if (threadIdx.x == 0)
    gLse[bh * shape.seqlen_q + row] = all.sum != 0 ? all.max + logf(all.sum) : -INFINITY;
}

template <class Element>
Status launch(const Arguments& args) {
  const ForwardParams<Element> params(args);
  const Problem& p = args.problem;
  args.phase("attention");
  return launch_kernel(attention_kernel<Element>,
                       dim3(static_cast<unsigned>(p.batch * p.heads * p.seqlen_q)),
                       dim3(Config::kThreads), sizeof(SharedStorage), args.stream, params.q,
                       params.k, params.v, params.o, params.lse, shape_of(p));
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype,
                        [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v7_attention_row
