// Steps that choose their key blocks: the rule by hand, and exact attention over the chosen blocks.
#include <cmath>

#include "08_quant_sparse/host/predict.h"
#include "08_quant_sparse/kernels/sparse.h"
#include "08_quant_sparse/host/token_order.h"
#include "attn/error.h"
#include "check/field.h"
#include "run/runner.h"
#include "tests/step_cases.h"
#include "tests/test_predict.h"

using namespace attn;
using namespace attn::tests;

namespace {

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
  p.softmax_scale = std::log(2);  // a score higher by 1 has twice the weight
  p.finish();
  return p;
}

}  // namespace

TEST_CASE("steps that choose blocks are exact over the chosen blocks", "[emulated]") {
  Counts ran;
  int on_canvases = 0;  // without a mask
  const int problems = chosen_problems([&](const Problem& p) {
    ran += check_steps("predict", p, Backend::emulated);
    on_canvases += has_field(p) && !p.masked();
  });
  CHECK(on_canvases > 2);
  CHECK(ran.text() == fmt::format("s4_predict {}, s6_hilbert {}", problems, on_canvases));
}
TEST_CASE("reordered tokens with text and without", "[emulated]") {
  int n = 0;
  for (const TokenOrder order : {TokenOrder::rows, TokenOrder::hilbert, TokenOrder::random})
    for (const auto& [canvas, text] : {std::pair("5x7x11", 0), {"8x8x12", 77}, {"1x1x3", 1}}) {
      ++n;
      Problem p = on_canvas(canvas, text, n % 3 == 0 ? 128 : n % 3 == 1 ? 64 : 256,
                            n % 2 == 0 ? DType::fp16 : DType::bf16);
      p.own["order"] = {double(order)}, p.own["keep"] = {0.4}, p.own["similarity"] = {0.05};
      p.batch = 1 + n % 2, p.heads = 3, p.kv_heads = n % 4 == 0 ? 3 : 1;
      CHECK(check_steps("predict", p, Backend::emulated).text() == "s6_hilbert 1");
    }
}
// The identity order gives s4's result; and with all blocks kept, any order is attention over all
// keys.
TEST_CASE("s6 equals s4 on permuted tokens", "[emulated]") {
  Problem p = on_canvas("4x8x12", 50, 64);
  p.heads = 2, p.kv_heads = 1;
  p.own["keep"] = {0.3}, p.own["similarity"] = {0.05};
  p.finish();
  HostTensors plain, ordered;
  CHECK(run_step(step_named("s4_predict"), p, Backend::emulated, &plain) == "");
  Problem q = p;
  q.own["order"] = {double(TokenOrder::rows)};
  CHECK(run_step(step_named("s6_hilbert"), q, Backend::emulated, &ordered) == "");
  CHECK(same(plain.at("o"), ordered.at("o")));
  CHECK(same(plain.at("lse"), ordered.at("lse")));
  // Along the curve: s4 on inputs in that order, with rows at other positions.
  Case in_memory(p, predict());
  in_memory.inputs = in_order(p, in_memory.inputs, TokenOrder::hilbert);
  in_memory.expected = predict().reference(p, in_memory.inputs, {});
  CHECK(run_step(step_named("s4_predict"), in_memory, Backend::emulated, &plain) == "");
  CHECK(run_step(step_named("s6_hilbert"), p, Backend::emulated, &ordered) == "");
  const std::vector<int64_t> tokens = token_order(p, TokenOrder::hilbert);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t n = 0; n < p.seqlen_q; ++n) {
      const int64_t token = tokens[static_cast<std::size_t>(n)];
      REQUIRE(std::equal(plain.at("o").row(0, h, n), plain.at("o").row(0, h, n) + 64,
                         ordered.at("o").row(0, h, token)));
      REQUIRE(plain.at("lse").row(0, h, n)[0] == ordered.at("lse").row(0, h, token)[0]);
    }
}
// The diagonal of the first query tile ends three keys before key 0, so it keeps no block.
TEST_CASE("a diagonal before key 0 keeps no block", "[emulated][predict]") {
  for (const char* name :
       {"s4_predict", "s5_skip_pv", "s7_int8", "s8_lpt_order", "s9_tuned"}) {
    const Step& step = step_named(name);
    const bool rounds = std::ranges::count(step.takes, "e4m3") > 0;
    Problem p = problem(330, 200, 64, rounds ? DType::e4m3 : DType::bf16, InputKind::peaked);
    if (step.name == "s5_skip_pv") p.own["skip_below"] = {126};
    p.own["keep"] = {0}, p.own["similarity"] = {-1}, p.own["keep_diagonal"] = {1};
    p.finish();
    INFO(name);
    CHECK(run_step(step, p, Backend::emulated) == "");
  }
}
// Thresholds at which tiles are skipped, and one at which none is.
TEST_CASE("skipped P V stays within the error bound of its threshold", "[emulated]") {
  int n = 0, differing = 0;
  for (const double threshold : {3.0, 8.0, 20.0, 126.0})
    for (const int64_t d : {64, 128, 256}) {
      if (++n % 2 == 0 && d == 256) continue;  // slow
      Problem p =
          on_canvas("8x8x12", n % 2 == 0 ? 70 : 0, d, n % 3 == 0 ? DType::fp16 : DType::bf16);
      p.own["skip_below"] = {threshold};
      p.own["keep"] = {0.8};
      p.heads = 2, p.kv_heads = n % 2 == 0 ? 1 : 2, p.causal = n % 4 == 1;
      // Scores close enough that the skipped P is not negligible anyway.
      p.softmax_scale = 0.5 / std::sqrt(double(d));
      p.finish();
      HostTensors skipped, all;
      INFO(p.text());
      CHECK(run_step(step_named("s5_skip_pv"), p, Backend::emulated, &skipped) == "");
      Problem plain = p;
      plain.own.erase("skip_below");
      CHECK(run_step(step_named("s4_predict"), plain, Backend::emulated, &all) == "");
      // The denominator includes what O lacks.
      CHECK(same(skipped.at("lse"), all.at("lse")));
      const bool differs = !same(skipped.at("o"), all.at("o"));
      if (threshold == 126) CHECK(!differs);
      if (threshold == 3) differing += differs;
    }
  CHECK(differing > 0);  // some tiles are skipped
}
TEST_CASE("steps that choose blocks and skip P V under any mask", "[emulated]") {
  int n = 0;
  chosen_problems([&](Problem p) {
    if (++n % 3 != 0) return;
    p.own["skip_below"] = {double(4 + n)};
    CHECK(check_steps("predict", p, Backend::emulated).text() == "s5_skip_pv 1");
  });
  CHECK(n == 14);
}
TEST_CASE("steps that choose blocks on the GPU", "[gpu]") {
  chosen_problems([&](Problem p) {
    check_steps("predict", p, Backend::gpu);  // s6 too, where there is a canvas and no mask
    p.own["skip_below"] = {10};
    check_steps("predict", p, Backend::gpu);
    p.own.erase("skip_below"), p.dtype = DType::e4m3;
    check_steps("predict", p, Backend::gpu);
  });
}

