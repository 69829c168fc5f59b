/// \file
/// Command-line options derived from a chapter's table: its operations, step names, and the options
/// of its steps.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "attn/step.h"

namespace attn {

std::vector<std::string> operation_names(const Chapter&);
/// The types that --dtype accepts in this chapter.
std::string dtype_help(const Chapter&);

/// The step with that name, or the only one that begins with it. An underscore after the name
/// breaks ties: `v7` is `v7_grid`, even if there is a `v70_...`. `option` is named in the
/// InputError if no step, or more than one, matches.
const Step& step_called(const Chapter&, const char* option, const std::string& name);

/// For --help: options of some operations only are shown in a group per operation, and options that
/// no step of the chapter supports are hidden. Hidden options are still parsed, and refused with
/// the reason.
void group_options(const Chapter&, CLI::App&);

}  // namespace attn
