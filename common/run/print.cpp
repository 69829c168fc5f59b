#include "run/print.h"

#include <fmt/format.h>

#include <algorithm>

#include "check/operation.h"
#include "run/session.h"  // bytes_text

namespace attn {
namespace {

// TFLOP/s, or GB/s by the step's own model for memory-bound operations without MMAs.
std::string rate_text(const StepResult& s) {
  const double flop_per_s = s.flop / s.time->median;
  if (s.read_s)
    return fmt::format("{:.1f} GB/s of use ({:.1f} % of the read roof)",
                       s.compulsory_bytes / s.time->median * 1e-9,
                       100 * *s.read_s / s.time->median);
  if (s.flop == 0)
    return fmt::format("{:.1f} GB/s", modelled_bytes(s.cost) / s.time->median * 1e-9);
  return flop_per_s >= 1e12 ? fmt::format("{:.1f} TFLOP/s", flop_per_s * 1e-12)
                            : fmt::format("{:.1f} GFLOP/s", flop_per_s * 1e-9);
}

// "error 1.6e-03 of 6.0e-03 at o(b 0, h 3, row 127)", for the tensor closest to its bound.
std::string error_text(const StepResult& s) {
  const Verdict* worst = nullptr;
  const auto share = [](const Verdict& v) { return v.bound > 0 ? v.worst_row_error / v.bound : 0; };
  for (const Verdict& v : s.verdicts)
    if (worst == nullptr || share(v) > share(*worst)) worst = &v;
  if (worst == nullptr) return "not checked";
  return fmt::format("row error {:.1e} of {:.1e} at {}(b {}, h {}, row {})", worst->worst_row_error,
                     worst->bound, worst->tensor, worst->b, worst->h, worst->row);
}

// "fp16, bf16; head dims 64, 128, 256; up to 16 queries; any lengths, GQA; scales from 1e-37".
std::string support_of(const Step& step) {
  std::vector<std::string> parts;
  if (step.needs.no_later) parts.push_back(fmt::format("sm_{}a", step.needs.compute_capability));
  if (const DType to = quantises_to(step); to != DType::bf16) {
    parts.push_back(fmt::format("{}, given in bf16", name(to)));
  } else if (!step.limits.dtypes.empty()) {
    std::vector<std::string_view> names;
    for (const DType type : step.limits.dtypes) names.push_back(name(type));
    parts.push_back(fmt::format("{}", fmt::join(names, ", ")));
  }
  if (const auto& dims = step.limits.head_dims; !dims.empty())
    parts.push_back(
        fmt::format("head dim{} {}", dims.size() == 1 ? "" : "s", fmt::join(dims, ", ")));
  if (const int64_t most = step.limits.most_queries; most > 0)
    parts.push_back(most == 1 ? "one query" : fmt::format("up to {} queries", most));
  if (!step.support.empty()) parts.push_back(step.support);
  if (step.limits.least_scale > 0)
    parts.push_back(fmt::format("--scale from {}", step.limits.least_scale));
  return fmt::format("{}", fmt::join(parts, "; "));
}

}  // namespace

void print_list(const Chapter& c, const Operation* operation) {
  fmt::print("{}: {}\n", c.name, c.summary);
  for (const Step& s : c.steps) {
    if (operation != nullptr && s.operation != operation) continue;
    fmt::print("  {:<16} {:<12} {}\n  {:<16} {:<12} supports {}{}\n", s.name, s.operation->name,
               s.idea, "", "", support_of(s),
               s.deterministic ? "" : "; results differ from run to run (order of atomics)");
  }
}

bool shown_for(const Step& step, DType type) {
  return quantises_to(step) == (bits_of(type) < 16 ? type : DType::bf16);
}

void print_other_types(const Chapter& c, const Operation& operation, Problem p) {
  const DType given = p.dtype;
  for (const DType type :
       {DType::fp32, DType::fp16, DType::bf16, DType::e4m3, DType::int8, DType::int4}) {
    p.dtype = type;
    std::vector<std::string> steps;
    for (const Step& s : c.steps)
      if (s.operation == &operation && shown_for(s, type) &&
          !refusal(s, p.empty() ? p.at_least_one() : p))
        steps.push_back(s.name);
    if (type != given && !steps.empty())
      fmt::print("with --dtype {}: {}\n", name(type), fmt::join(steps, ", "));
  }
}

void print_roofs(const Roofs& r, DType dtype) {
  const auto tera = [](const Roof& roof) { return roof.rate * 1e-12; };
  fmt::print("roofs: {}, {}: HBM {:.2f} TB/s", r.gpu, r.hbm_copy.source, tera(r.hbm_copy));
  if (r.l2.rate > 0) fmt::print(", L2 {:.1f} TB/s", tera(r.l2));
  fmt::print(", FP32 {:.1f} TFLOP/s", tera(r.fp32));
  if (dtype != DType::fp32) fmt::print(", tensor {:.0f} TFLOP/s", tera(r.tensor(dtype)));
  if (r.exp.rate > 0) fmt::print(", exp {:.2f} T/s", tera(r.exp));
  fmt::print("\n");
}

void print_step(const StepResult& s) {
  using Outcome = StepResult::Outcome;
  const bool not_launched = s.outcome == Outcome::pass && !s.reason.empty();  // an empty problem
  if (s.outcome == Outcome::unsupported || s.outcome == Outcome::error || not_launched) {
    fmt::print("{:<16} {:<11} {}\n", s.step, name(s.outcome), s.reason);
    return;
  }
  fmt::print("{:<16} {:<9} {}", s.step, name(s.outcome),
             s.outcome == Outcome::fail ? s.reason : error_text(s));
  if (s.time)
    fmt::print("  {} ({} .. {})  {}  {:.1f} % of the {} roof", time_text(s.time->median),
               time_text(s.time->q1), time_text(s.time->q3), rate_text(s),
               100 * *s.share_of_roof(), s.prediction.binding);
  else
    fmt::print("  not measured, at least {} ({} roof)", time_text(s.prediction.seconds),
               s.prediction.binding);
  fmt::print("  {} modelled, {} compulsory\n", bytes_text(modelled_bytes(s.cost)),
             bytes_text(s.compulsory_bytes));
  for (const Verdict& v : s.verdicts)
    if (const auto& d = v.to_originals)
      fmt::print("  {:<14} from the originals: cosine {:.6f}, relative L1 {:.2e}, RMSE {:.2e}\n",
                 v.tensor, d->cosine, d->relative_l1, d->rmse);
  for (const Verdict& v : s.verdicts) {
    if (v.failure != s.reason && !v.failure.empty()) fmt::print("  {}\n", v.failure);
    for (const std::string& line : v.shape) fmt::print("  {} {}\n", v.tensor, line);
  }
  if (!s.time) return;
  if (*s.share_of_roof() > 1) fmt::print("  above 100 %: {}\n", above_roof(s.prediction.binding));
  if (!s.launch_hidden)
    fmt::print(
        "  the time includes the host's launches: they took longer than the GPU was kept busy\n");
  if (s.plan_time)
    fmt::print("  {:<14} {:>12} measured, on the host before the launch\n", "plan",
               time_text(s.plan_time->median));
  for (std::size_t n = 0; n < s.phase_times.size(); ++n) {
    const auto& [phase, time] = s.phase_times[n];
    const auto predicted =
        std::find_if(s.prediction.phases.begin(), s.prediction.phases.end(),
                     [&, &phase = phase](const auto& p) { return p.name == phase; });
    if (predicted == s.prediction.phases.end()) continue;
    fmt::print("  {:<14} {:>12} measured, {:>12} predicted: {:.1f} % of the {} roof\n", phase,
               time_text(time.median), time_text(predicted->seconds),
               100 * predicted->seconds / time.median, predicted->binding);
  }
}

void print_variations(const RunResult& r, bool by_clocks) {
  bool failed = false;
  for (const StepResult& s : r.steps) {
    failed |= s.outcome == StepResult::Outcome::fail;
    if (!s.variations.empty())
      fmt::print("{:<16} varied: {}\n", s.step, varied_text(s.variations, s.reason));
  }
  if (failed && by_clocks)
    fmt::print("schedule: that of the model's clocks, which the same command repeats\n");
  else if (failed && r.backend == Backend::emulated)
    fmt::print(
        "schedule: --schedule {} repeats this order of threads, another number gives another\n",
        r.schedule);
}

}  // namespace attn
