/// \file
/// A chapter of three steps: one is right, one has a race, which only `--races` detects, and one
/// leaves a counter that makes its next launch wrong.
#include "attn/kernel.h"
#include "check/operation.h"
#include "tests/small_step.h"

namespace {
using namespace attn;
using attn::tests::small_step;

// Neighbouring threads exchange flags, without a barrier in the racy version. One thread per row,
// dot products as in the formula. The test of --races names the lines of the two accesses.
template <bool kBarrier>
__global__ void attention(const float* gQ, const float* gK, const float* gV, float* gO, float* gLse,
                          Shape shape) {
  __shared__ int here[32];
  here[threadIdx.x] = 1;
  if (kBarrier) __syncthreads();
  const int neighbours = here[threadIdx.x] + here[threadIdx.x ^ 1];
  const int i = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  if (i >= shape.seqlen_q) return;
  const int64_t row = int64_t{blockIdx.y} * shape.seqlen_q + i,
                first = int64_t{blockIdx.y} * shape.seqlen_k;
  const auto score = [&](int j) {
    float dot = 0;
    for (int c = 0; c < shape.head_dim; ++c)
      dot += gQ[row * shape.head_dim + c] * gK[(first + j) * shape.head_dim + c];
    return dot * shape.softmax_scale;
  };
  float row_max = -INFINITY, row_sum = 0;
  for (int j = 0; j < shape.seqlen_k; ++j) row_max = fmaxf(row_max, score(j));
  for (int j = 0; j < shape.seqlen_k; ++j) row_sum += __expf(score(j) - row_max);
  for (int c = 0; c < shape.head_dim; ++c) {
    float sum = 0;
    for (int j = 0; j < shape.seqlen_k; ++j)
      sum += __expf(score(j) - row_max) * gV[(first + j) * shape.head_dim + c];
    gO[row * shape.head_dim + c] = sum / row_sum;
  }
  gLse[row] = row_max + logf(row_sum) + (neighbours < 0 ? 1.0f : 0.0f);
}

__global__ void set_counter(unsigned* counter, unsigned value) { *counter = value; }
// Expects the counter at 0, and leaves it at 1.
__global__ void count(unsigned* counter, float* gLse) {
  if (*counter != 0) gLse[0] = 100;
  *counter = 1;
}

template <bool kBarrier>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.seqlen_q, int64_t{32})),
                  static_cast<unsigned>(p.batch * p.heads));
  return launch_kernel(attention<kBarrier>, grid, dim3(32), 0, args.stream, args.in<float>("q"),
                       args.in<float>("k"), args.in<float>("v"), args.out<float>("o"),
                       args.out<float>("lse"), shape_of(p));
}

Status launch_counted(const Arguments& args) {
  const Status status = launch<true>(args);
  return status.ok() ? launch_kernel(count, dim3(1), dim3(1), 0, args.stream,
                                     args.out<unsigned>("counter"), args.out<float>("lse"))
                     : status;
}
Status clear_counter(const Arguments& args) {
  return launch_kernel(set_counter, dim3(1), dim3(1), 0, args.stream,
                       args.out<unsigned>("counter"), 0u);
}
Step counted_step() {
  Step step = small_step("v3_counter", launch_counted);
  step.workspaces = [](const Problem&) { return std::vector<Workspace>{{"counter", 4, true}}; };
  step.prepare = {nullptr, clear_counter};
  return step;
}

}  // namespace

const attn::Chapter& attn::chapter() {
  static const Chapter c{"racy",
                         "right numbers, a race, and a counter",
                         {small_step("v1_barrier", launch<true>),
                          small_step("v2_no_barrier", launch<false>), counted_step()}};
  return c;
}
