// Whether blocks of the backward pass own whole KV heads. Shared by the kernels and the cost model.
#pragma once

#include <algorithm>

#include "attn/cost.h"
#include "attn/problem.h"

namespace attn {

// True if Q, dO and the dQ accumulators of the heads at work, one KV head per SM, fit in 4/5 of L2
// (48 MB on an H200), and if whole heads keep at least 9 of 10 SMs busy.
inline bool owns_whole_heads(const Problem& p, const Machine& machine) {
  const int64_t num_sms = machine.num_sms;
  const int64_t heads = p.batch * p.kv_heads, rounds = (heads + num_sms - 1) / num_sms;
  const int64_t head_bytes = p.group() * p.seqlen_q * p.head_dim * (2 + 2 + 4);
  return double(head_bytes * std::min(heads, num_sms)) <= 0.8 * machine.l2_bytes &&
         10 * heads >= 9 * rounds * num_sms;
}

}  // namespace attn
