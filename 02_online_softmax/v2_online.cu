// v2_online: online softmax, max and sum in one pass.
//
// parent    v1_three_pass
// change    Each thread carries a state (m, l): the running max and the sum of exp(x - m). When m
//           grows, l is multiplied by exp(m_old - m_new). The same rule merges the states of
//           threads.
// why       Max and sum need one pass instead of two.
// expect    2 reads and 1 write instead of 3 and 1: 3/4 of the bytes for rows too long for L2. ncu:
//           dram__bytes_read.sum
// supports  fp32, fp16, bf16; any number of rows and columns
// source    Milakov and Gimelshein 2018 (arXiv 1805.02867), algorithm 3
#include "attn/kernel.h"

namespace ATTN_BACKEND::v2_online {
using namespace attn;

struct Config {
  static constexpr int kThreads = 256;
};

// Online softmax state of a set of scores: maximum m and sum l of exp(score - m).
struct SoftmaxState {
  float max = kNothing, sum = 0;
  // Finite initial row maximum: avoids (-inf) - (-inf) = NaN.
  static constexpr float kNothing = -3.4028234e38f;
};
//! [ex02a]
// The state of the union of two disjoint sets.
__device__ __forceinline__ SoftmaxState merge(SoftmaxState a, SoftmaxState b) {
  const float max = fmaxf(a.max, b.max);
  return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
}

struct SharedStorage {
  SoftmaxState partial[Config::kThreads];  // one state per thread
  ATTN_MEMBERS(SharedStorage, partial)
};

// Merges the states of all threads in a tree; all threads get the result.
__device__ SoftmaxState block_merge(SoftmaxState value, SoftmaxState* partial) {
  const int tid = threadIdx.x;
  partial[tid] = value;
  __syncthreads();  // all states are stored
  for (int half = Config::kThreads / 2; half > 0; half /= 2) {
    if (tid < half) partial[tid] = merge(partial[tid], partial[tid + half]);
    __syncthreads();  // this level is complete
  }
  return partial[0];
}

// Adds one element to the state. Of the two exponentials of merge(), one is exp(0) = 1.
__device__ __forceinline__ SoftmaxState take(SoftmaxState state, float x) {
  const float difference = x - state.max;
  const float e = __expf(-fabsf(difference));
  return difference > 0 ? SoftmaxState{x, state.sum * e + 1}
                        : SoftmaxState{state.max, state.sum + e};
}
//! [ex02a]

template <class Element>
__global__ void softmax_kernel(const Element* __restrict__ gX,  // [rows, cols]
                               Element* __restrict__ gY,        // [rows, cols]
                               int cols) {
  auto& smem = dynamic_shared<SharedStorage>();
  const int64_t row = blockIdx.x;
  const Element* __restrict__ x = gX + row * cols;
  Element* __restrict__ y = gY + row * cols;

  // (1) first pass: max and sum.
  //! [pass]
  SoftmaxState state;
  for (int c = threadIdx.x; c < cols; c += Config::kThreads) state = take(state, to_float(x[c]));
  state = block_merge(state, smem.partial);
  //! [pass]

  // (2) second pass: normalisation. A row of only -inf has sum 0 and becomes 0.
  const float inverse_sum = state.sum != 0 ? 1 / state.sum : 0;
  for (int c = threadIdx.x; c < cols; c += Config::kThreads)
    y[c] = from_float<Element>(__expf(to_float(x[c]) - state.max) * inverse_sum);
}

template <class Element>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;  // rows: batch * heads * seqlen_q, columns: seqlen_k
  args.phase("softmax");
  return launch_kernel(softmax_kernel<Element>, dim3(static_cast<unsigned>(p.batch * p.heads * p.seqlen_q)),
                       dim3(Config::kThreads), sizeof(SharedStorage), args.stream, args.in<Element>("x"),
                       args.out<Element>("y"), static_cast<int>(p.seqlen_k));
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype,
                        [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v2_online
