// v6_softmax_topk: fused softmax and top-k.
//
// parent    v3_warp
// change    In the same pass as the softmax state, each warp keeps a sorted list of the k largest
//           elements, one per lane. Only k probabilities are computed and written.
// why       exp is monotonic, so the largest scores are the largest probabilities. Sampling needs
//           neither the other probabilities nor a sort.
// expect    1 read per element, not the 5 accesses of a three-pass softmax (3 reads, 1 write)
//           and a search (1 read).
// supports  fp32, fp16, bf16; any number of rows and columns; --top-k up to 32
// source    Milakov and Gimelshein 2018 (arXiv 1805.02867), section 4 and algorithm 4
#include "attn/kernel.h"
#include "kernels/entry.h"
#include "kernels/vectors.h"

namespace ATTN_BACKEND::v6_softmax_topk {
using namespace attn;
using namespace softmax_vectors;  // Vector, load: kernels/vectors.h

struct Config {
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kMaxK = 32;  // one per lane
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
  Entry best[Config::kWarps][Config::kMaxK];  // one list per warp
  ATTN_MEMBERS(SharedStorage, partial, best)
};

// Merges the states of the 32 lanes; all lanes get the result.
__device__ SoftmaxState warp_merge(SoftmaxState value) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = merge(value, {__shfl_xor_sync(~0u, value.max, distance), __shfl_xor_sync(~0u, value.sum, distance)});
  return value;
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

  __device__ Row(int64_t row, int cols) : begin(row * cols) {
    head = min(cols, static_cast<int>((kSize - begin % kSize) % kSize));
    vectors = (cols - head) / kSize;
    edges = cols - vectors * kSize;
  }
  // First column of vector v; column of edge i.
  __device__ int vector(int v) const { return head + v * kSize; }
  __device__ int edge(int i) const { return i < head ? i : i + vectors * kSize; }
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
__global__ void softmax_topk_kernel(const Element* gX,  // [rows, cols]
                                    Element* gValues,   // [rows, k]
                                    int* gIndices,      // [rows, k]
                                    int cols, int k) {
  auto& smem = dynamic_shared<SharedStorage>();
  const Row<Element> row(blockIdx.x, cols);
  const Element* __restrict__ x = gX + row.begin;
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;

  // (1) one pass: the state and the list of each warp.
  SoftmaxState state;
  Entry best;  // this lane's entry of the warp's list; {-inf, -1}: empty
  // Warp-uniform trip count: insert() is a warp-wide operation.
  for (int v0 = warp_id * 32; v0 < row.vectors; v0 += Config::kThreads) {
    const int v = v0 + lane_id;
    float largest = -INFINITY;
    float part[Vector<Element>::kSize];
    if (v < row.vectors) {
      const Vector<Element> vector = load(x + row.vector(v));
      state = take(state, vector);
      vector.to_floats(part);
#pragma unroll
      for (const float value : part) largest = fmaxf(largest, value);
    }
    // Fast path: no element of these 32 vectors enters the list. Ties pass: insert() decides them.
    const float worst = __shfl_sync(~0u, best.value, k - 1);
    if (!__any_sync(~0u, largest > -INFINITY && largest >= worst)) continue;
#pragma unroll
    for (int i = 0; i < Vector<Element>::kSize; ++i)
      insert(best, v < row.vectors ? Entry{part[i], row.vector(v) + i} : Entry{}, k);
  }
  if (warp_id == 0) {  // the edges, at most one per lane
    Entry candidate;
    if (lane_id < row.edges) candidate = {to_float(x[row.edge(lane_id)]), row.edge(lane_id)};
    insert(best, candidate, k);
    if (lane_id < row.edges) state = merge(state, {candidate.value, 1});
  }
  state = warp_merge(state);
  if (lane_id == 0) smem.partial[warp_id] = state;
  smem.best[warp_id][lane_id] = best;
  __syncthreads();  // states and lists of all warps are stored
  if (warp_id > 0) return;

  // (2) warp 0 merges states and lists.
  state = warp_merge(lane_id < Config::kWarps ? smem.partial[lane_id] : SoftmaxState{});
  for (int w = 1; w < Config::kWarps; ++w) insert(best, lane_id < k ? smem.best[w][lane_id] : Entry{}, k);

  // (3) k probabilities; an empty list entry (column -1), as in a row of only -inf, gets 0.
  if (lane_id < k) {
    const float probability = best.column < 0 ? 0 : __expf(best.value - state.max) / state.sum;
    gValues[int64_t{blockIdx.x} * k + lane_id] = from_float<Element>(probability);
    gIndices[int64_t{blockIdx.x} * k + lane_id] = best.column;
  }
}

template <class Element>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;  // rows: batch * heads * seqlen_q, columns: seqlen_k
  args.phase("softmax");
  return launch_kernel(softmax_topk_kernel<Element>,
                       dim3(static_cast<unsigned>(p.batch * p.heads * p.seqlen_q)), dim3(Config::kThreads),
                       sizeof(SharedStorage), args.stream, args.in<Element>("x"), args.out<Element>("values"),
                       args.out<int>("indices"), static_cast<int>(p.seqlen_k), static_cast<int>(p.top_k));
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype,
                        [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v6_softmax_topk
