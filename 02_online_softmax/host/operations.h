// Operations of chapter 02 other than attention. Both take rows of scores x [B, Hq, seqlen_q,
// seqlen_k].
#pragma once

#include "check/operation.h"

namespace attn {

/// y: the softmax of each row of x. A row of only -inf has y = 0.
const Operation& softmax();

/// values, indices [B, Hq, seqlen_q, top_k]: the largest probabilities of each row of x in
/// descending order, and their columns. Ties: the smaller column first. If a row has fewer than
/// top_k elements above -inf, the rest are value 0 and index -1.
const Operation& softmax_topk();

}  // namespace attn
