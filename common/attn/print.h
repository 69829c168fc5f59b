/// \file
/// The lines that a chapter program prints; docs/results_schema.md explains them.
#pragma once

#include "attn/results.h"
#include "attn/step.h"

namespace attn {

/// `--list`: the steps, their operations, ideas and what they support.
void print_list(const Chapter&);
/// The roofs that predictions use.
void print_roofs(const Roofs&, DType);
/// A step as it finishes: verdict, time, share of the roof that binds, bytes; with times a line for each phase.
void print_step(const StepResult&);

}  // namespace attn
