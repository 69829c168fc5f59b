// Steps that choose what they look at: the rule by hand, and right attention to what it chooses.
#define ATTN_EMULATED  // length_class as a function of the host
#include <cmath>
#include <functional>
#include <random>
#include <set>

#include "08_quant_sparse/longest_first.h"
#include "08_quant_sparse/predict.h"
#include "08_quant_sparse/sparse.h"
#include "08_quant_sparse/token_order.h"
#include "attn/error.h"
#include "check/field.h"
#include "run/runner.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

const Step& step_named(const std::string& name) {
  for (const Step& step : chapter().steps)
    if (step.name == name) return step;
  throw InputError("no step " + name);
}

Problem on_canvas(const std::string& canvas, int64_t text, int64_t d, DType dtype = DType::bf16) {
  Problem p = problem(1, 1, d, dtype);
  p.own["field"] = read_field(canvas);
  p.seqlen_q = p.seqlen_k = field_of(p).tokens() + text;
  return p;
}

// Problems in which what is chosen, and what else hides keys, meet: fields, where means stand for
// their blocks, and other inputs, where that is asked for.
template <class Body>
int chosen_problems(Body body) {
  constexpr int64_t kDims[] = {128, 64, 256};
  const std::map<std::string, std::vector<double>> kRules[] = {
      {{"keep", {0.3}}},
      {{"keep_mass", {0.9}}, {"keep_sink", {1}}},
      {{"keep", {0}}, {"keep_diagonal", {1}}},
      {},
      {{"keep", {0.4}}, {"keep_sink", {1}}, {"keep_diagonal", {1}}},
      {{"keep_mass", {0.5}}},
      {{"keep_mass", {1}}, {"similarity", {0.5}}}};
  constexpr int64_t kLengths[][2] = {{300, 700}, {513, 513}, {70, 1030}, {900, 400}, {1, 640}};
  int n = 0;
  for (const auto& rule : kRules)
    for (const bool smooth : {true, false}) {
      Problem p = on_canvas("8x8x12", n % 3 == 0 ? 0 : 77, kDims[n % 3],
                            n % 2 == 0 ? DType::bf16 : DType::fp16);
      p.own["similarity"] = {0.05};  // about 1/77 is what text has
      if (!smooth) {
        p = problem(kLengths[n / 2 % 5][0], kLengths[n / 2 % 5][1], kDims[n % 3], p.dtype,
                    n % 4 == 1 ? InputKind::needle : InputKind::peaked);
        p.own["similarity"] = {n % 3 == 0 ? 0.0 : 0.0078};  // 1/128 is what random rows have
      }
      for (const auto& [name, value] : rule) p.own[name] = value;
      p.batch = 1 + n % 2, p.heads = 4, p.kv_heads = n % 4 < 2 ? 2 : 1;
      p.causal = n % 3 == 1;
      if (n % 5 == 2) p.window_left = 300, p.window_right = 30;
      p.seed = static_cast<uint64_t>(++n);
      p.finish();
      body(p);
    }
  return n;
}

// Which blocks each tile of queries of head h chooses: "1.1." for two of four.
std::vector<std::string> rows_of(const Problem& p, const BlockMask& mask, int64_t h = 0) {
  std::vector<std::string> rows;
  for (int64_t m = 0; m < mask.shape()[2]; ++m) {
    rows.emplace_back();
    for (int64_t n = 0; n < mask.shape()[3]; ++n) rows.back() += mask.open(0, h, m, n) ? '1' : '.';
  }
  (void)p;
  return rows;
}

// Blocks of 128 equal rows: block n of Q and of K has q[n] and k[n] in its first channel.
HostTensors of_levels(const Problem& p, const std::vector<float>& q, const std::vector<float>& k) {
  HostTensors in;
  for (const TensorSpec& spec : forward().inputs(p)) in.emplace(spec.name, zeros(spec));
  const auto fill = [&](HostTensor& t, const std::vector<float>& levels) {
    for (std::size_t row = 0; row < t.data.size() / 64; ++row) {
      t.data[64 * row] = levels[row / 128];
      t.data[64 * row + 1] = 1;  // so that a level of 0 has a direction
    }
  };
  fill(in.at("q"), q), fill(in.at("k"), k);
  return in;
}
Problem of_blocks(std::size_t m, std::size_t n, std::map<std::string, std::vector<double>> rule) {
  Problem p = one_head(
      problem(static_cast<int64_t>(128 * m), static_cast<int64_t>(128 * n), 64, DType::bf16));
  p.own = std::move(rule);
  p.softmax_scale = std::log(2);  // a score of 1 more is a weight of twice as much
  p.finish();
  return p;
}

}  // namespace

