// v5_split_row: split rows, several blocks per row.
//
// parent    v3_warp
// change    Rows are cut into chunks of 64 KiB, and each of two kernels has one block per chunk. A
//           block of the first kernel stores the (m, l) state of its chunk. A block of the second
//           merges all states of the row and normalises its chunk.
// why       With one block per row, 8 rows keep 8 SMs busy. Flash-Decoding (chapter 05) splits the
//           keys of a query in the same way.
// expect    2 reads and 1 write at the speed of HBM, even for few rows if these are long. The
//           second kernel begins with the last chunk, which may still be in L2; then
//           dram__bytes_read.sum is less than 2 reads.
// supports  fp32, fp16, bf16; any number of rows and columns
#include "attn/kernel.h"
#include "kernels/vectors.h"

namespace ATTN_BACKEND::v5_split_row {
using namespace attn;
using namespace softmax_vectors;  // Vector, load, store, quotient: kernels/vectors.h

struct Config {
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kChunk = 4096;  // vectors per chunk: 64 KiB
  static constexpr int kUnroll = 4;  // vectors in flight per thread
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
__device__ SoftmaxState warp_merge(SoftmaxState value) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = merge(value, {__shfl_xor_sync(~0u, value.max, distance), __shfl_xor_sync(~0u, value.sum, distance)});
  return value;
}
// Merges the states of all threads: the lanes of each warp, then the warps.
__device__ SoftmaxState block_merge(SoftmaxState value, SoftmaxState* partial) {
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  value = warp_merge(value);
  if (lane_id == 0) partial[warp_id] = value;
  __syncthreads();  // the states of all warps are stored
  return warp_merge(lane_id < Config::kWarps ? partial[lane_id] : SoftmaxState{});
}

// A row as whole 16-byte vectors plus edges. Rows are contiguous, so a row may begin and end in the
// middle of an aligned vector that it shares with the adjacent row. These elements, the edges, are
// loaded and stored one by one.
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

// Adds the elements of a vector to the state. The max over all of them comes first, so the sum is
// rescaled once per vector.
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

// Calls body(column, vector) for this thread's whole vectors of a chunk, kUnroll loads at a time.
template <class Element, class Body>
__device__ __forceinline__ void for_each_vector(const Row<Element>& row, const Element* x, int chunk, Body body) {
  const int end = min((chunk + 1) * Config::kChunk, row.vectors);
  for (int v = chunk * Config::kChunk + threadIdx.x; v < end; v += Config::kUnroll * Config::kThreads) {
    Vector<Element> part[Config::kUnroll];
#pragma unroll
    for (int n = 0; n < Config::kUnroll; ++n)
      if (v + n * Config::kThreads < end) part[n] = load(x + row.vector(v + n * Config::kThreads));
#pragma unroll
    for (int n = 0; n < Config::kUnroll; ++n)
      if (v + n * Config::kThreads < end) body(row.vector(v + n * Config::kThreads), part[n]);
  }
}

// (1) State of a chunk. The block of a row's first chunk also processes the row's edges.
template <class Element>
__global__ void partial_kernel(const Element* gX,  // [rows, cols]
                               SoftmaxState* gPartial,   // [rows, chunks]
                               int cols, int chunks) {
  auto& smem = dynamic_shared<SharedStorage>();
  const int64_t row_id = blockIdx.x / chunks;
  const int chunk = blockIdx.x % chunks, tid = threadIdx.x;
  const Row<Element> row(row_id, cols);
  const Element* x = gX + row.begin;
  SoftmaxState state;
  for_each_vector(row, x, chunk,
                  [&](int, const Vector<Element>& part) { state = take(state, part); });
  if (chunk == 0 && tid < row.edges) state = merge(state, {to_float(x[row.edge(tid)]), 1});
  state = block_merge(state, smem.partial);
  if (tid == 0) gPartial[row_id * chunks + chunk] = state;
}

// (2) State of the row, from all its chunks; then y of one chunk. Blocks take the last chunk first.
template <class Element>
__global__ void quotients_kernel(const Element* gX,       // [rows, cols]
                                 const SoftmaxState* gPartial,  // [rows, chunks]
                                 Element* gY,             // [rows, cols]
                                 int cols, int chunks) {
  auto& smem = dynamic_shared<SharedStorage>();
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const int64_t row_id = block / chunks;
  const int chunk = block % chunks, tid = threadIdx.x;
  const Row<Element> row(row_id, cols);
  const Element* x = gX + row.begin;
  Element* y = gY + row.begin;
  SoftmaxState state;
  for (int c = tid; c < chunks; c += Config::kThreads)
    state = merge(state, gPartial[row_id * chunks + c]);
  state = block_merge(state, smem.partial);
  const float inverse_sum = state.sum != 0 ? 1 / state.sum : 0;
  for_each_vector(row, x, chunk, [&](int column, const Vector<Element>& part) {
    store(y + column, quotients(part, state.max, inverse_sum));
  });
  if (chunk == 0 && tid < row.edges)
    y[row.edge(tid)] = quotient(x[row.edge(tid)], state.max, inverse_sum);
}

template <class Element>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;  // rows: batch * heads * seqlen_q, columns: seqlen_k
  constexpr int kSize = Vector<Element>::kSize;
  const int chunks = static_cast<int>(ceil_div(p.seqlen_k, int64_t{kSize} * Config::kChunk));
  const dim3 grid(static_cast<unsigned>(p.batch * p.heads * p.seqlen_q * chunks));
  args.phase("partial");
  Status status =
      launch_kernel(partial_kernel<Element>, grid, dim3(Config::kThreads), sizeof(SharedStorage),
                    args.stream, args.in<Element>("x"), args.out<SoftmaxState>("partial"),
                    static_cast<int>(p.seqlen_k), chunks);
  if (!status.ok()) return status;
  args.phase("quotients");
  return launch_kernel(quotients_kernel<Element>, grid, dim3(Config::kThreads), sizeof(SharedStorage),
                       args.stream, args.in<Element>("x"), args.out<SoftmaxState>("partial"),
                       args.out<Element>("y"), static_cast<int>(p.seqlen_k), chunks);
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype,
                        [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v5_split_row
