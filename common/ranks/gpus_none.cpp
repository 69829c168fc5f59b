// Without CUDA.
#include "ranks/gpus.h"

namespace attn::ranks {

Status run_on_gpus(const std::vector<int>&, Transport, const Program&,
                   const std::function<void(Rank&)>&, double, const Process&) {
  return Status::device_error("built without CUDA");
}
void copy_rows_on_gpus(void*, int64_t, const void*, int64_t, int64_t, int64_t) {}

}  // namespace attn::ranks
