/// \file
/// What is right: attention in double precision with Eigen, forward and backward.
///
/// Forward, for every query i and the keys j it sees (the textbook formula, no tiles):
///
///     S_ij = scale * q_i . k_j      lse_i = log sum_j exp(S_ij)
///     P_ij = exp(S_ij - lse_i)      o_i   = sum_j P_ij v_j
///
/// Backward, with D_i = do_i . o_i:
///
/// With dropout, P is multiplied by Z (0 or 1/(1 - dropout), see philox.h) before it meets V, and
/// so is dP.
///
///     dV_j  = sum_i P_ij do_i       dP_ij = do_i . v_j        dS_ij = P_ij (dP_ij - D_i)
///     dQ_i  = scale * sum_j dS_ij k_j                         dK_j  = scale * sum_i dS_ij q_i
///
/// With a softcap C, S = C tanh(S' / C) of the scaled products S', before masks; then dS is
/// multiplied by 1 - tanh^2 before it meets K and Q.
///
/// With ALiBi, -slope_h |i + seqlen_k - seqlen_q - j| is added to S, after the cap.
///
/// The size of a row is max(||row||, ||terms||), where `terms` is the root of the sum of squares of
/// what is added up: rounding errors of the terms are independent, so they add up like this too,
/// and a row whose sum happens to be near 0 is not asked for more than arithmetic can give. For dS
/// the terms are P (|dP| + |D|): the difference dP - D vanishes where one key has all the weight.
///
/// Beside each value stands `low`: the same formula as a good kernel computes it, with sums in
/// float32 and P, dS and the results rounded to the element type. Its error says what the type
/// itself costs on these inputs; the checker allows a multiple of it.
#pragma once

#include <string>
#include <vector>

#include "attn/feature.h"
#include "attn/tensor.h"

namespace attn {

/// Some rows of one output tensor, as they should be.
struct Expected {
  TensorSpec spec;
  double row_bound;  ///< largest error of a row, relative to `scale`
  bool field_rule;   ///< also rule 2 of check.h (not for lse, which is float32 in any case)
  struct Row {
    int64_t b, h, i;
  };
  std::vector<Row> rows;
  std::vector<double> reference;  ///< [rows, columns]
  std::vector<float> low;         ///< [rows, columns]
  std::vector<double> scale;      ///< [rows]: size of the row, or of its terms where they cancel
  /// [rows]: error that float32 scores cause. An error of a score is a relative error of its P, and
  /// with scores of 1e4 the last bit of a float32 is 1e-3. With a softcap it holds the error of
  /// tanh, too: for 16-bit types that of the hardware's.
  std::vector<double> slack;
  /// [rows]: error that the operation's own inputs bring, allowed at least: for dQ and dK what the
  /// roundings of the saved O, and of P in it, do through D = rowsum(dO . O).
  std::vector<double> given;
  /// What rule 2 allows in any case. P of e4m3 has 3 bits behind the point: where few keys make up
  /// a row, `low` may be lucky with all of its roundings, and a kernel with another maximum not.
  double field_least = 0;
  /// [rows, columns] in place of all these, where the tensor holds whole numbers: right or wrong.
  std::vector<int64_t> numbers = {};
};
/// The part of a row's slack that does not shrink with the row: what rounding to the spacing of the
/// type's subnormal numbers does.
double subnormal_slack(const TensorSpec&);
/// Of `rows` rows, zeros.
Expected expected_rows(const TensorSpec&, std::size_t rows, double row_bound, bool field_rule);

/// Which rows to compare: `full` means all of them.
struct Selection {
  bool full = true;
  /// For samples: pairs (query, key) that may be computed before it gets too slow.
  double budget = 2e7;
};

/// Expected o `[B, Hq, seqlen_q, d]` and lse `[B, Hq, seqlen_q, 1]`. A sample holds, of every
/// chosen head, the first and last rows, those around multiples of the tile sizes 16..128, and
/// random ones.
std::vector<Expected> forward_reference(const Problem&, const HostTensors& inputs, Selection);
/// The same with features of an operation's own besides (feature.h).
std::vector<Expected> attention_reference(const Problem&, const HostTensors& inputs, Selection,
                                          const std::vector<Feature>& own);

/// Expected dq, dk, dv. A sample is all rows of some key/value heads.
std::vector<Expected> backward_reference(const Problem&, const HostTensors& inputs, Selection);

}  // namespace attn
