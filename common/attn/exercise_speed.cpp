#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "attn/check.h"
#include "attn/exercise.h"
#include "attn/inputs.h"
#include "attn/session.h"

namespace attn {
namespace {

constexpr int kInputSets = 3;  // in turns: an output kept from the launch before is wrong
constexpr int kRounds = 6;

// Large enough to fill a GPU, small enough to be checked after every launch.
Problem speed_problem(const Step& step, uint64_t seed) {
  Problem p;
  if (works_on_rows(step.operation)) {
    p.heads = p.kv_heads = 1;
    p.seqlen_q = 8192, p.seqlen_k = 8192;
    p.softmax_scale = 1;
  } else {
    p.heads = p.kv_heads = 16, p.head_dim = 64, p.seqlen_q = p.seqlen_k = 1024;
  }
  p.seed = seed;
  p.finish();
  return p;
}

// Inputs on the GPU with what they should give, on a sample of rows.
struct InputSet {
  Problem problem;
  std::vector<Expected> expected;
  std::unique_ptr<Session> session;
};

InputSet input_set(const Step& step, uint64_t seed) {
  InputSet set{speed_problem(step, seed), {}, nullptr};
  const Operation& op = *find_operation(step.operation);
  const HostTensors inputs = draw_inputs(set.problem, op.inputs(set.problem));
  set.expected = op.reference(set.problem, inputs, {.full = false, .budget = 2e7});
  set.session = std::make_unique<Session>(set.problem, op, Backend::gpu, inputs);
  return set;
}

std::string wrong_output(InputSet& set) {
  if (const auto damage = set.session->damage()) return *damage;
  const HostTensors out = set.session->outputs();
  for (const Expected& e : set.expected)
    if (const Verdict v = check(out.at(e.spec.name), e); !v.pass) return v.failure;
  return "";
}

}  // namespace

double speed_points(double ratio) {
  constexpr double kFull = 1.2, kNone = 10;
  return std::clamp(std::log(kNone / ratio) / std::log(kNone / kFull), 0.0, 1.0);
}

std::optional<Speed> measure_speed(const Step& shipped, const Step& student, uint64_t seed) {
  if (!gpu_info().available || !student.launch.gpu) return std::nullopt;
  Speed result;
  result.problem = speed_problem(student, seed);
  if (refusal(student, result.problem)) return std::nullopt;
  std::vector<InputSet> sets;
  for (uint64_t i = 0; i < kInputSets; ++i) sets.push_back(input_set(student, seed + 1000 * i));
  GpuTimer timer;
  const Step* const steps[] = {&student, &shipped};
  std::vector<double> seconds[2];
  double wall = 0, events = 0;
  for (int round = 0; round < kRounds; ++round)
    for (InputSet& set : sets)
      for (const int which : {0, 1}) {
        Status status = set.session->prepare(*steps[which]);
        // Once outside the clock: it poisons outputs and workspaces, and loads the kernel.
        if (status.ok()) status = set.session->launch();
        Sample sample;
        if (status.ok()) {
          set.session->poison();
          const auto begin = std::chrono::steady_clock::now();
          status = set.session->time(timer, sample);
          wall += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        }
        result.wrong = status.ok() ? wrong_output(set) : status.message;
        if (!result.wrong.empty()) return result;
        events += sample.seconds;
        seconds[which].push_back(sample.seconds);
      }
  result.student = statistics(seconds[0]);
  result.shipped = statistics(seconds[1]);
  result.ratio = result.student.median / result.shipped.median;
  // Events between two points of a stream cannot say more than the clock on the wall.
  if (events > wall)
    result.wrong = fmt::format("the GPU's clock says {:.3f} ms, the wall's {:.3f} ms", events * 1e3, wall * 1e3);
  return result;
}

bool profile_speed_problem(const Step& student, uint64_t seed) {
  if (!gpu_info().available || !student.launch.gpu) return false;
  InputSet set = input_set(student, seed);
  return set.session->prepare(student).ok() && set.session->profile().ok();
}

nlohmann::json to_json(const Speed& speed, const Step& step) {
  const Operation& op = *find_operation(step.operation);
  const auto time = [](const TimeStatistics& t) {
    return nlohmann::json{{"median_s", t.median}, {"q1_s", t.q1}, {"q3_s", t.q3}, {"count", t.count}};
  };
  int64_t inputs = 0;
  for (const TensorSpec& t : op.inputs(speed.problem)) inputs += t.bytes();
  // The field counts five products for a backward pass; with P kept, four are enough.
  const double required = op.flop(speed.problem) * (op.name == "backward" ? 0.8 : 1);
  nlohmann::json json{{"problem", problem_text(op, speed.problem)},
                      {"required_flop", required},
                      {"input_bytes", inputs}};
  // No implementation is faster than its compulsory bytes and its operations at the vendor's rates.
  if (const GpuSpec* gpu = spec_of_device(gpu_info().name)) {
    const Roofs roofs = datasheet_roofs(*gpu);
    json["roof_s"] = std::max(op.compulsory_bytes(speed.problem) / roofs.hbm_copy.rate,
                              required / roofs.tensor(speed.problem.dtype).rate);
  }
  if (!speed.wrong.empty()) {
    json["wrong"] = speed.wrong;
    return json;
  }
  json["student"] = time(speed.student);
  json["shipped"] = time(speed.shipped);
  json["ratio"] = speed.ratio;
  json["points"] = speed_points(speed.ratio);
  return json;
}

}  // namespace attn
