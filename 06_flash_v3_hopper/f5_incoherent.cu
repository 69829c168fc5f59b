// f5_incoherent: Q and K are rotated before they are rounded (incoherent processing).
//
// parent    f4_block_scales
// idea      A row with an outlier has one large number and many small ones, and the large one sets
//           the scale. Q and K are multiplied by one orthogonal matrix, M = diag(+-1) H / sqrt(d),
//           H being Hadamard's. (Q M)(K M)^T is Q K^T, and each number becomes a signed sum of all
//           d numbers of its row, so that none is much larger than the rest. The pass that
//           quantises also rotates, because it has whole rows in registers: log2(d) rounds of
//           additions and subtractions, four of them in one MMA. It is quantise_tiles_kernel with
//           kRotated (quantise_tiles.h), in short:
//
//               add_sixteens(bits, rotation, numbers);  // signs; 4 rounds, by the tensor core
//               add_the_rest(numbers);                  // log2(d) - 4 rounds: a + b and a - b
//               quantise_tile(..., kHadamardNorm<kHeadDim>);  // the scale takes 1 / sqrt(d)
//
//           V is not rotated. The attention kernel is the parent's, compiled once for both steps.
// expect    errors of inputs with outliers; no more time
// supports  --dtype e4m3, given in bf16; head dims 64, 128, 256; any lengths, masks, GQA
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "kernels/quantise_tiles.h"

ATTN_ATTENTION_OF(f4_block_scales);

namespace ATTN_BACKEND::f5_incoherent {
using namespace attn;
using namespace hopper;

//! [launch]
template <int kHeadDim>
Status launch(const Arguments& args) {
  if (!args.on_tiling)
    if (const Status done = quantise_tiles</*kRotated=*/true, kHeadDim>(args); !done.ok())
      return done;
  return f4_block_scales::attend(args);
}
//! [launch]

Status launch(const Arguments& args) {
  switch (args.problem.head_dim) {
    case 64: return launch<64>(args);
    case 128: return launch<128>(args);
    case 256: return launch<256>(args);
  }
  return Status::unsupported("only head dims 64, 128 and 256");
}

}  // namespace ATTN_BACKEND::f5_incoherent
