/// \file
/// How tensors of a problem are drawn; field.h has a fifth way. Functions of the seed alone, the
/// same on every machine, with any number of cores.
///
/// | kind | Q, K, V | what it finds |
/// |---|---|---|
/// | random | N(0, 1) | the ordinary case |
/// | needle | each query points at one visible key, at a tile edge; V as random | a key that is skipped, shifted, masked wrongly or summed twice |
/// | peaked | Q times a factor per row, from 1/4 to 2000: scores up to about +-1e4 | overflow, a stale maximum, a missing rescale |
/// | outlier | N(0, 1) + N(0, 100) x Bernoulli(0.001) | lost precision (the test of the FlashAttention-3 paper, section 4.3) |
///
/// Scores x are drawn alike: a needle is one score of 16 in a row; peaked multiplies a row; and
/// what the mask hides is -inf, so that a causal problem with more rows than columns has rows of
/// -inf alone.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "attn/tensor.h"

namespace attn {

/// A standard normal number, the `index`-th of `stream` under `seed`.
float normal(uint64_t seed, uint64_t stream, uint64_t index);

/// `count` lengths from 1/64 of the longest to the longest, which is among them: in such batches padding is most of
/// the work, and a block of the longest sequence outlives the others. Their logarithms are uniform.
std::vector<int64_t> skewed_lengths(int64_t count, int64_t longest, uint64_t seed);

/// Draws tensors in the order of `specs`, each rounded to its dtype, or makes them
/// (TensorSpec::made). The names q, k, v, do and x (and any other, drawn as random) have the
/// meaning above. Rows that belong to no sequence are NaN.
HostTensors draw_inputs(const Problem& problem, std::span<const TensorSpec> specs);

/// What rows of an input hold that no sequence uses: a NaN that says whose they are, also in 16
/// bits and behind arithmetic, but for a GPU's, which makes its canonical NaN of all. `sequence`:
/// behind whose last key they lie; -1: in a page of no sequence.
///
/// Its fraction begins with 1 and a number of 6 bits: of the sequence and 1, or one of these.
inline constexpr std::uint32_t kUnwrittenCode = 0x25, kAnySequenceCode = 61, kNoSequenceCode = 62;
inline float unused_nan(int64_t sequence) {
  std::uint32_t code = sequence < 0 ? kNoSequenceCode : kAnySequenceCode;
  if (sequence >= 0 && sequence + 1 < kAnySequenceCode && sequence + 1 != kUnwrittenCode)
    code = static_cast<std::uint32_t>(sequence + 1);
  return std::bit_cast<float>(0x7FC00000u | code << 16);
}

/// Makes the rows of `t` that belong to no sequence NaN: behind what is in use of a cache, in pages
/// of nobody.
void poison_unused(const Problem&, HostTensor& t);

}  // namespace attn
