// The steps that work on several ranks.
#pragma once

#include "attn/step.h"

namespace attn::rank_steps {

// The chapter with these steps, and their commands.
Chapter with_ranks(Chapter);

}  // namespace attn::rank_steps