TEST_CASE("steps that choose are right about what they choose", "[emulated]") {
  Counts ran;
  int on_canvases = 0;  // without a mask
  const int problems = chosen_problems([&](const Problem& p) {
    ran += check_steps("predict", p, Backend::emulated);
    on_canvases += has_field(p) && !p.masked();
  });
  CHECK(on_canvases > 2);
  CHECK(ran.text() == fmt::format("s5_predict {}, s7_hilbert {}", problems, on_canvases));
}
TEST_CASE("tokens in an order of their own, with text and without", "[emulated]") {
  int n = 0;
  for (const TokenOrder order : {TokenOrder::rows, TokenOrder::hilbert, TokenOrder::random})
    for (const auto& [canvas, text] : {std::pair("5x7x11", 0), {"8x8x12", 77}, {"1x1x3", 1}}) {
      ++n;
      Problem p = on_canvas(canvas, text, n % 3 == 0 ? 128 : n % 3 == 1 ? 64 : 256,
                            n % 2 == 0 ? DType::fp16 : DType::bf16);
      p.own["order"] = {double(order)}, p.own["keep"] = {0.4}, p.own["similarity"] = {0.05};
      p.batch = 1 + n % 2, p.heads = 3, p.kv_heads = n % 4 == 0 ? 3 : 1;
      CHECK(check_steps("predict", p, Backend::emulated).text() == "s7_hilbert 1");
    }
}
// An order that changes nothing gives what s5 gives; and all blocks are all keys, in any order.
TEST_CASE("a step that permutes tokens is s5 of permuted tokens", "[emulated]") {
  Problem p = on_canvas("4x8x12", 50, 64);
  p.heads = 2, p.kv_heads = 1;
  p.own["keep"] = {0.3}, p.own["similarity"] = {0.05};
  p.finish();
  HostTensors plain, ordered;
  CHECK(run_step(step_named("s5_predict"), p, Backend::emulated, &plain) == "");
  Problem q = p;
  q.own["order"] = {double(TokenOrder::rows)};
  CHECK(run_step(step_named("s7_hilbert"), q, Backend::emulated, &ordered) == "");
  CHECK(same(plain.at("o"), ordered.at("o")));
  CHECK(same(plain.at("lse"), ordered.at("lse")));
  // Along the curve: s5 of inputs in that order, whose rows are elsewhere.
  Case in_memory(p, predict());
  in_memory.inputs = in_order(p, in_memory.inputs, TokenOrder::hilbert);
  in_memory.expected = predict().reference(p, in_memory.inputs, {});
  CHECK(run_step(step_named("s5_predict"), in_memory, Backend::emulated, &plain) == "");
  CHECK(run_step(step_named("s7_hilbert"), p, Backend::emulated, &ordered) == "");
  const std::vector<int64_t> tokens = token_order(p, TokenOrder::hilbert);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t n = 0; n < p.seqlen_q; ++n) {
      const int64_t token = tokens[static_cast<std::size_t>(n)];
      REQUIRE(std::equal(plain.at("o").row(0, h, n), plain.at("o").row(0, h, n) + 64,
                         ordered.at("o").row(0, h, token)));
      REQUIRE(plain.at("lse").row(0, h, n)[0] == ordered.at("lse").row(0, h, token)[0]);
    }
}
// In 8 bits they choose by what they were given, as those do.
TEST_CASE("steps of 8 bits that choose are right about what they choose", "[emulated]") {
  Counts ran;
  const int problems = chosen_problems([&](Problem p) {
    p.dtype = DType::e4m3;
    ran += check_steps("predict", p, Backend::emulated);
  });
  CHECK(ran.of == std::map<std::string, int>{{"s8_int8", problems},
                                             {"s9_longest_first", problems},
                                             {"s10_tuned", problems}});
}
TEST_CASE("longer lists are in an earlier class, for any number of blocks", "[predict]") {
  using ::emulated::hopper::kLengthClasses, ::emulated::hopper::length_class;
  for (const int blocks : {1, 2, 63, 64, 65, 1000, 65535}) {
    CHECK(length_class(blocks, blocks) == 0);
    CHECK(length_class(0, blocks) < kLengthClasses);
    CHECK(length_class(0, blocks) >= std::min(blocks, kLengthClasses) - 1);
    int ordered = 0;
    std::set<int> classes{0};
    for (int n = 1; n <= blocks; ++n) {
      ordered += length_class(n, blocks) <= length_class(n - 1, blocks);
      classes.insert(length_class(n - 1, blocks));
    }
    CHECK(ordered == blocks);
    CHECK(std::ssize(classes) == std::min(blocks + 1, kLengthClasses));  // none is left out
  }
}
// Of each section all its tiles, longer lists before shorter ones.
void check_order(const std::vector<int32_t>& order, const ::emulated::hopper::TileOrder& tiles,
                 const std::function<int(std::size_t list)>& length, int n_blocks) {
  REQUIRE(std::ssize(order) == tiles.count());
  const unsigned section = tiles.section * tiles.num_m_blocks;
  for (unsigned first = 0; first < tiles.count(); first += section) {
    const unsigned end = std::min(tiles.count(), first + section);
    std::set<unsigned> taken;
    int before = 0;
    for (unsigned n = first; n < end; ++n) {
      const auto own = static_cast<unsigned>(order[n]);
      REQUIRE((own >= first && own < end));
      taken.insert(own);
      const auto [head, row0] = tiles.at<kSparseBlockM>(own);
      const auto list = static_cast<std::size_t>(head) * tiles.num_m_blocks +
                        static_cast<std::size_t>(row0 / kSparseBlockM);
      const int its = ::emulated::hopper::length_class(length(list), n_blocks);
      REQUIRE(its >= before);
      before = its;
    }
    CHECK(taken.size() == end - first);
  }
}
struct TilesOf128 {
  static constexpr int kBlockM = kSparseBlockM;
};
// Sections of more tiles than the kernel has threads, and a last one that is smaller.
TEST_CASE("the longest lists of a section come first", "[emulated]") {
  using namespace ::emulated::hopper;
  constexpr int kBlocks = 300;
  Problem p = problem(140 * kSparseBlockM, 1, 64, DType::e4m3);
  p.batch = 1, p.heads = 5;
  TileOrder tiles(p, kSparseBlockM);
  std::mt19937 random(7);
  std::vector<Visits> visits(tiles.count());
  for (Visits& v : visits) v.first = 10, v.end = 10 + static_cast<int>(random() % (kBlocks + 1));
  const VisitLists lists{visits.data(), nullptr, 5 * 140, 140};
  for (const unsigned section : {1u, 2u, 5u}) {
    tiles.section = section;
    std::vector<int32_t> order(tiles.count(), -1);
    const Status done = ::attn::emulated::launch_kernel(
        order_kernel<OrderPass, TilesOf128>, dim3(::attn::emulated::ceil_div(5u, section)),
        dim3(OrderPass::kThreads), 0, nullptr, tiles, lists, kBlocks, order.data());
    REQUIRE(done.message == "");
    check_order(order, tiles, [&](std::size_t n) { return visits[n].count(); }, kBlocks);
  }
}
// And of a step's own lists, as the launch has left both in device memory.
TEST_CASE("tiles are taken in the order of their lists", "[emulated]") {
  for (const char* name : {"s9_longest_first", "s10_tuned"}) {
    Problem p = problem(8 * 128, 8 * 128, 64, DType::e4m3);
    p.batch = 1, p.heads = 3, p.kv_heads = 1, p.causal = true;  // which gives lists their lengths
    p.own = {{"keep", {0.5}}, {"similarity", {0}}};
    p.finish();
    Session session(p, predict(), Backend::emulated, draw_inputs(p, predict().inputs(p)));
    REQUIRE(session.prepare(step_named(name)).ok());
    REQUIRE(session.launch().message == "");
    ::emulated::hopper::TileOrder tiles(p, kSparseBlockM);
    tiles.section = ::emulated::hopper::section_of_codes(p, tiles.num_m_blocks);
    const std::vector<int32_t> visits = session.workspace("visits");  // of each list three numbers
    std::set<int> lengths;
    const auto length = [&](std::size_t list) {
      return *lengths.insert(visits[3 * list + 2] - visits[3 * list]).first;
    };
    check_order(session.workspace("tile_order"), tiles, length, 8);
    CHECK(lengths.size() > 1);
  }
}
// Which tile is taken when changes no bit.
TEST_CASE("tiles in the order of their lists give what they give in any order", "[emulated]") {
  Problem p = on_canvas("8x8x12", 77, 64, DType::e4m3);
  p.own["keep"] = {0.3}, p.own["similarity"] = {0.05};
  p.heads = 4, p.kv_heads = 2;
  p.finish();
  HostTensors s8, s9;
  CHECK(run_step(step_named("s8_int8"), p, Backend::emulated, &s8) == "");
  CHECK(run_step(step_named("s9_longest_first"), p, Backend::emulated, &s9) == "");
  CHECK(same(s8.at("o"), s9.at("o")));
  CHECK(same(s8.at("lse"), s9.at("lse")));
}
// More than the 32 blocks of a window: one more, several windows, tiles that visit few beside tiles
// that visit many, so that what one left in device memory is not taken for another's.
TEST_CASE("s10 merges windows of the blocks that it visits", "[emulated]") {
  const auto check = [](Problem p, double keep) {
    p.own["similarity"] = {0}, p.own["keep"] = {keep};
    p.dtype = DType::e4m3;
    const Counts ran = check_steps("predict", p, Backend::emulated, [](const Step& step, int) {
      return step.name == "s10_tuned";
    });
    CHECK(ran.text() == "s10_tuned 1");
  };
  Problem p = problem(70, 33 * 128, 64, DType::e4m3, InputKind::needle);
  p.heads = 4, p.kv_heads = 2;
  check(p, 1);
  p = problem(200, 12000, 64, DType::e4m3, InputKind::peaked);
  p.batch = 1, p.heads = p.kv_heads = 2;
  check(p, 0.75);
  p = problem(4600, 4600, 128, DType::e4m3, InputKind::random);
  p.batch = p.heads = p.kv_heads = 1, p.causal = true;
  check(p, 1);
  p = problem(65, 4096 + 65, 256, DType::e4m3, InputKind::needle);
  p.batch = p.heads = p.kv_heads = 1;
  check(p, 1);
  // A window whose edges are behind 30 blocks or so: the last of the first 32 has a mask, too.
  p = problem(140, 6000, 64, DType::e4m3, InputKind::needle);
  p.batch = p.heads = p.kv_heads = 1, p.window_left = 3950, p.window_right = 0;
  check(p, 1);
}
TEST_CASE("what a step of 8 bits multiplies has beside it what it chooses by", "[predict]") {
  Problem p = on_canvas("4x8x12", 50, 64, DType::e4m3);
  p.own["keep"] = {0.5};
  p.finish();
  const HostTensors in = draw_inputs(p, predict().inputs(p));
  for (const char* step : {"s8_int8", "s10_tuned"}) {
    const HostTensors stored = step_named(step).logical(p, in);
    CHECK_FALSE(same(stored.at("q"), in.at("q")));
    CHECK(same(stored.at("q_given"), in.at("q")));
    CHECK(same(stored.at("k_given"), in.at("k")));
    CHECK(rows_of(p, *chosen_blocks(p, stored)) == rows_of(p, *chosen_blocks(p, in)));
  }
}
// Means, similarities and scores of means have the same bits in all kernels that choose: so do the
// lists, as the launches have left them.
TEST_CASE("steps of 8 bits visit what s5 visits", "[emulated]") {
  int n = 0, chosen = 0;
  for (const int64_t d : {64, 128, 256})
    for (const auto& [canvas, text] : {std::pair("8x8x12", 77), {"8x8x8", 0}, {"4x8x12", 1}}) {
      Problem p = on_canvas(canvas, text, d);
      p.own["keep"] = {0.3}, p.own["similarity"] = {n % 2 == 0 ? 0.05 : 0.2};
      if (n % 3 == 2) p.own.erase("keep"), p.own["keep_mass"] = {0.8};
      p.batch = 1 + n % 2, p.heads = 4, p.kv_heads = n % 4 == 0 ? 1 : 2, p.causal = n % 3 == 1;
      p.seed = static_cast<uint64_t>(++n);
      p.finish();
      const HostTensors in = draw_inputs(p, predict().inputs(p));
      std::vector<std::vector<int32_t>> of_s5, means_of_s5;
      for (const char* name : {"s5_predict", "s8_int8", "s9_longest_first", "s10_tuned"}) {
        INFO(name << " " << p.text());
        Problem own = p;
        if (std::string(name) != "s5_predict") own.dtype = DType::e4m3;
        Session session(own, predict(), Backend::emulated, draw_inputs(own, predict().inputs(own)));
        REQUIRE(session.prepare(step_named(name)).ok());
        REQUIRE(session.launch().message == "");
        const std::vector<int32_t> visits = session.workspace("visits"),
                                   visited = session.workspace("visited");
        std::vector<std::vector<int32_t>> lists;
        for (std::size_t at = 0; at < visits.size(); at += 3) {
          lists.emplace_back(visited.begin() + visits[at], visited.begin() + visits[at + 2]);
          lists.back().push_back(visits[at + 1] - visits[at]);  // how many of them have no mask
        }
        std::vector<std::vector<int32_t>> means;
        for (const char* buffer :
             {"q_mean", "q_similar", own.dtype == DType::e4m3 ? "k_means" : "k_mean", "k_similar"})
          means.push_back(session.workspace(buffer));
        if (of_s5.empty()) of_s5 = lists, means_of_s5 = means;
        REQUIRE(means == means_of_s5);
        REQUIRE(lists == of_s5);
      }
      for (const auto& list : of_s5)
        chosen += std::ssize(list) - 1 < ceil_div(p.seqlen_k, d == 256 ? 64 : 128);
    }
  CHECK(chosen > 20);
}
// Rows of few keys, for which the checker's own rounding of P is a bad guide (check.h, rule 2).
TEST_CASE("rows of few keys are as far off as their roundings may be", "[emulated]") {
  Problem p = problem(128, 129, 64, DType::e4m3);
  p.batch = 2, p.heads = 2, p.kv_heads = 1, p.seed = 389, p.own["similarity"] = {0.0078};
  CHECK(check_steps("predict", p, Backend::emulated).of.size() == 3);
  p = problem(300, 128, 64, DType::e4m3, InputKind::outlier);
  p.batch = 2, p.heads = p.kv_heads = 1, p.seed = 238, p.causal = true;
  p.own["similarity"] = {0.5};
  CHECK(check_steps("predict", p, Backend::emulated).of.size() == 3);
}
// Those before the first key have no place among the keys.
TEST_CASE("more queries than keys have no diagonal", "[predict]") {
  for (const char* name :
       {"s5_predict", "s6_skip_pv", "s8_int8", "s9_longest_first", "s10_tuned"}) {
    const Step& step = step_named(name);
    const bool rounds = std::ranges::count(step.takes, "e4m3") > 0;
    Problem p = problem(401, 400, 64, rounds ? DType::e4m3 : DType::bf16);
    if (step.name == "s6_skip_pv") p.own["skip_below"] = {6};
    p.finish();
    INFO(name);
    CHECK(refusal(step, p).value_or("") == "");
    p.own["keep_diagonal"] = {1};
    CHECK(refusal(step, p).value_or("") ==
          "--keep-diagonal: 401 queries and 400 keys: the first ones have no place among the keys");
    p.seqlen_q = 400;
    CHECK(refusal(step, p).value_or("") == "");
  }
}
// It is in its channel's scale, and in s10 in the mean: so all rows of the head have it there,
// whether they visit its block or not. All other numbers are as they were.
TEST_CASE("a V that is no number takes its channel of the head", "[emulated]") {
  for (const char* name : {"s8_int8", "s9_longest_first", "s10_tuned"})
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      Problem p = problem(300, 520, 64, DType::e4m3, InputKind::peaked);
      p.heads = p.kv_heads = 2;
      p.own = {{"keep", {0.4}}, {"similarity", {0}}};
      p.finish();
      INFO(name << " " << bad);
      Case c(p, predict());
      HostTensors right, out;
      CHECK(run_step(step_named(name), c, Backend::emulated, &right) == "");
      c.inputs.at("v").data[500 * 64 + 7] = bad;
      c.expected = predict().reference(p, c.inputs, {});
      run_step(step_named(name), c, Backend::emulated, &out);
      int wrong = 0;
      for (int64_t h = 0; h < 2; ++h)
        for (int64_t i = 0; i < 300; ++i)
          for (int64_t c0 = 0; c0 < 64; ++c0) {
            const float got = out.at("o").row(0, h, i)[c0];
            wrong += h == 0 && c0 == 7 ? !std::isnan(got) : got != right.at("o").row(0, h, i)[c0];
          }
      CHECK(wrong == 0);
      CHECK(same(out.at("lse"), right.at("lse")));
    }
}
// Thresholds at which tiles are skipped, and one at which none is.
TEST_CASE("P V that is skipped is within the error that its threshold says", "[emulated]") {
  int n = 0, differing = 0;
  for (const double threshold : {3.0, 8.0, 20.0, 126.0})
    for (const int64_t d : {64, 128, 256}) {
      if (++n % 2 == 0 && d == 256) continue;  // slow
      Problem p =
          on_canvas("8x8x12", n % 2 == 0 ? 70 : 0, d, n % 3 == 0 ? DType::fp16 : DType::bf16);
      p.own["skip_below"] = {threshold};
      p.own["keep"] = {0.8};
      p.heads = 2, p.kv_heads = n % 2 == 0 ? 1 : 2, p.causal = n % 4 == 1;
      // Scores that are not so far apart that nothing of P is left in any case.
      p.softmax_scale = 0.5 / std::sqrt(double(d));
      p.finish();
      HostTensors skipped, all;
      INFO(p.text());
      CHECK(run_step(step_named("s6_skip_pv"), p, Backend::emulated, &skipped) == "");
      Problem plain = p;
      plain.own.erase("skip_below");
      CHECK(run_step(step_named("s5_predict"), plain, Backend::emulated, &all) == "");
      // The denominator has what O lacks.
      CHECK(same(skipped.at("lse"), all.at("lse")));
      const bool differs = !same(skipped.at("o"), all.at("o"));
      if (threshold == 126) CHECK(!differs);
      if (threshold == 3) differing += differs;
    }
  CHECK(differing > 0);  // what is skipped is there
}
TEST_CASE("steps that choose and skip, for any mask", "[emulated]") {
  int n = 0;
  chosen_problems([&](Problem p) {
    if (++n % 3 != 0) return;
    p.own["skip_below"] = {double(4 + n)};
    CHECK(check_steps("predict", p, Backend::emulated).text() == "s6_skip_pv 1");
  });
  CHECK(n == 14);
}
TEST_CASE("steps that choose on the GPU", "[gpu]") {
  chosen_problems([&](Problem p) {
    check_steps("predict", p, Backend::gpu);  // s7 too, where there is a canvas and no mask
    p.own["skip_below"] = {10};
    check_steps("predict", p, Backend::gpu);
    p.own.erase("skip_below"), p.dtype = DType::e4m3;
    check_steps("predict", p, Backend::gpu);
  });
}

