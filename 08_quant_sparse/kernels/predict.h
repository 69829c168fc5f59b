// Attention to blocks of keys that each tile of queries chooses itself: the operation, whose rule
// is a part of the problem, and the steps. (A guard by name: broken versions of a step hold its
// headers.)
#ifndef ATTN_08_PREDICT_H
#define ATTN_08_PREDICT_H

#include <memory>
#include <vector>

#include "attn/mask.h"
#include "attn/step.h"
#include "kernels/predict_rule.h"

namespace attn {

struct Operation;

/// The rule of a problem: its options, or what they are without them.
PredictRule rule_of(const Problem&);

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

#endif  // ATTN_08_PREDICT_H
