// The main() of a program with a student's kernel: ex01a_student, and check_ex01a with the planted
// versions.
//
// It launches what the judge requests and returns numbers. It knows neither the right results nor
// how the inputs were drawn, and contains none of the shipped steps. It is run by the judge,
// judge_01_naive.
#include <fmt/format.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>

#include "device/device.h"
#include "exercise/child.h"
#include "exercise/pipe.h"
#include "check/operation.h"
#include "ranks/emulated.h"
#include "run/schedule.h"
#include "run/session.h"
#include "run/timeline.h"
#include "emulator/simt.h"

namespace attn {
namespace {

// A failed problem is run again with one change. The kernel's output has then been printed already.
void print_nothing() {
  const int nowhere = open("/dev/null", O_WRONLY);
  dup2(nowhere, 1), dup2(nowhere, 2);
  close(nowhere);
}

// Records one launch. A page is written of a launch that fails, too.
Status record(Session& session, const Step& step, const Request& r) {
  Options options;
  options.timeline = r.timeline;
  RunResult run;
  run.chapter = r.title;
  run.problem = r.problem;
  run.steps.emplace_back().step = r.variant;
  OutputFile file("--timeline", r.timeline);
  TimelineRecorder recorder(options, run);
  Status status = recorder.record(session, step);
  if (!status.ok()) {
    run.steps.front().outcome = StepResult::Outcome::fail;
    run.steps.front().reason = status.message;
  }
  recorder.write(file);
  return status;
}

Reply answer(const Request& r) {
  if (r.quiet) print_nothing();
  const std::vector<Variant>& all = variants();
  const auto v = std::ranges::find(all, r.variant, &Variant::name);
  if (v == all.end())
    return Reply::failure(fmt::format("--variant {}: no such version", r.variant));
  Reply reply;
  if (r.what == Request::What::probe) {
    if (v->probe) {
      const std::vector<float> values = v->probe();
      const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
      reply.bytes.assign(bytes, bytes + values.size() * sizeof(float));
    }
    return reply;
  }
  Operation operation;
  operation.inputs = [&](const Problem&) { return r.input_specs; };
  operation.saved = [](const Problem&) { return std::vector<TensorSpec>{}; };
  operation.outputs = [&](const Problem&) { return r.output_specs; };
  Step step;
  step.name = v->name;
  step.workspaces = [&](const Problem&) { return r.workspaces; };
  step.launch = v->launch;
  step.prepare = v->prepare;
  if (!step.launch.on(r.backend)) return Reply::failure(kNoGpuKernel);

  choose_schedule(r.schedule);
  emulator::find_races = true;
  // A workspace that one launch leaves to the next also carries data between CTAs.
  const bool kept = std::ranges::any_of(r.workspaces, &Workspace::saved);
  const bool on_ranks = r.problem.own.contains("devices");
  if (on_ranks && r.timeline.empty()) ranks::planted.runs = 2;  // finds the flags of the first run
  emulator::find_global_races = kept || on_ranks;
  Session session(r.problem, operation, r.backend, r.inputs);
  Status status = session.prepare(step);
  if (status.ok() && r.what == Request::What::profile) {
    status = session.profile();
    return status.ok() ? reply : Reply::failure(status.message);
  }
  // An untimed launch loads the kernel first.
  if (status.ok()) status = r.timeline.empty() ? session.launch() : record(session, step, r);
  for (int n = 2; status.ok() && kept && r.timeline.empty() && n <= r.launches; ++n) {
    status = session.launch();
    if (!status.ok())
      return Reply::failure(
          fmt::format("in the {} launch: {}", n == 2 ? "second" : "third", status.message));
  }
  if (status.ok() && r.what == Request::What::time) {
    GpuTimer timer;
    Sample sample;
    session.poison();
    status = session.time(timer, sample);
    reply.seconds = sample.seconds;
  }
  if (!status.ok()) return Reply::failure(status.message);
  if (const auto damage = session.damage()) return Reply::failure(*damage);
  const HostTensors outputs = session.outputs();
  for (const TensorSpec& t : r.output_specs) {
    const std::vector<std::byte> bytes = to_bytes(outputs.at(t.name));
    reply.bytes.insert(reply.bytes.end(), bytes.begin(), bytes.end());
  }
  return reply;
}

}  // namespace
}  // namespace attn

int main(int argc, char** argv) {
  if (argc != 2 || std::strcmp(argv[1], "--serve") != 0) {
    fmt::print(stderr, "{}: is run by judge_CHAPTER, which sends it problems: {}\n", argv[0],
               "cmake --build --preset release --target ex01a");
    return 2;
  }
  // This process may crash and is ended by a kill, which would lose a student's buffered printf
  // output.
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  std::setvbuf(stderr, nullptr, _IONBF, 0);
  try {
    while (const auto request = attn::read_request(0)) {
      attn::Reply reply;
      try {
        reply = attn::answer(*request);
      } catch (const std::exception& e) {
        reply = attn::Reply::failure(e.what());
      }
      attn::write_reply(3, reply);
    }
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}: {}\n", argv[0], e.what());
    return 2;
  }
}
