// Kernel that clears arrival counters.
#pragma once

#include "attn/kernel.h"

namespace ATTN_BACKEND::arrived {
using namespace attn;

__global__ static void clear_kernel(unsigned* gCounters, int count) {
  const int idx = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (idx < count) gCounters[idx] = 0;
}
inline Status clear(const Arguments& args, const char* counters, int64_t count) {
  return launch_kernel(clear_kernel, dim3(static_cast<unsigned>(ceil_div(count, 256))), dim3(256),
                       0, args.stream, args.out<unsigned>(counters), static_cast<int>(count));
}

}  // namespace ATTN_BACKEND::arrived
