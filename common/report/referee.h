/// \file
/// Checks from the counters of a launch whether a kernel did the work that its outputs need.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "report/counters.h"

namespace attn::report {

/// The least work of a launch; see attn::Speed.
struct Required {
  double flop = 0;  ///< operations by convention; 0: not checked
  double input_bytes = 0;  ///< read at least once from a cold HBM
  double roof_s = 0;  ///< lower bound for this GPU; 0: not known
};

/// Reads `speed` from the file that the judge of an exercise writes with --result. Throws
/// InputError.
Required read_required(const std::filesystem::path&);

/// Why the launch cannot have computed its outputs from its inputs; empty if nothing is wrong.
/// Counters missing from the export are not checked. Tolerance 10 %: a causal step may skip half of
/// its masked tiles, and HBM counts in sectors.
///
/// - a kernel whose name does not contain `own` ("_student"): from a library or elsewhere; - fewer
/// operations (tensor cores and FP32 units together) than the problem needs; - fewer bytes read
/// from HBM than the inputs have, although the caches were flushed; - less time than the roofs of
/// the GPU allow.
std::vector<std::string> objections(const std::vector<KernelCounters>&, const Required&,
                                    const std::string& own);

}  // namespace attn::report
