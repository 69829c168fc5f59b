// Kernels for the parts of CUDA C++ that the emulator implements: shuffles, votes, atomics, shared
// memory, blocks and grids of any shape.
#include <utility>

#include "attn/kernel.h"
#include "tests/kernels.h"

namespace ATTN_BACKEND::tests {
using namespace attn;
using namespace attn::tests;

dim3 dim3_of(const unsigned (&n)[3]) { return dim3(n[0], n[1], n[2]); }

template <int n, class T>
__device__ T shuffle_one(T value) {
  constexpr Shuffle s = kShuffles[n];
  if constexpr (s.kind == kXor) return __shfl_xor_sync(~0u, value, s.argument, s.width);
  if constexpr (s.kind == kUp) return __shfl_up_sync(~0u, value, s.argument, s.width);
  if constexpr (s.kind == kDown) return __shfl_down_sync(~0u, value, s.argument, s.width);
  if constexpr (s.kind == kIndex) return __shfl_sync(~0u, value, s.argument, s.width);
}
template <int... n>
__device__ void shuffle_all(std::integer_sequence<int, n...>, int value, int* out) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  ((out[n * threads + thread] = shuffle_one<n>(value)), ...);
}

// out [kNumShuffles + 3][threads]: every shuffle of kShuffles; then one of floats, one by only 8
// lanes of the warp, and one with a different source per lane.
__global__ void shuffles_kernel(int* out) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int value = shuffled_value(thread);
  shuffle_all(std::make_integer_sequence<int, kNumShuffles>{}, value, out);
  int* more = out + kNumShuffles * threads + thread;
  const float halves = __shfl_xor_sync(~0u, 0.5f * static_cast<float>(value), 2);
  more[0] = static_cast<int>(2 * halves);
  int some = -1;
  if (thread % 32 < 8) some = __shfl_xor_sync(0xFFu, value, 4);
  more[threads] = some;
  more[2 * threads] = __shfl_sync(~0u, value, (thread * 5) % 32);
}
Status shuffles(const KernelArguments& args) {
  return launch_kernel(shuffles_kernel, dim3(1), dim3_of(args.block), 0, nullptr,
                       static_cast<int*>(args.out));
}

// out [kNumVotes][threads]
__global__ void votes_kernel(unsigned* out) {
  const unsigned thread = threadIdx.x, threads = blockDim.x, lane_id = thread % 32;
  const unsigned results[kNumVotes] = {
      __ballot_sync(~0u, thread % 3 == 0),
      __ballot_sync(~0u, 0),
      static_cast<unsigned>(__any_sync(~0u, thread == 33)),
      static_cast<unsigned>(__any_sync(~0u, 0)),
      static_cast<unsigned>(__all_sync(~0u, thread != 33)),
      static_cast<unsigned>(__all_sync(~0u, 4)),  // any nonzero value is true
      lane_id < 4 ? __ballot_sync(0xFu, lane_id != 2) : 0u,
      static_cast<unsigned>(__popc(__ballot_sync(~0u, 1)))};
  for (unsigned n = 0; n < kNumVotes; ++n) out[n * threads + thread] = results[n];
}
Status votes(const KernelArguments& args) {
  return launch_kernel(votes_kernel, dim3(1), dim3_of(args.block), 0, nullptr,
                       static_cast<unsigned*>(args.out));
}

// Adds up thread indices: out[0] over all threads of the grid, out[1] the number of threads by a
// counter in shared memory, out[2] the largest index, out[3] the smallest, out[4 + b] the old
// values of the adds of block b.
__global__ void count_kernel(int* out) {
  __shared__ int in_block;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) in_block = 0;
  __syncthreads();
  atomicAdd(&out[0], thread);
  atomicMax(&out[2], thread + static_cast<int>(1000 * blockIdx.x));
  atomicMin(&out[3], thread - static_cast<int>(1000 * blockIdx.x));
  const int before = atomicAdd(&in_block, 1);
  atomicAdd(&out[4 + blockIdx.x], before);
  __syncthreads();
  if (thread == 0) atomicAdd(&out[1], in_block);
}
Status count_threads(const KernelArguments& args) {
  return launch_kernel(count_kernel, dim3_of(args.grid), dim3_of(args.block), 0, nullptr,
                       static_cast<int*>(args.out));
}

// out [blocks][threads]: the part of each block reversed, through static shared memory.
__global__ void reverse_static_kernel(const int* in, int* out) {
  __shared__ int tile[kMaxThreads];
  tile[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
Status reverse_static(const KernelArguments& args) {
  return launch_kernel(reverse_static_kernel, dim3_of(args.grid), dim3_of(args.block), 0, nullptr,
                       static_cast<const int*>(args.a), static_cast<int*>(args.out));
}

// The same through dynamic shared memory, at an offset of `padding` ints: over 48 KiB if requested.
__global__ void reverse_dynamic_kernel(const int* in, int* out, int padding) {
  int* tile = &dynamic_shared<int>() + padding;
  tile[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
Status reverse_dynamic(const KernelArguments& args) {
  const std::size_t ints = static_cast<std::size_t>(args.mode) + args.block[0];
  return launch_kernel(reverse_dynamic_kernel, dim3_of(args.grid), dim3_of(args.block),
                       ints * sizeof(int), nullptr, static_cast<const int*>(args.a),
                       static_cast<int*>(args.out), args.mode);
}

// out [grid.z][grid.y][grid.x][block.z][block.y][block.x]: the six indices as the digits of a
// decimal number.
__global__ void record_kernel(unsigned* out) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  __syncthreads();
  unsigned code = 0;
  for (const unsigned i :
       {blockIdx.z, blockIdx.y, blockIdx.x, threadIdx.z, threadIdx.y, threadIdx.x})
    code = code * 10 + i;
  out[block * threads + thread] = code;
}
Status record_indices(const KernelArguments& args) {
  return launch_kernel(record_kernel, dim3_of(args.grid), dim3_of(args.block), 0, nullptr,
                       static_cast<unsigned*>(args.out));
}

}  // namespace ATTN_BACKEND::tests