TEST_CASE("the selection rule by hand: top-k", "[predict]") {
  const std::vector<float> k{1, 5, 3, 4, 2};
  const auto chosen = [&](std::map<std::string, std::vector<double>> rule) {
    const Problem p = of_blocks(2, 5, std::move(rule));
    return rows_of(p, *chosen_blocks(p, of_levels(p, {1, -1}, k)));
  };
  using Rows = std::vector<std::string>;
  CHECK(chosen({{"keep", {0}}}) == Rows{".1...", "1...."});  // at least one
  CHECK(chosen({{"keep", {0.2}}}) == Rows{".1...", "1...."});
  CHECK(chosen({{"keep", {0.21}}}) == Rows{".1.1.", "1...1"});
  CHECK(chosen({{"keep", {0.6}}}) == Rows{".111.", "1.1.1"});
  CHECK(chosen({}) == Rows{".111.", "1.1.1"});  // half of five, rounded up
  CHECK(chosen({{"keep", {1}}}) == Rows{"11111", "11111"});
  CHECK(chosen({{"keep", {0}}, {"keep_sink", {1}}}) == Rows{"11...", "1...."});
  CHECK(chosen({{"keep", {0}}, {"keep_diagonal", {1}}}) == Rows{".1.1.", "1...1"});
  const Problem equal = of_blocks(1, 4, {{"keep", {0.25}}});  // equal scores, all kept
  CHECK(rows_of(equal, *chosen_blocks(equal, of_levels(equal, {1}, {2, 7, 7, 1}))) == Rows{".11."});
}

