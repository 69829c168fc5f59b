// Shared by every chapter's tests: runs each step on a back end and checks its results.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check/failure_shape.h"
#include "check/inputs.h"
#include "attn/parallel_for.h"
#include "attn/philox.h"
#include "run/schedule.h"
#include "run/session.h"
#include "tests/catch.h"

namespace attn::tests {

/// Inputs of a problem that is too large to draw individually: the same million normal numbers,
/// repeated. A million and three is prime, so no two rows begin with the same number. If there are
/// more than `most` numbers, only the first sequences are stored, and the device repeats them.
/// Their number is odd, so an offset that has lost its high bits leads to a different sequence. All
/// sequences then have one length.
inline HostTensors repeated_inputs(const Problem& problem, const std::vector<TensorSpec>& specs,
                                   int64_t most = int64_t{1} << 27) {
  HostTensors result;
  for (const TensorSpec& spec : specs) {
    if (spec.dtype != DType::fp16 && spec.dtype != DType::bf16) {
      result.merge(draw_inputs(problem, {&spec, 1}));
      continue;
    }
    std::mt19937_64 random(problem.seed + std::hash<std::string>{}(spec.name));
    std::normal_distribution<float> normal;
    std::vector<float> some(1'000'003);
    for (float& x : some) x = normal(random);
    round_to(spec.dtype, some.data(), some.size());
    const int64_t sequence = spec.elements() / problem.batch;
    const int64_t elements = std::min(spec.elements(), sequence * (most / sequence | 1));
    HostTensor t{spec, std::vector<float>(static_cast<std::size_t>(elements))};
    parallel_for(elements / spec.columns(), [&](int64_t r) {
      for (int64_t c = 0; c < spec.columns(); ++c) {
        const auto i = static_cast<std::size_t>(r * spec.columns() + c);
        t.data[i] = some[i % some.size()];
      }
    });
    result.emplace(spec.name, std::move(t));
  }
  return result;
}

/// A problem, its inputs and the expected results of every step of an operation.
struct Case {
  Problem problem;
  const Operation& operation;
  HostTensors inputs;
  std::vector<Expected> expected;
  Case(const Problem& p, const Operation& op)
      : problem(p),
        operation(op),
        inputs(draw(op, p).tensors),
        expected(operation.reference(p, inputs, {})) {}
};

/// The result of a step for a case: "" if it is correct, else the fault.
inline std::string run_step(const Step& step, const Case& c, Backend backend,
                            HostTensors* outputs = nullptr) {
  choose_schedule(c.problem.seed);  // as the chapter program does
  Session session(c.problem, c.operation, backend, c.inputs);
  if (const Status status = session.prepare(step); !status.ok())
    return "prepare: " + status.message;
  if (const Status status = session.launch(); !status.ok()) return "launch: " + status.message;
  if (const auto damage = session.damage()) return *damage;
  if (step.plan) {
    const auto planned = [&] {
      std::map<std::string, std::vector<std::byte>> bytes;
      for (const auto& [name, tensor] : step.plan(c.problem, c.inputs))
        bytes[name] = to_bytes(tensor);
      return bytes;
    };
    if (planned() != planned()) return "plan: two of one problem differ";
  }
  const HostTensors out = session.outputs();
  const std::vector<Expected> own =
      step.logical ? expected_of(step, c.problem, c.inputs, {}) : std::vector<Expected>();
  for (const Expected& e : step.logical ? own : c.expected) {
    const Verdict v = examine(out.at(e.spec.name), e, c.problem, step);
    if (!v.pass) return failure_text(v);
  }
  if (outputs) *outputs = out;
  return "";
}
inline std::string run_step(const Step& step, const Problem& problem, Backend backend,
                            HostTensors* outputs = nullptr) {
  return run_step(step, Case(problem, *step.operation), backend, outputs);
}

/// Bitwise equality.
inline bool same(const HostTensor& a, const HostTensor& b) {
  return a.data == b.data && a.numbers == b.numbers;
}

/// The chapter's step of this name.
inline const Step& step_named(const std::string& name) {
  const auto step = std::ranges::find(chapter().steps, name, &Step::name);
  if (step == chapter().steps.end()) throw std::runtime_error("no step " + name);
  return *step;
}

/// The outputs of a step for these inputs.
inline HostTensors outputs_of(const Step& step, const Problem& problem, const HostTensors& inputs,
                              Backend backend = Backend::emulated) {
  choose_schedule(problem.seed);
  Session session(problem, *step.operation, backend, inputs);
  REQUIRE(session.prepare(step).ok());
  REQUIRE(session.launch().ok());
  REQUIRE_FALSE(session.broken_guard());
  return session.outputs();
}

/// Checks that a step's results are bitwise equal in five other orders of threads. Every other
/// launch starts with the counters that the previous one left.
inline void check_schedules(const Step& step, const Problem& problem) {
  const Case c(problem, *step.operation);
  HostTensors first;
  CHECK(run_step(step, c, Backend::emulated, &first) == "");
  Session session(problem, c.operation, Backend::emulated, c.inputs);
  for (uint64_t seed = 100; seed < 105; ++seed) {
    emulator::schedule_seed = seed;
    if (seed % 2 == 0) CHECK(session.prepare(step).ok());
    CHECK(session.launch().ok());
    for (const auto& [name, t] : session.outputs()) {
      INFO(step.name << " " << name << " under schedule " << seed);
      CHECK(same(t, first.at(name)));
    }
  }
}

/// Checks that 1000 launches of a step on a GPU give bitwise equal results.
inline void check_gpu_repeats(const Step& step, const Problem& problem) {
  INFO(step.name);
  const Operation& op = *step.operation;
  Session session(problem, op, Backend::gpu, draw(op, problem).tensors);
  REQUIRE(session.prepare(step).ok());
  CHECK(session.repeats_differ(1000) == "");
}

/// Checks that a step's results on a GPU and in the emulator differ by at most one rounding of
/// bf16, and not at all in indices.
inline void check_back_ends_agree(const Step& step, const Problem& problem) {
  INFO(step.name);
  HostTensors gpu, emulated;
  REQUIRE(run_step(step, problem, Backend::gpu, &gpu) == "");
  REQUIRE(run_step(step, problem, Backend::emulated, &emulated) == "");
  for (const auto& [name, t] : gpu) {
    INFO(name);
    if (t.data.empty()) {  // indices have no data, only numbers
      REQUIRE(!t.numbers.empty());
      CHECK(same(t, emulated.at(name)));
      continue;
    }
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < t.data.size(); ++i) {
      const double a = t.data[i], b = emulated.at(name).data[i];
      if (std::isfinite(b)) difference += (a - b) * (a - b), size += b * b;
    }
    CHECK(std::sqrt(difference / size) < 4e-3);
  }
}