TEST_CASE("the rule by hand: a share of the blocks", "[predict]") {
  const std::vector<float> k{1, 5, 3, 4, 2};
  const auto chosen = [&](std::map<std::string, std::vector<double>> rule) {
    const Problem p = of_blocks(2, 5, std::move(rule));
    return rows_of(p, *chosen_blocks(p, of_levels(p, {1, -1}, k)));
  };
  using Rows = std::vector<std::string>;
  CHECK(chosen({{"keep", {0}}}) == Rows{".1...", "1...."});  // one at least
  CHECK(chosen({{"keep", {0.2}}}) == Rows{".1...", "1...."});
  CHECK(chosen({{"keep", {0.21}}}) == Rows{".1.1.", "1...1"});
  CHECK(chosen({{"keep", {0.6}}}) == Rows{".111.", "1.1.1"});
  CHECK(chosen({}) == Rows{".111.", "1.1.1"});  // half of five, rounded up
  CHECK(chosen({{"keep", {1}}}) == Rows{"11111", "11111"});
  CHECK(chosen({{"keep", {0}}, {"keep_sink", {1}}}) == Rows{"11...", "1...."});
  CHECK(chosen({{"keep", {0}}, {"keep_diagonal", {1}}}) == Rows{".1.1.", "1...1"});
  const Problem equal = of_blocks(1, 4, {{"keep", {0.25}}});  // those that are equal, all of them
  CHECK(rows_of(equal, *chosen_blocks(equal, of_levels(equal, {1}, {2, 7, 7, 1}))) == Rows{".11."});
}

