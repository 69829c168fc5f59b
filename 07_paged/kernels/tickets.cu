// Counters of v11_mixed, 0 before its first launch.
#include "attn/kernel.h"
#include "kernels/decode/arrived.h"
#include "kernels/work.h"

namespace ATTN_BACKEND::tickets {
using namespace attn;

Status launch(const Arguments& args) {
  const Status status = arrived::clear(args, "tickets", plans::kTickets);
  return status.ok()
             ? arrived::clear(args, "arrived", plans::mixed_bounds(args.problem).row_blocks + 1)
             : status;
}

}  // namespace ATTN_BACKEND::tickets
