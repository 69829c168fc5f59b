// Compares two device buffers. Built by nvcc only.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/device.h"

namespace attn {
namespace {

__global__ void same_bytes_kernel(const unsigned char* a, const unsigned char* b, int64_t bytes,
                                  int* differs) {
  const int64_t words = bytes / 4, step = int64_t{gridDim.x} * blockDim.x;
  const int64_t own = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const auto *wa = reinterpret_cast<const unsigned*>(a), *wb = reinterpret_cast<const unsigned*>(b);
  bool other = false;
  for (int64_t i = own; i < words; i += step) other |= wa[i] != wb[i];
  for (int64_t i = 4 * words + own; i < bytes; i += step) other |= a[i] != b[i];
  if (other) *differs = 1;
}

}  // namespace

bool same_bytes_on_gpu(const void* a, const void* b, int64_t bytes) {
  int *differs = nullptr, result = 0;
  cudaError_t error = cudaMalloc(&differs, sizeof(int));
  if (error == cudaSuccess) error = cudaMemset(differs, 0, sizeof(int));
  if (error == cudaSuccess) {
    const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(bytes / 4096, 1, 1024));
    same_bytes_kernel<<<blocks, 256>>>(static_cast<const unsigned char*>(a),
                                       static_cast<const unsigned char*>(b), bytes, differs);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess)
    error = cudaMemcpy(&result, differs, sizeof(int), cudaMemcpyDeviceToHost);
  cudaFree(differs);
  if (error != cudaSuccess) throw DeviceError(cudaGetErrorString(error));
  return result == 0;
}

}  // namespace attn