TEST_CASE("the visited share of the blocks is printed", "[predict]") {
  Problem p = of_blocks(2, 5, {{"keep", {0.21}}});  // two of five, and two of five
  const HostTensors in = of_levels(p, {1, -1}, {-1, 2, 0, 1, -2});
  CHECK(predict().note(p, in) == "choice: visited 40.0 % of blocks");
  p.causal = true;  // of four and five
  CHECK(predict().note(p, in) ==
        "choice: visited 33.3 % of the blocks that causal and window leave");
}

TEST_CASE("the visited share in a token order is printed", "[predict]") {
  Problem p = on_canvas("8x16x16", 0, 64);
  p.own["similarity"] = {0}, p.own["keep"] = {0.25};
  p.finish();
  const HostTensors in = draw_inputs(p, predict().inputs(p));
  CHECK(predict().note(p, in) == "choice: visited 25.0 % of blocks; with --order hilbert 25.0 %");
  p.own["similarity"] = {0.4}, p.own["order"] = {double(TokenOrder::random)};
  CHECK(predict().note(p, in) == "choice: visited 62.5 % of blocks; with --order random 65.6 %");
  CHECK(predict().note(p, in_order(p, in, TokenOrder::random)).find("choice: visited 65.6 %") == 0);
}

TEST_CASE("the selection rule by hand: top-p", "[predict]") {
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

TEST_CASE("weights are powers of two to within one unit", "[predict]") {
  CHECK(weight_of(0) == 65536);
  CHECK(weight_of(-1) == 32768);
  CHECK(weight_of(-16) == 1);
  CHECK(weight_of(-17) == 0);
  CHECK(weight_of(-INFINITY) == 0);
  CHECK(weight_of(NAN) == 0);
  for (float x = 0; x > -18; x -= 0.0137f)
    CHECK(std::abs(weight_of(x) - 65536 * std::exp2(double{x})) < 1.1);
}

TEST_CASE("the self-similarity of a block is the mean cosine of its pairs of rows", "[predict]") {
  Problem p = one_head(on_canvas("4x8x20", 0, 64));  // 640 tokens: 5 blocks
  p.own["keep"] = {0};
  p.finish();
  for (const std::string name : {"q", "k"}) {
    // Rows of the other tensor are equal within each block, and no block of K is best for all of Q.
    HostTensors in = draw_inputs(p, predict().inputs(p));
    HostTensor& other = in.at(name == "q" ? "k" : "q");
    for (std::size_t n = 0; n < other.data.size(); ++n) {
      const auto block = static_cast<float>(n / 64 / 128);
      other.data[n] = n % 64 > 0 ? 0 : (n / 64 / 128 % 2 == 0 ? 1 : -1) * (block + 1);
    }
    std::vector<double> similarity;
    for (std::size_t block = 0; block < 5; ++block) {
      std::vector<double> sum(64);  // mean of the unit vectors
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
        // The only eligible block is chosen, by all.
        if (name == "k" && similarity[block] == *std::ranges::max_element(similarity)) continue;
        p.own["similarity"] = {similarity[block] + off};
        const auto rows = rows_of(p, *chosen_blocks(p, in));
        bool always = true;  // visited by all, or visits all
        for (std::size_t n = 0; n < 5; ++n)
          always = always && (name == "k" ? rows[n][block] : rows[block][n]) == '1';
        INFO(name << " " << block << " " << off);
        CHECK(always == (off > 0));
      }
  }
}

TEST_CASE("choices respect causal masks and windows and leave no tile without a block",
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
          CHECK(rows[m].find_last_of('1') <= m);  // nothing right of the diagonal
          if (!causal) CHECK(rows[m].find('1') + 1 >= m);  // nor left of the window
        }
      }
    }
}