/// Checks that the forward steps which take dropout drop the same probabilities as the reference,
/// bit for bit. With V the identity O is P: an element of O is 0 if its probability was dropped.
inline void check_dropped() {
  Problem p;
  p.seqlen_q = 33, p.seqlen_k = p.head_dim = 64, p.dtype = DType::fp16;
  p.heads = p.kv_heads = 2;
  p.dropout = 0.5;
  p.finish();
  const Operation& op = forward();
  HostTensors in = draw_inputs(p, op.inputs(p));
  for (float& x : in.at("q").data) x = 0;  // all probabilities equal
  for (std::size_t i = 0; i < in.at("v").data.size(); ++i)
    in.at("v").data[i] = i / 64 % 64 == i % 64 ? 1 : 0;
  int ran = 0;
  for (const Step& step : chapter().steps) {
    if (step.operation != &op || refusal(step, p)) continue;
    INFO(step.name);
    const HostTensors out = outputs_of(step, p, in);
    ++ran;
    int wrong = 0;
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t i = 0; i < 33; ++i)
        for (int64_t j = 0; j < 64; ++j)
          wrong += (out.at("o").row(0, h, i)[j] != 0) !=
                   dropout_keeps(p.seed, h, static_cast<int>(i), static_cast<int>(j), 128);
    CHECK(wrong == 0);
  }
  CHECK(ran > 0);
}

/// The same for rows of tensors too large to download: "", or the fault. The step must have been
/// launched. Writes to its inputs are not checked: see Session::damage.
inline std::string check_rows(Session& session, const std::vector<Expected>& expected) {
  if (const auto broken = session.broken_guard()) return *broken;
  for (Expected e : expected) {
    std::vector<int64_t> rows;
    for (Expected::Row& row : e.rows) {
      rows.push_back(e.spec.row(row.b, row.h, row.i));
      row = {0, 0, static_cast<int64_t>(rows.size()) - 1};
    }
    const Verdict v = check(session.output_rows(e.spec.name, rows), e);
    if (!v.pass)
      return fmt::format("{}; in memory this row is {}", v.failure,
                         rows[static_cast<std::size_t>(v.row)]);
  }
  return "";
}

/// Whether a step must support a problem. The chapter's test.cpp states this independently of the
/// step, so that a step which refuses too much or too little fails.
bool promised(const Step& step, const Problem& problem);
inline bool plain(const Problem& p) {
  return p.dropout == 0 && p.softcap == 0 && !p.alibi && p.one_length() && !p.mask;
}
inline bool one_of(int64_t x, std::initializer_list<int64_t> list) {
  return std::find(list.begin(), list.end(), x) != list.end();
}
inline bool one_of_steps(const Step& step, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), step.name) != names.end();
}

