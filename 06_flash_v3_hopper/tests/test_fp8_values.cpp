// Faults that random inputs with a tolerance of a tenth would not reveal: a scale of V from another
// tile or head, a P above 448, several blocks of 256 columns; and inputs without a regular scale:
// zeros, tiny numbers, NaN and infinities.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attn/tiling.h"
#include "host/fp8.h"
#include "run/runner.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

// Without a rotary embedding f7 equals f6.
constexpr const char* kSteps[] = {"f1_fp8",          "f2_p_scale",    "f3_two_level",
                                  "f4_block_scales", "f5_incoherent", "f6_smooth_v_chunks",
                                  "f8_q_in_registers"};

// Steps that differ in quantisation.
constexpr const char* kPasses[] = {"f1_fp8", "f4_block_scales", "f5_incoherent",
                                   "f6_smooth_v_chunks"};
// f8 has Q in registers at d=128.
int64_t dim_of(const std::string& step) { return step.starts_with("f8") ? 128 : 64; }

bool sums_by_chunks(const Step& step) {
  return one_of_steps(step, {"f6_smooth_v_chunks", "f7_rotary", "f8_q_in_registers"});
}

// A problem, and its inputs after `change(tensors)`, rounded to bf16 again.
template <class Change>
Case case_of(Problem p, Change change) {
  p.finish();
  Case c(p, forward());
  change(c.inputs);
  for (const char* name : {"q", "k", "v"}) {
    std::vector<float>& x = c.inputs.at(name).data;
    round_to(DType::bf16, x.data(), x.size());
  }
  return c;
}

// Runs the steps named by `which` and compares some rows of each head, for problems on which the
// whole reference would take longer than the step. Returns the number of steps.
int check_some_rows(Problem p, Backend backend, bool (*which)(const Step&), double budget) {
  p.finish();
  const HostTensors in = draw(forward(), p).tensors;
  int ran = 0;
  for (const Step* step : steps_for("forward", p)) {
    if (!which(*step)) continue;
    ++ran;
    INFO(step->name << ": " << p.text());
    Session session(p, forward(), backend, in);
    REQUIRE(session.prepare(*step).ok());
    REQUIRE(session.launch().ok());
    CHECK_FALSE(session.damage());
    const HostTensors out = session.outputs();
    for (const Expected& e : expected_of(*step, p, in, {.full = false, .budget = budget})) {
      const Verdict v = examine(out.at(e.spec.name), e, p, *step);
      CHECK(failure_text(v) == "");
    }
  }
  return ran;
}

// Each group of `keys` keys of each head of V has its own means and magnitude: a scale or mean of a
// neighbour or of another head is wrong by a factor of at least 2. Each query of a needle takes its
// whole O from one of them.
void part_values(HostTensor& v, int64_t keys) {
  const int64_t rows = v.spec.shape[2], d = v.spec.columns();
  for (std::size_t i = 0; i < v.data.size(); ++i) {
    const auto row = static_cast<int64_t>(i) / d, column = static_cast<int64_t>(i) % d;
    const int64_t head = row / rows, part = row % rows / keys;
    const float mean = 1 + 0.5f * static_cast<float>(column % 5);
    v.data[i] = std::ldexp(v.data[i] + mean, static_cast<int>((3 * head + part) % 5 - 2));
  }
}

}  // namespace

TEST_CASE("V uses the scale of its tile and head", "[emulated][fp8]") {
  Problem p = problem(150, 515, 64, DType::e4m3, InputKind::needle);
  p.batch = 2, p.heads = 2, p.kv_heads = 1;
  Problem causal = p;
  causal.batch = 1, causal.kv_heads = 2, causal.causal = true;
  for (const Problem& one : {p, causal}) {
    const Case c = case_of(one, [](HostTensors& in) { part_values(in.at("v"), 128); });
    for (const char* name : {"f4_block_scales", "f5_incoherent"}) {
      INFO(name << " " << c.problem.text());
      CHECK(run_step(step_named(name), c, Backend::emulated) == "");
    }
  }
}
TEST_CASE("V uses the mean and scale of its chunk and head", "[emulated][fp8]") {
  Problem p = problem(12, 4160, 64, DType::e4m3, InputKind::needle);
  p.heads = 4, p.kv_heads = 2;
  Problem edge = p;  // first visible key of the rows: 4066 to 4135
  edge.seqlen_q = 70, edge.seqlen_k = 4260, edge.window_left = 124, edge.window_right = 0;
  for (const Problem& one : {p, edge}) {
    const Case c = case_of(one, [](HostTensors& in) { part_values(in.at("v"), 4096); });
    INFO(c.problem.text());
    CHECK(run_step(step_named("f6_smooth_v_chunks"), c, Backend::emulated) == "");
  }
}

