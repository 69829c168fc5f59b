// f7_rotary: rotary embedding of Q and K fused into the quantisation pass.
//
// parent    f6_smooth_v_chunks
// change    The pass that quantises also turns columns c and c + d/2 of a row by the angle of the
//           row's position (--rotary). It has whole rows in registers, and both elements of a pair
//           in one lane: a lane's groups of eight j and j + d/64 (RowLanes). A block processes four
//           heads in turn, because all heads have the same angles, and keeps these in shared
//           memory (kernels/quantise_turned.h). The attention kernel is the parent's, compiled
//           once for both steps.
// why       f6 has a separate pass, which reads Q and K and writes them back in bf16.
// expect    the phase rotary of f6 is gone; one rounding less
// supports  --dtype e4m3, inputs in bf16; head dims 64, 128, 256; any lengths, masks, GQA; --rotary
// source    RoFormer (arXiv 2104.09864)
#include "attn/kernel.h"
#include "kernels/quantise_turned.h"

ATTN_ATTENTION_OF(f6_smooth_v_chunks);

namespace ATTN_BACKEND::f7_rotary {
using namespace attn;
using namespace hopper;

//! [launch]
template <int kHeadDim>
Status launch(const Arguments& args) {
  if (!args.on_tiling)
    if (const Status done = quantise_chunks<kHeadDim>(args, quantise_turned<kHeadDim>); !done.ok())
      return done;
  return f6_smooth_v_chunks::attend(args);
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

}  // namespace ATTN_BACKEND::f7_rotary