/// The steps of `operation` that do not refuse the problem: exactly the promised ones.
inline std::vector<const Step*> steps_for(const std::string& operation, const Problem& problem) {
  std::vector<const Step*> steps;
  for (const Step& step : chapter().steps) {
    if (step.operation->name != operation) continue;
    const std::optional<std::string> reason = refusal(step, problem);
    INFO(step.name << ": " << operation << " " << problem.text() << ": "
                   << reason.value_or("not refused"));
    CHECK(promised(step, problem) == !reason);
    if (!reason) steps.push_back(&step);
  }
  return steps;
}

/// The number of problems that each step ran.
struct Counts {
  std::map<std::string, int> of;
  void operator+=(const Counts& other) {
    for (const auto& [step, n] : other.of) of[step] += n;
  }
  /// The smallest number of problems that any step of a ladder ("v") ran, so that an added step is
  /// covered too.
  int least(char ladder) const {
    int fewest = std::numeric_limits<int>::max();
    for (const Step& step : chapter().steps)
      if (step.name[0] == ladder)
        fewest = std::min(fewest, of.contains(step.name) ? of.at(step.name) : 0);
    return fewest;
  }
  std::string text() const {  // "v1_global 80, v2_coalesced 80"
    std::string all;
    for (const auto& [step, n] : of)
      all += fmt::format("{}{} {}", all.empty() ? "" : ", ", step, n);
    return all;
  }
};

/// Runs every step of `operation` that must support the problem.
inline Counts check_steps(const std::string& operation, Problem problem, Backend backend,
                          bool (*which)(const Step&, int) = nullptr, int number = 0) {
  problem.finish();
  std::optional<Case> all;  // shared by all steps: on a GPU the reference takes most of the time
  Counts ran;
  for (const Step* step : steps_for(operation, problem)) {
    if (which != nullptr && !which(*step, number)) continue;
    if (!all) all.emplace(problem, *step->operation);
    INFO(step->name << ": " << operation << " " << problem.text());
    CHECK(run_step(*step, *all, backend) == "");
    ++ran.of[step->name];
  }
  return ran;
}

/// Neighbouring steps share most of their code. So in the emulator, the first, the tuned and the
/// last step of a ladder run all problems of a long list, and each of the others runs every third,
/// in turn; on a GPU all steps run all problems. `turn` assigns the n-th of covering_problems such
/// that each step meets every mask, head dim, type, batch, kind of input, and lengths unequal both
/// ways.
inline int turn(int n) { return 2 * (n / 5) + n % 5 + 2 * (n / 3); }
inline bool in_turn(const Step& step, int number) {
  const auto rung = [](const Step& s) { return std::stoi(s.name.substr(1)); };
  // A step that lacks one of these head dims is no later one.
  const std::vector<int64_t>& dims = step.limits.head_dims;
  const auto shares = [&](const Step& s) {
    const std::vector<int64_t>& other = s.limits.head_dims;
    const auto has = [&](int64_t d) { return std::ranges::count(other, d) > 0; };
    return other.empty() || std::ranges::all_of(dims, has);
  };
  int last = 0;
  for (const Step& s : chapter().steps)
    if (s.operation == step.operation && s.name[0] == step.name[0] && shares(s))
      last = std::max(last, rung(s));
  return rung(step) == 1 || rung(step) == last || step.name.ends_with("_tuned") ||
         (number + rung(step)) % 3 == 0;
}

/// Checks the backward steps with all scores near -500. Keys past the end are rows of zeros:
/// unmasked, their scores of 0 would give e^500 in P, and NaN in dQ. The same for rows past the end
/// if their lse were finite.
inline void check_far_scores(Problem p) {
  p.softmax_scale = 1;
  p.finish();
  const Operation& op = backward();
  HostTensors in = draw_inputs(p, op.inputs(p));
  const float size = std::sqrt(500.0f / static_cast<float>(p.head_dim));
  for (float& x : in.at("q").data) x = round_to(p.dtype, size + 0.01f * x);
  for (float& x : in.at("k").data) x = round_to(p.dtype, -size + 0.01f * x);
  for (const Step* step : steps_for("backward", p)) {
    INFO(step->name << " " << p.text());
    const HostTensors out = outputs_of(*step, p, in);
    for (const Expected& e : op.reference(p, in, {}))
      CHECK(check(out.at(e.spec.name), e).failure == "");
  }
}

inline Problem problem(int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim, DType dtype,
                       InputKind inputs = InputKind::random) {
  Problem p;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.head_dim = head_dim;
  p.dtype = dtype;
  p.inputs = inputs;
  return p;
}

