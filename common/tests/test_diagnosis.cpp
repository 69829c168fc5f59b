// Variations of a failed problem: what the chapter program prints and writes. The steps here exist
// for this test: each is correct except for one fault.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "check/operation.h"
#include "check/variations.h"
#include "emulator/simt.h"
#include "run/diagnosis.h"
#include "run/runner.h"
#include "run/schedule.h"
#include "tests/catch.h"

namespace {

using namespace attn;

// fp32 attention, query by query, over the `keys` subset of the visible keys.
template <class Keys>
void attend(const Arguments& args, Keys keys) {
  const Problem& p = args.problem;
  const float *q = args.in<float>("q"), *k = args.in<float>("k"), *v = args.in<float>("v");
  float *o = args.out<float>("o"), *lse = args.out<float>("lse");
  const int64_t d = p.head_dim;
  for (int64_t row = 0; row < p.batch * p.heads * p.seqlen_q; ++row) {
    const int64_t bh = row / p.seqlen_q,
                  kv = (bh / p.heads * p.kv_heads + bh % p.heads / p.group()) * p.seqlen_k;
    const KeyRange seen = keys(p.visible(row % p.seqlen_q));
    double sum = 0;
    std::vector<double> acc(static_cast<std::size_t>(d));
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      double score = 0;
      for (int64_t c = 0; c < d; ++c) score += double{q[row * d + c]} * k[(kv + j) * d + c];
      const double weight = std::exp(score * p.softmax_scale);
      sum += weight;
      for (int64_t c = 0; c < d; ++c)
        acc[static_cast<std::size_t>(c)] += weight * v[(kv + j) * d + c];
    }
    for (int64_t c = 0; c < d; ++c)
      o[row * d + c] = sum > 0 ? static_cast<float>(acc[static_cast<std::size_t>(c)] / sum) : 0;
    lse[row] = static_cast<float>(std::log(sum));
  }
}
KeyRange all(KeyRange seen) { return seen; }

Step step(const char* name, LaunchFunction launch) {
  Step s;
  s.name = name, s.operation = &forward(), s.idea = "a fault", s.support = "fp32";
  s.refuses = [](const Problem& p) -> std::optional<std::string> {
    if (p.dtype != DType::fp32) return "fp32 alone";
    if (p.seqlen_k % 128 == 0) return "no whole tiles";
    return std::nullopt;
  };
  s.workspaces = [](const Problem&) { return std::vector<Workspace>{}; };
  s.cost = [](const Problem&) { return Cost{Phase{.name = "all"}}; };
  s.launch.emulated = launch;
  return s;
}

// Masks the last key visible under a causal mask; crashes if there is one head.
Status last_key_masked(const Arguments& args) {
  if (args.problem.heads == 1) raise(SIGKILL);
  attend(args, [&](KeyRange seen) { return KeyRange{seen.begin, seen.end - args.problem.causal}; });
  return Status::success();
}
Status of_two_sequences(const Arguments& args) {
  if (args.problem.batch > 1)
    return Status::kernel_error("deadlock: thread 0 waits at x.cu:1; 3 of 4 have exited");
  if (args.problem.masked())
    return Status::kernel_error("deadlock: thread 1 waits at x.cu:2; none have exited");
  attend(args, all);
  return Status::success();
}
Status right(const Arguments& args) {
  attend(args, all);
  return Status::success();
}
// Leaves out the last row of the second head of O.
Status one_row_left_out(const Arguments& args) {
  float* const left_out =
      args.out<float>("o") + (2 * args.problem.seqlen_q - 1) * args.problem.head_dim;
  const std::vector<float> before(left_out, left_out + args.problem.head_dim);
  attend(args, all);
  std::ranges::copy(before, left_out);
  return Status::success();
}
Status nothing_at_all(const Arguments&) { return Status::success(); }
// Correct or wrong depending only on the schedule.
Status odd_schedule(const Arguments& args) {
  attend(args, all);
  if (emulator::schedule_seed % 2 == 1) args.out<float>("lse")[0] += 1;
  return Status::success();
}

