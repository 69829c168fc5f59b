/// \file
/// The shape of a failure: what the wrong elements of a tensor have in common. Its place and its
/// values point to the cause faster than one wrong number: a tile, a tail, a head, a factor.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "attn/step.h"
#include "check/check.h"

namespace attn {

/// Lines for a verdict that fails; none for one that passes.
///
///     wrong: 2048 of 65536 elements, 32 of 1024 rows, 64 of 64 columns, 2 of 16 tiles of 64 rows
///     where: only head 1, only rows 16 to 31 of every 64; all 32 such rows are wrong, in all
///     columns value: each is 1.443 times what is expected (log2 e: a logarithm to base 2)
///
/// A place is named only if every wrong element is there, and if the others are right or so many
/// are wrong that chance would not have put them there: what is scattered has no second line.
/// Sequences, heads, rows and columns are looked at one by one: a single one, a range, every
/// second, a range of each period of 4 to 128 or of the step's tiles, rows with nothing to attend.
/// Rows of dk and dv are keys.
std::vector<std::string> failure_shape(const Verdict&, const HostTensor& out, const Expected&,
                                       const Problem&, const std::optional<Tiling>&);

/// check() of what `step` gave for a problem, with the shape of a failure.
Verdict examine(const HostTensor& out, const Expected&, const Problem&, const Step& step);

/// A failure and the lines of its shape, each on a line of its own: all but the first begin with
/// `indent`.
std::string failure_text(const Verdict&, std::string_view indent = "  ");

}  // namespace attn
