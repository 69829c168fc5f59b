/// \file
/// The lines that a chapter program prints; docs/results_schema.md explains them.
#pragma once

#include "run/results.h"
#include "attn/step.h"

namespace attn {

/// `--list`: the steps (of one operation, unless it is null), their ideas and what they support.
void print_list(const Chapter&, const Operation*);
/// Whether a step that nobody named is shown for a problem of this type: those that quantise, for
/// the type that they quantise to, and nowhere else.
bool shown_for(const Step&, DType);
/// Where no step takes a problem as it is: those that do in another type, a line a type.
void print_other_types(const Chapter&, const Operation&, Problem);
/// The roofs that predictions use.
void print_roofs(const Roofs&, DType);
/// A step as it finishes: verdict, time, share of the roof that binds, bytes; with times a line for
/// each phase. What failed has lines for its shape.
void print_step(const StepResult&);
/// What became of the variations of steps that failed, a line each; and how to run the same
/// schedule again.
void print_variations(const RunResult&);

}  // namespace attn
