/// \file
/// Launches with attributes: clusters, and programmatic dependent launches (sm_90). CUDA C++
/// Programming Guide, "Thread Block Clusters", "Programmatic Dependent Launch and Synchronization".
#pragma once

#include <cstddef>
#include <string>

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// `cluster`: blocks of a cluster along x, a divisor of the grid's, at most 8 (ptx/cluster.h).
/// `dependent`: the kernel may begin before the launch before it in the stream has ended
/// (ptx/grid_dependency.h).
struct LaunchAttributes {
  unsigned cluster = 1;
  bool dependent = false;
};

/// As launch_kernel without attributes (attn/kernel.h).
template <class... Parameters, class... Values>
[[nodiscard]] Status launch_kernel(LaunchAttributes attributes, void (*kernel)(Parameters...),
                                   dim3 grid, dim3 block, std::size_t shared_bytes,
                                   [[maybe_unused]] Stream stream, Values... arguments) {
#ifdef ATTN_EMULATED
  try {
    attn::emulator::run_grid(
        grid, block, shared_bytes,
        {[&] { kernel(Parameters(arguments)...); }, reinterpret_cast<const void*>(kernel),
         ATTN_INSTRUMENTED, attributes.cluster, attributes.dependent});
  } catch (const attn::emulator::KernelError& e) {
    return Status::kernel_error(e.what());
  }
#else
#ifdef ATTN_RECORD_TIMELINE
  static_assert(sizeof...(Parameters) > 1000, "launches with attributes cannot be recorded");
#endif
  cudaError_t error = cudaSuccess;
  if (shared_bytes > 48 * 1024)  // more than 48 KiB must be requested
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
  cudaLaunchAttribute given[2];
  given[0].id = cudaLaunchAttributeClusterDimension;
  given[0].val.clusterDim.x = attributes.cluster;
  given[0].val.clusterDim.y = given[0].val.clusterDim.z = 1;
  given[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  given[1].val.programmaticStreamSerializationAllowed = attributes.dependent;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = given, config.numAttrs = 2;
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  if (error != cudaSuccess)
    return Status::device_error(std::string(cudaGetErrorName(error)) + ": " +
                                cudaGetErrorString(error));
#endif
  return Status::success();
}

}  // namespace ATTN_BACKEND
}  // namespace attn
