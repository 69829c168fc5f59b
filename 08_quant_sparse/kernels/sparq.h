// What d4_sparq's kernels and its host model compute bitwise equally: which columns and tokens are
// read. Sums have a fixed order, FMAs are explicit, and exp2 is made of FMAs, so no compiler or
// unit rounds differently.
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

// sums over keys: this many strided partial sums, then pairs of them
constexpr int kSumThreads = 256;
constexpr int kMaxGroup = 64;  // query heads per K/V head

// r, k and l of the paper: columns of K for the estimate; tokens that are read; the newest of them.
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

// 2^x for x <= 0, error some 1e-7; 0 below 2^-60, so that no unit has a subnormal to flush. NaN
// stays NaN.
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

// The factor of a head's partial dot products, in log2 units. The paper's temperature: sqrt(d)
// times the root of the share of |q| that these columns have.
inline ATTN_SPARQ_BOTH float guess_scale(float scale_log2, float all, float chosen) {
  return chosen > 0 ? scale_log2 * sqrtf(all / chosen) : scale_log2;
}

}  // namespace attn::sparq