// The second block that a row visits has the largest scores, by a factor of 2^0.8 in the first warp
// up to 2^9.6 in the twelfth. A step that fails to rescale has P larger by that factor, and e4m3
// ends at 448.
TEST_CASE("P stays within e4m3 for any growth of the row max", "[emulated][fp8]") {
  const Case c = case_of(one_head(problem(192, 384, 64, DType::e4m3)), [](HostTensors& in) {
    std::vector<float>&q = in.at("q").data, &k = in.at("k").data, &v = in.at("v").data;
    for (std::size_t i = 0; i < q.size(); ++i) {
      const auto warp = static_cast<float>(i / 64 / 16);
      q[i] = i % 64 == 0 ? 8 * 0.8f * (warp + 1) * std::log(2.0f) : 0.25f * q[i];
    }
    for (std::size_t i = 0; i < k.size(); ++i)
      k[i] = i % 64 == 0 ? (i / 64 / 128 == 1 ? 1.0f : 0.0f) : 0.25f * k[i];
    for (float& x : v) x += 2;  // then O is too small everywhere
  });
  for (const char* name : kSteps) {
    INFO(name);
    CHECK(run_step(step_named(name), c, Backend::emulated) == "");
  }
}

TEST_CASE("FP8 steps are correct on several tiles at head dim 256", "[emulated][fp8]") {
  Problem p = problem(150, 395, 256, DType::e4m3, InputKind::needle);
  p.heads = 2, p.kv_heads = 1, p.causal = true;
  check_steps("forward", p, Backend::emulated);
}

// More queries than keys: the first rows are fully masked; the last tile visits two chunks.
TEST_CASE("f6 and f8 merge chunks with more queries than keys", "[emulated][fp8]") {
  const auto both = [](const Step& step) {
    return one_of_steps(step, {"f6_smooth_v_chunks", "f8_q_in_registers"});
  };
  for (const int64_t d : {64, 128}) {  // Q is in registers at d=128
    Problem p = one_head(problem(4230, 4190, d, DType::e4m3, InputKind::needle));
    p.window_left = 64, p.window_right = 0;
    CHECK(check_some_rows(p, Backend::emulated, both, 1e6) == 2);
  }
}

// More tiles than blocks: a block processes several, and reuses its workspace.
TEST_CASE("FP8 steps are correct with several tiles per block on the GPU", "[gpu][fp8]") {
  for (const int64_t d : {64, 128, 256}) {
    Problem p = problem(4200, 9000, d, DType::e4m3, InputKind::needle);
    p.heads = 16, p.kv_heads = 4, p.causal = true;
    check_some_rows(
        p, Backend::gpu, [](const Step&) { return true; }, 1e7);
  }
  Problem p = problem(6000, 4500, 64, DType::e4m3, InputKind::needle);
  p.heads = 16, p.kv_heads = 4;
  for (const bool causal : {false, true}) {
    p.causal = causal;
    check_some_rows(p, Backend::gpu, sums_by_chunks, 1e7);
  }
  p.causal = false, p.window_left = 200, p.window_right = 100;
  check_some_rows(p, Backend::gpu, sums_by_chunks, 1e7);
}

TEST_CASE("O is 0 if V is 0", "[emulated][fp8]") {
  for (const char* name : kSteps) {
    INFO(name);
    const Case c = case_of(one_head(problem(70, 150, dim_of(name), DType::e4m3)),
                           [](HostTensors& in) { std::ranges::fill(in.at("v").data, 0.0f); });
    HostTensors out;
    CHECK(run_step(step_named(name), c, Backend::emulated, &out) == "");  // lse too
    CHECK(std::ranges::all_of(out.at("o").data, [](float x) { return x == 0; }));
  }
}
// Keeps 448 / max from overflowing. The last factor leaves numbers that are subnormal in bf16, and
// 0 in codes.
TEST_CASE("scales have a lower bound of 1e-10 for Q and K and of 2^-80 for V", "[emulated][fp8]") {
  for (const char* tensor : {"q", "k", "v"})
    for (const int exponent : {-50, -66, -90, -130}) {
      const Case c = case_of(one_head(problem(20, 60, 64, DType::e4m3)), [&](HostTensors& in) {
        for (float& x : in.at(tensor).data) x = std::ldexp(x, exponent);
      });
      for (const char* name : kPasses) {
        INFO(name << ", " << tensor << " times 2^" << exponent);
        HostTensors out;
        CHECK(run_step(step_named(name), c, Backend::emulated, &out) == "");
        if (*tensor != 'v' || exponent < -80) continue;
        // Relative to the given values, not the stored ones: a V of 1e-20 is not 0.
        const Distance lost =
            distance(out.at("o"), forward().reference(c.problem, c.inputs, {}).front());
        CHECK(lost.cosine > 0.99);
      }
    }
}

