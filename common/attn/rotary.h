/// \file
/// Rotary embedding (RoPE): columns c and c + d/2 of a row of Q or K are rotated, as a 2-vector, by
/// the row's position times 10000^(-c / (d/2)). Scores then depend on the distance of query and key
/// (Su et al., "RoFormer", 2021; pairs as in GPT-NeoX and Hugging Face's Llama, not 2c and 2c + 1
/// as in the paper).
#pragma once

#include <span>

#include "attn/feature.h"
#include "attn/tensor.h"

namespace attn {

/// The input `cos_sin` [1, 1, positions, d], fp32: for each position d/2 cosines, then d/2 sines.
/// They are computed on the host, because fp32 is too imprecise for angles as large as a position.
/// Key j has position j, query i position i + seqlen_k - seqlen_q. Row 0 is the first position: 0,
/// or that of query 0 if there are more queries than keys.
TensorSpec rotary_table(const Problem&);
/// Rows of query 0 and key 0 in the table.
int64_t rotary_row_of_queries(const Problem&);
int64_t rotary_row_of_keys(const Problem&);

/// Rotates a row by a row of the table.
template <class Scalar>
void turn(std::span<Scalar> x, const float* angles) {
  const std::size_t half = x.size() / 2;
  for (std::size_t c = 0; c < half; ++c) {
    const Scalar a = x[c], b = x[c + half], cosine = angles[c], sine = angles[c + half];
    x[c] = a * cosine - b * sine, x[c + half] = b * cosine + a * sine;
  }
}

/// `--rotary` of an operation whose inputs are Q, K and the table. Without a table, for example if
/// the step stored Q and K already rotated, the reference does not rotate.
Feature rotary_feature();
bool has_rotary(const Problem&);

}  // namespace attn
