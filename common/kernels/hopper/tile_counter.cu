// Clears the tile counter of a dynamic scheduler, once, before the first launch.
#include "attn/kernel.h"

namespace ATTN_BACKEND::tile_counter {
using namespace attn;

__global__ void clear_kernel(unsigned* gCounter) { *gCounter = 0; }

Status launch(const Arguments& args) {
  return launch_kernel(clear_kernel, dim3(1), dim3(1), 0, args.stream,
                       args.out<unsigned>("tile_counter"));
}

}  // namespace ATTN_BACKEND::tile_counter
