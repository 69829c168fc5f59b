#include "run/runner.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>
#include <tuple>

#include "attn/error.h"
#include "check/failure_shape.h"
#include "check/inputs.h"
#include "files/tensor_files.h"
#include "run/diagnosis.h"
#include "run/elsewhere.h"
#include "run/options.h"
#include "run/output_file.h"
#include "run/planned.h"
#include "run/print.h"
#include "run/progress.h"
#include "run/results.h"
#include "run/schedule.h"
#include "run/session.h"
#include "run/timeline.h"

namespace attn {
namespace {

enum Exit {
  kPass = 0,
  kCheckFailed = 1,
  kBadInput = 2,
  kUnsupported = 3,
  kDevice = 4,
  kNoGpu = 77,
};

// Above this many multiply-adds of one pass over Q and K the reference samples rows.
constexpr double kFullCheckLimit = 3e9;

// One run of the program, and the state its parts share.
class Run {
 public:
  Run(const Chapter& chapter, const Options& options)
      : chapter_(chapter), options_(options), operation_(*options.operation) {}

  int run() {
    if (options_.gpu_number && gpu_info().available) {
      if (*options_.gpu_number >= gpu_info().count)
        throw InputError(fmt::format("--device gpu:{}: must be below {}, the number of GPUs",
                                     *options_.gpu_number, gpu_info().count));
      in_use_.emplace(Device(Backend::gpu, *options_.gpu_number));
    }
    const bool have_gpu = gpu_info().available;
    if (!have_gpu && (options_.require_gpu || options_.device == DeviceChoice::gpu)) {
      fmt::print("device: none ({}): a GPU is required\n", gpu_info().error);
      return kNoGpu;
    }
    result_.backend =
        have_gpu && options_.device != DeviceChoice::emulated ? Backend::gpu : Backend::emulated;
    if (options_.schedule && result_.backend == Backend::gpu)
      throw InputError(fmt::format("--schedule {}: for the emulator only (--device emulated)",
                                   *options_.schedule));
    if (options_.races && result_.backend == Backend::gpu)
      throw InputError("--races: for the emulator only (--device emulated)");
    if (!options_.timeline.empty() && result_.backend == Backend::gpu)
      for (const Step& step : chapter_.steps)
        if (is_asked_for(options_, step))
          if (const auto reason = cannot_record(chapter_, step))
            throw InputError(fmt::format("--timeline {}: {}", options_.timeline, *reason));
    result_.schedule = options_.schedule.value_or(problem().seed);
    result_.chapter = chapter_.name;
    result_.operation = operation_.name;
    result_.problem = options_.problem;
    result_.device = device_text(result_.backend);
    fmt::print("device: {}\n", result_.device);
    fmt::print("problem: {} {}\n", operation_.name, problem_text());
    std::fflush(stdout);
    if (!options_.warning.empty()) fmt::print(stderr, "{}: {}\n", chapter_.name, options_.warning);
    if (options_.time && result_.backend == Backend::emulated)
      fmt::print("time: not measured (emulated)\n");
    OutputFile json_file("--json", options_.json);
    OutputFile timeline_file("--timeline", options_.timeline);
    // fails early if the folder is not writable
    if (!options_.save.empty()) save_tensors(options_.save, {});

    if (problem().empty()) return finish(json_file, run_empty());
    result_.memory_free_bytes = static_cast<double>(free_bytes(result_.backend));
    const std::vector<Planned> plan =
        planned_steps(chapter_, options_, result_.backend, result_.memory_free_bytes);
    result_.roofs = choose_roofs(options_, result_.backend);
    const bool none_supported = std::all_of(plan.begin(), plan.end(), [](const Planned& p) {
      return p.refused && p.refused->outcome == StepResult::Outcome::unsupported;
    });
    const bool none_left = std::all_of(plan.begin(), plan.end(),
                                       [](const Planned& p) { return p.refused.has_value(); });
    if (none_left || (!launches_anything(options_, result_.backend) && options_.profile.empty())) {
      if (!none_left) print_roofs(result_.roofs, type_of_products(operation_, problem()));
      for (const Planned& p : plan) add(p.refused ? *p.refused : predicted(*p.step));
      if (none_supported && options_.steps.empty())
        print_other_types(chapter_, operation_, problem());
      return finish(json_file, none_supported ? kUnsupported : device_failed_ ? kDevice : kPass);
    }
    std::tie(inputs_, originals_) = drawn_or_loaded();
    save_inputs();
    choose_schedule(result_.schedule);
    emulator::find_races = emulator::find_global_races = options_.races;
    Session session(problem(), operation_, result_.backend, inputs_);
    if (!options_.profile.empty()) return profile(session, *plan.front().step);
    if (!options_.timeline.empty()) timeline_.emplace(options_, result_);
    print_roofs(result_.roofs, type_of_products(operation_, problem()));
    if (operation_.note && options_.check != CheckChoice::off)
      fmt::print("{}\n", operation_.note(problem(), inputs_));
    if (options_.races)
      fmt::print("races: looked for in shared and in global memory; each is a failure\n");
    if (options_.time && result_.backend == Backend::gpu) timer_.emplace();
    if (options_.turns && timer_) return finish(json_file, take_turns(session, plan));
    for (const Planned& p : plan) add(p.refused ? *p.refused : run_step(session, *p.step));
    // Variations run after all steps: on a GPU, a crash in one of them affects no later step.
    for (std::size_t n = 0; n < plan.size(); ++n)
      if (StepResult& s = result_.steps[n]; s.outcome == StepResult::Outcome::fail)
        s.variations = diagnose(*plan[n].step, problem(), result_.backend, result_.schedule);
    print_variations(result_, !options_.timeline.empty());
    // In the emulator a failure is worth looking at, up to the point where it ended the launch.
    const bool recorded = result_.backend == Backend::emulated || !(failed_ || device_failed_);
    if (timeline_ && recorded) timeline_->write(timeline_file);
    return finish(json_file, failed_ ? kCheckFailed : device_failed_ ? kDevice : kPass);
  }

