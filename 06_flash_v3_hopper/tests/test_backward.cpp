// Tests of chapter 06, backward.
#include <fmt/format.h>

#include "device/device.h"
#include "kernels/whole_heads.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

const std::vector<int64_t> kShort{1, 17, 64, 65, 113, 127, 129, 203};
const std::vector<int64_t> kHeadDims{64, 128, 64};
const std::vector<DType> kDTypes{DType::bf16, DType::fp16, DType::bf16};

Problem with_heads(Problem p, int64_t heads, int64_t kv_heads) {
  p.heads = heads, p.kv_heads = kv_heads;
  return p;
}

// Window widths at tile boundaries, to each side and to both; an odd number of heads, so that a
// persistent step takes key tiles, and an even one, so that its blocks own whole heads.
template <class Body>
void window_problems(std::initializer_list<int64_t> widths, std::vector<int64_t> head_dims,
                     Body body) {
  int n = 0;
  for (const int64_t width : widths)
    for (int side = 0; side < 3; ++side, ++n) {
      Problem p = problem(side == 2 ? 330 : 270, side == 1 ? 330 : 270,
                          head_dims[static_cast<std::size_t>(n) % head_dims.size()],
                          n % 3 == 0 ? DType::fp16 : DType::bf16, InputKind::needle);
      p.heads = p.kv_heads = 1 + n / 2 % 2;
      if (side != 0) p.window_left = width;
      if (side != 1) p.window_right = width;
      p.seed = static_cast<uint64_t>(n) + 1;
      body(p, n);
    }
}

// The largest difference of two tensors, relative to the largest element.
double distance(const HostTensor& a, const HostTensor& b) {
  double most = 0, size = 0;
  for (std::size_t i = 0; i < a.data.size(); ++i) {
    most = std::max(most, std::abs(double{a.data[i]} - double{b.data[i]}));
    size = std::max(size, std::abs(double{b.data[i]}));
  }
  return most / size;
}

std::vector<const Step*> backward_steps() {
  std::vector<const Step*> steps;
  for (const Step& step : chapter().steps)
    if (step.operation == &backward()) steps.push_back(&step);
  return steps;
}

// dK and dV have the same bits in every run: their sums stay in one thread. dQ is summed in the
// order in which blocks arrive, except in deterministic steps and with `whole_heads`: there the
// steps from b5 on give each head to one block.
void check_repeats(Backend backend, Problem p, int repeats, bool whole_heads) {
  p.finish();
  const Operation& op = backward();
  const auto schedule = [](int n) { emulator::schedule_seed = 100 + static_cast<uint64_t>(n); };
  for (const Step* step : backward_steps()) {
    if (refusal(*step, p)) continue;
    INFO(step->name << ", " << p.text());
    Session session(p, op, backend, draw_inputs(p, op.inputs(p)));
    REQUIRE(session.prepare(*step).ok());
    std::vector<std::string> bitwise{"dk", "dv"};
    const bool whole = whole_heads && !one_of_steps(*step, {"b1_wgmma", "b2_warp_specialised",
                                                            "b3_overlap", "b4_persistent"});
    if (step->deterministic || whole) bitwise.push_back("dq");
    CHECK(session.repeats_differ(repeats, schedule, bitwise) == "");
    if (bitwise.size() == 3) continue;
    HostTensors first;
    for (int n = 0; n < std::min(repeats, 8); ++n) {
      schedule(n);
      REQUIRE(session.launch().ok());
      const HostTensors now = session.outputs();
      if (n == 0) first = now;
      CHECK(distance(now.at("dq"), first.at("dq")) < 0x1p-7);
    }
  }
}

}  // namespace

TEST_CASE("backward steps match the reference on short problems", "[emulated]") {
  Counts ran;
  int n = 0;
  covering_problems(kShort, kHeadDims, kDTypes, [&](const Problem& p) {
    ran += check_steps("backward", p, Backend::emulated, in_turn, turn(n));
    ++n;
  });
  n = 0;
  covering_problems({1, 7, 63, 64, 65, 129, 130, 203}, {256}, kDTypes, [&](const Problem& p) {
    ran += check_steps("backward", p, Backend::emulated, in_turn, turn(n));
    ++n;
  });
  INFO(ran.text());
  CHECK(ran.least('b') >= 12);
}

