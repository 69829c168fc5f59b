#include "api/memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#if ATTN_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace gpu::api {
[[gnu::weak]] attn::Status copy(void*, const void*, const attn::api::Strided&, int, attn::Stream);
}
namespace emulated::api {
attn::Status copy(void*, const void*, const attn::api::Strided&, int, attn::Stream);
}

namespace attn::api {

int current_gpu() {
#if ATTN_HAVE_CUDA
  int ordinal = -1;
  if (cudaGetDevice(&ordinal) == cudaSuccess) return ordinal;
  (void)cudaGetLastError();
#endif
  return -1;
}

Status upload(Device device, void* to, const void* from, std::size_t bytes,
              [[maybe_unused]] Stream stream) {
  if (device.backend == Backend::emulated) {
    std::memcpy(to, from, bytes);
    return Status::success();
  }
#if ATTN_HAVE_CUDA
  // From pageable memory the call returns when the bytes are staged.
  const cudaError_t error =
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return Status::success();
  return Status::device_error(std::string("copying the schedule: ") + cudaGetErrorName(error));
#else
  return Status::device_error("built without CUDA");
#endif
}

Status allocate(Backend backend, std::size_t bytes, void** memory) {
  constexpr std::size_t kAlignment = 256;
  const std::size_t rounded =
      (std::max<std::size_t>(bytes, 1) + kAlignment - 1) & ~(kAlignment - 1);
  if (backend == Backend::emulated) {
    *memory = rounded >= bytes ? std::aligned_alloc(kAlignment, rounded) : nullptr;
    return *memory ? Status::success() : Status::device_error("the host has no memory left");
  }
#if ATTN_HAVE_CUDA
  const cudaError_t error = cudaMalloc(memory, rounded);
  if (error == cudaSuccess) return Status::success();
  return Status::device_error("allocating " + std::to_string(bytes) +
                              " bytes: " + cudaGetErrorName(error));
#else
  return Status::device_error("built without CUDA");
#endif
}

void release(Backend backend, void* memory) {
  if (backend == Backend::emulated) return std::free(memory);
#if ATTN_HAVE_CUDA
  (void)cudaFree(memory);
#endif
}

Status record([[maybe_unused]] Stream stream, [[maybe_unused]] void** mark) {
#if ATTN_HAVE_CUDA
  cudaEvent_t event = nullptr;
  cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (error == cudaSuccess) error = cudaEventRecord(event, static_cast<cudaStream_t>(stream));
  *mark = event;
  if (error == cudaSuccess) return Status::success();
  return Status::device_error(std::string("marking a stream: ") + cudaGetErrorName(error));
#else
  return Status::device_error("built without CUDA");
#endif
}

bool done([[maybe_unused]] void* mark) {
#if ATTN_HAVE_CUDA
  const auto event = static_cast<cudaEvent_t>(mark);
  if (cudaEventQuery(event) == cudaErrorNotReady) return false;
  (void)cudaEventDestroy(event);
#endif
  return true;
}

Status stream_wait([[maybe_unused]] Stream stream, [[maybe_unused]] Stream other) {
#if ATTN_HAVE_CUDA
  cudaEvent_t event = nullptr;
  cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (error == cudaSuccess) error = cudaEventRecord(event, static_cast<cudaStream_t>(other));
  if (error == cudaSuccess)
    error = cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event, 0);
  if (event) (void)cudaEventDestroy(event);
  if (error == cudaSuccess) return Status::success();
  return Status::device_error(std::string("ordering two streams: ") + cudaGetErrorName(error));
#else
  return Status::device_error("built without CUDA");
#endif
}

Status copy_strided(Device device, void* to, const void* from, const Strided& strided, int unit,
                    Stream stream) {
  if (device.backend == Backend::emulated)
    return emulated::api::copy(to, from, strided, unit, stream);
  if (!gpu::api::copy) return Status::device_error("built without CUDA");
  return gpu::api::copy(to, from, strided, unit, stream);
}

}  // namespace attn::api