 private:
  const Problem& problem() const { return options_.problem; }
  // Options with a grammar appear as typed, not as the numbers they were parsed into.
  std::string problem_text() const {
    std::string text = problem().text();
    for (const auto& [name, typed] : options_.typed) {
      const auto own = problem().own.find(name);
      if (own == problem().own.end()) continue;
      const std::string numbers = fmt::format(" {}={}", name, fmt::join(own->second, ","));
      if (const auto at = text.find(numbers); at != text.npos)
        text.replace(at, numbers.size(), fmt::format(" {}={}", name, typed));
    }
    return text;
  }

  int finish(OutputFile& json_file, int exit_status) {
    json_file.write(to_json(result_).dump(1));
    return exit_status;
  }

  void save_inputs() const {
    if (!options_.save.empty() && options_.save != options_.load)
      save_tensors(options_.save, inputs_, problem().files_bnhd);
  }
  // Saves the outputs and the launch's choices.
  void save_all(Session& session, const Step& step, const HostTensors& outputs) const {
    save_outputs(step, outputs);
    if (step.choices)
      save_outputs(step, step.choices(problem(), [&](const std::string& name) {
        return session.workspace(name);
      }));
  }
  void save_outputs(const Step& step, const HostTensors& outputs) const {
    save_tensors(std::filesystem::path(options_.save) / step.name, outputs, problem().files_bnhd);
  }

