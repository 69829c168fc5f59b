/// \file
/// What the command line takes from the table of a chapter: its operations, the names of its steps,
/// and which options they have.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "attn/step.h"

namespace attn {

std::vector<std::string> operation_names(const Chapter&);
/// What --dtype takes in this chapter.
std::string dtype_help(const Chapter&);

/// The step of that name, or the one that begins with it: `v7` is `v7_grid`, whatever `v70_...`
/// there is. `option` is named in the InputError if there is none, or more than one.
const Step& step_called(const Chapter&, const char* option, const std::string& name);

/// For --help: an option of some operations alone stands in a group of theirs, and one that no step
/// of the chapter takes is left out. It is read all the same, and refused with the reason.
void group_options(const Chapter&, CLI::App&);

}  // namespace attn
