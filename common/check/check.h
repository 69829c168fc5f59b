/// \file
/// The checker. Two rules must hold on every compared row, and NaN never passes.
///
/// 1. The error of a row, ||out - ref||, is at most max(row_bound x its size, 2 x the error of
///    `low`). This finds one wrong row in a million, however small the other errors are.
/// 2. The field's rule: max |out - ref| <= 2 max |low - ref| + 2 max |(ref + 0.3 - 0.3) - ref|. The
///    last term is the rounding of the element type itself. `field_least` replaces the first term
///    if it is larger.
///
/// Both rules also allow the error `given` with the inputs (a gradient reads O as the forward pass
/// rounded it) and the `slack` of float32 scores, which matters for scores in the thousands.
///
/// An element that the launch did not write (tensor.h) never passes either; the failure says so.
///
/// Where the reference is not finite (lse of a fully masked row), `out` must be equal to it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "check/reference.h"

namespace attn {

/// The distance of a tensor from the one it approximates, over all compared rows: the error of
/// quantisation.
struct Distance {
  double cosine = 1;  ///< cosine similarity
  double relative_l1 = 0;  ///< sum of |out - ref| over sum of |ref|
  double rmse = 0;
};
Distance distance(const HostTensor& out, const Expected&);

/// The verdict on one tensor.
struct Verdict {
  std::string tensor;
  bool pass = true;
  double worst_row_error = 0;  ///< relative to the row's size
  double bound = 0;  ///< allowed error of that row
  int64_t b = 0, h = 0, row = 0;  ///< position of the worst row
  double max_error = 0, max_bound = 0;  ///< rule 2
  int64_t rows_checked = 0;
  std::optional<Distance> to_originals;  ///< if inputs are stored in fewer bits
  /// In words: the first element that was never written, and their number; else the first NaN, and
  /// their number; else the first wrong element: (b, h, row, column), expected, got.
  std::string failure;
  /// [rows, columns] of the compared rows; empty if all elements are correct
  std::vector<bool> wrong;
  std::vector<std::string> shape;  ///< failure_shape() of it; the caller sets it
};

/// Compares an output tensor with its expected rows.
Verdict check(const HostTensor& out, const Expected& expected);

}  // namespace attn
