// v3_warp: warp-shuffle merge and 16-byte loads.
//
// parent    v2_online
// change    Five rounds of shuffles merge the states of a warp, and one exchange through shared
//           memory merges the warps. A load fetches 16 bytes; its 8 (fp32: 4) elements share one
//           rescale.
// why       The merge is associative and commutative, so any tree is correct. 2-byte loads need 8
//           times as many instructions for the same bytes.
// expect    Fewer load instructions, fewer stalls on barriers, the same bytes. ncu:
//           l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum
// supports  fp32, fp16, bf16; any number of rows and columns
#include "attn/kernel.h"
#include "kernels/vectors.h"

namespace ATTN_BACKEND::v3_warp {
using namespace attn;
using namespace softmax_vectors;  // Vector, load, store, quotient: kernels/vectors.h

struct Config {
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
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
  ATTN_MEMBERS(SharedStorage, partial)
};

// Merges the states of the 32 lanes; all lanes get the result.
//! [merge]
__device__ SoftmaxState warp_merge(SoftmaxState value) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = merge(value, {__shfl_xor_sync(~0u, value.max, distance), __shfl_xor_sync(~0u, value.sum, distance)});
  return value;
}
//! [merge]
// Merges the states of all threads: the lanes of each warp, then the warps.
__device__ SoftmaxState block_merge(SoftmaxState value, SoftmaxState* partial) {
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  value = warp_merge(value);
  if (lane_id == 0) partial[warp_id] = value;
  __syncthreads();  // the states of all warps are stored
  return warp_merge(lane_id < Config::kWarps ? partial[lane_id] : SoftmaxState{});
}

// A row as aligned 16-byte vectors plus edges. A row may start and end inside a vector that it
// shares with the adjacent row. The elements before its first and after its last whole vector, its
// edges, are loaded and stored one by one.
template <class Element>
struct Row {
  static constexpr int kSize = Vector<Element>::kSize;
  static constexpr int kMaxEdges = 2 * (kSize - 1);
  int64_t begin;  // index of the row's first element in the tensor
  int head;       // elements before the first whole vector
  int vectors;    // whole vectors
  int edges;  // elements outside whole vectors

  //! [ex02b]
  __device__ Row(int64_t row, int cols) : begin(row * cols) {
    head = min(cols, static_cast<int>((kSize - begin % kSize) % kSize));
    vectors = (cols - head) / kSize;
    edges = cols - vectors * kSize;
  }
  // First column of vector v; column of edge i.
  __device__ int vector(int v) const { return head + v * kSize; }
  __device__ int edge(int i) const { return i < head ? i : i + vectors * kSize; }
  //! [ex02b]
};

// Adds the elements of a vector to the state: their max first, then one rescale for all.
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

  // (1) first pass: max and sum.
  SoftmaxState state;
  for (int v = tid; v < row.vectors; v += Config::kThreads)
    state = take(state, load(x + row.vector(v)));
  if (tid < row.edges) state = merge(state, {to_float(x[row.edge(tid)]), 1});
  state = block_merge(state, smem.partial);

  // (2) second pass: normalisation. A row of only -inf has sum 0 and becomes 0.
  const float inverse_sum = state.sum != 0 ? 1 / state.sum : 0;
  for (int v = tid; v < row.vectors; v += Config::kThreads)
    store(y + row.vector(v), quotients(load(x + row.vector(v)), state.max, inverse_sum));
  if (tid < row.edges) y[row.edge(tid)] = quotient(x[row.edge(tid)], state.max, inverse_sum);
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

}  // namespace ATTN_BACKEND::v3_warp
