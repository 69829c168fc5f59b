// v3_warp: pairs merged by shuffles, 16 bytes a load.
//
// parent    v2_online
// idea      merging pairs is associative and commutative, so any tree will do: 5 shuffles inside a warp, one
//           exchange between warps. A load brings 16 bytes; its 8 (or 4) numbers share one rescale.
// expect    fewer load instructions and barriers: closer to the 3 accesses of HBM that the model counts.
//           ncu: l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum, stalls on barriers
// supports  fp32, fp16, bf16; any number of rows and columns
#include "attn/kernel.h"
#include "kernels/vectors.h"

namespace ATTN_BACKEND::v3_warp {
using namespace attn;
using namespace softmax_vectors;

struct Config {
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
};

//! [maxsum]
// The maximum of some numbers and the sum of exp(number - maximum).
struct SoftmaxState {
  float max = kNothing, sum = 0;
  // Stands for -inf where nothing was seen. It is finite, so that differences are numbers.
  static constexpr float kNothing = -3.4028234e38f;
};
// The pair of both sets together.
__device__ __forceinline__ SoftmaxState merge(SoftmaxState a, SoftmaxState b) {
  const float max = fmaxf(a.max, b.max);
  return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
}
//! [maxsum]

struct SharedStorage {
  SoftmaxState partial[Config::kWarps];  // one pair a warp
  ATTN_MEMBERS(SharedStorage, partial)
};

// Merges the pairs of all threads: first the lanes of each warp, then the warps.
//! [merge]
__device__ SoftmaxState warp_merge(SoftmaxState value) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = merge(value, {__shfl_xor_sync(~0u, value.max, distance), __shfl_xor_sync(~0u, value.sum, distance)});
  return value;
}
//! [merge]
__device__ SoftmaxState block_merge(SoftmaxState value, SoftmaxState* partial) {
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  value = warp_merge(value);
  if (lane_id == 0) partial[warp_id] = value;
  __syncthreads();  // the pairs of all warps are there
  return warp_merge(lane_id < Config::kWarps ? partial[lane_id] : SoftmaxState{});
}

// A row as whole vectors and edges: it may begin and end inside a vector that it shares with its neighbours.
// The elements before its first and after its last whole vector are read and written one by one.
template <class Element>
struct Row {
  static constexpr int kSize = Vector<Element>::kSize;
  static constexpr int kMaxEdges = 2 * (kSize - 1);
  int64_t begin;  // index of the row's first element in the tensor
  int head;       // elements before the first whole vector
  int vectors;    // whole vectors
  int edges;      // elements outside of them

  //! [ex02b]
  __device__ Row(int64_t row, int cols) : begin(row * cols) {
    head = min(cols, static_cast<int>((kSize - begin % kSize) % kSize));
    vectors = (cols - head) / kSize;
    edges = cols - vectors * kSize;
  }
  // Columns: the first of whole vector v, and that of edge i.
  __device__ int vector(int v) const { return head + v * kSize; }
  __device__ int edge(int i) const { return i < head ? i : i + vectors * kSize; }
  //! [ex02b]
};

// Takes the numbers of a vector into the pair: their maximum first, then one rescale for all of them.
template <class Element>
__device__ __forceinline__ SoftmaxState take(SoftmaxState state, const Vector<Element>& vector) {
  float x[Vector<Element>::kSize];
  vector.to_floats(x);
  float max = state.max;
#pragma unroll
  for (const float value : x) max = fmaxf(max, value);
  float sum = state.sum * __expf(state.max - max);
#pragma unroll
  for (const float value : x) sum += __expf(value - max);
  return {max, sum};
}

template <class Element>
__global__ void softmax_kernel(const Element* __restrict__ gX,  // [rows, cols]
                               Element* __restrict__ gY,        // [rows, cols]
                               int cols) {
  auto& smem = dynamic_shared<SharedStorage>();
  const Row<Element> row(blockIdx.x, cols);
  const Element* __restrict__ x = gX + row.begin;
  Element* __restrict__ y = gY + row.begin;
  const int tid = threadIdx.x;

  // (1) first pass: maximum and sum together.
  SoftmaxState state;
  for (int v = tid; v < row.vectors; v += Config::kThreads)
    state = take(state, load(x + row.vector(v)));
  if (tid < row.edges) state = merge(state, {to_float(x[row.edge(tid)]), 1});
  state = block_merge(state, smem.partial);

  // (2) second pass: the quotients. A row of -inf only has seen nothing: its sum is 0.
  const float inverse_sum = state.sum != 0 ? 1 / state.sum : 0;
  for (int v = tid; v < row.vectors; v += Config::kThreads)
    store(y + row.vector(v), quotients(load(x + row.vector(v)), state.max, inverse_sum));
  if (tid < row.edges) y[row.edge(tid)] = quotient(x[row.edge(tid)], state.max, inverse_sum);
}

template <class Element>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  args.phase("softmax");
  return launch_kernel(softmax_kernel<Element>, dim3(static_cast<unsigned>(p.batch * p.heads * p.seqlen_q)),
                       dim3(Config::kThreads), sizeof(SharedStorage), args.stream, args.in<Element>("x"),
                       args.out<Element>("y"), static_cast<int>(p.seqlen_k));
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype,
                        [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v3_warp