/// The same with one head: the emulator's time is proportional to the number of heads.
inline Problem one_head(Problem p) {
  p.heads = p.kv_heads = 1;
  return p;
}

/// A small problem of five sequences, and a limit on drawn numbers by which three of them are
/// repeated.
inline Problem small_repeated_problem() {
  Problem p = problem(70, 90, 64, DType::bf16);
  p.batch = 5, p.causal = true;
  return p;
}
inline constexpr int64_t kThreeRepeated = 2 * 2 * 90 * 64;

/// Problems in which Q and O, then K and V, have more than 2^31 elements; and the first one packed.
inline std::vector<Problem> large_problems() {
  Problem queries = problem(1024, 1024, 128, DType::bf16),
          keys = problem(64, 131072, 128, DType::bf16);
  Problem packed = queries;
  queries.batch = 16 * 129, queries.heads = 8, queries.kv_heads = 1;
  queries.causal = true;
  keys.batch = 129, keys.heads = keys.kv_heads = 1;
  packed.varlen_q.assign(16 * 129, 1024), packed.heads = 8, packed.kv_heads = 1;
  return {queries, keys, packed};
}

/// Limit on drawn numbers if each step also quantises them on the host.
inline constexpr int64_t kLargeCodes = int64_t{1} << 25;

/// Runs every step of `operation` that must support the problem, and compares sampled rows,
/// including the last rows of the last head. Reports steps for which the device lacks memory.
inline void check_large_steps(const std::string& operation, Problem p, Backend backend,
                              int64_t most = int64_t{1} << 27) {
  p.finish();
  const std::vector<const Step*> steps = steps_for(operation, p);
  if (steps.empty()) return;
  const Operation& op = *steps.front()->operation;
  const HostTensors inputs = repeated_inputs(p, op.inputs(p), most);
  const auto expected_by = [&](const Step& step) {
    return expected_of(step, p, inputs, {.full = false, .budget = 1e7});
  };
  const std::vector<Expected> expected = expected_by(*steps.front());
  Session session(p, op, backend, inputs);
  for (const Step* step : steps) {
    INFO(step->name << " " << p.text());
    if (memory_need(p, op, *step).total() > static_cast<double>(free_bytes(backend))) {
      skipped(step->name + " needs more memory than there is: " + p.text());
      continue;
    }
    REQUIRE(session.prepare(*step).ok());
    REQUIRE(session.launch().ok());
    CHECK(check_rows(session, step->logical ? expected_by(*step) : expected) == "");
  }
  CHECK_FALSE(session.damage());
}

/// Lengths that expose faults: one, odd lengths, and tile boundaries.
inline const std::vector<int64_t> kLengths{1,  2,   3,   15,  16,  17,  31,  32,  33,   63,   64,
                                           65, 113, 127, 128, 129, 203, 239, 799, 1000, 1023, 1024};

inline const std::vector<int64_t> kShortLengths{1,  2,  3,  15,  16,  17,  31,  33,
                                                63, 64, 65, 113, 127, 128, 129, 203};

/// Runs `body(problem)` over a set of problems in which every pair (length, mask), (length, head
/// dim), (length, inputs) and (mask, heads) occurs: a covering array, not the product.
template <class Body>
void covering_problems(const std::vector<int64_t>& lengths, const std::vector<int64_t>& head_dims,
                       const std::vector<DType>& dtypes, Body body) {
  constexpr InputKind kInputs[] = {InputKind::needle, InputKind::random, InputKind::peaked,
                                   InputKind::needle, InputKind::outlier};
  constexpr int64_t kGroups[][2] = {{1, 1}, {2, 2}, {2, 1}, {3, 1}, {4, 1}, {7, 1}, {8, 2}};
  std::size_t n = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    for (int mask = 0; mask < 5; ++mask, ++n) {
      // Every other case has unequal lengths, in both directions.
      const int64_t other = lengths[(i * 7 + static_cast<std::size_t>(mask) * 3) % lengths.size()];
      const int64_t q = n % 3 == 1 ? other : lengths[i], k = n % 3 == 2 ? other : lengths[i];
      Problem p = problem(q, k, head_dims[n % head_dims.size()], dtypes[n % dtypes.size()],
                          kInputs[n % std::size(kInputs)]);
      const auto& heads = kGroups[n % std::size(kGroups)];
      p.heads = heads[0], p.kv_heads = heads[1];
      p.batch = (n + n / 4) % 4 == 0 ? 2 : 1;
      p.causal = mask == 1;
      if (mask == 2) p.window_left = 16, p.window_right = 0;
      if (mask == 3) p.window_left = 0, p.window_right = 5;
      if (mask == 4) p.window_right = 33;
      p.seed = n + 1;
      body(p);
    }
}

}  // namespace attn::tests
