// Whether blocks of the backward pass own whole KV heads. Shared by the kernels and the cost model.
#pragma once

#include <algorithm>

#include "attn/problem.h"

namespace attn {

// True if Q, dO and the dQ accumulators of the heads at work, one KV head per SM, fit in 48 MB of
// L2, and if whole heads keep at least 9 of 10 SMs busy.
inline bool owns_whole_heads(const Problem& p, int64_t num_sms) {
  constexpr int64_t kL2Bytes = int64_t{48} << 20;  // an H200's L2 has 60 MB
  const int64_t heads = p.batch * p.kv_heads, rounds = (heads + num_sms - 1) / num_sms;
  const int64_t head_bytes = p.group() * p.seqlen_q * p.head_dim * (2 + 2 + 4);
  return head_bytes <= kL2Bytes / std::min(heads, num_sms) && 10 * heads >= 9 * rounds * num_sms;
}

}  // namespace attn