  // A batch or a length of 0 (Problem::empty): all steps that support it have the same result, and
  // no kernel is launched.
  int run_empty() {
    std::tie(inputs_, originals_) = drawn_or_loaded();
    save_inputs();
    bool any = false;
    for (const Step& step : chapter_.steps) {
      if (!is_asked_for(options_, step) ||
          (options_.steps.empty() && !shown_for(step, problem().dtype)))
        continue;
      if (const auto reason =
              reasons_against(options_, result_.backend, step, problem().at_least_one())) {
        add(refused(step, StepResult::Outcome::unsupported, *reason));
        continue;
      }
      any = true;
      if (!options_.save.empty())
        save_outputs(step, outputs_without_keys(problem(), operation_, inputs_));
      add(refused(step, StepResult::Outcome::pass,
                  "no query or no key: outputs are 0, nothing is launched"));
    }
    return any ? kPass : kUnsupported;
  }

  void add(StepResult s) {
    print_step(s);
    std::fflush(stdout);
    if (s.outcome == StepResult::Outcome::fail) failed_ = true;
    if (s.outcome == StepResult::Outcome::error) device_failed_ = true;
    result_.steps.push_back(std::move(s));
  }

  StepResult predicted(const Step& step) const {
    return attn::predicted(options_, result_.roofs, step);
  }

  int profile(Session& session, const Step& step) {
    Status status = session.prepare(step);
    if (status.ok()) status = session.profile();
    if (status.ok()) {
      fmt::print("{:<16} launched once{}\n", step.name,
                 result_.backend == Backend::gpu ? "" : " (emulated: nothing to profile)");
      return kPass;
    }
    fmt::print("{:<16} error  {}\n", step.name, status.message);
    return kDevice;
  }

  Selection selection() const {
    // An element of a softmax costs an exponential in double precision, as much as 64
    // multiply-adds.
    const int64_t depth = problem().matrix ? 64 : problem().head_dim;
    const double work = problem().total_pairs() * static_cast<double>(depth);
    const bool full = options_.check == CheckChoice::full ||
                      (options_.check == CheckChoice::automatic && work <= kFullCheckLimit);
    return {.full = full};
  }

  const std::vector<Expected>& expected(const Step& step) {
    const std::string inputs = step.logical ? step.name : "";  // a step with inputs of its own
    if (expected_.empty() || expected_of_inputs_ != inputs) {
      const Progress progress("the reference, in double precision");
      expected_ = expected_of(step, problem(), inputs_, selection());
      expected_of_inputs_ = inputs;
    }
    return expected_;
  }

  std::pair<HostTensors, HostTensors> drawn_or_loaded() const {
    Inputs inputs = options_.load.empty() ? draw(operation_, problem())
                                          : load_inputs(options_.load, problem(), operation_);
    if (!options_.load.empty())
      if (const auto others = files_not_read(options_.load, problem(), operation_); !others.empty())
        fmt::print(stderr, "{}: warning: {}: not read by {} with these options: {}\n",
                   chapter_.name, options_.load, operation_.name, fmt::join(others, ", "));
    return {std::move(inputs.tensors), std::move(inputs.originals)};
  }

  // The expected outputs for the original inputs, where inputs are stored in fewer bits: they show
  // the error of the quantisation.
  const std::vector<Expected>& expected_of_originals(const Step& step) {
    static const std::vector<Expected> none;
    if (!operation_.logical && !step.logical) return none;
    if (expected_of_originals_.empty())
      expected_of_originals_ = attention_reference(problem(), step.logical ? inputs_ : originals_,
                                                   selection(), operation_.own);
    return expected_of_originals_;
  }

