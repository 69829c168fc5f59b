// The main() of judge_01_naive: runs the program with a student's kernel and judges its results.
//
//     judge_01_naive ex01a                       all problems of ex01a_student, in the same folder;
//                                                exit 0, or 1
//     judge_01_naive ex01a --seed 7 --case 4     one problem
//     judge_01_naive ex01a --case 4 --timeline t.html    a page of that problem's launch
//     judge_01_naive ex01a --result FILE         also writes the verdict as JSON; with --speed on a
//                                                GPU the speed
//     judge_01_naive ex01a --profile             one launch on a GPU, for ncu
//     judge_01_naive ex01a --program check_ex01a --variant last_key_skipped
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "attn/error.h"
#include "exercise/exercise.h"
#include "run/timeline_page.h"

namespace attn {
namespace {

struct Options {
  std::string exercise, program, variant = "student", result, timeline;
  uint64_t seed = 1;
  std::optional<int> only;
  double limit = 300;
  bool profile = false, speed = false;
};

// The verdict is written here, after the student's process has ended.
void write_result(const Options& o, const std::optional<Speed>& speed, const Step& step,
                  bool passed) {
  if (o.result.empty()) return;
  nlohmann::json json{{"schema", "attn-exercise-2"},
                      {"exercise", o.exercise},
                      {"seed", o.seed},
                      {"passed", passed}};
  if (speed) json["speed"] = to_json(*speed, step);
  std::ofstream file(o.result);
  file << json.dump(1) << '\n';
  if (!file.flush()) throw InputError(o.result + ": cannot be written");
}

int run(const Options& o) {
  if (!o.timeline.empty() && !is_timeline_page(o.timeline))
    throw InputError(fmt::format("--timeline {}: must end with .html", o.timeline));
  const std::vector<Exercise>& all = exercises();
  const auto e = std::ranges::find(all, o.exercise, &Exercise::name);
  if (e == all.end())
    throw InputError(fmt::format("{}: no such exercise (--list prints all)", o.exercise));
  const Step& step = shipped_step(*e);
  const std::string beside =
      std::filesystem::canonical("/proc/self/exe").parent_path() / (e->name + "_student");
  std::optional<Speed> speed;
  bool passed = true;
  {
    StudentProcess student(o.program.empty() ? beside : o.program, o.variant, o.limit);
    if (o.profile) return profile_speed_problem(step, student, o.seed) ? 0 : 77;
    passed = run_exercise(*e, student, o.seed, o.timeline.empty() ? o.only : o.only.value_or(1),
                          o.timeline);
    if (passed && o.speed) speed = measure_speed(step, student, o.seed);
  }
  if (speed && !speed->wrong.empty()) {
    fmt::print("FAIL  gpu, timed:\n      {}\n", speed->wrong);
    passed = false;
  } else if (speed) {
    fmt::print("time: {:.3f} ms, the shipped step {:.3f} ms: {:.2f} x\n",
               speed->student.median * 1e3, speed->shipped.median * 1e3, speed->ratio);
  }
  write_result(o, speed, step, passed);
  return passed ? 0 : 1;
}

}  // namespace
}  // namespace attn

int main(int argc, char** argv) {
  attn::Options o;
  bool list = false;
  CLI::App app("judges an exercise", "judge");
  app.add_option("exercise", o.exercise, "ex01a, ...");
  app.add_option(
      "--program", o.program,
      "the program with the student's kernel (default: EXERCISE_student next to this one)");
  app.add_option("--variant", o.variant, "which version in it");
  app.add_option("--seed", o.seed, "of the inputs and the emulator's schedules");
  app.add_option("--case", o.only, "this problem alone, by its number");
  app.add_option("--limit", o.limit, "seconds for all problems together")
      ->check(CLI::PositiveNumber);
  app.add_option("--result", o.result, "file for the verdict, as JSON");
  app.add_option("--timeline", o.timeline,
                 "write a page of one problem's launch in the emulator to FILE.html (--case 1)");
  app.add_flag("--speed", o.speed, "on a GPU, time it and the shipped step");
  app.add_flag("--profile", o.profile, "launch once on the GPU, for a profiler");
  app.add_flag("--list", list, "the exercises of this chapter");
  try {
    app.parse(argc, argv);
    if (list)
      for (const attn::Exercise& e : attn::exercises()) fmt::print("{}\n", e.name);
    if (list) return 0;
    if (o.exercise.empty()) throw attn::InputError("an exercise must be named (--list prints all)");
    return attn::run(o);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return 0;
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "judge: {}\n", error.what());
  } catch (const std::exception& error) {
    fmt::print(stderr, "judge: {}\n", error.what());
  }
  return 2;
}
