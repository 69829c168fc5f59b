// Which tokens of d9's cache are encoded: whole groups of 32, except the newest tokens. Shared by
// the kernels, the step table and the checks.
#pragma once

namespace attn::groups {

//! [groups]
constexpr int kGroup = 32;  // tokens that share scales and zero points of K's channels
constexpr int kNewest = 128;  // at least this many tokens are fp16, or all
constexpr int kNewestRoom = kNewest + kGroup;  // and fewer than this
// Number of encoded tokens; those after them are fp16.
constexpr int coded_of(int seqlen_k) {
  return seqlen_k < kNewest ? 0 : (seqlen_k - kNewest) / kGroup * kGroup;
}
// Arrays of codes have room for whole groups.
constexpr int room_of(int seqlen_k) { return (seqlen_k + kGroup - 1) / kGroup * kGroup; }
//! [groups]
// Bytes of a group's metadata: per channel an e5m2 scale and an fp16 zero point; two fp32 factors
// and 8 bytes of padding.
constexpr int group_bytes(int head_dim) { return 3 * head_dim + 16; }

}  // namespace attn::groups
