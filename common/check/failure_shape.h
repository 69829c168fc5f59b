/// \file
/// The shape of a failure: the pattern of the wrong elements of a tensor. Their positions and
/// values point to the cause faster than a single wrong element: a tile, a tail, a head, a factor.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "attn/step.h"
#include "check/check.h"

namespace attn {

/// Lines for a failed verdict; none for one that passes.
///
///     wrong: 2048 of 65536 elements, 32 of 1024 rows, 64 of 64 columns, 2 of 16 tiles of 64 rows
///     where: only head 1, only rows 16 to 31 of every 64; all 32 such rows are wrong, in all
///     columns value: each is 1.443 times what is expected (log2 e: a logarithm to base 2)
///
/// A place is named only if it contains every wrong element, and if either the other elements are
/// right or the number of wrong ones rules out chance. Scattered errors have no second line.
/// Sequences, heads, rows and columns are searched separately for: a single index, a range, every
/// second index, a range within each period of 4 to 128 or of the step's tiles, and fully masked
/// rows. The rows of dk and dv are keys.
std::vector<std::string> failure_shape(const Verdict&, const HostTensor& out, const Expected&,
                                       const Problem&, const std::optional<Tiling>&);

/// check() of the output of `step`, with the shape of the failure.
Verdict examine(const HostTensor& out, const Expected&, const Problem&, const Step& step);

/// A failure and the lines of its shape, one per line; all but the first begin with `indent`.
std::string failure_text(const Verdict&, std::string_view indent = "  ");

}  // namespace attn