TEST_CASE("the share of blocks that are visited is said", "[predict]") {
  Problem p = of_blocks(2, 5, {{"keep", {0.21}}});  // two of five, and two of five
  const HostTensors in = of_levels(p, {1, -1}, {-1, 2, 0, 1, -2});
  CHECK(predict().note(p, in) == "choice: visited 40.0 % of blocks");
  p.causal = true;  // of four and five
  CHECK(predict().note(p, in) ==
        "choice: visited 33.3 % of the blocks that causal and window leave");
}

TEST_CASE("and what share it is in an order of tokens", "[predict]") {
  Problem p = on_canvas("8x16x16", 0, 64);
  p.own["similarity"] = {0}, p.own["keep"] = {0.25};
  p.finish();
  const HostTensors in = draw_inputs(p, predict().inputs(p));
  CHECK(predict().note(p, in) == "choice: visited 25.0 % of blocks; with --order hilbert 25.0 %");
  p.own["similarity"] = {0.4}, p.own["order"] = {double(TokenOrder::random)};
  CHECK(predict().note(p, in) == "choice: visited 62.5 % of blocks; with --order random 65.6 %");
  CHECK(predict().note(p, in_order(p, in, TokenOrder::random)).find("choice: visited 65.6 %") == 0);
}

TEST_CASE("the rule by hand: a share of the probability", "[predict]") {
  // Weights 1/2, 1/4, 1/8, 1/8.
  const auto chosen = [&](double mass) {
    const Problem p = of_blocks(1, 4, {{"keep_mass", {mass}}});
    return rows_of(p, *chosen_blocks(p, of_levels(p, {1}, {-1, 1, 0, -1})))[0];
  };
  CHECK(chosen(0) == ".1..");
  CHECK(chosen(0.5) == ".1..");
  CHECK(chosen(0.51) == ".11.");
  CHECK(chosen(0.75) == ".11.");
  CHECK(chosen(0.76) == "1111");  // the last two are equal
  CHECK(chosen(1) == "1111");
}