TEST_CASE("backward: several query tiles and key tiles", "[emulated]") {
  Problem p = with_heads(problem(150, 395, 64, DType::bf16, InputKind::needle), 2, 1);
  p.causal = true;
  check_steps("backward", p, Backend::emulated);
  p = with_heads(problem(300, 290, 128, DType::fp16, InputKind::peaked), 2, 2);
  p.window_left = 130, p.window_right = 40;
  check_steps("backward", p, Backend::emulated);
  p = with_heads(problem(150, 395, 256, DType::fp16, InputKind::peaked), 2, 2);
  check_steps("backward", p, Backend::emulated);
}

TEST_CASE("backward: sliding windows at tile boundaries", "[emulated]") {
  window_problems({0, 63, 64, 127, 128}, {64, 128}, [](const Problem& p, int n) {
    check_steps("backward", p, Backend::emulated, in_turn, n);
  });
  window_problems({63, 128}, {256}, [](const Problem& p, int n) {
    check_steps("backward", p, Backend::emulated, in_turn, n);
  });
}

TEST_CASE("backward: fully masked rows, and keys visible to no row", "[emulated]") {
  for (const int64_t d : {64, 128, 256})
    for (const int64_t window_left : {-1, 3})
      for (const int64_t heads : {1, 2}) {
        Problem rows = with_heads(problem(300, 20, d, DType::fp16), heads, heads);
        Problem keys = with_heads(problem(20, 300, d, DType::fp16), heads, heads);
        rows.causal = true, rows.window_left = window_left;
        keys.window_left = std::max<int64_t>(window_left, 0), keys.window_right = 0;
        check_steps("backward", rows, Backend::emulated, in_turn, static_cast<int>(heads));
        check_steps("backward", keys, Backend::emulated, in_turn, static_cast<int>(heads));
      }
}

TEST_CASE("backward: dK and dV sum over the query heads of a KV head", "[emulated]") {
  int n = 0;
  for (const auto& [heads, kv_heads] : {std::pair<int64_t, int64_t>{7, 1}, {8, 4}, {3, 3}})
    for (const int64_t seqlen_q : {40, 150}) {
      Problem p =
          with_heads(problem(seqlen_q, 140, n % 2 == 0 ? 64 : 128, DType::bf16), heads, kv_heads);
      p.batch = heads == 3 ? 2 : 1, p.causal = n % 3 == 0;
      check_steps("backward", p, Backend::emulated, in_turn, n++);
      if (seqlen_q == 40) continue;
      p.head_dim = 256;
      check_steps("backward", p, Backend::emulated);
    }
}

TEST_CASE("backward: keys past the end have no weight when all scores are near -500",
          "[emulated]") {
  for (const int64_t d : {64, 128, 256})
    for (const int64_t heads : {1, 2})
      check_far_scores(with_heads(problem(70, 140, d, DType::bf16), heads, heads));
}

TEST_CASE("backward: softmax scales", "[emulated]") {
  int n = 0;
  for (const double scale : {1e-37, 1e-3, 3.0}) {
    Problem p = with_heads(problem(70, 130, 64, DType::bf16), 2, 2);
    p.causal = true, p.softmax_scale = scale;
    check_steps("backward", p, Backend::emulated, in_turn, n++);
    p.head_dim = 128;
    check_steps("backward", p, Backend::emulated, in_turn, n);
    p.head_dim = 256;
    check_steps("backward", p, Backend::emulated);
  }
}

TEST_CASE("backward steps refuse unsupported problems with the reason", "[emulated]") {
  const auto reasons = [](const Problem& given, const char* part,
                          const std::vector<std::string>& takers = {}) {
    for (const Step* step : backward_steps()) {
      if (std::ranges::count(takers, step->name) > 0) continue;
      Problem p = given;
      if (p.head_dim == 64) p.head_dim = step->limits.head_dims.back();
      p.finish();
      INFO(step->name << ": " << refusal(*step, p).value_or("not refused"));
      CHECK(refusal(*step, p).value_or("").find(part) != std::string::npos);
    }
  };
  const Problem p = problem(8, 8, 64, DType::bf16);
  for (const int64_t d : {32, 96, 192}) reasons(problem(8, 8, d, p.dtype), "--head-dim");
  for (const Step* step : backward_steps())  // 64 and 128, or one
    for (const int64_t d : {64, 128, 256}) {
      Problem other = problem(8, 8, d, p.dtype);
      other.finish();
      const std::vector<int64_t>& dims = step->limits.head_dims;
      const std::string takes =
          dims.size() == 2 ? "takes 64 and 128" : fmt::format("takes {}", dims.front());
      CHECK((refusal(*step, other).value_or("").find(takes) != std::string::npos) ==
            (std::ranges::count(dims, d) == 0));
    }
  reasons(problem(8, 8, 64, DType::fp32), "fp16 and bf16");
  Problem other = p;
  other.softcap = 15;
  reasons(other, "this step has no softcap",
          {"b12_features", "b14_softcap_d256", "b15_packed_d256"});
  other = p, other.varlen_q = {8};
  reasons(other, "--varlen", {"b12_features", "b15_packed_d256"});
  other = p, other.dropout = 0.25;
  reasons(other, "this step has no dropout");
  other = p, other.softmax_scale = -1;
  reasons(other, "--scale -1: this step takes at least 1e-37");
  other = with_heads(problem(8, int64_t{1} << 29, 64, DType::bf16), 1024, 1024);
  reasons(other, "2^31 - 1 blocks");
  // At d=256 two blocks convert dQ of a query tile of 64 rows.
  other = with_heads(problem(8, 8, 256, DType::bf16), int64_t{3} << 29, int64_t{3} << 29);
  other.finish();
  for (const Step* step : backward_steps())
    if (step->limits.head_dims == std::vector<int64_t>{256})
      CHECK(refusal(*step, other).value_or("").find("2^31 - 1 blocks") != std::string::npos);
}

