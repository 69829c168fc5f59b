// A kernel that writes one element past a buffer, under AddressSanitizer: the report must name this
// file and the line that #line assigns to the store (see CMakeLists.txt).
#include <cstdio>

#define ATTN_EMULATED
#include "device/device.h"
#include "attn/kernel.h"

namespace {

__global__ void write_elements(float* out, int count) {
  const int i = static_cast<int>(threadIdx.x);
#line 1000
  if (i <= count) out[i] = 1;
}

}  // namespace

int main() {
  attn::DeviceBuffer buffer(attn::Backend::emulated, "o", 40 * sizeof(float));
  const attn::Status status = attn::launch_kernel(write_elements, dim3(1), dim3(64), 0, nullptr,
                                                  static_cast<float*>(buffer.data()), 40);
  std::printf("nothing found: %s\n", status.message.c_str());
  return 0;
}
