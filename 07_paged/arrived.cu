// What the steps of one launch need once: counters that are 0 at first.
#include "attn/kernel.h"
#include "splits.h"

namespace ATTN_BACKEND::arrived {
using namespace attn;

__global__ void clear_kernel(unsigned* gArrived, int count) {
  const int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (at < count) gArrived[at] = 0;
}

Status launch(const Arguments& args) {
  const int64_t count = splits::row_blocks(args.problem, splits::kMmaRows);
  return launch_kernel(clear_kernel, dim3(static_cast<unsigned>(ceil_div(count, 256))), dim3(256),
                       0, args.stream, args.out<unsigned>("arrived"), static_cast<int>(count));
}

}  // namespace ATTN_BACKEND::arrived
