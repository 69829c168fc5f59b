// Spin kernel. Built by nvcc only.
#include <cuda_runtime.h>

#include "device/device.h"

namespace attn {
namespace {

__device__ unsigned long long nanoseconds() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__global__ void spin_kernel(unsigned long long duration) {
  const unsigned long long begin = nanoseconds();
  while (nanoseconds() - begin < duration) {
  }
}

}  // namespace

Status spin(Stream stream, double seconds) {
  spin_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<unsigned long long>(seconds * 1e9));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status::success() : Status::device_error(cudaGetErrorString(error));
}

}  // namespace attn
