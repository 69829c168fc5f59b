// The steps that work on several ranks.
#pragma once

#include "attn/step.h"

namespace attn::rank_steps {

// The backward pass on one GPU, without ranks, and its workspaces.
Launch one_gpu_backward();
std::vector<Workspace> workspaces_of_backward(const Problem&);
// The chapter with these steps, and their commands.
Chapter with_ranks(Chapter);

}  // namespace attn::rank_steps
