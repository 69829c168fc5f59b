// Number of parts into which a head's keys are split for their mean: shared by the kernel and the
// step table.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#define ATTN_BOTH __host__ __device__
#else
#define ATTN_BOTH
#endif

namespace attn {

// Keys per part: whole tiles of 128; at most 64 parts.
inline ATTN_BOTH int mean_part_keys(int64_t seqlen_k) {
  return static_cast<int>((seqlen_k + 128 * 64 - 1) / (128 * 64) * 128);
}
inline ATTN_BOTH int mean_parts(int64_t seqlen_k) {
  return static_cast<int>((seqlen_k + mean_part_keys(seqlen_k) - 1) / mean_part_keys(seqlen_k));
}

}  // namespace attn
