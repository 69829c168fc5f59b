/// \file
/// Derives the sizes of a problem from the shapes of the `--load` files.
#pragma once

#include <set>
#include <string>

#include "attn/problem.h"

namespace attn {

struct Operation;

/// Sets the sizes of a problem from the headers of the files in `folder`. `given`: the options on
/// the command line, which must not contradict them. Throws InputError, naming the file, for shapes
/// that do not fit together. Returns a warning, or "". Example: without `--layout`, q [2, 97, 8,
/// 64] is valid both as `[batch, heads, seqlen, head_dim]` and as FlashAttention's `[batch, seqlen,
/// heads, head_dim]`, and the result of the wrong reading looks right.
std::string take_shapes_of_files(const std::string& folder, const Operation&,
                                 const std::set<std::string>& given, Problem&);

}  // namespace attn
