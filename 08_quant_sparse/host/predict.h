// Attention to blocks of keys that each tile of queries chooses itself: the operation, whose rule
// is a part of the problem, and the steps.
#pragma once

#include <memory>
#include <vector>

#include "attn/mask.h"
#include "attn/step.h"
#include "kernels/predict_rule.h"

namespace attn {

struct Operation;

/// What the rule makes of inputs: `block_mask` [B, Hq, tiles of queries, blocks of keys], for keys
/// that causal and window leave. Where inputs are what a step of 8 bits multiplies, `q_given` and
/// `k_given` are beside them: it chooses by those.
std::shared_ptr<const BlockMask> chosen_blocks(const Problem&, const HostTensors& inputs);

/// The mean similarity of the blocks of Q, and of K.
struct Similarity {
  double q = 0, k = 0;
};
Similarity mean_similarity(const Problem&, const HostTensors& inputs);

/// As forward, of the blocks that the rule chooses. How far that is from attention to all keys is
/// said beside it.
const Operation& predict();

/// Its steps.
std::vector<Step> predict_steps();

}  // namespace attn
