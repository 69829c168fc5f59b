// Varlen batches: the meaning of the problem, the layout of packed tensors, predictions, and
// detection of steps that get any of it wrong.
#include <nlohmann/json.hpp>
#include <cmath>
#include <string>
#include <vector>

#include "attn/error.h"
#include "run/results.h"
#include "tests/step_cases.h"

namespace {

using namespace attn;
using namespace attn::tests;
using Lengths = std::vector<int64_t>;

Problem varlen(Lengths q, Lengths k = {}) {
  Problem p;
  p.varlen_q = std::move(q), p.varlen_k = std::move(k);
  p.heads = 4, p.kv_heads = 2, p.head_dim = 8;
  p.finish();
  return p;
}

TEST_CASE("the lengths of a batch say its size and the longest sequence", "[varlen]") {
  Problem p = varlen({0, 133, 17, 1}, {5, 90, 0, 200});
  CHECK((p.batch == 4 && p.seqlen_q == 133 && p.seqlen_k == 200));
  CHECK((p.tokens_q() == 151 && p.tokens_k() == 295));
  CHECK(p.text() ==
        "B=4 Hq=4 Hkv=2 varlen=0,133,17,1 varlen_k=5,90,0,200 d=8 bf16 inputs=random seed=1");
  p.finish();  // a second time changes nothing
  CHECK((p.batch == 4 && p.seqlen_q == 133 && p.seqlen_k == 200));
  const Problem one = p.sequence(1);
  CHECK((one.batch == 1 && one.seqlen_q == 133 && one.seqlen_k == 90 && !one.varlen() &&
         one.heads == 4));
  CHECK(
      (shape_of(p).seqlen_q == 133 && shape_of(p).seqlen_k == 200 && shape_of(p).tokens_q == 151));
  const Problem same = varlen({3, 5});
  CHECK(same.varlen_k == Lengths{3, 5});
  CHECK(same.text() == "B=2 Hq=4 Hkv=2 varlen=3,5 d=8 bf16 inputs=random seed=1");
  Problem plain = problem(6, 7, 8, DType::bf16);
  plain.batch = 3;
  CHECK((plain.tokens_q() == 18 && plain.tokens_k() == 21 && shape_of(plain).tokens_q == 0));
  CHECK((plain.sequence(2).batch == 1 && plain.sequence(2).seqlen_q == 6 &&
         plain.sequence(2).seqlen_k == 7));
}

TEST_CASE("the results say the lengths", "[varlen]") {
  RunResult run;
  run.problem = problem(3, 4, 8, DType::bf16);
  CHECK_FALSE(to_json(run)["problem"].contains("varlen_q"));
  run.problem = varlen({0, 133}, {5, 90});
  const nlohmann::json p = to_json(run)["problem"];
  CHECK((p["varlen_q"] == Lengths{0, 133} && p["varlen_k"] == Lengths{5, 90}));
  CHECK((p["batch"] == 2 && p["seqlen_q"] == 133 && p["seqlen_k"] == 90));
}

TEST_CASE("lists of lengths without a meaning are refused in one line", "[varlen]") {
  const auto refuses = [](const std::string& what, Lengths q, Lengths k = {}) {
    std::string message;
    try {
      varlen(std::move(q), std::move(k));
    } catch (const InputError& error) {
      message = error.what();
    }
    INFO(what << ": '" << message << "'");
    CHECK(message.find(what) == 0);
    CHECK(message.find('\n') == std::string::npos);
  };
  refuses("--varlen: a length of -1", {3, -1});
  refuses("--varlen-k: a length of -7", {3, 4}, {2, -7});
  refuses("--varlen: a length of 16777217", {1 << 24 | 1});
  refuses("--varlen: the lengths must add up to at most 2^24 tokens", {1 << 23, 1 << 23, 1});
  refuses("--varlen-k: the lengths must add up to at most 2^24 tokens", {1, 1}, {1 << 24, 1});
  refuses("--varlen-k: 1 lengths, must be 2", {3, 4}, {7});
  refuses("--varlen-k: 1 lengths, must be 0", {}, {7});
  refuses("--varlen: 16385 sequences", Lengths(16385, 1));
  varlen(Lengths(16384, 1024));  // the longest and most numerous allowed
}

TEST_CASE("work is counted sequence by sequence", "[varlen]") {
  Problem p = varlen({0, 4, 3, 5}, {2, 6, 0, 3});
  CHECK(p.total_pairs() == 4 * (24 + 15));
  p.causal = true;
  CHECK(p.total_pairs() == 4 * ((3 + 4 + 5 + 6) + (1 + 2 + 3)));
  CHECK(forward().flop(p) == 4 * 8 * p.total_pairs());
  CHECK(backward().flop(p) == 2.5 * forward().flop(p));
  // Q, O, K, V in bf16, lse and twice five cumulative lengths in 32 bits.
  CHECK(forward().compulsory_bytes(p) ==
        2 * 12 * 4 * 8 * 2 + 2 * 11 * 2 * 8 * 2 + 12 * 4 * 4 + 2 * 5 * 4);

  Step step;
  step.operation = &forward();
  step.cost = [](const Problem& one) {
    CHECK((one.batch == 1 && one.seqlen_q > 0 && one.seqlen_k > 0));
    CHECK((one.varlen_q == std::vector{one.seqlen_q} && one.varlen_k == std::vector{one.seqlen_k}));
    const auto q = static_cast<double>(one.seqlen_q), k = static_cast<double>(one.seqlen_k);
    return Cost{{.name = "a", .tensor_flop = q * k, .fp32_flop = q, .exp = k},
                {.name = "b", .hbm_read = q, .hbm_write = 2 * q, .l2_bytes = 3 * k}};
  };
  Cost cost = cost_of(step, p);
  REQUIRE(cost.size() == 2);
  CHECK((cost[0].name == "a" && cost[0].tensor_flop == 39 && cost[0].fp32_flop == 9 &&
         cost[0].exp == 9));
  // Three queries without keys: O in bf16 and lse are written.
  const double o_lse = 3 * 4 * (8 * 2 + 4);
  CHECK((cost[1].name == "b" && cost[1].hbm_read == 9 && cost[1].hbm_write == 18 + o_lse));
  CHECK(cost[1].l2_bytes == 27 + o_lse);

  // Backward: dQ of the same queries, and dK and dV of two keys that are visible to no query.
  step.operation = &backward();
  CHECK(cost_of(step, p)[1].hbm_write == 18 + 3 * 4 * 8 * 2 + 2 * 2 * 2 * 8 * 2);

  // No visible pair: only the outputs are written, and phases keep their names.
  step.operation = &forward();
  cost = cost_of(step, varlen({3, 0}, {0, 2}));
  REQUIRE(cost.size() == 2);
  CHECK((cost[0].name == "a" && cost[0].tensor_flop == 0 && cost[0].hbm_write == 0));
  CHECK((cost[1].name == "b" && cost[1].hbm_read == 0 && cost[1].hbm_write == o_lse &&
         cost[1].l2_bytes == 0));
}

TEST_CASE("tokens are packed with the heads of a token side by side", "[varlen]") {
  const Problem p = varlen({2, 0, 3}, {4, 1, 2});
  const TensorSpec q = like_q(p, "q"), k = like_k(p, "k"), lse = lse_of(p);
  CHECK((q.elements() == 5 * 4 * 8 && k.elements() == 7 * 2 * 8 && lse.elements() == 4 * 5));
  CHECK(q.row(2, 3, 1) == (2 + 1) * 4 + 3);  // [tokens, heads]
  CHECK(k.row(1, 1, 0) == 4 * 2 + 1);
  CHECK(lse.row(2, 3, 1) == 3 * 5 + 2 + 1);  // [heads, tokens]
  CHECK((q.layout.row_step == 4 && k.layout.row_step == 2 && lse.layout.row_step == 1));
  CHECK((q.rows_of(0) == 2 && q.rows_of(1) == 0 && k.rows_of(2) == 2 && lse.rows_of(2) == 3));
  CHECK(lse.dtype == DType::fp32);

  const HostTensors in = draw_inputs(p, backward().inputs(p));
  CHECK(in.at("cu_seqlens_q").numbers == Lengths{0, 2, 2, 5});
  CHECK(in.at("cu_seqlens_k").numbers == Lengths{0, 4, 5, 7});
  CHECK(in.at("cu_seqlens_q").spec.dtype == DType::int32);
  CHECK(in.at("do").spec.shape[1] == 5);
  CHECK(forward().inputs(problem(3, 3, 8, DType::bf16)).size() == 3);
}

TEST_CASE("needles point at keys of their own sequence", "[varlen]") {
  Problem p = varlen({20, 13, 0, 40}, {90, 25, 7, 0});
  p.inputs = InputKind::needle, p.dtype = DType::fp32, p.causal = true;
  const HostTensors in = draw_inputs(p, forward().inputs(p));
  for (int64_t b = 0; b < p.batch; ++b) {
    const Problem one = p.sequence(b);
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t i = 0; i < one.seqlen_q; ++i) {
        const KeyRange keys = one.visible(i);
        if (keys.size() == 0) continue;
        const auto score = [&](int64_t j) {
          double dot = 0;
          for (int64_t c = 0; c < p.head_dim; ++c)
            dot += double{in.at("q").row(b, h, i)[c]} * in.at("k").row(b, h / 2, j)[c];
          return dot * p.softmax_scale;
        };
        int needles = 0;
        for (int64_t j = keys.begin; j < keys.end; ++j) needles += std::abs(score(j) - 16) < 1e-3;
        CHECK(needles == 1);
      }
  }
}