TEST_CASE("keeping all blocks is attention to all keys", "[emulated]") {
  Problem p = on_canvas("4x8x12", 50, 128);
  p.heads = 2, p.kv_heads = 1;
  p.own["keep"] = {1};
  p.finish();
  HostTensors all, dense;
  CHECK(run_step(step_named("s4_predict"), p, Backend::emulated, &all) == "");
  Problem plain = p;
  plain.own.erase("keep");
  CHECK(run_step(step_named("s1_block_mask"), plain, Backend::emulated, &dense) == "");
  CHECK(same(all.at("o"), dense.at("o")));
  CHECK(same(all.at("lse"), dense.at("lse")));
}

// A block with NaN or Inf has no mean, so all tiles visit it: NaN does not disappear because of a
// choice.
TEST_CASE("a block with NaN or Inf is always visited", "[emulated]") {
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
      CHECK(run_step(step_named("s4_predict"), c, Backend::emulated, &out) == "");
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

TEST_CASE("problems without a valid choice are refused", "[predict]") {
  Problem p = problem(256, 256, 64, DType::bf16);
  p.finish();
  const Step& step = step_named("s4_predict");
  CHECK(refusal(step, p).value_or("") == "");
  Problem q = p;
  q.own["skip_below"] = {10};
  CHECK(refusal(step, q).value_or("") == "--skip-below 10: this step has no skipped P V");
  q = p, q.dtype = DType::fp32;
  CHECK(refusal(step, q).value_or("") == "--dtype fp32: this step takes fp16 and bf16");
  CHECK(refusal(step_named("s7_int8"), p).value_or("") ==
        "--dtype bf16: this step quantises its inputs to e4m3");
  q = p, q.dtype = DType::e4m3, q.softmax_scale = 1e-11;
  CHECK(refusal(step_named("s7_int8"), q).value_or("") ==
        "--scale 1e-11: this step takes at least 1e-10");
  q = p, q.softmax_scale = 1e-11;
  CHECK(refusal(step, q).value_or("") == "--scale 1e-11: this step takes at least 1e-10");
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
    if (other.name == "s6_hilbert") own.own["field"] = read_field("4x8x8");
    INFO(other.name);
    CHECK(refusal(other, own).value_or("").find("mask") != std::string::npos);
    own.mask = nullptr;
    CHECK(refusal(other, own).value_or("") == "");
  }
  const Step& orders = step_named("s6_hilbert");
  CHECK(refusal(orders, p).value_or("") ==
        "this step reorders the tokens of a canvas, and needs --inputs field:TxHxW");
  q = p, q.own["field"] = read_field("4x8x8");
  CHECK(refusal(orders, q).value_or("") == "");
  q.own["order"] = {2};
  CHECK(refusal(orders, q).value_or("") == "");
  CHECK(refusal(step, q).value_or("") == "--order: this step has no token order of its own");
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
  CHECK(refusal(step_named("s5_skip_pv"), p).value_or("") ==
        "this step skips P V, and needs --skip-below");
}

// What --save writes in addition to O and lse: the blocks that a launch visited, in the form of
// `--mask block:`, and s6's order.
TEST_CASE("a launch saves the blocks and the order of the rule", "[emulated]") {
  for (const char* name : {"s4_predict", "s6_hilbert", "s8_lpt_order"}) {
    const Step& step = step_named(name);
    Problem p = on_canvas("8x8x8", 40, 64, DType::bf16);
    p.dtype = quantises_to(step);
    p.own["keep"] = {0.4};
    p.finish();
    const HostTensors in = draw(predict(), p).tensors;
    Session session(p, predict(), Backend::emulated, in);
    REQUIRE(session.prepare(step).ok());
    REQUIRE(session.launch().ok());
    const HostTensors choices =
        step.choices(p, [&](const std::string& buffer) { return session.workspace(buffer); });
    INFO(name);
    const auto rule = chosen_blocks(p, step.logical(p, in));
    CHECK(choices.at("block_mask").data == rule->tensors().front().data);
    CHECK(choices.contains("token_order") == (step.name == "s6_hilbert"));
    if (choices.contains("token_order"))
      CHECK(choices.at("token_order").numbers == token_order(p, TokenOrder::hilbert));
    CHECK(choices.contains("tile_order") == (step.name == "s8_lpt_order"));
  }
}