  StepResult run_step(Session& session, const Step& step) {
    using Outcome = StepResult::Outcome;
    StepResult s = predicted(step);
    const auto stop = [&](Outcome outcome, std::string reason) {
      s.outcome = outcome;
      s.reason = std::move(reason);
      return s;
    };
    try {
      Status status = session.prepare(step);
      // What one launch leaves to the next, such as a counter, may be wrong from the second on.
      const bool keeps = std::ranges::any_of(step.workspaces(problem()), &Workspace::saved);
      const int launches = timeline_ ? 1 : options_.check == CheckChoice::off ? 0 : keeps ? 2 : 1;
      for (int n = 0; n < launches && status.ok() && s.outcome != Outcome::fail; ++n) {
        {
          const Progress progress(step.name +
                                  (result_.backend == Backend::gpu ? "" : ", emulated"));
          status = timeline_ ? timeline_->record(session, step) : session.launch();
          if (n > 0 && !status.ok()) status.message = "in the second launch: " + status.message;
        }
        s.verdicts.clear();
        if (status.ok()) {
          if (auto damage = session.damage()) return stop(Outcome::fail, *damage);
          const HostTensors outputs = session.outputs();
          if (!options_.save.empty()) save_all(session, step, outputs);
          s.outcome = Outcome::pass;
          if (options_.check == CheckChoice::off) {
            s.outcome = Outcome::unchecked;
            break;
          }
          for (const Expected& e : expected(step)) {
            s.verdicts.push_back(examine(outputs.at(e.spec.name), e, problem(), step));
            for (const Expected& original : expected_of_originals(step))
              if (original.spec.name == e.spec.name)
                s.verdicts.back().to_originals = distance(outputs.at(e.spec.name), original);
            if (!s.verdicts.back().pass && s.outcome == Outcome::pass)
              stop(Outcome::fail,
                   (n > 0 ? "in the second launch: " : "") + s.verdicts.back().failure);
          }
        }
      }
      if (launches == 0 && status.ok() && !options_.save.empty()) {
        status = session.launch();
        if (status.ok()) save_all(session, step, session.outputs());
      }
      // Events of several GPUs cannot be subtracted: such steps have a way of timing of their own.
      const bool times = timer_ && !takes(step, "devices");
      if (status.ok() && times && s.outcome != Outcome::fail) status = time_step(session, s);
      if (status.code == Status::Code::kUnsupported)
        return stop(Outcome::unsupported, status.message);
      if (status.code == Status::Code::kKernelError) return stop(Outcome::fail, status.message);
      if (!status.ok()) return stop(Outcome::error, status.message);
    } catch (const DeviceError& e) {
      return stop(Outcome::error, e.what());
    }
    return s;
  }

  // After long MMA work a GPU reaches its power limit and lowers its clock, so a later step would
  // look slow. The GPU therefore idles before each step for twice as long as the previous step kept
  // it busy.
  Status time_step(Session& session, StepResult& s) {
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(1.0, 2 * busy_s_)));
    busy_s_ = 0;
    std::vector<double> whole;
    std::vector<std::pair<std::string, std::vector<double>>> phases;
    const auto add_phases = [&](const Sample& sample) {
      busy_s_ += sample.seconds;
      phases.resize(sample.phases.size());
      for (std::size_t n = 0; n < phases.size(); ++n) {
        phases[n].first = sample.phases[n].first;
        phases[n].second.push_back(sample.phases[n].second);
      }
    };
    Sample sample;
    for (int i = -options_.warmup; i < options_.repeat; ++i) {
      if (Status status = session.time(*timer_, sample); !status.ok()) return status;
      if (i < 0) {
        busy_s_ += sample.seconds;
        continue;
      }
      s.launch_hidden &= sample.launch_hidden;
      whole.push_back(sample.seconds);
      add_phases(sample);
    }
    s.time = statistics(whole);
    // Launches with several phases are timed per phase in separate launches, since events take
    // time.
    for (int i = 0; i < options_.repeat && sample.phases.size() != 1; ++i) {
      if (Status status = session.time_phases(*timer_, sample); !status.ok()) return status;
      add_phases(sample);
    }
    std::vector<double> plans;
    for (int i = 0; i < options_.repeat; ++i)
      if (const auto seconds = session.time_plan()) plans.push_back(*seconds);
    if (!plans.empty()) s.plan_time = statistics(plans);
    for (const auto& [name, seconds] : phases)
      s.phase_times.emplace_back(name, statistics(seconds));
    return Status::success();
  }