TEST_CASE("skewed lengths spread from a 64th of the longest to the longest", "[varlen]") {
  const Lengths lengths = skewed_lengths(1000, 6400, 3);
  REQUIRE(lengths.size() == 1000);
  int below_800 = 0;  // half of the logarithms
  for (const int64_t n : lengths) {
    CHECK((n >= 100 && n <= 6400));
    below_800 += n < 800;
  }
  CHECK((below_800 > 440 && below_800 < 560));
  CHECK(std::count(lengths.begin(), lengths.end(), 6400) >= 1);
  CHECK(skewed_lengths(1000, 6400, 3) == lengths);
  CHECK(skewed_lengths(1000, 6400, 4) != lengths);
  CHECK(skewed_lengths(1, 5, 9) == Lengths{5});
  for (const int64_t n : skewed_lengths(50, 1, 1)) CHECK(n == 1);
}

// ---- a step ------------------------------------------------------------------------------------

// The fault of a step's model.
enum class Wrong { nothing, own_input, longest_for_all, no_keys_skipped };
Wrong wrong = Wrong::nothing;

// fp32 attention through the kernel interface of a varlen problem: pointers and Shape. Query by
// query, in float32.
Status attend_packed(const Arguments& args) {
  const Shape shape = shape_of(args.problem);
  const float *q = args.in<float>("q"), *k = args.in<float>("k"), *v = args.in<float>("v");
  const int32_t *cu_q = args.in<int32_t>("cu_seqlens_q"), *cu_k = args.in<int32_t>("cu_seqlens_k");
  float *o = args.out<float>("o"), *lse = args.out<float>("lse");
  const int d = shape.head_dim, group = shape.heads / shape.kv_heads;
  for (int64_t b = 0; b < args.problem.batch; ++b)
    for (int h = 0; h < shape.heads; ++h)
      for (int i = 0; i < cu_q[b + 1] - cu_q[b]; ++i) {
        if (wrong == Wrong::no_keys_skipped && cu_k[b + 1] == cu_k[b]) continue;
        const int64_t token = cu_q[b] + i, row = (token * shape.heads + h) * d;
        const int keys = wrong == Wrong::longest_for_all
                             ? std::min(shape.seqlen_k, cu_k[args.problem.batch] - cu_k[b])
                             : cu_k[b + 1] - cu_k[b];
        std::vector<float> s(static_cast<std::size_t>(keys));
        float row_max = -INFINITY, row_sum = 0;
        for (int j = 0; j < keys; ++j) {
          const int64_t key = ((int64_t{cu_k[b]} + j) * shape.kv_heads + h / group) * d;
          float& score = s[static_cast<std::size_t>(j)] = 0;
          for (int c = 0; c < d; ++c) score += shape.softmax_scale * q[row + c] * k[key + c];
          row_max = std::max(row_max, score);
        }
        for (float& x : s) row_sum += x = std::exp(x - row_max);
        for (int c = 0; c < d; ++c) {
          float sum = 0;
          for (int j = 0; j < keys; ++j)
            sum += s[static_cast<std::size_t>(j)] *
                   v[((int64_t{cu_k[b]} + j) * shape.kv_heads + h / group) * d + c];
          o[row + c] = row_sum > 0 ? sum / row_sum : 0;
        }
        lse[int64_t{h} * shape.tokens_q + token] =
            row_sum > 0 ? row_max + std::log(row_sum) : -INFINITY;
      }
  if (wrong == Wrong::own_input) const_cast<int32_t*>(cu_q)[1] += 1;
  return Status::success();
}

TEST_CASE("a step on packed sequences is run and checked", "[varlen]") {
  Step step;
  step.name = "packed", step.operation = &forward();
  step.refuses = [](const Problem&) { return std::nullopt; };
  step.workspaces = [](const Problem&) { return std::vector<Workspace>(); };
  step.launch.emulated = attend_packed;
  Problem p = varlen({0, 33, 17, 5, 40, 0}, {5, 33, 0, 9, 64, 0});
  p.dtype = DType::fp32;
  CHECK(refusal(step, p) == "--varlen: this step has no packed sequences");
  step.takes = {"varlen"};
  CHECK_FALSE(refusal(step, p));
  const auto found = [&](Wrong what) {
    wrong = what;
    return run_step(step, p, Backend::emulated);
  };
  CHECK(found(Wrong::nothing) == "");
  CHECK(found(Wrong::own_input) == "wrote to its input cu_seqlens_q");
  CHECK(found(Wrong::longest_for_all).find("o (b 1, h 0, row 0, ") == 0);
  CHECK(found(Wrong::no_keys_skipped).find("o (b 2, h 0, row 0, column 0) was never written; ") ==
        0);
}

}  // namespace
