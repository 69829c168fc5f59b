/// \file
/// Is a tensor right? Two rules must hold on every compared row, and NaN never passes.
///
/// 1. The error of a row, ||out - ref||, is at most max(row_bound x its size, 2 x the error of
///    `low`): one wrong row in a million is found, however small the rest of the error is.
/// 2. The field's rule: max |out - ref| <= 2 max |low - ref| + 2 max |(ref + 0.3 - 0.3) - ref|. The
///    last term is the rounding of the element type itself. Where `field_least` is larger than the
///    first one, it takes its place.
///
/// Both allow what is `given` with the inputs in any case (a gradient sees O as the forward pass
/// rounded it), and the `slack` of float32 scores besides, which matters for scores in the
/// thousands.
///
/// An element that the launch did not write (tensor.h) never passes either, and the failure says
/// so.
///
/// Where the reference is not finite (lse of a row with nothing to attend) `out` must be equal.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "check/reference.h"

namespace attn {

/// How far a tensor is from another that it stands for, over all compared rows: what quantising
/// costs.
struct Distance {
  double cosine = 1;       ///< of the angle between them
  double relative_l1 = 0;  ///< sum of |out - ref| over sum of |ref|
  double rmse = 0;
};
Distance distance(const HostTensor& out, const Expected&);

/// The verdict on one tensor.
struct Verdict {
  std::string tensor;
  bool pass = true;
  double worst_row_error = 0;  ///< relative to the row's size
  double bound = 0;            ///< what that row was allowed
  int64_t b = 0, h = 0, row = 0;  ///< where the worst row is
  double max_error = 0, max_bound = 0;  ///< rule 2
  int64_t rows_checked = 0;
  std::optional<Distance> to_originals;  ///< of an operation that stores its inputs in fewer bits
  /// In words: the first element that was never written, and how many were not; else the first NaN,
  /// and how many; else the first wrong one: (b, h, row, column), expected, got.
  std::string failure;
  /// [rows, columns] of what was compared; empty where all is right
  std::vector<bool> wrong;
  std::vector<std::string> shape;  ///< failure_shape() of it, by whoever knows the problem
};

/// Compares a whole output tensor with the rows that are expected of it.
Verdict check(const HostTensor& out, const Expected& expected);

}  // namespace attn
