// Which tokens of d9's cache are codes: whole groups of 32, but for the newest ones. What the
// kernels, the table and the checks share.
#pragma once

namespace attn::groups {

//! [groups]
constexpr int kGroup = 32;    // tokens that share the scales and zero points of K's channels
constexpr int kNewest = 128;  // at least so many are in 16 bits, or all
constexpr int kNewestRoom = kNewest + kGroup;  // and fewer than this
// Tokens in codes; those behind them are in 16 bits.
constexpr int coded_of(int seqlen_k) {
  return seqlen_k < kNewest ? 0 : (seqlen_k - kNewest) / kGroup * kGroup;
}
// Arrays of codes have room for whole groups.
constexpr int room_of(int seqlen_k) { return (seqlen_k + kGroup - 1) / kGroup * kGroup; }
//! [groups]
// Bytes of what a group has: for each channel a scale of e5m2 and a zero point of fp16; two factors
// in float32, and 8 bytes that are nothing.
constexpr int group_bytes(int head_dim) { return 3 * head_dim + 16; }

}  // namespace attn::groups
