// The rule by which a tile of queries chooses blocks of keys: its numbers, and the arithmetic that
// kernels and the reference have in common. Nothing in it is rounded in two ways: sums have an
// order, products that are added up are fused, and exponentials are whole numbers. So a choice has
// the same bits everywhere, and attention to it can be checked.
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
  bool by_mass;            // keep blocks that have a share of the probability; else of their number
  float amount;            // that share
  float least_similarity;  // of a block whose rows its mean stands for; others are always seen
  bool sink, diagonal;     // whether the first block, and those at the queries' places, are too
  float skip_below;        // s5: P V of a tile is skipped where all of P is below 2^-this; 0: never
};
//! [rule]

/// That of a problem: its options, or what they are without them.
PredictRule rule_of(const Problem&);

constexpr int kPoolThreads = 64;      // that pool: the order of their sums depends on it
constexpr int kTilesTogether = 8;      // tiles of queries that read means of keys once
constexpr int kScoresInShared = 1024;  // blocks of keys whose scores fit in shared memory

constexpr int kWeightBits = 16;
// 2^x in units of 2^-16, x at most 0: whole numbers, whose sums do not depend on their order.
//! [weight]
inline ATTN_BOTH_RULE unsigned weight_of(float x) {
  if (!(x > -kWeightBits - 1)) return 0;
  const float whole = floorf(x), part = x - whole;
  float power = fmaf(part, 0.0018775767f, 0.0089893397f);  // 2^part, off by 2^-19 at most
  power = fmaf(power, part, 0.055826318f);
  power = fmaf(power, part, 0.24015361f);
  power = fmaf(power, part, 0.69315308f);
  power = fmaf(power, part, 1.0f);
  return static_cast<unsigned>(power * static_cast<float>(1 << (kWeightBits + 1 + int(whole)))) / 2;
}
//! [weight]

// How many of `count` blocks, or how much of the sum of their weights, is to be kept at least.
inline ATTN_BOTH_RULE unsigned needed(const PredictRule& rule, unsigned of_all) {
  const auto part = static_cast<unsigned>(ceilf(rule.amount * static_cast<float>(of_all)));
  return part < 1 ? 1 : part > of_all ? of_all : part;
}

}  // namespace attn
