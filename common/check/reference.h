/// \file
/// The reference: attention in double precision with Eigen, forward and backward.
///
/// Forward, for every query i and its visible keys j (the textbook formula, no tiles):
///
///     S_ij = scale * q_i . k_j      lse_i = log sum_j exp(S_ij)
///     P_ij = exp(S_ij - lse_i)      o_i   = sum_j P_ij v_j
///
/// Backward, with D_i = do_i . o_i:
///
///     dV_j  = sum_i P_ij do_i       dP_ij = do_i . v_j        dS_ij = P_ij (dP_ij - D_i)
///     dQ_i  = scale * sum_j dS_ij k_j                         dK_j  = scale * sum_i dS_ij q_i
///
/// With dropout, P is multiplied by Z (0 or 1/(1 - dropout), see philox.h) before P V, and so is
/// dP.
///
/// With a softcap C, S = C tanh(S' / C) of the scaled products S', before masking. dS is then
/// multiplied by 1 - tanh^2 before the products with K and Q.
///
/// With ALiBi, -slope_h |i + seqlen_k - seqlen_q - j| is added to S, after the softcap.
///
/// The size of a row is max(||row||, ||terms||), where `terms` is the root of the sum of squares of
/// the summands. Rounding errors of the summands are independent and add up in the same way. So a
/// row whose sum happens to be near 0 need not be more accurate than arithmetic allows. For dS the
/// summands are P (|dP| + |D|): the difference dP - D vanishes where one key has all the weight.
///
/// Each value comes with `low`: the same formula as a good kernel computes it, with sums in float32
/// and with P, dS and the results rounded to the element type. The error of `low` is what the type
/// itself costs on these inputs; the checker allows a multiple of it.
#pragma once

#include <string>
#include <vector>

#include "attn/feature.h"
#include "attn/tensor.h"

namespace attn {

/// The expected values of some rows of an output tensor.
struct Expected {
  TensorSpec spec;
  double row_bound;  ///< largest error of a row, relative to `scale`
  bool field_rule;  ///< also rule 2 of check.h (not for lse, which is always float32)
  struct Row {
    int64_t b, h, i;
  };
  std::vector<Row> rows;
  std::vector<double> reference;  ///< [rows, columns]
  std::vector<float> low;         ///< [rows, columns]
  std::vector<double> scale;      ///< [rows]: size of the row, or of its terms where they cancel
  /// [rows]: error caused by float32 scores. An error of a score is a relative error of its P, and
  /// the last bit of a float32 score of 1e4 is 1e-3. With a softcap it includes the error of tanh;
  /// for 16-bit types, of the hardware's tanh.
  std::vector<double> slack;
  /// [rows]: error caused by the operation's own inputs, always allowed: for dQ and dK the rounding
  /// of the saved O, and of the P in it, through D = rowsum(dO . O).
  std::vector<double> given;
  /// Lower limit of the error that rule 2 allows. P in e4m3 has 3 mantissa bits: where few keys
  /// dominate a row, all roundings of `low` may be lucky, and those of a kernel with another
  /// maximum not.
  double field_least = 0;
  /// [rows, columns], replaces all fields above for tensors of integers: right or wrong.
  std::vector<int64_t> numbers = {};
};
/// The part of a row's slack that does not shrink with the row: rounding to the spacing of the
/// type's subnormal numbers.
double subnormal_slack(const TensorSpec&);
/// An Expected with `rows` rows of zeros.
Expected expected_rows(const TensorSpec&, std::size_t rows, double row_bound, bool field_rule);

/// Which rows to compare: `full` means all of them.
struct Selection {
  bool full = true;
  /// For samples: the maximum number of (query, key) pairs to compute.
  double budget = 2e7;
};

/// Expected o `[B, Hq, seqlen_q, d]` and lse `[B, Hq, seqlen_q, 1]`. A sample holds, for every
/// chosen head, the first and last rows, the rows around multiples of the tile sizes 16..128, and
/// random rows.
std::vector<Expected> forward_reference(const Problem&, const HostTensors& inputs, Selection);
/// The same, with features that only one operation has (feature.h).
std::vector<Expected> attention_reference(const Problem&, const HostTensors& inputs, Selection,
                                          const std::vector<Feature>& own);

/// Expected dq, dk, dv. A sample consists of all rows of some K/V heads.
std::vector<Expected> backward_reference(const Problem&, const HostTensors& inputs, Selection);

}  // namespace attn
