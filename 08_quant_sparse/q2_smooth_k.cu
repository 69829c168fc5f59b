// q2_smooth_k: smooth K: subtract the mean over the tokens before quantising.
//
// parent    q1_int8_qk
// change    A pass computes the mean of each head's keys, and K minus the mean is quantised. lse
//           decreases by softmax_scale q . mean. The pass that quantises Q, which has its rows in
//           registers, computes this shift, and the epilogue of the parent's kernel adds it.
// why       Models have channels of K with a large mean over the tokens, which the scale has to
//           cover. Softmax is invariant to that mean: q . mean is the same for all keys of a row.
// expect    errors fall on inputs with biased channels; another phase, which reads K once
// supports  --dtype int8, inputs in bf16; head dims 64, 128, 256; any lengths, masks, GQA
// source    SageAttention (arXiv 2410.02367), section 4.2
#include "device/device.h"
#include "attn/kernel.h"
#include "kernels/smooth.h"

ATTN_ATTENTION_OF(q1_int8_qk);

namespace ATTN_BACKEND::q2_smooth_k {
using namespace attn;
using namespace hopper;

//! [launch]
template <int kHeadDim>
Status launch(const Arguments& args) {
  if (!args.on_tiling)
    if (const Status done = quantise_smoothed<kHeadDim, BlockGroups>(args); !done.ok())
      return done;
  return q1_int8_qk::attend(args);
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

}  // namespace ATTN_BACKEND::q2_smooth_k
