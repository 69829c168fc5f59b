// The operations of chapter 02 besides attention; both take rows of scores x [B, Hq, seqlen_q,
// seqlen_k].
#pragma once

#include "check/operation.h"

namespace attn {

/// y, the softmax of each row of x. A row of -inf alone has y = 0.
const Operation& softmax();

/// values and indices [B, Hq, seqlen_q, top_k]: the largest probabilities of each row of x, in
/// falling order, and their columns; of equals the one with the smaller column comes first. Where a
/// row has fewer entries above -inf the rest is 0 and -1.
const Operation& softmax_topk();

}  // namespace attn