TEST_CASE("the cost model of the backward pass matches a hand count", "[emulated]") {
  Problem p = problem(1024, 1024, 128, DType::bf16);
  p.finish();
  for (const Step* step : backward_steps()) {
    INFO(step->name);
    const Cost cost = step->cost(p);
    const auto phase = std::ranges::find(cost, "attention_backward", &Phase::name);
    REQUIRE(phase != cost.end());
    CHECK(phase->exp == 2.0 * 1024 * 1024);
    CHECK(phase->tensor_flop == 10.0 * 128 * phase->exp);
    // 8 key tiles: each loads all of Q, dO, lse and D, and adds to all of dQ; K, V, dK and dV move
    // once.
    CHECK(phase->l2_bytes >= 2 * (8 * 1024 * (2 * 128 * 2 + 8 + 128 * 4) + 4 * 1024 * 128 * 2));
  }
}

TEST_CASE("the cost model of packed sequences has the kernels of the launch", "[emulated]") {
  Problem p = problem(900, 900, 64, DType::bf16);
  p.heads = p.kv_heads = 128;  // whole heads, for the short sequence alone
  p.varlen_q = {8, 900};
  p.finish();
  int taken = 0;
  for (const Step* step : backward_steps()) {
    if (refusal(*step, p)) continue;
    ++taken;
    INFO(step->name);
    CHECK(cost_of(*step, p, Machine{}).size() == 3);
  }
  CHECK(taken == 1);
}

TEST_CASE("dK and dV are bitwise equal under every thread schedule, dQ to rounding", "[emulated]") {
  Problem p = with_heads(problem(140, 300, 64, DType::bf16, InputKind::needle), 2, 1);
  p.causal = true;
  check_repeats(Backend::emulated, p, 4, false);
  // Sums of six key tiles in fp16: another order would give other bits.
  p = with_heads(problem(100, 700, 64, DType::fp16), 2, 2);
  check_repeats(Backend::emulated, p, 4, true);
  for (const int64_t d : {128, 256}) {
    p = with_heads(problem(140, 300, d, DType::fp16), 2, 1);
    check_repeats(Backend::emulated, p, 4, false);
  }
  // Nine key tiles: b7 and b16 add them in another order under every other schedule.
  for (const int64_t d : {64, 256}) {
    p = with_heads(problem(d == 256 ? 70 : 300, 1100, d, DType::fp16), d == 256 ? 1 : 3, 1);
    p.finish();
    for (const Step* step : backward_steps()) {
      if (refusal(*step, p) || !(step->deterministic || step->name.starts_with("b7_") ||
                                 step->name.starts_with("b16_")))
        continue;
      INFO(step->name << ", " << p.text());
      Session session(p, backward(), Backend::emulated, draw_inputs(p, backward().inputs(p)));
      REQUIRE(session.prepare(*step).ok());
      const auto schedule = [](int n) { emulator::schedule_seed = 1 + static_cast<uint64_t>(n); };
      CHECK((session.repeats_differ(4, schedule, {"dq"}) == "") == step->deterministic);
    }
  }
}

TEST_CASE("deterministic backward steps need only one resident block, or cluster", "[emulated]") {
  const std::size_t resident = emulator::resident_blocks;
  for (const int64_t d : {64, 128, 256}) {
    emulator::resident_blocks = emulator::most_resident_blocks = d == 256 ? 2 : 1;
    Problem p = with_heads(problem(200, 500, d, DType::bf16), 3, 3);
    p.finish();
    for (const Step* step : backward_steps())
      if (step->deterministic && !refusal(*step, p)) {
        INFO(step->name << ", " << p.text());
        CHECK(run_step(*step, p, Backend::emulated) == "");
      }
  }
  emulator::resident_blocks = resident, emulator::most_resident_blocks = 0;
}

