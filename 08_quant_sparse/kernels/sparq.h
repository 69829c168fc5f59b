// What d4_sparq's kernels and its model on the host both compute, with the same bits: which columns
// and which tokens are read. Sums in a given order, fused multiply-adds where they are written, and
// an exp2 of these alone, so that no other compiler or unit rounds otherwise.
#pragma once

#include <cmath>
#include <cstdint>

#include "attn/problem.h"

#ifdef __CUDACC__
#define ATTN_SPARQ_BOTH __host__ __device__
#else
#define ATTN_SPARQ_BOTH
#endif

namespace attn::sparq {

constexpr int kSumThreads = 256;  // sums over keys: so many strided ones, then pairs of them
constexpr int kMaxGroup = 64;    // query heads of a K/V head

// r, k and l of the paper: columns of K that guess the scores; tokens that are read; how many of
// them are the newest ones.
struct Choice {
  int columns, keys, newest;
};
inline Choice choice_of(const Problem& p) {
  const auto option = [&](const char* name, int otherwise) {
    const auto found = p.own.find(name);
    return found == p.own.end() ? otherwise : static_cast<int>(found->second[0]);
  };
  const int keys = option("top_keys", 128);
  return {option("top_columns", 32), keys, option("newest_keys", keys < 4 ? 1 : keys / 4)};
}

// 2^x of x <= 0, to some 1e-7; 0 below 2^-60, so that no unit has a
// subnormal number to flush. NaN stays.
//! [exp2]
inline ATTN_SPARQ_BOTH float exp2_of(float x) {
  if (!(x >= -60)) return x == x ? 0 : x;
  const float whole = rintf(x), part = x - whole;  // -1/2 to 1/2
  float y = 1.5403530e-4f;                         // ln(2)^n / n!
  y = fmaf(y, part, 1.3333558e-3f);
  y = fmaf(y, part, 9.6181291e-3f);
  y = fmaf(y, part, 5.5504109e-2f);
  y = fmaf(y, part, 2.4022651e-1f);
  y = fmaf(y, part, 6.9314718e-1f);
  y = fmaf(y, part, 1.0f);
  return ldexpf(y, static_cast<int>(whole));  // exact
}
//! [exp2]

// What a head's sums of products with some columns are multiplied by, to base 2. The paper's
// temperature: sqrt(d) times the root of the part of |q| that these columns have.
inline ATTN_SPARQ_BOTH float guess_scale(float scale_log2, float all, float chosen) {
  return chosen > 0 ? scale_log2 * sqrtf(all / chosen) : scale_log2;
}

}  // namespace attn::sparq
