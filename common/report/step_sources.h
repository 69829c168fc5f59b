/// \file
/// What the step files of a chapter say of themselves: parent and expected counters, and the tree
/// that the parents make.
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
  std::string parent;  ///< a step of the same chapter; else empty
  std::string from;    ///< the header's words on a parent elsewhere: "04_flash_v2/v4_..."
  std::string expect;  ///< its paragraph `expect`, as one line
};

/// Steps in the order of a tree: each stands below its parent. Of the children whose names begin
/// with the same letter, that from which most steps descend, or the last one, goes on at its
/// parent's depth; other children, branches, are one deeper and come before it.
struct TreeRow {
  const StepSource* step = nullptr;
  int depth = 0;
};

/// "v10_vectorised_combine": the family and the number, for the order of steps.
std::pair<std::size_t, int> partial_index(const std::string& step);

/// The steps of a chapter's folder; empty where there are none.
std::vector<StepSource> read_step_sources(const std::filesystem::path& chapter);

/// The tree of those steps whose names are in `wanted`, all if it is empty. A step whose parent is
/// left out hangs from the nearest ancestor that is not.
std::vector<TreeRow> step_tree(const std::vector<StepSource>&,
                               const std::vector<std::string>& wanted);

/// Does the header expect this counter to move: is one of ncu's names for it, or its label, there?
bool expects(const StepSource&, const Counter&);

}  // namespace attn::report
