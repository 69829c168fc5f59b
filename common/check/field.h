/// \file
/// A smooth field over a canvas of three dimensions, as inputs: `--inputs field:TxHxW`. Of random
/// numbers nothing may be skipped, since all look at all alike; in a model of video tokens that are
/// near each other are alike, and heads look at what is near.
///
///     K   each channel a sum of a few waves of random directions, and noise:
///         sqrt(2 / 4) sum_w cos(f_w . x + phase_w) + 0.3 N(0, 1)
///     Q   twice the waves of its K/V head, and noise of its own
///     V   as K, of other waves
///
/// The frequencies are normal, of 1 over the head's reach: the score of two tokens that are r
/// reaches apart falls as exp(-r^2 / 2), from 2 sqrt(d) to about 0. Reaches are the sides of the
/// canvas over 8, 2, 16, 4, in turn with the K/V heads: some heads are local, some wide. Tokens
/// behind the canvas are text, N(0, 1).
#pragma once

#include <array>
#include <string>
#include <vector>

#include "attn/problem.h"
#include "attn/tensor.h"

namespace attn {

/// The canvas of such inputs: sides in time, height and width. Tokens lie row by row, or, given the
/// sides of a tile, tile after tile, as in `--mask sta:`. Kept as Problem::own["field"].
struct Field {
  std::array<int64_t, 3> sides, tile;
  int64_t tokens() const { return sides[0] * sides[1] * sides[2]; }
  /// Where a token of the canvas lies in it.
  std::array<int64_t, 3> place(int64_t token) const;
};

/// "TxHxW" or "TxHxW,TxHxW" as Problem::own keeps it. Throws InputError.
std::vector<double> read_field(const std::string& text);
/// The field of a problem that has one. check_field throws InputError where it does not fit: there
/// must be as many queries as keys, and no fewer than the canvas has tokens.
bool has_field(const Problem&);
Field field_of(const Problem&);
void check_field(const Problem&);

/// The waves of q, k or v, drawn once for all of its rows.
class FieldWaves {
 public:
  FieldWaves(const Problem&, const TensorSpec&);
  /// Sets row `r`, counted through the tensor, from its N(0, 1), if it lies on the canvas.
  void set(int64_t r, float* row) const;

 private:
  static constexpr int kWaves = 4;
  struct Wave {
    double frequency[3], phase;
  };
  Field field_;
  int64_t group_, rows_, d_;  // query heads that share waves; 1 of k and v
  double height_;             // of a wave
  std::vector<Wave> waves_;   // [B, heads, d, kWaves]
};

}  // namespace attn
