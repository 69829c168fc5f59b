#include "run/planned.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "check/operation.h"
#include "check/refusals.h"
#include "device/gpus.h"
#include "run/print.h"
#include "run/session.h"

namespace attn {
namespace {

// The GPU features that the step needs and the predicted GPU, or the device, lacks.
std::optional<std::string> lacking(const Options& options, Backend backend, const Step& step) {
  std::optional<std::string> reason;
  if (const GpuSpec* spec = find_gpu(options.gpu))
    reason = lacks(step, spec->full_name, 10 * spec->cc_major + spec->cc_minor);
  if (reason && backend == Backend::emulated) *reason += " (without --gpu it runs in the emulator)";
  if (const GpuInfo& gpu = gpu_info(); !reason && backend == Backend::gpu)
    reason = lacks(step, gpu.name, 10 * gpu.cc_major + gpu.cc_minor);
  return reason;
}

}  // namespace

bool is_asked_for(const Options& options, const Step& step) {
  return step.operation == options.operation &&
         (options.steps.empty() || std::ranges::count(options.steps, step.name) > 0);
}

bool launches_anything(const Options& options, Backend backend) {
  return !options.timeline.empty() || options.check != CheckChoice::off || !options.save.empty() ||
         (options.time && backend == Backend::gpu);
}

std::optional<std::string> reasons_against(const Options& options, Backend backend,
                                           const Step& step, const Problem& problem) {
  const std::vector<std::string> all = refusals(step, problem);
  return all.empty() ? lacking(options, backend, step) : fmt::format("{}", fmt::join(all, "; "));
}

StepResult refused(const Step& step, StepResult::Outcome outcome, std::string reason) {
  StepResult s;
  s.step = step.name;
  s.operation = step.operation->name;
  s.outcome = outcome;
  s.reason = std::move(reason);
  return s;
}

StepResult predicted(const Options& options, const Roofs& roofs, const Step& step) {
  const Operation& operation = *options.operation;
  const Problem& problem = options.problem;
  StepResult s;
  s.step = step.name;
  s.operation = step.operation->name;
  s.cost = cost_of(step, problem, roofs.machine);
  s.prediction = predict(s.cost, roofs, type_of_products(operation, problem));
  s.flop = operation.flop(problem);
  s.compulsory_bytes = operation.compulsory_bytes(problem);
  if (operation.useful_bytes) s.read_s = read_seconds(s.compulsory_bytes, roofs);
  s.memory_bytes = memory_need(problem, operation, step).total();
  return s;
}

std::vector<Planned> planned_steps(const Chapter& chapter, const Options& options, Backend backend,
                                   double free) {
  const Problem& problem = options.problem;
  std::vector<Planned> plan;
  double most = 0;
  std::string most_text;
  const auto fits = [&](const Step& s) { return shown_for(s, problem.dtype); };
  const bool some = std::ranges::any_of(
      chapter.steps, [&](const Step& s) { return s.operation == options.operation && fits(s); });
  for (const Step& step : chapter.steps) {
    if (!is_asked_for(options, step)) continue;
    if (options.steps.empty() && some && !fits(step)) continue;
    std::optional<std::string> reason = reasons_against(options, backend, step, problem);
    if (!reason && !step.launch.on(backend)) reason = "not built for this device";
    if (reason) {
      plan.push_back({&step, refused(step, StepResult::Outcome::unsupported, *reason)});
      continue;
    }
    const MemoryNeed need = memory_need(problem, *options.operation, step);
    const std::string text = fmt::format(
        "{} needed ({}{}tensors {}), {} free", bytes_text(need.total()), need.workspace_text,
        need.workspace_text.empty() ? "" : " + ", bytes_text(need.tensors), bytes_text(free));
    if (need.total() > free && launches_anything(options, backend)) {
      plan.push_back({&step, refused(step, StepResult::Outcome::error, "out of memory: " + text)});
      plan.back().refused->memory_bytes = need.total();
      continue;
    }
    plan.push_back({&step, std::nullopt});
    if (need.total() > most) most = need.total(), most_text = step.name + " " + text;
  }
  if (most > 0) fmt::print("memory: {}\n", most_text);
  std::fflush(stdout);
  return plan;
}

Roofs choose_roofs(const Options& options, Backend backend) {
  if (options.time && backend == Backend::gpu && options.gpu.empty()) return measure_roofs();
  if (!options.gpu.empty()) return datasheet_roofs(*find_gpu(options.gpu));
  if (!gpu_info().available) return datasheet_roofs(*find_gpu("h200"));
  const GpuSpec* spec = spec_of_device(gpu_info().name);
  // no datasheet: measuring is slow but right
  return spec ? datasheet_roofs(*spec) : measure_roofs();
}

}  // namespace attn
