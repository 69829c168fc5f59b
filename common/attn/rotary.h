/// \file
/// Rotary embedding: columns c and c + d/2 of a row of Q or of K are turned, as a vector of two, by
/// the row's position times 10000^(-c / (d/2)). Scores then depend on how far apart a query and a
/// key are (Su et al., "RoFormer", 2021; pairs as in GPT-NeoX and Hugging Face's Llama, not 2c and
/// 2c + 1 as there).
#pragma once

#include <span>

#include "attn/feature.h"
#include "attn/tensor.h"

namespace attn {

/// The input `cos_sin` [1, 1, positions, d], fp32: of each position the d/2 cosines, then the
/// sines. Of angles as large as a position float32 has no digits left, so they are worked out on
/// the host. Key j has position j, query i position i + seqlen_k - seqlen_q. Row 0 is the first
/// position of all: 0, or that of query 0 where there are more queries than keys.
TensorSpec rotary_table(const Problem&);
/// The row of query 0 and that of key 0.
int64_t rotary_row_of_queries(const Problem&);
int64_t rotary_row_of_keys(const Problem&);

/// Turns a row by a row of the table.
template <class Scalar>
void turn(std::span<Scalar> x, const float* angles) {
  const std::size_t half = x.size() / 2;
  for (std::size_t c = 0; c < half; ++c) {
    const Scalar a = x[c], b = x[c + half], cosine = angles[c], sine = angles[c + half];
    x[c] = a * cosine - b * sine, x[c + half] = b * cosine + a * sine;
  }
}

/// `--rotary` of an operation that is given Q and K and the table. Where inputs have no table, as
/// those that a step stores turned already, the reference turns nothing.
Feature rotary_feature();
bool has_rotary(const Problem&);

}  // namespace attn
