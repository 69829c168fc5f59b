// What the steps of one launch need once: counters that are 0 at first.
#include "attn/kernel.h"
#include "mixed_plan.h"
#include "splits.h"

namespace ATTN_BACKEND::arrived {
using namespace attn;

__global__ void clear_kernel(unsigned* gArrived, int count) {
  const int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (at < count) gArrived[at] = 0;
}

Status clear(const Arguments& args, const char* counters, int64_t count) {
  return launch_kernel(clear_kernel, dim3(static_cast<unsigned>(ceil_div(count, 256))), dim3(256),
                       0, args.stream, args.out<unsigned>(counters), static_cast<int>(count));
}
Status launch(const Arguments& args) {
  return clear(args, "arrived", splits::row_blocks(args.problem, splits::kMmaRows));
}
// Of v11_mixed.
Status mixed(const Arguments& args) {
  const Status status = clear(args, "tickets", plans::kTickets);
  return status.ok() ? clear(args, "arrived", plans::mixed_bounds(args.problem).row_blocks + 1)
                     : status;
}

}  // namespace ATTN_BACKEND::arrived
