/// \file
/// Sequences of launches: replayed as CUDA graphs with other inputs, after an aborted launch, and
/// concurrently with a launch in another stream. State left by a launch (tile counters, arrival
/// counters, side streams) must not affect the next result. Linked into every chapter's tests.
#include <cmath>
#include <cstring>
#include <optional>

#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

// A problem with several tiles and sequences, or nothing if the step supports none of these.
std::optional<Problem> problem_for(const Step& step, Backend backend) {
  const Operation& op = *step.operation;
  const bool small = backend == Backend::emulated;
  Problem p = problem(op.few_queries > 0 ? 3
                      : small            ? 70
                                         : 300,
                      small ? 150 : 420, 64, quantises_to(step));
  p.batch = small ? 1 : 2, p.heads = small ? 2 : 4, p.kv_heads = small ? 1 : 2, p.causal = true;
  p.top_k = 5;
  if (op.name == "paged_mla") p.head_dim = 576, p.kv_heads = 1;
  for (int n = 0; n < 5; ++n) {
    Problem one = p;
    if (n == 1) one.causal = false;
    if (n == 2) one.dtype = DType::fp32;
    if (n == 3) one.varlen_q = {p.seqlen_q, 17}, one.varlen_k = {p.seqlen_k, 33};
    if (n == 4) one.head_dim = 256;  // of a step for wide heads alone
    if (op.complete) op.complete(one, {"--head-dim", "--kv-heads", "--heads"});
    one.matrix = op.matrix;
    one.finish();
    if (!refusal(step, one)) return one;
  }
  return std::nullopt;
}

HostTensors inputs_of(const Step& step, Problem p, uint64_t seed) {
  p.seed = seed;
  return draw(*step.operation, p).tensors;
}

// Whether `prepare` only keeps counters: a forward pass or a cache would depend on the inputs.
bool keeps_counters_alone(const Step& step, const Problem& p) {
  if (!step.operation->saved(p).empty()) return false;
  for (const Workspace& w : step.workspaces(p))
    if (w.saved && w.name.find("counter") == w.name.npos && w.name.find("arrived") == w.name.npos)
      return false;
  return true;
}

bool same_bits(const HostTensor& a, const HostTensor& b) {
  return a.numbers == b.numbers && a.data.size() == b.data.size() &&
         std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(float)) == 0;
}

struct Launched {
  const Step& step;
  Problem p;
  HostTensors inputs[2], outputs[2];
  Launched(const Step& of, const Problem& problem, Backend backend) : step(of), p(problem) {
    const bool two = keeps_counters_alone(step, p);
    for (uint64_t n = 0; n < 2; ++n) {
      inputs[n] = inputs_of(step, p, two ? 1 + n : 1);
      Session session(p, *step.operation, backend, inputs[n]);
      REQUIRE(session.prepare(step).ok());
      REQUIRE(session.launch().ok());
      outputs[n] = session.outputs();
    }
  }
  // Bitwise; for a step that is not deterministic, within rounding.
  void compare(Session& session, int n) const {
    CHECK_FALSE(session.damage());
    for (const auto& [name, t] : session.outputs()) {
      INFO(name << " of inputs " << n);
      const HostTensor& right = outputs[n].at(name);
      if (step.deterministic) {
        CHECK(same_bits(t, right));  // a page pool has NaN in unused rows
        continue;
      }
      double error = 0, size = 0;
      for (std::size_t i = 0; i < t.data.size(); ++i)
        error += std::pow(double{t.data[i]} - right.data[i], 2),
            size += std::pow(double{right.data[i]}, 2);
      CHECK(error <= 1e-4 * size);
    }
  }
};

template <class Body>
void each_step(Backend backend, Body body) {
  int ran = 0;
  for (const Step& step : chapter().steps) {
    if (!step.launch.on(backend)) continue;
    if (backend == Backend::emulated && !in_turn(step, 0)) continue;
    const std::optional<Problem> p = problem_for(step, backend);
    if (!p) continue;
    INFO(step.name << ": " << p->text());
    body(Launched(step, *p, backend));
    ++ran;
  }
  CHECK(ran > 0);
}

// A captured launch gets other inputs at each replay, and counters as the previous launch left
// them.
void replay(Backend backend) {
  each_step(backend, [&](const Launched& l) {
    Session session(l.p, *l.step.operation, backend, l.inputs[0]);
    REQUIRE(session.prepare(l.step).ok());
    REQUIRE(session.capture().ok());
    for (const int n : {0, 1, 1, 0}) {
      session.replace(l.inputs[n]);
      session.replan(l.inputs[n]);
      REQUIRE(session.launch().ok());
      l.compare(session, n);
    }
  });
}

void after_an_abort(Backend backend) {
  each_step(backend, [&](const Launched& l) {
    Session session(l.p, *l.step.operation, backend, l.inputs[0]);
    REQUIRE(session.prepare(l.step).ok());
    REQUIRE(session.launch().ok());
    session.abandon();
    REQUIRE(session.prepare(l.step).ok());
    REQUIRE(session.launch().ok());
    l.compare(session, 0);
  });
}

}  // namespace

TEST_CASE("a launch is right again with other inputs", "[emulated][launches]") {
  replay(Backend::emulated);
}
TEST_CASE("a CUDA graph is right each time it is replayed", "[gpu][launches]") {
  replay(Backend::gpu);
}
TEST_CASE("a launch after one that was aborted is right", "[emulated][launches]") {
  after_an_abort(Backend::emulated);
}
TEST_CASE("a launch after one that was aborted is right on the GPU", "[gpu][launches]") {
  after_an_abort(Backend::gpu);
}
TEST_CASE("two launches in two streams do not meet", "[gpu][launches]") {
  each_step(Backend::gpu, [](const Launched& l) {
    Session first(l.p, *l.step.operation, Backend::gpu, l.inputs[0]);
    Session second(l.p, *l.step.operation, Backend::gpu, l.inputs[1]);
    for (Session* const s : {&first, &second}) {
      REQUIRE(s->prepare(l.step).ok());
      REQUIRE(s->capture().ok());
    }
    for (int n = 0; n < 10; ++n) {
      REQUIRE(first.start().ok());
      REQUIRE(second.start().ok());
      synchronize(Backend::gpu);
      l.compare(first, 0), l.compare(second, 1);
    }
  });
}