namespace {

constexpr float kInfinities[] = {std::numeric_limits<float>::infinity(),
                                 -std::numeric_limits<float>::infinity()};

// Outputs of a step for a problem, and for the same with one element of the first head replaced.
struct Spoilt {
  int64_t column = 7;
  const Step& step;
  Problem p;
  HostTensors in, right, out = {};
  Backend backend = Backend::emulated;
  Spoilt(const Step& of, const Problem& given)
      : Spoilt(of, given, draw(forward(), given).tensors, Backend::emulated) {}
  Spoilt(const Step& of, const Problem& given, HostTensors inputs, Backend where)
      : step(of), p(given), in(std::move(inputs)), right(outputs_of(step, p, in, where)),
        backend(where) {}
  void spoil(const char* tensor, int64_t row, float bad) {
    HostTensors changed = in;
    changed.at(tensor).data[static_cast<std::size_t>(row * p.head_dim + column)] = bad;
    out = outputs_of(step, p, changed, backend);
  }
  bool nan(int64_t h, int64_t i, int64_t c) const {
    return std::isnan(out.at("o").row(0, h, i)[c]);
  }
  bool lost(int64_t h, int64_t i) const {
    for (int64_t c = 0; c < p.head_dim; ++c)
      if (!nan(h, i, c)) return false;
    return std::isnan(out.at("lse").row(0, h, i)[0]);
  }
  bool lse_as_before(int64_t h, int64_t i) const {
    return out.at("lse").row(0, h, i)[0] == right.at("lse").row(0, h, i)[0];
  }
  // Bitwise equal, except one column, which may differ by a share `within` of the row's norm.
  bool as_before(int64_t h, int64_t i, float within = 0) const {
    const float *o = out.at("o").row(0, h, i), *before = right.at("o").row(0, h, i);
    double size = 0;
    for (int64_t c = 0; c < p.head_dim; ++c) size += std::pow(double{before[c]}, 2);
    const double rms = std::sqrt(size / static_cast<double>(p.head_dim));
    for (int64_t c = 0; c < p.head_dim; ++c)
      if (!(std::abs(o[c] - before[c]) <= (c == column ? within * rms : 0))) return false;
    return lse_as_before(h, i);
  }
  // Bitwise equal, except one column, which is NaN.
  bool column_nan(int64_t h, int64_t i) const {
    const float *o = out.at("o").row(0, h, i), *before = right.at("o").row(0, h, i);
    for (int64_t c = 0; c < p.head_dim; ++c)
      if (c == column ? !std::isnan(o[c]) : o[c] != before[c]) return false;
    return lse_as_before(h, i);
  }
};

// Rows of the first head have 20 visible keys to each side; key 10 is in the first tile.
Problem narrow_window(const std::string& step) {
  Problem p = problem(300, 300, dim_of(step), DType::e4m3);
  p.window_left = 20, p.window_right = 20;
  p.finish();
  return p;
}

}  // namespace