Problem small() {
  Problem p;
  p.heads = 4, p.kv_heads = 2, p.seqlen_q = 40, p.seqlen_k = 70, p.head_dim = 16;
  p.dtype = DType::fp32;
  return p;
}
std::string diagnosis(const Step& s, Problem p, const std::string& failure = "",
                      uint64_t schedule = 1) {
  p.finish();
  return varied_text(diagnose(s, p, Backend::emulated, schedule), failure);
}

TEST_CASE("the changes that a problem can have", "[diagnosis]") {
  const auto changes = [](Problem p, bool rows_alone = false, std::optional<Tiling> tiling = {}) {
    p.finish();
    std::vector<std::string> text;
    Operation op;
    op.matrix = rows_alone;
    for (const Variation& v : variations(p, op, tiling))
      text.push_back(v.change + ": " + v.problem.text());
    return fmt::format("{}", fmt::join(text, "\n"));
  };
  Problem p = small();
  CHECK(changes(p) ==
        "with one head: B=1 Hq=1 Hkv=1 seqlen_q=40 seqlen_k=70 d=16 fp32 inputs=random seed=1\n"
        "with whole tiles (128, 128): B=1 Hq=4 Hkv=2 seqlen_q=128 seqlen_k=128 d=16 fp32 "
        "inputs=random seed=1");
  p.causal = true, p.batch = 2, p.softcap = 5, p.dropout = 0.5;
  CHECK(changes(p, false, Tiling{64, 32}) ==
        "without --causal: B=2 Hq=4 Hkv=2 seqlen_q=40 seqlen_k=70 d=16 fp32 softcap=5 dropout=0.5 "
        "inputs=random seed=1\n"
        "with equal lengths (70): B=2 Hq=4 Hkv=2 seqlen_q=70 seqlen_k=70 d=16 fp32 causal "
        "softcap=5 dropout=0.5 inputs=random seed=1\n"
        "without --softcap: B=2 Hq=4 Hkv=2 seqlen_q=40 seqlen_k=70 d=16 fp32 causal dropout=0.5 "
        "inputs=random seed=1\n"
        "without --dropout: B=2 Hq=4 Hkv=2 seqlen_q=40 seqlen_k=70 d=16 fp32 causal softcap=5 "
        "inputs=random seed=1\n"
        "with one head: B=2 Hq=1 Hkv=1 seqlen_q=40 seqlen_k=70 d=16 fp32 causal softcap=5 "
        "dropout=0.5 inputs=random seed=1\n"
        "with one sequence: B=1 Hq=4 Hkv=2 seqlen_q=40 seqlen_k=70 d=16 fp32 causal softcap=5 "
        "dropout=0.5 inputs=random seed=1\n"
        "with whole tiles (64, 96): B=2 Hq=4 Hkv=2 seqlen_q=64 seqlen_k=96 d=16 fp32 causal "
        "softcap=5 dropout=0.5 inputs=random seed=1");
  Problem least;
  least.heads = least.kv_heads = 1, least.seqlen_q = 64, least.seqlen_k = 32, least.window_left = 3;
  CHECK(changes(least, false, Tiling{64, 32}).starts_with("without --window: "));
  least.window_left = -1;
  CHECK(changes(least, false, Tiling{64, 32}) == "");
  Problem packed;
  packed.varlen_q = {3, 70, 0}, packed.varlen_k = {9, 64, 5}, packed.heads = packed.kv_heads = 1;
  packed.finish();
  const std::vector<Variation> of_packed = variations(packed, {}, Tiling{64, 32});
  REQUIRE(of_packed.size() == 2);
  CHECK((of_packed[0].change == "with one sequence" &&
         of_packed[0].problem.varlen_k == std::vector<int64_t>{64}));
  CHECK((of_packed[1].change == "with lengths of whole tiles" &&
         of_packed[1].problem.varlen_q == std::vector<int64_t>{64, 128, 0}));
  Problem rows;
  rows.heads = rows.kv_heads = 1, rows.head_dim = 1, rows.seqlen_q = 5, rows.seqlen_k = 100;
  CHECK(changes(rows, true).starts_with("with one row: B=1 Hq=1 Hkv=1 seqlen_q=1 seqlen_k=100"));
  CHECK(changes(rows, true).find("with columns (128): ") != std::string::npos);
}