  // --turns: the caller selects which step is timed when, and leaves the GPU its pauses. Each turn
  // prints its times; the JSON file has those of all turns.
  int take_turns(Session& session, const std::vector<Planned>& plan) {
    std::map<std::string, std::vector<double>> seconds;
    for (const Planned& p : plan)
      result_.steps.push_back(p.refused ? *p.refused : predicted(*p.step));
    fmt::print("{{\"ready\": true}}\n");
    std::fflush(stdout);
    for (std::string name; std::getline(std::cin, name);) {
      const auto s = std::ranges::find(result_.steps, name, &StepResult::step);
      if (s == result_.steps.end())
        throw InputError(fmt::format("--turns: {}: not a step of this run", name));
      const Planned& p = plan[static_cast<std::size_t>(s - result_.steps.begin())];
      nlohmann::json line{{"step", name}};
      std::vector<double> turn;
      Status status = p.refused ? Status::unsupported(p.refused->reason) : session.prepare(*p.step);
      for (int i = -options_.warmup; i < options_.repeat && status.ok(); ++i) {
        Sample sample;
        status = session.time(*timer_, sample);
        if (i < 0) continue;
        turn.push_back(sample.seconds);
        s->launch_hidden &= sample.launch_hidden;
      }
      if (status.ok()) {
        seconds[name].insert(seconds[name].end(), turn.begin(), turn.end());
        line.update({{"seconds", turn}, {"launch_hidden", s->launch_hidden}});
      } else {
        s->reason = status.message;
        line["reason"] = status.message;
      }
      fmt::print("{}\n", line.dump());
      std::fflush(stdout);
    }
    for (StepResult& s : result_.steps)
      if (!seconds[s.step].empty()) s.time = statistics(seconds[s.step]);
    return kPass;
  }

  const Chapter& chapter_;
  const Options& options_;
  const Operation& operation_;
  std::optional<InUse> in_use_;  // keeps the GPU of --device gpu:N selected
  RunResult result_;
  HostTensors inputs_, originals_;
  std::vector<Expected> expected_, expected_of_originals_;
  std::string expected_of_inputs_;  // the step whose own inputs expected_ is of, if it has any
  std::optional<GpuTimer> timer_;
  std::optional<TimelineRecorder> timeline_;
  double busy_s_ = 0;  // GPU time of the previously timed step
  bool failed_ = false, device_failed_ = false;
};

}  // namespace

int run_chapter(const Chapter& chapter, int argc, const char* const* argv) {
  try {
    for (const Command& command : chapter.commands)
      if (argc > 1 && argv[1] == command.option) return command.run({argv + 2, argv + argc});
    const std::optional<Options> options = parse_options(chapter, argc, argv);
    if (!options) return kPass;
    if (options->list) {
      print_list(chapter, options->operation_given ? options->operation : nullptr);
      return kPass;
    }
    if (options->takes) {
      const std::vector<std::string> steps =
          steps_that_take(chapter, *options->operation, options->problem);
      for (const std::string& name : steps) fmt::print("{}\n", name);
      return steps.empty() ? kUnsupported : kPass;
    }
    const int exit_status = Run(chapter, *options).run();
    if (exit_status == kUnsupported) print_who_takes(chapter, *options, {argv + 1, argv + argc});
    if (std::fflush(stdout) != 0 || std::ferror(stdout))
      throw InputError("standard output: could not be written");
    return exit_status;
  } catch (const InputError& e) {
    fmt::print(stderr, "{}: {}\n", chapter.name, e.what());
    return kBadInput;
  } catch (const DeviceError& e) {
    fmt::print(stderr, "{}: {}\n", chapter.name, e.what());
    return kDevice;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "{}: the host is out of memory\n", chapter.name);
    return kDevice;
  }
}

}  // namespace attn
