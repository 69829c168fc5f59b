/// \file
/// Which steps of a chapter run on a problem, and why the others do not.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "run/options.h"
#include "run/results.h"

namespace attn {

struct Step;

/// A requested step, and its result if it will not run.
struct Planned {
  const Step* step;
  std::optional<StepResult> refused;
};

/// Whether a step is of the operation of a run and was requested.
bool is_asked_for(const Options&, const Step&);
/// Whether a run launches kernels. With --check off and nothing to time or save, only predictions
/// are printed.
bool launches_anything(const Options&, Backend);

/// All reasons for which a step does not run on a problem, in one line; or nothing. Those are what
/// the step refuses, or else the GPU features that it needs and the predicted GPU, or the device,
/// lacks.
std::optional<std::string> reasons_against(const Options&, Backend, const Step&, const Problem&);
/// The result of a step that does not run.
StepResult refused(const Step&, StepResult::Outcome, std::string reason);
/// The part of a step's result that is known before it runs.
StepResult predicted(const Options&, const Roofs&, const Step&);

/// The requested steps. Prints the memory needed for S, P and the like before anything is
/// allocated; `free` is the memory of the device, in bytes.
std::vector<Planned> planned_steps(const Chapter&, const Options&, Backend, double free);

/// The roofs for predictions: measured, or from a datasheet.
Roofs choose_roofs(const Options&, Backend);

}  // namespace attn
