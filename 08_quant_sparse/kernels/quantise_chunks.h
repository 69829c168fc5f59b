// The passes of q8: the mean of K, then codes of Q and K as in smooth.h, and of V as in smooth_v.h.
#pragma once

#include "kernels/hopper/smooth_v.h"
#include "kernels/quantise_v.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

//! [launch_chunks]
template <int kHeadDim, class Groups>
Status quantise_chunks(const Arguments& args) {
  if (const Status status = quantise_smoothed<kHeadDim, Groups>(args); !status.ok()) return status;
  args.phase("chunks");
  return smooth_v<kHeadDim>(args);
}
//! [launch_chunks]

}  // namespace ATTN_BACKEND::hopper