// docs/notation.md, "NaN and infinities". P of a masked key is 0, and 0 times NaN is NaN: so if one
// row of a query tile has the key tile in its range, all of its rows get NaN. Scales and means use
// finite values only, so nothing else changes, except in f6, whose mean of the channel lacks a
// value.
TEST_CASE("NaN in V affects its channel in query tiles that visit its key tile",
          "[emulated][fp8]") {
  for (const char* name : kSteps) {
    const Problem p = narrow_window(name);
    const Step& step = step_named(name);
    const int64_t block_m = tiling_of(step, p)->block_m;
    const float within = sums_by_chunks(step) ? 0.1f : 0;
    Spoilt s(step, p);
    for (const float bad : {NAN, kInfinities[0], kInfinities[1]}) {
      s.spoil("v", 10, bad);
      INFO(name << " " << bad);
      for (int64_t i = 0; i < 300; ++i) {
        const bool visits = i / block_m * block_m - 20 < 128;
        CHECK((visits ? s.column_nan(0, i) : s.as_before(0, i, within)));
        CHECK(s.as_before(1, i));
      }
    }
  }
}
void check_nan_in_v(Backend backend) {
  const auto check = [&](const char* step, int64_t d, int64_t key, int64_t column, bool visits) {
    Problem p = problem(40, 4400, d, DType::e4m3);  // row 0 is aligned with key 4360
    p.window_left = visits ? 4360 - key + 39 : 50, p.window_right = 0;
    p.finish();
    HostTensors in = draw(forward(), p).tensors;
    HostTensor& v = in.at("v");  // chunks and halves of the columns have other means
    for (std::size_t i = 0; i < v.data.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / d % 4400, half = static_cast<int64_t>(i) % d / 64;
      v.data[i] += 2 + 4 * static_cast<float>(row / 4096) + 8 * static_cast<float>(half);
    }
    round_to(DType::bf16, v.data.data(), v.data.size());
    Spoilt s(step_named(step), p, std::move(in), backend);
    s.column = column;
    for (const float bad : {NAN, kInfinities[0], kInfinities[1]}) {
      s.spoil("v", key, bad);
      INFO(step << " " << key << " " << bad << " " << visits);
      for (int64_t i = 0; i < 40; ++i) {
        CHECK((visits ? s.column_nan(0, i) : s.as_before(0, i, 0.02f)));
        CHECK(s.as_before(1, i));
      }
    }
  };
  // a tile of the first chunk's first block; of its second, in the second panel; of the last chunk
  for (const bool visits : {false, true}) {
    check("f6_smooth_v_chunks", 64, 100, 7, visits);
    check("f8_q_in_registers", 128, 1000, 71, visits);
    check("f8_q_in_registers", 128, 4150, 71, visits);
  }
}
TEST_CASE("NaN in V of f6 and f8 affects its key tile and not its chunk", "[emulated][fp8]") {
  check_nan_in_v(Backend::emulated);
}
TEST_CASE("NaN in V of f6 and f8 affects its key tile on the GPU", "[gpu][fp8]") {
  check_nan_in_v(Backend::gpu);
}
// Its codes are all NaN. Mean and scale are those of no finite key at all.
TEST_CASE("a column of V that is NaN makes a column of O NaN, and no other", "[emulated][fp8]") {
  Problem p = problem(40, 700, 128, DType::e4m3);
  p.finish();
  const Step& step = step_named("f8_q_in_registers");
  HostTensors in = draw(forward(), p).tensors;
  const HostTensors right = outputs_of(step, p, in);
  for (std::size_t key = 0; key < 700; ++key) in.at("v").data[key * 128 + 71] = NAN;
  const HostTensors out = outputs_of(step, p, in);
  for (int64_t h = 0; h < p.heads; ++h)
    for (int64_t i = 0; i < 40; ++i)
      for (int64_t c = 0; c < 128; ++c) {
        const float o = out.at("o").row(0, h, i)[c];
        const bool as_expected =
            h == 0 && c == 71 ? std::isnan(o) : o == right.at("o").row(0, h, i)[c];
        if (!as_expected) INFO(h << " " << i << " " << c << ": " << o);
        CHECK(as_expected);
      }
}

// NaN in Q affects its row; NaN in K all rows for which the key is visible. The Hadamard rotation
// spreads it over all columns of its row.
TEST_CASE("NaN in Q or K makes O and lse NaN in the rows that use it", "[emulated][fp8]") {
  std::vector<const char*> steps(std::begin(kPasses), std::end(kPasses));
  steps.push_back("f8_q_in_registers");
  for (const char* name : steps) {
    const Problem p = narrow_window(name);
    const Step& step = step_named(name);
    Spoilt s(step, p);
    for (const char* tensor : {"q", "k"})
      for (const float bad : {NAN, kInfinities[0], kInfinities[1]}) {
        s.spoil(tensor, 10, bad);
        INFO(name << " " << tensor << " " << bad);
        const int64_t first = *tensor == 'q' ? 10 : 0, last = *tensor == 'q' ? 10 : 30;
        for (int64_t i = 0; i < 300; ++i) {
          // Other rows of a warp may round differently, because a warp rescales its rows together.
          if (i >= first && i <= last)
            CHECK(s.lost(0, i));
          else if (i / 16 == first / 16 || i / 16 == last / 16)
            CHECK_FALSE(s.nan(0, i, 0));
          else
            CHECK(s.as_before(0, i));
          CHECK(s.as_before(1, i));
        }
      }
  }
}
