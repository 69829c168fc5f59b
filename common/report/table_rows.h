/// \file
/// The rows of a chapter's step table as tokens: the parts of them that affect a launch.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "report/tokens.h"

namespace attn::report {

/// Whether a name is that of a step: v1_global.
bool is_step_name(const std::string&);
/// The name of a step in a string token, without quotes; empty for other strings.
std::string step_in(const std::string& token);

/// Drops the parts of a table row that do not affect a launch, such as the cost model: ".cost =
/// ...".
Tokens without_model(const Tokens&);

/// The row of each step in a function that fills a chapter's table. Declarations between rows are
/// added to `chunks`; a statement that belongs to no row counts for all rows.
std::map<std::string, Tokens> table_rows(const Tokens& function, std::vector<Chunk>& chunks);

}  // namespace attn::report
