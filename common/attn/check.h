/// \file
/// Is a tensor right? Two rules must hold on every compared row, and NaN never passes.
///
/// 1. The error of a row, ||out - ref||, is at most max(row_bound x its size, 2 x the error of
///    `low`): one wrong row in a million is found, however small the rest of the error is.
/// 2. The field's rule: max |out - ref| <= 2 max |low - ref| + 2 max |(ref + 0.3 - 0.3) - ref|, where
///    the last term is the rounding of the element type itself.
///
/// Both allow what is `given` with the inputs in any case (a gradient sees O as the forward pass rounded it), and
/// the `slack` of float32 scores besides, which matters for scores in the thousands.
///
/// Where the reference is not finite (lse of a row with nothing to attend) `out` must be equal.
#pragma once

#include <span>
#include <string>

#include "attn/reference.h"

namespace attn {

/// The verdict on one tensor.
struct Verdict {
  std::string tensor;
  bool pass = true;
  double worst_row_error = 0;  ///< relative to the row's size
  double bound = 0;            ///< what that row was allowed
  int64_t b = 0, h = 0, row = 0;  ///< where the worst row is
  double max_error = 0, max_bound = 0;  ///< rule 2
  int64_t rows_checked = 0;
  std::string failure;  ///< the first one: (b, h, row, column), expected, got
};

/// Compares a whole output tensor with the rows that are expected of it.
Verdict check(const HostTensor& out, const Expected& expected);

}  // namespace attn
