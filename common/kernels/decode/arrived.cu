// Clears the arrival counters before the first launch of a step with a fused combine (chapter
// 05_flash_decoding).
#include "attn/kernel.h"
#include "kernels/decode/arrived.h"
#include "kernels/decode/splits.h"

namespace ATTN_BACKEND::arrived {

Status launch(const Arguments& args) {
  return clear(args, "arrived", splits::row_blocks(args.problem, splits::kMmaRows));
}

}  // namespace ATTN_BACKEND::arrived
