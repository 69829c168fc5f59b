// The main() of an exercise's programs.
//
//     ex01a_student --variant student     cases; the first failure; the next hint. Exit 0, or 1
//     ex01a_student --hint                the next hint alone
//     ex01a_student --result FILE         also writes what was found as JSON, with the speed on a GPU
//     ex01a_student --profile             one launch on a GPU, for ncu
//     check_ex01a --variant last_key_skipped
//
// How many hints were shown is kept in the file that --state names.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "attn/exercise.h"

namespace {

void print_next_hint(const attn::Exercise& e, const std::string& state) {
  int shown = 0;
  std::ifstream(state) >> shown;
  const auto text = attn::hint(e, shown + 1);
  if (!text) {
    fmt::print("no more hints; the task is in {}\n", e.text);
    return;
  }
  fmt::print("\nhint {}:\n{}\n", shown + 1, *text);
  std::ofstream(state) << shown + 1 << '\n';
}

// All cases passed. The seed in the file shows that this run wrote it.
int report_speed(const attn::Exercise& e, const attn::Variant& v, uint64_t seed, const std::string& path) {
  const attn::Step& shipped = attn::shipped_step(e);
  const attn::Step student = attn::step_of(e, v);
  nlohmann::json json{{"schema", "attn-exercise-1"}, {"exercise", e.name}, {"seed", seed}, {"passed", true}};
  const auto speed = attn::measure_speed(shipped, student, seed);
  if (speed) json["speed"] = attn::to_json(*speed, student);
  const bool right = !speed || speed->wrong.empty();
  if (speed && !right) fmt::print("FAIL  gpu, timed:\n      {}\n", speed->wrong);
  if (speed && right)
    fmt::print("time: {:.3f} ms, the shipped step {:.3f} ms: {:.2f} x\n", speed->student.median * 1e3,
               speed->shipped.median * 1e3, speed->ratio);
  if (!path.empty()) {
    json["passed"] = right;
    std::ofstream file(path);
    file << json.dump(1) << '\n';
    if (!file.flush()) {
      fmt::print(stderr, "{}: {}: cannot be written\n", e.name, path);
      return 2;
    }
  }
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const attn::Exercise& e = attn::exercise();
  std::string variant = e.variants.front().name, state, result;
  uint64_t seed = 1;
  bool hint_alone = false, list = false, profile = false;
  CLI::App app("runs one exercise", e.name);
  app.add_option("--variant", variant, "which version to run");
  app.add_option("--seed", seed, "of the inputs and the emulator's schedules");
  app.add_option("--state", state, "file that remembers how many hints were shown");
  app.add_option("--result", result, "file for the verdict and the speed, as JSON");
  app.add_flag("--profile", profile, "launch once on the GPU, for a profiler");
  app.add_flag("--hint", hint_alone, "print the next hint");
  app.add_flag("--list", list, "the versions in this program");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return 0;
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "{}: {}\n", e.name, error.what());
    return 2;
  }
  if (hint_alone) {
    print_next_hint(e, state);
    return 0;
  }
  for (const attn::Variant& v : e.variants) {
    if (list) fmt::print("{}\n", v.name);
    if (list || v.name != variant) continue;
    if (profile) return attn::profile_speed_problem(attn::step_of(e, v), seed) ? 0 : 77;
    if (attn::run_exercise(e, v, seed)) return report_speed(e, v, seed, result);
    if (!state.empty()) print_next_hint(e, state);
    return 1;
  }
  if (list) return 0;
  fmt::print(stderr, "{}: --variant {}: there is no such version (--list)\n", e.name, variant);
  return 2;
}
