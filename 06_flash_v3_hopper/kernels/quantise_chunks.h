// The passes of f6 and later steps: Q and K are quantised as in quantise_tiles.h (with a rotary
// embedding, as in quantise_rotary.h or quantise_turned.h), V as in smooth_v.h, with a mean and a
// scale per channel of a chunk of 4096 keys.
#pragma once

#include "kernels/hopper/smooth_v.h"
#include "kernels/quantise_rotary.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

struct ChunksPass : RotaryPass {};

//! [launch_chunks]
// `quantise_turned` turns and quantises Q and K, if there is a rotary embedding.
template <int kHeadDim>
Status quantise_chunks(const Arguments& args,
                       LaunchFunction quantise_turned = turn_and_quantise<ChunksPass, kHeadDim>) {
  const bool turned = args.in_or_null<float>("cos_sin") != nullptr;
  if (const Status status =
          turned ? quantise_turned(args) : quantise_q_and_k<ChunksPass, true, kHeadDim>(args);
      !status.ok())
    return status;
  return smooth_v<kHeadDim>(args);
}
//! [launch_chunks]

}  // namespace ATTN_BACKEND::hopper
