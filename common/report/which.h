/// \file
/// `attn_report which`: the steps of libattention that take a problem, and why the others do not.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "api/attention.h"

namespace attn::report {

/// What `which` is asked.
struct WhichArguments {
  attn_problem problem{};
  std::string operation = "forward", dtype = "bf16", device = "auto", library;
  std::vector<int64_t> window;
  int64_t kv_heads = 0, seqlen = 0;
  bool causal = false, alibi = false, device_lengths = false;
};
CLI::App* add_which_command(CLI::App&, WhichArguments&);

/// The answer: one line per step. Loads the library. Throws InputError.
std::string which(const WhichArguments&);

}  // namespace attn::report
