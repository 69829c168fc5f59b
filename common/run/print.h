/// \file
/// The lines that a chapter program prints; docs/results_schema.md explains them.
#pragma once

#include "run/results.h"
#include "attn/step.h"

namespace attn {

/// `--list`: the steps (of one operation, unless it is null), their ideas and what they support.
void print_list(const Chapter&, const Operation*);
/// Whether a step that was not named on the command line is shown for this type. Steps that
/// quantise are shown only for the type they quantise to.
bool shown_for(const Step&, DType);
/// If no step supports the problem, prints the steps that support it in another type, one line per
/// type.
void print_other_types(const Chapter&, const Operation&, Problem);
/// Prints the roofs that predictions use.
void print_roofs(const Roofs&, DType);
/// A step's result: verdict, time, share of the binding roof, bytes; when timed, a line per phase.
/// A failure also has lines for its shape.
void print_step(const StepResult&);
/// The results of the variations of failed steps, one line each, and what repeats the schedule;
/// `by_clocks`: that of a timeline.
void print_variations(const RunResult&, bool by_clocks);

}  // namespace attn
