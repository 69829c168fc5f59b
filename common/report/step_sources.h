/// \file
/// The headers of a chapter's step files: parents, expected counters, and the tree of the parents.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "report/counters.h"

namespace attn::report {

/// The header of one step file.
struct StepSource {
  std::string name;    ///< "v2_split_kv"
  std::string parent;  ///< step of the same chapter, or empty
  std::string from;  ///< a parent in another chapter, as written: "04_flash_v2/v4_..."
  std::string expect;  ///< the field `expect`, as one line
};

/// The steps in tree order: each below its parent. Of the children whose names begin with the same
/// letter, the one with the most descendants, or the last one, stays at its parent's depth. The
/// other children are branches: they are one level deeper and come first.
struct TreeRow {
  const StepSource* step = nullptr;
  int depth = 0;
};

/// "v10_vectorised_combine": the letter and the number, for sorting steps.
std::pair<std::size_t, int> partial_index(const std::string& step);

/// The steps of a chapter's folder; empty where there are none.
std::vector<StepSource> read_step_sources(const std::filesystem::path& chapter);

/// The tree of the steps whose names are in `wanted`, or of all if it is empty. A step whose parent
/// is left out is attached to its nearest remaining ancestor.
std::vector<TreeRow> step_tree(const std::vector<StepSource>&,
                               const std::vector<std::string>& wanted);

/// Whether the header expects this counter to change: it contains one of its ncu names or its
/// label.
bool expects(const StepSource&, const Counter&);

}  // namespace attn::report
