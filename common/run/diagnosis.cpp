#include "run/diagnosis.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>

#include "attn/tiling.h"
#include "check/check.h"
#include "check/inputs.h"
#include "check/operation.h"
#include "run/schedule.h"
#include "run/session.h"

namespace attn {
namespace {

using Outcome = Varied::Outcome;

Varied run(const Step& step, const Operation& op, const Problem& p, Backend backend,
           std::uint64_t schedule) {
  const HostTensors inputs = draw(op, p).tensors;
  const std::vector<Expected> expected = expected_of(step, p, inputs, {});
  for (std::uint64_t n = schedule; n < schedule + (backend == Backend::emulated ? 3 : 1); ++n) {
    choose_schedule(n);
    Session session(p, op, backend, inputs);
    Status status = session.prepare(step);
    if (status.ok()) status = session.launch();
    if (status.code == Status::Code::kUnsupported) return {Outcome::unsupported, status.message};
    if (!status.ok()) return {Outcome::stopped, status.message};
    if (const auto damage = session.damage()) return {Outcome::stopped, *damage};
    const HostTensors outputs = session.outputs();
    for (const Expected& e : expected)
      if (const Verdict v = check(outputs.at(e.spec.name), e); !v.pass)
        return {Outcome::fail, v.failure};
  }
  return {Outcome::pass, ""};
}

// Runs `work` in a child process. Returns its result, or how the process ended.
Varied apart(const std::function<Varied()>& work) {
  constexpr int kSeconds = 60;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return {Outcome::not_tried, std::strerror(errno)};
  std::fflush(nullptr);  // else the child would print it again
  const pid_t parent = getpid(), process = fork();
  if (process == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    const int nowhere = open("/dev/null", O_WRONLY);  // the kernel's output has been printed before
    dup2(nowhere, 1), dup2(nowhere, 2);
    Varied v{Outcome::stopped, ""};
    try {
      v = work();
    } catch (const std::exception& e) {
      v.reason = e.what();
    }
    const std::string text =
        static_cast<char>('0' + static_cast<int>(v.outcome)) + v.reason.substr(0, 2000);
    _exit(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(ends[1]);
  if (process < 0) {
    close(ends[0]);
    return {Outcome::not_tried, std::strerror(errno)};
  }
  // The result fits into the pipe, so it is complete when the child closes its end.
  pollfd ended{ends[0], POLLIN, 0};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(kSeconds);
  int ready = 0;
  do {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    ready = left.count() > 0 ? poll(&ended, 1, static_cast<int>(left.count())) : 0;
  } while (ready < 0 && errno == EINTR);
  if (ready == 0) kill(process, SIGKILL);
  std::string text(2001, '\0');
  const ssize_t bytes = read(ends[0], text.data(), text.size());
  close(ends[0]);
  int status = 0;
  waitpid(process, &status, 0);
  if (ready == 0) return {Outcome::stopped, fmt::format("did not end in {} s", kSeconds)};
  if (bytes < 1)
    return {Outcome::stopped, WIFSIGNALED(status)
                                  ? fmt::format("crashed: {}", strsignal(WTERMSIG(status)))
                                  : fmt::format("ended with status {}", WEXITSTATUS(status))};
  return {static_cast<Outcome>(text[0] - '0'), text.substr(1, static_cast<std::size_t>(bytes) - 1)};
}

}  // namespace

std::vector<Varied> diagnose(const Step& step, const Problem& p, Backend backend,
                             std::uint64_t schedule) {
  const Operation& op = *step.operation;
  if (const auto none = not_varied(p, op.matrix, backend)) return {*none};
  std::vector<Varied> all;
  bool device_failed = false;
  for (const Variation& variation : variations(p, op, tiling_of(step, p))) {
    Varied varied;
    if (const auto reason = refusal(step, variation.problem)) {
      varied = {Outcome::unsupported, *reason};
    } else if (device_failed) {
      varied = {Outcome::not_tried, "the GPU has failed"};
    } else if (backend == Backend::emulated) {
      varied = apart([&] { return run(step, op, variation.problem, backend, schedule); });
    } else {
      try {
        varied = run(step, op, variation.problem, backend, schedule);
      } catch (const DeviceError& e) {
        varied = {Outcome::stopped, e.what()}, device_failed = true;
      }
    }
    varied.change = variation.change;
    all.push_back(std::move(varied));
  }
  return all;
}

}  // namespace attn
