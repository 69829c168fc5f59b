// Which accumulators the epilogue of a block reads, and whether it writes fp32 or the final O. A
// parameter of p1's `attend`, which other steps call, so it is outside the back ends' namespaces.
#pragma once

#include "attn/kernel.h"

namespace attn::ranks {

// Rows are counted from the first row of the block; `split`: those from there on belong to the
// second part of the rank's queries.
struct Accumulation {
  int64_t lse_stride;  // rows of the shard: lse is [Hq, rows]
  int split;
  unsigned first, last;  // bit n, of part n: nothing was accumulated before; nothing follows
  __device__ unsigned bit(int row) const { return row < split ? 1 : 2; }
};

}  // namespace attn::ranks