TEST_CASE("a failure is run again with one thing changed", "[diagnosis]") {
  Problem p = small();
  p.causal = true;
  CHECK(diagnosis(step("last_key_masked", last_key_masked), p) ==
        "passes without --causal; fails with equal lengths (70); stops with one head (crashed: "
        "Killed); "
        "cannot run with whole tiles (128, 128) (no whole tiles)");
  Problem two = small();
  two.batch = 2, two.causal = true;
  const std::string failure = "deadlock: thread 0 waits at x.cu:1; 2 of 4 have exited";
  CHECK(diagnosis(step("of_two_sequences", of_two_sequences), two, failure) ==
        "stops likewise without --causal; stops likewise with equal lengths (70); stops likewise "
        "with one head; "
        "stops with one sequence (deadlock: thread 1 waits at x.cu:2); cannot run with whole tiles "
        "(128, 128) (no whole tiles)");
  Problem large = small();
  large.seqlen_q = large.seqlen_k = 4001;
  CHECK(diagnosis(step("right", right), large) ==
        "not tried (the problem is 20 times as large as any that is run again)");
  large.inputs = InputKind::files;
  CHECK(diagnosis(step("right", right), large) == "not tried (the inputs are from files)");
}

TEST_CASE("the same in another thread is the same", "[diagnosis]") {
  const auto text = [](const char* reason) {
    return varied_text(
        {{Varied::Outcome::stopped, reason, "with one head"}},
        "thread (3,0,0) of block (0,0,1) calls f at x.cu:1 on a barrier; 3 have exited");
  };
  CHECK(text("thread (40,0,0) of block (0,0,0) calls f at x.cu:1 on a barrier; 7 have exited") ==
        "stops likewise with one head");
  CHECK(text("thread (3,0,0) of block (0,0,1) calls f at x.cu:2 on a barrier") ==
        "stops with one head (thread (3,0,0) of block (0,0,1) calls f at x.cu:2 on a barrier)");
}

TEST_CASE("three schedules are run of each change", "[diagnosis]") {
  for (const uint64_t schedule : {1, 2})  // 1, 2, 3 or 2, 3, 4
    CHECK(diagnosis(step("odd_schedule", odd_schedule), small(), "", schedule)
              .starts_with("fails with one head"));
  CHECK(diagnosis(step("right", right), small()).starts_with("passes with one head"));
}

// ---- the chapter program ------------------------------------------------------------------------

struct Ran {
  int status;
  std::string output;
  nlohmann::json json;
};
Ran run(const Chapter& chapter, std::vector<std::string> arguments) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / fmt::format("diagnosis.{}", getpid());
  std::filesystem::create_directory(folder);
  arguments.insert(arguments.begin(), "program");
  arguments.insert(arguments.end(), {"--device", "emulated", "--dtype", "fp32", "--json",
                                     (folder / "run.json").string()});
  std::vector<const char*> argv;
  for (const std::string& a : arguments) argv.push_back(a.c_str());
  std::fflush(stdout);
  const int before = dup(1);
  REQUIRE(std::freopen((folder / "out").c_str(), "w", stdout));
  Ran ran{run_chapter(chapter, static_cast<int>(argv.size()), argv.data()), "", {}};
  std::fflush(stdout);
  dup2(before, 1), close(before);
  std::ifstream output(folder / "out"), json(folder / "run.json");
  ran.output.assign(std::istreambuf_iterator<char>(output), {});
  ran.json = nlohmann::json::parse(json, nullptr, false);
  std::filesystem::remove_all(folder);
  return ran;
}
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("the program says the shape of a failure, what passes, and the schedule", "[diagnosis]") {
  const Chapter chapter{
      "99_wrong", "steps with a fault", {step("last_key", last_key_masked), step("right", right)}};
  const Ran ran = run(chapter, {"--seqlen", "70", "--causal", "--head-dim", "16"});
  INFO(ran.output);
  CHECK(ran.status == 1);
  CHECK(contains(ran.output, "\n  o wrong: "));
  CHECK(contains(ran.output, "\n  lse wrong: 140 of 140 elements, 140 of 140 rows\n"));
  CHECK(contains(ran.output, "\nright            pass "));
  CHECK(contains(ran.output,
                 "\nlast_key         varied: passes without --causal; stops with one head "
                 "(crashed: Killed); cannot run "));
  CHECK(contains(ran.output, "\nschedule: --schedule 1 repeats "));
  const nlohmann::json& failed = ran.json.at("steps").at(0);
  CHECK(failed.at("verdicts").at(1).at("shape").at(0) ==
        "wrong: 140 of 140 elements, 140 of 140 rows");
  CHECK(failed.at("variations").at(0) ==
        nlohmann::json{{"change", "without --causal"}, {"outcome", "pass"}, {"reason", ""}});
  CHECK(failed.at("variations").at(1) == nlohmann::json{{"change", "with one head"},
                                                        {"outcome", "stopped"},
                                                        {"reason", "crashed: Killed"}});
  CHECK(ran.json.at("steps").at(1).at("variations").empty());
  CHECK(ran.json.at("steps").at(1).at("verdicts").at(1).at("shape").empty());
  CHECK(ran.json.at("device").at("schedule") == 1);
}

