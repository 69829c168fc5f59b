/// \file
/// The steps of all chapters in libattention, by name and by operation.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attn/step.h"
#include "check/operation.h"

namespace attn::api {

/// Defined by a file that CMake writes.
std::vector<const Chapter*> chapters();

struct NamedStep {
  std::string name;  ///< "06_flash_v3_hopper/v14_tuned"
  const Step* step = nullptr;
};
const std::vector<NamedStep>& all_steps();

/// What the host knows when it plans.
struct Known {
  Problem problem;
  Device device = Backend::emulated;
  bool host_lengths = true;  ///< false: lengths of sequences are on the device alone
  bool deterministic = false;  ///< only steps whose outputs are bitwise equal from run to run
};
/// A line about options of the chapter programs, with the names of attn_problem's fields:
/// "--head-dim 7: ..." becomes "head_dim 7: ...".
std::string in_fields(const std::string& line);

/// Why a step cannot run what is known, or nothing.
std::optional<std::string> reason_against(const NamedStep&, const Known&);

/// The steps of an operation, the preferred ones first. The order is that of a table; it depends on
/// the type, the kind of mask and the size of the problem alone.
std::vector<const NamedStep*> by_preference(std::string_view operation, const Problem&);

}  // namespace attn::api
