// The steps that work on several ranks.
#pragma once

#include "attn/step.h"

namespace attn::rank_steps {

void add_steps(Chapter&);

}  // namespace attn::rank_steps
