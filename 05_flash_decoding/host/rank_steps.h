// The steps that work on several ranks.
#pragma once

#include "attn/step.h"

namespace attn::rank_steps {

// The backward pass on one GPU, without ranks.
Launch one_gpu_backward();
// The chapter with these steps, and their commands.
Chapter with_ranks(Chapter);

}  // namespace attn::rank_steps
