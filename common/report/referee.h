/// \file
/// The counters of one launch as a referee: did this kernel do the work that its outputs need?
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "report/counters.h"

namespace attn::report {

/// What a launch must at least have done; see attn::Speed.
struct Required {
  double flop = 0;         ///< operations by the field's convention; 0: not asked for
  double input_bytes = 0;  ///< read at least once from a cold HBM
  double roof_s = 0;       ///< no GPU of this kind is faster; 0: not known
};

/// Reads `speed` of the file that the judge of an exercise writes with --result. Throws InputError.
Required read_required(const std::filesystem::path&);

/// Why the launch cannot have computed its outputs from its inputs; nothing if all is well. A
/// counter that the export lacks judges nothing. Allowances of 10 %: a causal step may skip half of
/// its masked tiles, and HBM counts in sectors.
///
/// - a kernel whose name does not hold `own` ("_student"): a library's, or one from elsewhere;
/// - fewer operations (tensor cores and FP32 units together) than the problem needs;
/// - fewer bytes read from HBM than the inputs have, though the caches were flushed;
/// - less time than the roofs of the GPU allow.
std::vector<std::string> objections(const std::vector<KernelCounters>&, const Required&,
                                    const std::string& own);

}  // namespace attn::report
