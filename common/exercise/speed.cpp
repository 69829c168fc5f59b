#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "check/check.h"
#include "exercise/exercise.h"
#include "check/inputs.h"
#include "run/mask_option.h"
#include "run/session.h"

namespace attn {
namespace {

constexpr int kInputSets = 3;  // rotated, so that an output kept from the previous launch is wrong
constexpr int kRounds = 6;

// Large enough to fill a GPU, small enough to be checked after every launch.
Problem speed_problem(const Step& step, uint64_t seed) {
  Problem p;
  p.dtype = quantises_to(step);
  if (step.operation->matrix) {
    p.heads = p.kv_heads = 1;
    p.seqlen_q = 8192, p.seqlen_k = 8192;
    p.matrix = true;
  } else if (step.operation->few_queries > 0) {
    p.batch = 16, p.heads = 32, p.kv_heads = 8, p.head_dim = 64;
    p.seqlen_q = step.operation->few_queries, p.seqlen_k = 8192;
  } else {
    p.heads = p.kv_heads = 16, p.head_dim = 64, p.seqlen_q = p.seqlen_k = 1024;
  }
  p.seed = seed;
  p.finish();
  // For steps that need a mask: column intervals, or a canvas of 8 tiles.
  if (takes(step, "mask") && refusal(step, p))
    for (const char* const mask : {"flashmask:document", "sta:2x8x64,2x8x8,2x8x24"}) {
      p.mask = read_mask(mask, p);
      if (!refusal(step, p)) break;
    }
  return p;
}

// Inputs with their expected outputs on a sample of rows; on the GPU, for the shipped step.
struct InputSet {
  Request request;
  std::vector<Expected> expected;
  std::unique_ptr<Session> session;
};

InputSet input_set(const Step& step, uint64_t seed) {
  const Problem p = speed_problem(step, seed);
  InputSet set{request_for(step, p, Backend::gpu), {}, nullptr};
  add_inputs(set.request, step, p);
  set.expected = expected_of(step, p, set.request.inputs, {.full = false, .budget = 2e7});
  return set;
}

std::string wrong_output(const HostTensors& out, const InputSet& set) {
  for (const Expected& e : set.expected)
    if (const Verdict v = check(out.at(e.spec.name), e); !v.pass) return v.failure;
  return "";
}

// The least work that the outputs of a backward pass need: the convention counts five products, but
// four are enough if P is kept.
double required_flop(const Operation& op, const Problem& p) {
  return op.flop(p) * (op.name == "backward" ? 0.8 : 1);
}

// The least share of a problem's bytes that a launch moves: a step that quantises has made K and V
// smaller before.
double least_share(const Problem& p) { return std::min(1.0, bits_of(p.dtype) / 16.0); }

// Lower bound for every implementation: the compulsory bytes and the operations at the vendor's
// rates.
double roof_seconds(const Operation& op, const Problem& p) {
  const GpuSpec* gpu = spec_of_device(gpu_info().name);
  if (gpu == nullptr) return 0;
  const Roofs roofs = datasheet_roofs(*gpu);
  return std::max(op.compulsory_bytes(p) * least_share(p) / roofs.hbm_copy.rate,
                  required_flop(op, p) / roofs.tensor(p.dtype).rate);
}

// One launch of the student's version, checked; the time comes from the student's process.
std::string time_student(InputSet& set, StudentProcess& student,
                         std::vector<double>& seconds) {
  set.request.what = Request::What::time;
  const auto begin = std::chrono::steady_clock::now();
  const Reply reply = student.ask(set.request);
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
  if (!reply.message.empty()) return reply.message;
  // The time between two events must be positive and shorter than the wall time.
  if (!(reply.seconds > 0 && reply.seconds < wall.count()))
    return fmt::format("the GPU's clock says {:.3f} ms, the wall's {:.3f} ms", reply.seconds * 1e3,
                       wall.count() * 1e3);
  seconds.push_back(reply.seconds);
  return wrong_output(reply.outputs(set.request), set);
}

// The same for the shipped step, in this process.
std::string time_shipped(InputSet& set, const Step& step, GpuTimer& timer,
                         std::vector<double>& seconds) {
  Status status = set.session->prepare(step);
  // An untimed launch first: it poisons outputs and workspaces, and loads the kernel.
  if (status.ok()) status = set.session->launch();
  Sample sample;
  if (status.ok()) {
    set.session->poison();
    status = set.session->time(timer, sample);
  }
  if (!status.ok()) return status.message;
  seconds.push_back(sample.seconds);
  return wrong_output(set.session->outputs(), set);
}

}  // namespace

double speed_points(double ratio) {
  constexpr double kFull = 1.2, kNone = 10;
  return std::clamp(std::log(kNone / ratio) / std::log(kNone / kFull), 0.0, 1.0);
}

std::optional<Speed> measure_speed(const Step& shipped, StudentProcess& student, uint64_t seed) {
  if (!gpu_info().available || !shipped.launch.gpu) return std::nullopt;
  Speed result;
  result.problem = speed_problem(shipped, seed);
  if (refusal(shipped, result.problem)) return std::nullopt;
  const Operation& op = *shipped.operation;
  std::vector<InputSet> sets;
  for (uint64_t i = 0; i < kInputSets; ++i) {
    InputSet& set = sets.emplace_back(input_set(shipped, seed + 1000 * i));
    set.session =
        std::make_unique<Session>(set.request.problem, op, Backend::gpu, set.request.inputs);
  }
  GpuTimer timer;
  std::vector<double> seconds[2];
  for (int round = 0; round < kRounds; ++round)
    for (InputSet& set : sets) {
      result.wrong = time_student(set, student, seconds[0]);
      if (!result.wrong.empty()) return result;
      if (const std::string ours = time_shipped(set, shipped, timer, seconds[1]); !ours.empty())
        throw DeviceError("the shipped step: " + ours);
    }
  result.student = statistics(seconds[0]);
  result.shipped = statistics(seconds[1]);
  result.ratio = result.student.median / result.shipped.median;
  result.roof_s = roof_seconds(op, result.problem);
  // The student's process reports its own times: this limits the gain of a false report.
  if (result.student.median < result.roof_s)
    result.wrong = fmt::format("{:.4f} ms, where no such GPU takes less than {:.4f} ms",
                               result.student.median * 1e3, result.roof_s * 1e3);
  return result;
}

bool profile_speed_problem(const Step& step, StudentProcess& student, uint64_t seed) {
  if (!gpu_info().available || !step.launch.gpu) return false;
  if (refusal(step, speed_problem(step, seed))) return false;
  InputSet set = input_set(step, seed);
  set.request.what = Request::What::profile;
  const Reply reply = student.ask(set.request);
  if (!reply.message.empty()) fmt::print("FAIL  gpu, profiled:\n      {}\n", reply.message);
  return reply.message.empty();
}

nlohmann::json to_json(const Speed& speed, const Step& step) {
  const Operation& op = *step.operation;
  const auto time = [](const TimeStatistics& t) {
    return nlohmann::json{
        {"median_s", t.median}, {"q1_s", t.q1}, {"q3_s", t.q3}, {"count", t.count}};
  };
  double inputs = 0;
  for (const TensorSpec& t : op.inputs(speed.problem))
    inputs += static_cast<double>(t.bytes()) * least_share(speed.problem);
  nlohmann::json json{{"problem", speed.problem.text()},
                      {"required_flop", required_flop(op, speed.problem)},
                      {"input_bytes", inputs}};
  if (speed.roof_s > 0) json["roof_s"] = speed.roof_s;
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
