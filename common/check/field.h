/// \file
/// Inputs drawn as a smooth field over a 3D canvas: `--inputs field:TxHxW`. With random inputs no
/// block may be skipped, since every query attends to every key about equally. In a video model,
/// neighbouring tokens are similar and heads attend locally.
///
///     K   each channel a sum of a few waves of random directions, and noise:
///         sqrt(2 / 4) sum_w cos(f_w . x + phase_w) + 0.3 N(0, 1)
///     Q   twice the waves of its K/V head, and its own noise
///     V   like K, with other waves
///
/// The frequencies are normally distributed with standard deviation 1 / reach. So the score of two
/// tokens at a distance of r reaches falls as exp(-r^2 / 2), from 2 sqrt(d) to about 0. The reaches
/// of successive K/V heads are the canvas sides over 8, 2, 16, 4: some heads are local, some wide.
/// Tokens after the canvas are text, drawn from N(0, 1).
#pragma once

#include <array>
#include <string>
#include <vector>

#include "attn/problem.h"
#include "attn/tensor.h"

namespace attn {

/// The canvas of such inputs: its sides in time, height and width. Tokens are in row-major order
/// or, given the sides of a tile, tile by tile as in `--mask sta:`. Kept as Problem::own["field"].
struct Field {
  std::array<int64_t, 3> sides, tile;
  int64_t tokens() const { return sides[0] * sides[1] * sides[2]; }
  /// Position of a token within the canvas.
  std::array<int64_t, 3> place(int64_t token) const;
};

/// Parses "TxHxW" or "TxHxW,TxHxW" into the values of Problem::own. Throws InputError.
std::vector<double> read_field(const std::string& text);
/// The field of a problem that has one. check_field throws InputError where it does not fit: the
/// problem must have as many queries as keys, and no fewer than the canvas has tokens.
bool has_field(const Problem&);
Field field_of(const Problem&);
void check_field(const Problem&);

/// The waves of q, k or v, drawn once for all of its rows.
class FieldWaves {
 public:
  FieldWaves(const Problem&, const TensorSpec&);
  /// Sets row `r` of the tensor from its N(0, 1), if it lies on the canvas.
  void set(int64_t r, float* row) const;

 private:
  static constexpr int kWaves = 4;
  struct Wave {
    double frequency[3], phase;
  };
  Field field_;
  int64_t group_, rows_, d_;  // query heads that share waves; 1 for k and v
  double height_;  // amplitude of a wave
  std::vector<Wave> waves_;   // [B, heads, d, kWaves]
};

}  // namespace attn
