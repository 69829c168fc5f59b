// v4_one_read: the row stays on the chip.
//
// parent    v3_warp
// idea      a group of threads, as few as the row needs, keeps the row in registers, and the rest of a very
//           long one in shared memory: each element is read once and written once, and nothing can need less.
// expect    1 read and 1 write: 3/2 faster than v3 for long rows. ncu: dram__bytes_read.sum
// supports  fp32, fp16, bf16; rows of up to 352 KiB (one block's registers and shared memory)
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "kernels/vectors.h"

namespace ATTN_BACKEND::v4_one_read {
using namespace attn;
using namespace softmax_vectors;

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

// Threads a row, and vectors of 16 bytes a thread in registers.
template <int kGroup_, int kVectors_>
struct Config {
  static constexpr int kGroup = kGroup_, kVectors = kVectors_;
  static constexpr int kThreads = kGroup > 128 ? kGroup : 128;
  static constexpr int kRows = kThreads / kGroup;  // rows a block
  static constexpr int kWarps = kThreads / 32;
  // Threads an SM: 1536 (40 registers each), or 1024 (64) where a thread holds many vectors.
  static constexpr int kBlocksPerSm = (kVectors < 4 ? 1536 : 1024) / kThreads;
  static_assert(kGroup <= 32 || kGroup % 32 == 0, "a row is part of a warp or whole warps");
};
template <class Config>
struct SharedStorage {
  SoftmaxState partial[Config::kWarps];  // one pair a warp
  ATTN_MEMBERS(SharedStorage, partial)
};
constexpr std::size_t kMaxShared = 224 * 1024;  // for vectors beyond the registers

// Merges the pairs of the threads of a row: lanes first, then warps.
template <class Config>
__device__ SoftmaxState group_merge(SoftmaxState value, SoftmaxState* partial) {
  constexpr int kLanes = Config::kGroup < 32 ? Config::kGroup : 32;
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    value = merge(value, {__shfl_xor_sync(~0u, value.max, distance), __shfl_xor_sync(~0u, value.sum, distance)});
  if constexpr (Config::kGroup > 32) {
    constexpr int kWarps = Config::kGroup / 32;  // of a row
    const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
    if (lane_id == 0) partial[warp_id] = value;
    __syncthreads();  // the pairs of all warps are there
    value = partial[warp_id / kWarps * kWarps + lane_id % kWarps];
    for (int distance = kWarps / 2; distance > 0; distance /= 2)
      value = merge(value, {__shfl_xor_sync(~0u, value.max, distance), __shfl_xor_sync(~0u, value.sum, distance)});
  }
  return value;
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

  __device__ Row(int64_t row, int cols) : begin(row * cols) {
    head = min(cols, static_cast<int>((kSize - begin % kSize) % kSize));
    vectors = (cols - head) / kSize;
    edges = cols - vectors * kSize;
  }
  // Columns: the first of whole vector v, and that of edge i.
  __device__ int vector(int v) const { return head + v * kSize; }
  __device__ int edge(int i) const { return i < head ? i : i + vectors * kSize; }
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

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    softmax_kernel(const Element* gX,  // [rows, cols]
                   Element* gY,        // [rows, cols]
                   int64_t rows, int cols) {
  constexpr int kGroup = Config::kGroup, kVectors = Config::kVectors;
  constexpr int kEdges = ceil_div(Row<Element>::kMaxEdges, kGroup);
  auto& smem = dynamic_shared<SharedStorage<Config>>();
  // Vectors of the row beyond the registers, each read and written by one thread alone: no barrier.
  auto* sX = reinterpret_cast<Vector<Element>*>(&smem + 1);  // [row.vectors - kGroup * kVectors]
  const int member = threadIdx.x % kGroup;
  const int64_t row_id = int64_t{blockIdx.x} * Config::kRows + threadIdx.x / kGroup;
  // A group beyond the last row reads that row too: it has to take part in the shuffles.
  const Row<Element> row(row_id < rows ? row_id : rows - 1, cols);
  const Element* x = gX + row.begin;
  Element* y = gY + row.begin;

  // (1) the only read: all loads are in flight before the first number is used.
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

  // (2) maximum and sum together.
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

  // (3) the only write. A row of -inf only has seen nothing: its sum is 0.
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
  const Problem& p = args.problem;
  const int64_t rows = p.batch * p.heads * p.seqlen_q;
  const int beyond = vectors - Config::kGroup * Config::kVectors;  // to shared memory
  const std::size_t shared = sizeof(SharedStorage<Config>) + (beyond > 0 ? std::size_t(beyond) * 16 : 0);
  args.phase("softmax");
  return launch_kernel(softmax_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(ceil_div(rows, Config::kRows))), dim3(Config::kThreads),
                       shared, args.stream, args.in<Element>("x"), args.out<Element>("y"), rows,
                       static_cast<int>(p.seqlen_k));
}

// The smallest group that holds a row of so many vectors; the longest rows go partly to shared memory.
//! [groups]
template <class Element>
Status launch(const Arguments& args) {
  constexpr int kSize = Vector<Element>::kSize;
  const int n = static_cast<int>(args.problem.seqlen_k / kSize);  // whole vectors, at most
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
