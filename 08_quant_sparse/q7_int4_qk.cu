// q7_int4_qk: 4-bit Q and K.
//
// parent    q6_smooth_q
// change    Codes run from -7 to 7, one byte each, as wgmma takes them. The pass is q6's
//           (quantise_smooth_q of smooth_q.h) with other groups, whose absolute maximum becomes 7.
//           In short, for each group (quantise.h):
//
//               scale = Groups::kLargest / largest;  // 127 in q6, 7 here
//               code = round(x * scale);
//
//           The attention kernel is the parent's, compiled once for both steps.
// why       To measure what 4 bits cost in accuracy. It gains no time: Hopper has no int4 MMA, and
//           an mma.sync of s4 compiles to two int8 MMAs and some 185 other instructions.
// expect    errors of O grow; the time is q6's
// supports  --dtype e4m3, inputs in bf16; head dims 64, 128, 256; any lengths, masks, GQA
// source    SageAttention2 (arXiv 2411.10958), section 3.1
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "kernels/quantise_v.h"
#include "kernels/smooth_q.h"

ATTN_ATTENTION_OF(q6_smooth_q);

namespace ATTN_BACKEND::q7_int4_qk {
using namespace attn;
using namespace hopper;

//! [launch]
struct Int4ThreadGroups : ThreadGroups {  // scales per thread, as in q3
  static constexpr float kLargest = 7;  // largest 4-bit code
};

template <int kHeadDim>
Status launch(const Arguments& args) {
  if (!args.on_tiling)
    if (const Status done = quantise_smooth_q<kHeadDim, Int4ThreadGroups>(args); !done.ok())
      return done;
  return q6_smooth_q::attend(args);
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

}  // namespace ATTN_BACKEND::q7_int4_qk