TEST_CASE("weights are powers of two, to a unit", "[predict]") {
  CHECK(weight_of(0) == 65536);
  CHECK(weight_of(-1) == 32768);
  CHECK(weight_of(-16) == 1);
  CHECK(weight_of(-17) == 0);
  CHECK(weight_of(-INFINITY) == 0);
  CHECK(weight_of(NAN) == 0);
  for (float x = 0; x > -18; x -= 0.0137f)
    CHECK(std::abs(weight_of(x) - 65536 * std::exp2(double{x})) < 1.1);
}

TEST_CASE("a block's similarity is the mean cosine of all pairs of its rows", "[predict]") {
  Problem p = one_head(on_canvas("4x8x20", 0, 64));  // 640 tokens: 5 blocks
  p.own["keep"] = {0};
  p.finish();
  for (const std::string name : {"q", "k"}) {
    // Rows of the other tensor are alike in each block, and no block of K is best for all of Q.
    HostTensors in = draw_inputs(p, predict().inputs(p));
    HostTensor& other = in.at(name == "q" ? "k" : "q");
    for (std::size_t n = 0; n < other.data.size(); ++n) {
      const auto block = static_cast<float>(n / 64 / 128);
      other.data[n] = n % 64 > 0 ? 0 : (n / 64 / 128 % 2 == 0 ? 1 : -1) * (block + 1);
    }
    std::vector<double> similarity;
    for (std::size_t block = 0; block < 5; ++block) {
      std::vector<double> sum(64);  // of the directions, over their number
      for (int64_t i = 0; i < 128; ++i) {
        const float* const row = in.at(name).row(0, 0, 128 * static_cast<int64_t>(block) + i);
        double norm2 = 0;
        for (std::size_t c = 0; c < 64; ++c) norm2 += double{row[c]} * row[c];
        for (std::size_t c = 0; c < 64; ++c) sum[c] += row[c] / std::sqrt(norm2) / 128;
      }
      similarity.push_back(0);  // sum . sum is the mean of cos(i, j) over all i and j
      for (const double x : sum) similarity.back() += x * x;
    }
    for (std::size_t block = 0; block < 5; ++block)
      for (const double off : {-1e-5, 1e-5}) {
        // The only one that can be chosen is, by all.
        if (name == "k" && similarity[block] == *std::ranges::max_element(similarity)) continue;
        p.own["similarity"] = {similarity[block] + off};
        const auto rows = rows_of(p, *chosen_blocks(p, in));
        bool always = true;  // seen by all, or sees all
        for (std::size_t n = 0; n < 5; ++n)
          always = always && (name == "k" ? rows[n][block] : rows[block][n]) == '1';
        INFO(name << " " << block << " " << off);
        CHECK(always == (off > 0));
      }
  }
}