TEST_CASE("deterministic backward steps clear what an earlier launch left in their semaphores",
          "[emulated]") {
  static LaunchFunction original;
  static int64_t semaphores;
  for (const int64_t d : {64, 128, 256}) {
    // One head with two key tiles, which the emulator runs side by side.
    Problem p = with_heads(problem(200, 200, d, DType::bf16), 1, 1);
    p.finish();
    for (const Step* step : backward_steps()) {
      if (!step->deterministic || refusal(*step, p)) continue;
      INFO(step->name << ", " << p.text());
      semaphores = 0;
      for (const Workspace& w : step->workspaces(p))
        if (w.name == "dq_semaphores") semaphores = w.bytes / 4;
      REQUIRE(semaphores > 0);
      Step again = *step;
      original = step->launch.emulated;
      again.launch.emulated = [](const Arguments& args) {
        std::fill_n(args.out<unsigned>("dq_semaphores"), semaphores, 1u);  // the second is next
        return original(args);
      };
      emulator::find_races = emulator::find_global_races = true;
      CHECK(run_step(again, p, Backend::emulated) == "");
      emulator::find_races = emulator::find_global_races = false;
    }
  }
}

TEST_CASE("1000 GPU runs give bitwise equal dK and dV; 8 of them dQ to rounding, or 1000 its bits",
          "[gpu]") {
  for (const int64_t d : {64, 128}) {
    Problem p = with_heads(problem(603, 803, d, DType::bf16), 4, 2);
    p.causal = d == 64;
    check_repeats(Backend::gpu, p, 1000, false);
    p = with_heads(problem(300, 300, d, DType::fp16), 4, 4);
    p.batch = 33;  // short, and a KV head for each SM of an H200
    check_repeats(Backend::gpu, p, 1000, owns_whole_heads(p, this_machine()));
  }
  Problem wide = with_heads(problem(603, 803, 256, DType::bf16), 4, 2);
  wide.causal = true;
  check_repeats(Backend::gpu, wide, 1000, false);
  wide.softcap = 15, wide.varlen_q = {603, 0, 70, 1}, wide.varlen_k = {803, 5, 9, 0};
  check_repeats(Backend::gpu, wide, 1000, false);
}

TEST_CASE("all backward steps match the reference on the GPU", "[gpu]") {
  Counts ran;
  covering_problems(kLengths, kHeadDims, kDTypes,
                    [&](const Problem& p) { ran += check_steps("backward", p, Backend::gpu); });
  covering_problems(kLengths, {256}, kDTypes,
                    [&](const Problem& p) { ran += check_steps("backward", p, Backend::gpu); });
  const auto takes_128_alone = [](const Step& step, int) {
    return step.limits.head_dims == std::vector<int64_t>{128};
  };
  covering_problems(kLengths, {128}, kDTypes, [&](const Problem& p) {
    ran += check_steps("backward", p, Backend::gpu, takes_128_alone);
  });
  CHECK(ran.least('b') >= 110);
  for (const std::vector<int64_t>& dims : {std::vector<int64_t>{64, 128}, {256}})
    window_problems({0, 1, 16, 63, 64, 65, 127, 128, 129, 500}, dims,
                    [](const Problem& p, int) { check_steps("backward", p, Backend::gpu); });
  for (const int64_t d : {64, 128, 256})
    for (const auto& [q, k] : {std::pair<int64_t, int64_t>{2100, 4000}, {4224, 4224}, {3000, 2500}})
      for (const bool causal : {false, true}) {
        Problem p = problem(q, k, d, DType::bf16, InputKind::needle);
        p.causal = causal;
        check_steps("backward", p, Backend::gpu);
      }
  // more heads than SMs, short: blocks own whole heads
  for (const int64_t d : {64, 128}) {
    Problem p = with_heads(problem(300, 300, d, DType::bf16), 32, 16);
    p.batch = 33, p.causal = true;
    check_steps("backward", p, Backend::gpu);
  }
}

TEST_CASE("the test of large gradients works on small ones", "[emulated]") {
  check_large_steps("backward", small_repeated_problem(), Backend::emulated, kThreeRepeated);
}

TEST_CASE("gradients of tensors of more than 2^31 elements", "[gpu][large]") {
  for (const Problem& p : large_problems()) check_large_steps("backward", p, Backend::gpu);
}