// Values and indices of four columns of each row of x: zeros suffice for this test.
const Operation& four_of_a_row() {
  static const Operation operation = [] {
    const auto rows = [](const Problem& p, const char* tensor, DType t, int64_t columns) {
      return TensorSpec{tensor, {p.batch, p.heads, p.seqlen_q, columns}, t};
    };
    Operation op;
    op.name = "four_of_a_row";
    op.inputs = [=](const Problem& p) { return std::vector{rows(p, "x", p.dtype, p.seqlen_k)}; };
    op.saved = [](const Problem&) { return std::vector<TensorSpec>(); };
    op.outputs = [=](const Problem& p) {
      return std::vector{rows(p, "values", p.dtype, 4), rows(p, "indices", DType::int32, 4)};
    };
    op.flop = [](const Problem&) { return 0.0; };
    op.reference = [outputs = op.outputs](const Problem& p, const HostTensors&, Selection) {
      std::vector<Expected> all;
      for (const TensorSpec& spec : outputs(p)) {
        Expected& e =
            all.emplace_back(expected_rows(spec, static_cast<std::size_t>(p.seqlen_q), 0, false));
        for (int64_t i = 0; i < p.seqlen_q; ++i) e.rows[static_cast<std::size_t>(i)] = {0, 0, i};
      }
      return all;
    };
    op.matrix = true;
    return op;
  }();
  return operation;
}

TEST_CASE("what a step leaves out was never written, of whatever type", "[diagnosis]") {
  const Chapter chapter{"99_wrong", "steps with a fault", {step("one_row", one_row_left_out)}};
  const Ran ran = run(chapter, {"--seqlen", "70", "--head-dim", "16"});
  CHECK(
      contains(ran.output,
               " o (b 0, h 1, row 69, column 0) was never written; 16 of 2240 elements were not "));
  CHECK(
      contains(ran.output, "\n  o wrong: 16 of 2240 elements, 1 of 140 rows, 16 of 16 columns\n"));
  Step topk = step("topk", nothing_at_all);
  topk.operation = &four_of_a_row();
  const Ran rows = run({"99_wrong", "rows", {topk}}, {"--rows", "3", "--cols", "40"});
  CHECK(contains(
      rows.output,
      " values (b 0, h 0, row 0, column 0) was never written; 12 of 12 elements were not "));
  CHECK(contains(
      rows.output,
      "\n  indices (b 0, h 0, row 0, column 0) was never written; 12 of 12 elements were not\n"));
}

TEST_CASE("a schedule is chosen by its number, else by the seed", "[diagnosis]") {
  const Chapter chapter{"99_wrong", "a race", {step("race", odd_schedule)}};
  CHECK(run(chapter, {"--seqlen", "70"}).status == 1);
  CHECK(run(chapter, {"--seqlen", "70", "--schedule", "6"}).status == 0);
  CHECK(run(chapter, {"--seqlen", "70", "--seed", "6"}).status == 0);
  const Ran ran = run(chapter, {"--seqlen", "70", "--seed", "6", "--schedule", "9"});
  CHECK(ran.status == 1);
  CHECK(contains(ran.output, "\nschedule: --schedule 9 repeats "));
  CHECK(ran.json.at("device").at("schedule") == 9);
}

}  // namespace
