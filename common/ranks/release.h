/// \file
/// For timing: streams of several GPUs that begin together.
#pragma once

#include "attn/step.h"

namespace attn::ranks {

/// Queues a kernel that ends when the host-mapped `flag` is `round` or later.
Status hold(Stream, unsigned* flag, unsigned round);

}  // namespace attn::ranks
