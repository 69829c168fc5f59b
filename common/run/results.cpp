#include "run/results.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "attn/mask.h"

namespace attn {

using nlohmann::json;

TimeStatistics statistics(std::vector<double> t) {
  std::sort(t.begin(), t.end());
  const auto at = [&](double share) {  // linear interpolation, NumPy's default
    const double x = share * static_cast<double>(t.size() - 1);
    const auto i = static_cast<std::size_t>(x);
    const std::size_t next = std::min(i + 1, t.size() - 1);
    return t[i] + (x - static_cast<double>(i)) * (t[next] - t[i]);
  };
  return {at(0.5), at(0.25), at(0.75), t.front(), static_cast<int>(t.size())};
}

std::optional<double> StepResult::share_of_roof() const {
  if (!time || prediction.seconds <= 0) return std::nullopt;
  return prediction.seconds / time->median;
}

std::string_view name(StepResult::Outcome o) {
  switch (o) {
    case StepResult::Outcome::pass: return "pass";
    case StepResult::Outcome::fail: return "fail";
    case StepResult::Outcome::unchecked: return "unchecked";
    case StepResult::Outcome::unsupported: return "unsupported";
    case StepResult::Outcome::error: return "error";
  }
  return "?";
}

namespace {

json to_json(const TimeStatistics& t) {
  return {{"median_s", t.median}, {"q1_s", t.q1}, {"q3_s", t.q3}, {"min_s", t.fastest},
          {"count", t.count}};
}

json to_json(const Roof& r) {
  return r.rate > 0 ? json{{"per_second", r.rate}, {"source", r.source}} : json(nullptr);
}

// JSON has no infinities, but a verdict may contain one.
json finite(double x) { return std::isfinite(x) ? json(x) : json(nullptr); }

json to_json(const Problem& p) {
  json j = {{"batch", p.batch},
          {"heads", p.heads},
          {"kv_heads", p.kv_heads},
          {"seqlen_q", p.seqlen_q},
          {"seqlen_k", p.seqlen_k},
          {"head_dim", p.head_dim},
          {"dtype", name(p.dtype)},
          {"causal", p.causal},
          {"window", {p.window_left, p.window_right}},
          {"softmax_scale", p.softmax_scale},
          {"inputs", name(p.inputs)},
          {"seed", p.seed}};
  if (p.matrix) j["matrix"] = true;
  if (!p.seqused_k.empty()) j["seqused_k"] = p.seqused_k;
  if (p.mask) j["mask"] = p.mask->text();
  if (!p.own.empty()) j["own"] = p.own;
  if (p.varlen()) j["varlen_q"] = p.varlen_q, j["varlen_k"] = p.varlen_k;
  if (p.softcap > 0) j["softcap"] = p.softcap;
  if (p.alibi) j["alibi"] = true;
  if (p.dropout > 0) j["dropout"] = p.dropout;
  if (p.top_k > 0) j["top_k"] = p.top_k;
  return j;
}

json to_json(const StepResult& s) {
  json phases = json::array();
  for (std::size_t n = 0; n < s.cost.size(); ++n) {
    const Phase& p = s.cost[n];
    json phase = {{"name", p.name},
                  {"tensor_flop", p.tensor_flop},
                  {"fp32_flop", p.fp32_flop},
                  {"exp", p.exp},
                  {"hbm_read", p.hbm_read},
                  {"hbm_write", p.hbm_write},
                  {"l2_bytes", p.l2_bytes > 0 ? json(p.l2_bytes) : json(nullptr)},
                  {"predicted_s", s.prediction.phases[n].seconds},
                  {"binding", s.prediction.phases[n].binding},
                  {"time", nullptr}};
    for (const auto& [phase_name, time] : s.phase_times)
      if (phase_name == p.name) phase["time"] = to_json(time);
    phases.push_back(std::move(phase));
  }
  json verdicts = json::array();
  for (const Verdict& v : s.verdicts) {
    verdicts.push_back({{"tensor", v.tensor},
                        {"pass", v.pass},
                        {"rows_checked", v.rows_checked},
                        {"worst_row_error", finite(v.worst_row_error)},
                        {"bound", finite(v.bound)},
                        {"at", {{"b", v.b}, {"h", v.h}, {"row", v.row}}},
                        {"max_error", finite(v.max_error)},
                        {"max_bound", finite(v.max_bound)},
                        {"failure", v.failure},
                        {"shape", v.shape}});
    if (const auto& d = v.to_originals)
      verdicts.back()["to_originals"] = {{"cosine", finite(d->cosine)},
                                         {"relative_l1", finite(d->relative_l1)},
                                         {"rmse", finite(d->rmse)}};
  }
  json variations = json::array();
  for (const Varied& v : s.variations)
    variations.push_back(
        {{"change", v.change}, {"outcome", name(v.outcome)}, {"reason", v.reason}});
  const auto share = s.share_of_roof();
  json j = {{"name", s.step},
          {"operation", s.operation},
          {"outcome", name(s.outcome)},
          {"reason", s.reason},
          {"verdicts", verdicts},
          {"variations", variations},
          {"flop", s.flop},
          {"compulsory_bytes", s.compulsory_bytes},
          {"modelled_bytes", modelled_bytes(s.cost)},
          {"memory_bytes", s.memory_bytes ? json(*s.memory_bytes) : json(nullptr)},
          {"predicted_s", s.prediction.seconds},
          {"binding", s.prediction.binding},
          {"time", s.time ? to_json(*s.time) : json(nullptr)},
          {"launch_hidden", s.time ? json(s.launch_hidden) : json(nullptr)},
          {"flop_per_s", s.time ? json(s.flop / s.time->median) : json(nullptr)},
          {"share_of_roof", share ? json(*share) : json(nullptr)},
          {"phases", phases}};
  if (s.read_s) {
    j["useful_read_s"] = *s.read_s;
    j["useful_bytes_per_s"] = s.time ? json(s.compulsory_bytes / s.time->median) : json(nullptr);
  }
  if (s.plan_time) j["plan_time"] = to_json(*s.plan_time);
  return j;
}

}  // namespace

json to_json(const RunResult& r) {
  json steps = json::array();
  for (const StepResult& s : r.steps) steps.push_back(to_json(s));
  const GpuInfo& gpu = gpu_info();
  json device = {{"backend", r.backend == Backend::gpu ? "gpu" : "emulated"}, {"text", r.device}};
  if (r.backend == Backend::emulated) device["schedule"] = r.schedule;
  if (r.backend == Backend::gpu)
    device.update({{"name", gpu.name},
                   {"number", gpu.ordinal},
                   {"compute_capability", {gpu.cc_major, gpu.cc_minor}},
                   {"num_sms", gpu.num_sms},
                   {"l2_bytes", gpu.l2_bytes},
                   {"memory_free_bytes", r.memory_free_bytes},
                   {"cuda_driver", gpu.driver_version},
                   {"cuda_runtime", gpu.runtime_version}});
  json roofs = {{"gpu", r.roofs.gpu},
                {"hbm_copy", to_json(r.roofs.hbm_copy)},
                {"hbm_read", to_json(r.roofs.hbm_read)},
                {"l2", to_json(r.roofs.l2)},
                {"fp32", to_json(r.roofs.fp32)},
                {"tensor_fp16", to_json(r.roofs.tensor_fp16)},
                {"tensor_bf16", to_json(r.roofs.tensor_bf16)},
                {"exp", to_json(r.roofs.exp)}};
  if (r.problem.dtype == DType::e4m3 || r.problem.dtype == DType::int8)
    roofs["tensor_e4m3"] = to_json(r.roofs.tensor_e4m3);
  return {{"schema", "attn-results-1"},
          {"timing_method", kTimingMethod},
          {"chapter", r.chapter},
          {"device", device},
          {"operation", r.operation},
          {"problem", to_json(r.problem)},
          {"roofs", roofs},
          {"steps", steps}};
}

}  // namespace attn
