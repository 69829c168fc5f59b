// v4_one_read: the row stays on chip, so HBM is read once.
//
// parent    v3_warp
// change    A group of threads, as few as the row needs, keeps the row in registers. Of a very long
//           row cp.async copies the rest to shared memory, where it stays.
// why       The second pass of v3 fetches the row again. One read and one write are the minimum.
// expect    1 read and 1 write: 3/2 times as fast as v3 on long rows. ncu: dram__bytes_read.sum
// supports  fp32, fp16, bf16; rows of up to 352 KiB (registers and shared memory of one block)
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "kernels/vectors.h"

namespace ATTN_BACKEND::v4_one_read {
using namespace attn;
using namespace softmax_vectors;  // Vector, load, store, quotient: kernels/vectors.h

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

// kGroup: threads per row. kVectors: 16-byte vectors per thread in registers.
template <int kGroup_, int kVectors_>
struct Config {
  static constexpr int kGroup = kGroup_, kVectors = kVectors_;
  static constexpr int kThreads = kGroup > 128 ? kGroup : 128;
  static constexpr int kRows = kThreads / kGroup;  // rows per block
  static constexpr int kWarps = kThreads / 32;
  // 1536 threads per SM (40 registers each), or 1024 (64 registers) if a thread holds many vectors.
  static constexpr int kBlocksPerSm = (kVectors < 4 ? 1536 : 1024) / kThreads;
  static_assert(kGroup <= 32 || kGroup % 32 == 0, "a row is part of a warp or whole warps");
};
template <class Config>
struct SharedStorage {
  SoftmaxState partial[Config::kWarps];  // one state per warp
  ATTN_MEMBERS(SharedStorage, partial)
};
constexpr std::size_t kMaxShared = 224 * 1024;  // for vectors that exceed the registers

// Merges the states of the threads of a row: lanes, then warps.
template <class Config>
__device__ SoftmaxState group_merge(SoftmaxState value, SoftmaxState* partial) {
  constexpr int kLanes = Config::kGroup < 32 ? Config::kGroup : 32;
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    value = merge(value, {__shfl_xor_sync(~0u, value.max, distance), __shfl_xor_sync(~0u, value.sum, distance)});
  if constexpr (Config::kGroup > 32) {
    constexpr int kWarps = Config::kGroup / 32;  // warps per row; Config::kWarps: per block
    const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
    if (lane_id == 0) partial[warp_id] = value;
    __syncthreads();  // the states of all warps are stored
    value = partial[warp_id / kWarps * kWarps + lane_id % kWarps];
    for (int distance = kWarps / 2; distance > 0; distance /= 2)
      value = merge(value, {__shfl_xor_sync(~0u, value.max, distance), __shfl_xor_sync(~0u, value.sum, distance)});
  }
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

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    softmax_kernel(const Element* gX,  // [rows, cols]
                   Element* gY,        // [rows, cols]
                   int64_t rows, int cols) {
  constexpr int kGroup = Config::kGroup, kVectors = Config::kVectors;
  constexpr int kEdges = ceil_div(Row<Element>::kMaxEdges, kGroup);
  auto& smem = dynamic_shared<SharedStorage<Config>>();
  // Vectors that exceed the registers. The thread that copies one also reads it: no barrier.
  auto* sX = reinterpret_cast<Vector<Element>*>(&smem + 1);  // [row.vectors - kGroup * kVectors]
  const int member = threadIdx.x % kGroup;
  const int64_t row_id = int64_t{blockIdx.x} * Config::kRows + threadIdx.x / kGroup;
  // A group past the last row processes that row again: it must take part in the shuffles.
  const Row<Element> row(row_id < rows ? row_id : rows - 1, cols);
  const Element* x = gX + row.begin;
  Element* y = gY + row.begin;

  // (1) the only read. All loads are issued before the first element is used.
  Vector<Element> rX[kVectors] = {};
#pragma unroll
  for (int n = 0; n < kVectors; ++n)
    if (const int v = member + n * kGroup; v < row.vectors) rX[n] = load(x + row.vector(v));
  Element rEdge[kEdges] = {};
#pragma unroll
  for (int n = 0; n < kEdges; ++n)
    if (const int i = member + n * kGroup; i < row.edges) rEdge[n] = x[row.edge(i)];
  for (int v = member + kVectors * kGroup; v < row.vectors; v += kGroup)
    cp_async_16(&sX[v - kVectors * kGroup], x + row.vector(v));
  cp_async_commit();

  // (2) max and sum.
  SoftmaxState state;
#pragma unroll
  for (int n = 0; n < kVectors; ++n)
    if (member + n * kGroup < row.vectors) state = take(state, rX[n]);
#pragma unroll
  for (int n = 0; n < kEdges; ++n)
    if (member + n * kGroup < row.edges) state = merge(state, {to_float(rEdge[n]), 1});
  cp_async_wait<0>();
  for (int v = member + kVectors * kGroup; v < row.vectors; v += kGroup)
    state = take(state, sX[v - kVectors * kGroup]);
  state = group_merge<Config>(state, smem.partial);
  if (row_id >= rows) return;

  // (3) the only write: normalisation. A row of only -inf has sum 0 and becomes 0.
  const float inverse_sum = state.sum != 0 ? 1 / state.sum : 0;
#pragma unroll
  for (int n = 0; n < kVectors; ++n)
    if (const int v = member + n * kGroup; v < row.vectors)
      store(y + row.vector(v), quotients(rX[n], state.max, inverse_sum));
#pragma unroll
  for (int n = 0; n < kEdges; ++n)
    if (const int i = member + n * kGroup; i < row.edges)
      y[row.edge(i)] = quotient(rEdge[n], state.max, inverse_sum);
  for (int v = member + kVectors * kGroup; v < row.vectors; v += kGroup)
    store(y + row.vector(v), quotients(sX[v - kVectors * kGroup], state.max, inverse_sum));
}

template <class Element, class Config>
Status launch(const Arguments& args, int vectors) {
  const Problem& p = args.problem;  // rows: batch * heads * seqlen_q, columns: seqlen_k
  const int64_t rows = p.batch * p.heads * p.seqlen_q;
  const int beyond = vectors - Config::kGroup * Config::kVectors;  // vectors in shared memory
  const std::size_t shared = sizeof(SharedStorage<Config>) + (beyond > 0 ? std::size_t(beyond) * 16 : 0);
  args.phase("softmax");
  return launch_kernel(softmax_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(ceil_div(rows, Config::kRows))), dim3(Config::kThreads),
                       shared, args.stream, args.in<Element>("x"), args.out<Element>("y"), rows,
                       static_cast<int>(p.seqlen_k));
}

// Dispatches to the smallest group that holds the row. The longest rows also use shared memory.
//! [groups]
template <class Element>
Status launch(const Arguments& args) {
  constexpr int kSize = Vector<Element>::kSize;
  const int n = static_cast<int>(args.problem.seqlen_k / kSize);  // upper bound on whole vectors
  if (n <= 4) return launch<Element, Config<4, 1>>(args, n);
  if (n <= 8) return launch<Element, Config<4, 2>>(args, n);
  if (n <= 16) return launch<Element, Config<4, 4>>(args, n);
  if (n <= 32) return launch<Element, Config<8, 4>>(args, n);
  if (n <= 64) return launch<Element, Config<16, 4>>(args, n);
  if (n <= 128) return launch<Element, Config<16, 8>>(args, n);
  if (n <= 256) return launch<Element, Config<32, 8>>(args, n);
  if (n <= 512) return launch<Element, Config<64, 8>>(args, n);
  if (n <= 1024) return launch<Element, Config<128, 8>>(args, n);
  if (n <= 2048) return launch<Element, Config<256, 8>>(args, n);
  if (n <= 8192) return launch<Element, Config<512, 8>>(args, n);
  if (n <= 8192 + static_cast<int>(kMaxShared) / 16) return launch<Element, Config<1024, 8>>(args, n);
  return Status::unsupported("a row of more than 352 KiB does not fit on one SM");
}
//! [groups]

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype,
                        [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v4_one_read
