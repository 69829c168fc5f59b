// Dropout on the probabilities in a lane's registers, from v3_register_scores on.
#pragma once

#include "attn/kernel.h"
#include "attn/philox.h"

namespace ATTN_BACKEND::flash1 {
using namespace attn;

// Zeroes the dropped probabilities of row `row` (row `r` of each accumulator). One Philox call
// gives the lane's 16 bytes for 64 keys.
template <int kWarpKeys>
__device__ __forceinline__ void drop(float (&s)[kWarpKeys / 8][4], int r, uint64_t seed, int64_t bh,
                                     int row, int key0, int dropped) {
#pragma unroll
  for (int first = 0; first < kWarpKeys; first += 64) {
    const PhiloxBits bits = dropout_bits(seed, bh, row, (key0 + first) / 64, threadIdx.x % 4);
    // bytes of the keys before key0
    const int skipped = kWarpKeys % 64 == 0 ? 0 : key0 % 64 / 4;
#pragma unroll
    for (int i = 0; i < 16 && first + i * 4 < kWarpKeys; ++i)
      if (bits.byte(skipped + i) < static_cast<uint32_t>(dropped))
        s[first / 8 + i / 2][2 * r + i % 2] = 0;
  }
}

}  // namespace ATTN_BACKEND::flash1
