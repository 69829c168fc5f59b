// f5_incoherent: Q and K are rotated before quantisation (incoherent processing).
//
// parent    f4_block_scales
// change    Q and K are multiplied by one orthogonal matrix, M = diag(+-1) H / sqrt(d), with the
//           Hadamard matrix H. (Q M)(K M)^T is Q K^T, and each number becomes a signed sum of its
//           row, so none is much larger than the rest. The quantisation pass rotates too, because
//           it has whole rows in registers: log2(d) rounds of additions and subtractions, four of
//           them in one MMA. It is quantise_tiles_kernel with kRotated (quantise_tiles.h), in
//           short:
//
//               add_sixteens(bits, rotation, numbers);  // signs; 4 rounds, by the tensor core
//               add_the_rest(numbers);                  // log2(d) - 4 rounds: a + b and a - b
//               quantise_tile(..., kHadamardNorm<kHeadDim>);  // the scale takes 1 / sqrt(d)
//
//           V is not rotated. The attention kernel is the parent's, compiled once for both steps.
// why       An outlier sets the scale of its tile and makes the small numbers next to it coarse.
// expect    smaller errors of inputs with outliers; no more time
// supports  --dtype e4m3, inputs in bf16; head dims 64, 128, 256; any lengths, masks, GQA
// source    QuIP (arXiv 2307.13304), QuaRot (arXiv 2404.00456); FlashAttention-3, section 3.3
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
