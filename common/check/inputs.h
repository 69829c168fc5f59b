/// \file
/// Input distributions; field.h has a fifth. They depend on the seed alone, so they are the same on
/// every machine and for any number of cores.
///
/// * random: Q, K, V are N(0, 1). The ordinary case.
/// * needle: each query points at one visible key, at a tile edge; V as in random. Finds a key that
///   is skipped, shifted, masked wrongly or summed twice.
/// * peaked: Q times a factor per row, from 1/4 to 2000: scores up to about +-1e4. Finds overflow,
///   a stale maximum, a missing rescale.
/// * outlier: N(0, 1) + N(0, 100) x Bernoulli(0.001). Finds lost precision (the test of the
///   FlashAttention-3 paper, section 4.3).
///
/// Scores x are drawn in the same way: a needle is one score of 16 in a row; peaked multiplies a
/// row. Masked elements are -inf, so a causal problem with more rows than columns has fully masked
/// rows.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "attn/tensor.h"

namespace attn {

/// The `index`-th standard normal number of `stream` for `seed`.
float normal(uint64_t seed, uint64_t stream, uint64_t index);

/// `count` lengths from 1/64 of the longest to the longest, which is included, with uniform
/// logarithms. In such batches a padded layout spends most of its work on padding, and the CTAs of
/// the longest sequence finish last.
std::vector<int64_t> skewed_lengths(int64_t count, int64_t longest, uint64_t seed);

/// Draws tensors in the order of `specs`, each rounded to its dtype, or makes them
/// (TensorSpec::made). The names q, k, v, do and x have the meaning above; any other name is drawn
/// as random. Rows that belong to no sequence are NaN.
HostTensors draw_inputs(const Problem& problem, std::span<const TensorSpec> specs);

/// Fills input rows that no sequence uses: a NaN with a code that identifies the row's owner. The
/// code survives conversion to 16 bits and x86 arithmetic; a GPU replaces it by its canonical NaN.
/// `sequence`: the sequence whose last key precedes the row; -1: a page of no sequence.
///
/// The fraction begins with a 1 and a 6-bit code: the sequence plus 1, or one of these constants.
inline constexpr std::uint32_t kUnwrittenCode = 0x25, kAnySequenceCode = 61, kNoSequenceCode = 62;
inline float unused_nan(int64_t sequence) {
  std::uint32_t code = sequence < 0 ? kNoSequenceCode : kAnySequenceCode;
  if (sequence >= 0 && sequence + 1 < kAnySequenceCode && sequence + 1 != kUnwrittenCode)
    code = static_cast<std::uint32_t>(sequence + 1);
  return std::bit_cast<float>(0x7FC00000u | code << 16);
}

/// Fills the rows of `t` that belong to no sequence with NaN: unused room of a cache, and unused
/// pages.
void poison_unused(const Problem&, HostTensor& t);

}  // namespace attn