TEST_CASE("a choice follows causal masks and windows, and leaves none without a block",
          "[predict]") {
  Problem p = on_canvas("8x8x12", 0, 64);
  p.heads = 2, p.kv_heads = 1;
  for (const bool causal : {true, false})
    for (const double keep : {0.0, 0.5}) {
      p.own["keep"] = {keep};
      p.causal = causal, p.window_left = causal ? -1 : 100, p.window_right = causal ? -1 : 0;
      p.finish();
      const auto mask = chosen_blocks(p, draw_inputs(p, predict().inputs(p)));
      for (int64_t h = 0; h < 2; ++h) {
        const auto rows = rows_of(p, *mask, h);
        for (std::size_t m = 0; m < rows.size(); ++m) {
          CHECK(rows[m].find('1') <= m);
          CHECK(rows[m].find_last_of('1') <= m);  // nothing behind the diagonal
          if (!causal) CHECK(rows[m].find('1') + 1 >= m);  // nor before the window
        }
      }
    }
}

TEST_CASE("all blocks are attention to all keys", "[emulated]") {
  Problem p = on_canvas("4x8x12", 50, 128);
  p.heads = 2, p.kv_heads = 1;
  p.own["keep"] = {1};
  p.finish();
  HostTensors all, dense;
  CHECK(run_step(step_named("s5_predict"), p, Backend::emulated, &all) == "");
  Problem plain = p;
  plain.own.erase("keep");
  CHECK(run_step(step_named("s1_block_mask"), plain, Backend::emulated, &dense) == "");
  CHECK(same(all.at("o"), dense.at("o")));
  CHECK(same(all.at("lse"), dense.at("lse")));
}

