// The rule by which a query tile chooses key blocks: its parameters, and the arithmetic shared by
// kernels and reference. Nothing is rounded in two ways: sums have a fixed order, products that are
// added are fused, and exponentials are integers. So a choice is bitwise reproducible, and
// attention over it can be checked.
#pragma once

#include <cmath>
#include <cstdint>

#include "attn/problem.h"

#ifdef __CUDACC__
#define ATTN_BOTH_RULE __host__ __device__
#else
#define ATTN_BOTH_RULE
#endif

namespace attn {

//! [rule]
struct PredictRule {
  bool by_mass;  // top-p: keep blocks with a share of the probability; else top-k
  float amount;            // that share
  float least_similarity;  // least self-similarity; blocks below it are always visited
  bool sink, diagonal;  // whether the first block, and the blocks on the diagonal, are always kept
  float skip_below;  // s5: P V of a tile is skipped if all of P is below 2^-this; 0: never
};
//! [rule]

/// The rule of a problem: its options, or their defaults.
PredictRule rule_of(const Problem&);

constexpr int kPoolThreads = 64;  // threads that pool: determines the order of their sums
constexpr int kTilesTogether = 8;  // query tiles that share one read of the key means
constexpr int kScoresInShared = 1024;  // key blocks whose scores fit in shared memory

constexpr int kWeightBits = 16;
// 2^x in units of 2^-16, x at most 0: integers, whose sum does not depend on the order.
//! [weight]
inline ATTN_BOTH_RULE unsigned weight_of(float x) {
  if (!(x > -kWeightBits - 1)) return 0;
  const float whole = floorf(x), part = x - whole;
  float power = fmaf(part, 0.0018775767f, 0.0089893397f);  // 2^part, error at most 2^-19
  power = fmaf(power, part, 0.055826318f);
  power = fmaf(power, part, 0.24015361f);
  power = fmaf(power, part, 0.69315308f);
  power = fmaf(power, part, 1.0f);
  return static_cast<unsigned>(power * static_cast<float>(1 << (kWeightBits + 1 + int(whole)))) / 2;
}
//! [weight]

// The least number of `count` blocks, or the least sum of weights, to keep.
inline ATTN_BOTH_RULE unsigned needed(const PredictRule& rule, unsigned of_all) {
  const auto part = static_cast<unsigned>(ceilf(rule.amount * static_cast<float>(of_all)));
  return part < 1 ? 1 : part > of_all ? of_all : part;
}

}  // namespace attn
