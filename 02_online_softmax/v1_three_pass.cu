// v1_three_pass: safe softmax, one block per row.
//
// parent    none: the softmax of 01_naive, for rows of any length
// change    Three passes over the row: max, sum of exp(x - max), normalisation.
// why       Each pass needs the complete result of the previous one, so a row that no cache holds
//           is read three times.
// expect    3 reads and 1 write of HBM if the rows in flight exceed L2; close to 1 read and 1 write
//           for rows well below 31 KB: L2 holds all rows in flight. ncu: dram__bytes_read.sum
// supports  fp32, fp16, bf16; any number of rows and columns
#include "attn/kernel.h"

namespace ATTN_BACKEND::v1_three_pass {
using namespace attn;

struct Config {
  static constexpr int kThreads = 256;
};
struct SharedStorage {
  float partial[Config::kThreads];  // one value per thread
  ATTN_MEMBERS(SharedStorage, partial)
};

// Tree reduction of one value per thread; all threads get the result.
template <class Combine>
__device__ float block_reduce(float value, float* partial, Combine combine) {
  const int tid = threadIdx.x;
  partial[tid] = value;
  __syncthreads();  // all values are stored
  for (int half = Config::kThreads / 2; half > 0; half /= 2) {
    if (tid < half) partial[tid] = combine(partial[tid], partial[tid + half]);
    __syncthreads();  // this level is complete
  }
  const float result = partial[0];
  __syncthreads();  // all reads are done: a later call may overwrite
  return result;
}

//! [softmax]
template <class Element>
__global__ void softmax_kernel(const Element* __restrict__ gX,  // [rows, cols]
                               Element* __restrict__ gY,        // [rows, cols]
                               int cols) {
  auto& smem = dynamic_shared<SharedStorage>();
  const int64_t row = blockIdx.x;
  const Element* __restrict__ x = gX + row * cols;
  Element* __restrict__ y = gY + row * cols;

  // (1) first pass: the max, which keeps exp from overflowing.
  float row_max = -INFINITY;
  for (int c = threadIdx.x; c < cols; c += Config::kThreads) row_max = fmaxf(row_max, to_float(x[c]));
  row_max = block_reduce(row_max, smem.partial, [](float a, float b) { return fmaxf(a, b); });

  // (2) second pass: the sum. If all of x is -inf, x - max would be NaN: skip it.
  const bool empty = row_max == -INFINITY;
  float row_sum = 0;
  for (int c = threadIdx.x; c < cols; c += Config::kThreads)
    if (!empty) row_sum += __expf(to_float(x[c]) - row_max);
  row_sum = block_reduce(row_sum, smem.partial, [](float a, float b) { return a + b; });

  // (3) third pass: normalisation.
  const float inverse_sum = empty ? 0 : 1 / row_sum;
  for (int c = threadIdx.x; c < cols; c += Config::kThreads)
    y[c] = from_float<Element>(empty ? 0 : __expf(to_float(x[c]) - row_max) * inverse_sum);
}
//! [softmax]

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

}  // namespace ATTN_BACKEND::v1_three_pass