// A block with a NaN or an infinity has no mean, so it is seen by all: what is no number does not
// vanish with a choice.
TEST_CASE("what is no number is always seen", "[emulated]") {
  for (const char* tensor : {"q", "k"})
    for (const float bad : {NAN, INFINITY}) {
      Problem p = on_canvas("8x8x12", 0, 64);
      p.heads = p.kv_heads = 2;
      p.own["keep"] = {0};
      p.own["similarity"] = {0};
      p.finish();
      Case c(p, predict());
      c.inputs.at(tensor).data[(768 + 300) * 64 + 7] = bad;  // of head 1
      INFO(tensor << " " << bad);
      HostTensors out;
      CHECK(run_step(step_named("s5_predict"), c, Backend::emulated, &out) == "");
      const auto rows = rows_of(p, *chosen_blocks(p, c.inputs), 1);
      int seeing = 0;
      for (const std::string& row : rows) seeing += row[2] == '1';
      if (tensor[0] == 'k')
        CHECK(seeing == 6);
      else
        CHECK(rows[2] == "111111");
      if (std::isnan(bad)) CHECK(std::isnan(out.at("o").row(0, 1, 300)[0]));
    }
}

TEST_CASE("problems that steps cannot choose for are refused", "[predict]") {
  Problem p = problem(256, 256, 64, DType::bf16);
  p.finish();
  const Step& step = step_named("s5_predict");
  CHECK(refusal(step, p).value_or("") == "");
  Problem q = p;
  q.own["skip_below"] = {10};
  CHECK(refusal(step, q).value_or("") == "--skip-below 10: this step has no P V that is skipped");
  q = p, q.dtype = DType::fp32;
  CHECK(refusal(step, q).value_or("") == "this step has fp16 and bf16");
  CHECK(refusal(step_named("s8_int8"), p).value_or("") ==
        "--dtype bf16: this step quantises what it is given to e4m3");
  q = p, q.dtype = DType::e4m3, q.softmax_scale = 1e-11;
  CHECK(refusal(step_named("s8_int8"), q).value_or("").find("--scale below 1e-10") == 0);
  q = p, q.softmax_scale = 1e-11;
  CHECK(refusal(step, q).value_or("").find("--scale below 1e-10") == 0);
  q = p, q.seqlen_k = 65536 * 128;
  CHECK(refusal(step, q).value_or("").find("--seqlen-k 8388608: at most 65535 blocks") == 0);
  q = p;
  q.mask = std::make_shared<BlockMask>(128, 128, std::vector<int64_t>{1, 1, 2, 2},
                                       std::vector<bool>(4, true));
  for (const Step& other : chapter().steps) {
    if (other.operation != &predict()) continue;
    Problem own = q;
    if (std::ranges::count(other.takes, "e4m3") > 0) own.dtype = DType::e4m3;
    if (std::ranges::count(other.takes, "skip_below") > 0) own.own["skip_below"] = {6};
    if (other.name == "s7_hilbert") own.own["field"] = read_field("4x8x8");
    INFO(other.name);
    CHECK(refusal(other, own).value_or("").find("mask") != std::string::npos);
    own.mask = nullptr;
    CHECK(refusal(other, own).value_or("") == "");
  }
  const Step& orders = step_named("s7_hilbert");
  CHECK(refusal(orders, p).value_or("") ==
        "this step puts the tokens of a canvas in order, and needs --inputs field:TxHxW");
  q = p, q.own["field"] = read_field("4x8x8");
  CHECK(refusal(orders, q).value_or("") == "");
  q.own["order"] = {2};
  CHECK(refusal(orders, q).value_or("") == "");
  CHECK(refusal(step, q).value_or("") == "--order: this step has no order of tokens of its own");
  q.causal = true;
  q.finish();
  CHECK(refusal(orders, q).value_or("").find("this step has no causal mask") == 0);
  q.causal = false, q.seqlen_k = 300;
  q.finish();
  CHECK(refusal(orders, q).value_or("") ==
        "256 queries and 300 keys: this step has one order for both");
  const auto option = std::ranges::find(predict().own, "order", &Feature::name);
  CHECK(option->read("random") == std::vector<double>{2});
  CHECK_THROWS_AS(option->read("curve"), InputError);
  CHECK(refusal(step_named("s6_skip_pv"), p).value_or("") ==
        "this step skips P V, and needs --skip-below");
}
