// Attention over the key blocks that each query tile chooses itself: the operation, whose rule is
// part of the problem, and its steps.
#pragma once

#include <memory>
#include <vector>

#include "attn/mask.h"
#include "attn/step.h"
#include "kernels/predict_rule.h"

namespace attn {

struct Operation;

/// The rule applied to inputs: `block_mask` [B, Hq, query tiles, key blocks], for the keys that
// causal and window leave. If the inputs are the quantised values of a step, `q_given` and
// `k_given` accompany them: the choice uses the originals.
std::shared_ptr<const BlockMask> chosen_blocks(const Problem&, const HostTensors& inputs);

/// The mean self-similarity of the blocks of Q, and of K.
struct Similarity {
  double q = 0, k = 0;
};
Similarity mean_similarity(const Problem&, const HostTensors& inputs);

/// As forward, over the blocks that the rule chooses. The distance from attention over all keys is
// printed as well.
const Operation& predict();

/// Its steps.
std::vector<Step> predict_steps();

}  // namespace attn
