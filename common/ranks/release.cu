// A kernel that holds back a stream until the host releases all GPUs together.
#include <cuda_runtime.h>

#include "ranks/release.h"

namespace attn::ranks {
namespace {

// Ends by itself after 20 s, and says so: a host that dies must not leave a GPU that spins.
__global__ void hold_kernel(volatile unsigned* flag, unsigned round) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (static_cast<int>(*flag - round) < 0 && now - begin < 20'000'000'000ull);
  if (static_cast<int>(*flag - round) < 0) flag[1] = round;
}

}  // namespace

Status hold(Stream stream, unsigned* flag, unsigned round) {
  hold_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(flag, round);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status::success() : Status::device_error(cudaGetErrorString(error));
}

}  // namespace attn::ranks
