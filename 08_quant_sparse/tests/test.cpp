// Prefill steps of chapter 08: correct on every shape that they accept, and within the errors that
// the chapter states.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <ranges>

#include "attn/sliding_tiles.h"
#include "attn/small_types.h"
#include "check/field.h"
#include "host/quantised.h"
#include "run/mask_option.h"
#include "kernels/sparse.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {
const std::vector<int64_t> kShort{1, 17, 64, 65, 113, 127, 129, 203};
const std::vector<int64_t> kHeadDims{64, 128, 64, 256};
constexpr DType kTypes[] = {DType::int8, DType::e4m3};  // of prefill steps
}  // namespace

// Prefill: int8, or e4m3 with FP8 P V, three head dims, --scale at least 1e-10. Decode: each its
// type, up to 16 queries, lengths and splits by their options. Block-sparse steps: 16 bits, and
// block masks in multiples of the tiles (with one exception, test_sparse.cpp has no others).
bool attn::tests::promised(const Step& step, const Problem& p) {
  if (!one_of(p.head_dim, {64, 128, 256})) return false;
  if (step.name.starts_with("q"))
    return p.dtype == (step.name < "q4" || step.name == "q9_mma_sync" ? DType::int8
                                                                      : DType::e4m3) &&
           p.softmax_scale >= 1e-10 && plain(p);
  if (step.operation->name == "predict") {
    const bool eight = one_of_steps(step, {"s7_int8", "s8_lpt_order", "s9_tuned"});
    const bool its_type =
        eight ? p.dtype == DType::e4m3 : p.dtype == DType::bf16 || p.dtype == DType::fp16;
    return its_type && plain(p) && p.softmax_scale >= 1e-10 &&
           p.own.contains("skip_below") == (step.name == "s5_skip_pv") &&
           (step.name == "s6_hilbert" ? has_field(p) && !p.masked() : !p.own.contains("order"));
  }
  if (step.name.starts_with("s")) {
    Problem q = p;
    q.mask = nullptr;
    if (step.name == "s2_flashmask" ? columns_of(p) == nullptr : columns_of(p) != nullptr)
      return false;
    if (step.name == "s3_sliding_tile" && (tiles_of_canvas(p) == nullptr || p.masked()))
      return false;
    return (p.dtype == DType::bf16 || p.dtype == DType::fp16) && plain(q) &&
           p.softmax_scale >= 1e-37;
  }
  if (step.name == "d4_sparq")  // at the choices of these tests
    return p.dtype == DType::bf16 && p.seqlen_q == 1 && p.window_left < 0 && !p.varlen() &&
           p.dropout == 0 && !p.mask && p.softcap == 0 && !p.alibi;
  const bool int8 = step.name == "d1_int8_kv" || step.name == "d8_int8_swap_ab";
  const DType type = int8                        ? DType::int8
                     : step.name == "d2_fp8_kv" ? DType::e4m3
                                                : DType::int4;
  return p.dtype == type && p.seqlen_q <= 16 && !p.varlen() && p.dropout == 0 && !p.mask &&
         p.softcap == 0 && !p.alibi && !p.own.contains("num_splits");
}

TEST_CASE("prefill steps match the reference on short problems", "[emulated]") {
  Counts ran;
  for (const DType type : kTypes) {
    int n = 0;
    covering_problems(kShort, kHeadDims, {type}, [&](Problem p) {
      const int number = n++;
      if (number / 4 % 3 != 0 && p.head_dim == 256) return;  // slow
      ran += check_steps("forward", p, Backend::emulated, in_turn, turn(number));
    });
  }
  CHECK(ran.least('q') >= 11);
}

// Chunks of 4096 values: one whole and part of another; three; some cut off by a mask; tiles of
// several heads, so that one head's workspace is not taken for another's. The last two have V in
// clusters of two and of four blocks.
TEST_CASE("q8 merges chunks", "[emulated]") {
  const auto check = [](Problem p) {
    const Counts ran = check_steps("forward", p, Backend::emulated, [](const Step& step, int) {
      return step.name == "q8_tuned";
    });
    CHECK(ran.text() == "q8_tuned 1");
  };
  Problem p = problem(70, 4097, 64, DType::e4m3, InputKind::needle);
  p.heads = 4, p.kv_heads = 2;
  check(p);
  p = problem(200, 8320, 64, DType::e4m3, InputKind::peaked);
  p.batch = 1, p.heads = p.kv_heads = 2, p.causal = true;
  check(p);
  p = problem(140, 9000, 128, DType::e4m3, InputKind::needle);
  p.batch = p.heads = p.kv_heads = 1, p.window_left = 4400, p.window_right = 0;
  check(p);
  p = problem(65, 8193, 256, DType::e4m3, InputKind::random);
  p.batch = p.heads = p.kv_heads = 1;
  check(p);
  for (const int64_t keys : {700, 1100}) {
    p = problem(65, keys, 128, DType::e4m3, InputKind::needle);
    check(p);
  }
}

TEST_CASE("prefill steps on the GPU", "[gpu]") {
  Counts ran;
  for (const DType type : kTypes) {
    covering_problems(kLengths, kHeadDims, {type},
                      [&](const Problem& p) { ran += check_steps("forward", p, Backend::gpu); });
    for (const int64_t d : {64, 128, 256}) {
      Problem p = problem(2100, d == 64 ? 9000 : 4000, d, type, InputKind::needle);
      p.causal = true;
      check_steps("forward", p, Backend::gpu);
    }
  }
  CHECK(ran.least('q') >= 110);
}

// A step gets the first of these problems that it does not refuse: plain, column intervals, a
// canvas with windows and text, a field with some P V skipped, and one with none skipped.
static std::vector<Problem> repeated_problems(const Step& step) {
  const bool decodes = step.operation->name == "decode";
  Problem plain = problem(decodes ? 2 : 1203, 1603, 128, quantises_to(step));
  plain.heads = 8, plain.kv_heads = 2;
  if (step.operation->name == "sparq") plain.seqlen_q = 1;
  plain.finish();
  Problem columns = plain;
  columns.seqlen_q = columns.seqlen_k;
  columns.finish();
  columns.mask = read_mask("flashmask:document", columns);
  Problem canvas = plain;
  canvas.seqlen_q = canvas.seqlen_k = 10 * 8 * 24 + 77;
  canvas.mask = std::make_shared<SlidingTiles>(Sides{10, 8, 24}, Sides{2, 8, 8},
                                               std::vector<Sides>(8, Sides{6, 8, 8}), 77);
  canvas.finish();
  Problem skipped = plain;
  skipped.own["field"] = read_field("8x8x24");
  skipped.seqlen_q = skipped.seqlen_k = field_of(skipped).tokens();
  skipped.own["keep"] = {0.5}, skipped.own["skip_below"] = {6};
  skipped.finish();
  Problem chosen = skipped;
  chosen.own.erase("skip_below");
  return {plain, columns, canvas, skipped, chosen};
}

TEST_CASE("1000 repeats give the same bits", "[gpu]") {
  for (const Step& step : chapter().steps) {
    INFO(step.name);
    const std::vector<Problem> problems = repeated_problems(step);
    const auto p =
        std::ranges::find_if(problems, [&](const Problem& q) { return !refusal(step, q); });
    REQUIRE(p != problems.end());
    check_gpu_repeats(step, *p);
  }
}

TEST_CASE("the large-tensor test on small tensors", "[emulated]") {
  for (const DType type : kTypes) {
    Problem p = small_repeated_problem();
    p.dtype = type;
    check_large_steps("forward", p, Backend::emulated, kThreeRepeated);
  }
}
TEST_CASE("tensors past 2^31 elements", "[gpu][large]") {
  for (const DType type : kTypes)
    for (Problem p : large_problems()) {
      if (p.varlen()) continue;
      p.dtype = type;
      check_large_steps("forward", p, Backend::gpu, kLargeCodes);
    }
}

namespace {

bool prefills(const Step& step) { return step.name.starts_with("q"); }

}  // namespace

// docs/notation.md, "NaN and infinities". int8 has no code for NaN, so the scale of its group
// carries it to the query tiles that are multiplied with the group's tile. With smooth K, the
// head's mean lacks one value, so other rows are rounded differently.
TEST_CASE("NaN in int8 Q or K reaches the rows that attend to its tile", "[emulated]") {
  for (const Step& step : chapter().steps | std::views::filter(prefills))
    for (const char* tensor : {"q", "k"})
      for (const float bad : {NAN, INFINITY, -INFINITY}) {
        Problem p = problem(300, 300, 64, quantises_to(step));
        p.heads = p.kv_heads = 2;
        p.window_left = 20, p.window_right = 20;
        p.finish();
        HostTensors in = draw_inputs(p, forward().inputs(p));
        const HostTensors right = outputs_of(step, p, in);
        in.at(tensor).data[10 * 64 + 7] = bad;  // in the first tile of the first head
        const HostTensors out = outputs_of(step, p, in);
        const auto all_nan = [&](int64_t h, int64_t i) {
          const float* const o = out.at("o").row(0, h, i);
          return std::all_of(o, o + 64, [](float x) { return std::isnan(x); }) &&
                 std::isnan(out.at("lse").row(0, h, i)[0]);
        };
        // Within a share of the row's magnitude, and lse within as much.
        const auto as_before = [&](int64_t h, int64_t i, double within = 0) {
          const float *const o = out.at("o").row(0, h, i), *const b = right.at("o").row(0, h, i);
          double error = 0, size = 0;
          for (int c = 0; c < 64; ++c)
            error += std::pow(double{o[c]} - b[c], 2), size += std::pow(double{b[c]}, 2);
          return error <= within * within * size &&
                 std::abs(out.at("lse").row(0, h, i)[0] - right.at("lse").row(0, h, i)[0]) <=
                     within;
        };
        INFO(step.name << " " << tensor << " " << bad);
        CHECK(all_nan(0, 10));  // it attends to itself
        if (tensor == std::string("k"))
          for (const int64_t i : {0, 20, 30}) CHECK(all_nan(0, i));
        const bool in_mean = step.name != "q1_int8_qk" && tensor == std::string("k");
        for (const int64_t i : {256, 299})  // in a distant tile
          CHECK(as_before(0, i, in_mean ? 0.05 : 0));
        for (const int64_t i : {0, 10, 299}) CHECK(as_before(1, i));
      }
}
TEST_CASE("NaN in e4m3 V poisons its channel in query tiles that visit its key tile",
          "[emulated]") {
  for (const Step& step : chapter().steps | std::views::filter(prefills))
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      if (quantises_to(step) != DType::e4m3) continue;
      Problem p = problem(300, 300, 64, DType::e4m3);
      p.heads = p.kv_heads = 2;
      p.window_left = 20, p.window_right = 20;
      p.finish();
      HostTensors in = draw_inputs(p, forward().inputs(p));
      const HostTensors right = outputs_of(step, p, in);
      in.at("v").data[10 * 64 + 7] = bad;
      const HostTensors out = outputs_of(step, p, in);
      INFO(step.name << " " << bad);
      int wrong = 0;
      double error = 0, size = 0;  // the channel in rows that do not attend to it
      for (int64_t h = 0; h < 2; ++h)
        for (int64_t i = 0; i < 300; ++i)
          for (int64_t c = 0; c < 64; ++c) {
            const float o = out.at("o").row(0, h, i)[c], before = right.at("o").row(0, h, i)[c];
            const bool channel = h == 0 && c == 7;
            if (!channel)
              wrong += o != before;
            else if (i <= 30)  // the rows that attend to it
              wrong += !std::isnan(o);
            else if (i >= 256 || !std::isnan(o))  // rows of its tiles may have it, no others
              error += std::pow(double{o} - before, 2), size += std::pow(double{before}, 2);
          }
      CHECK(wrong == 0);
      CHECK(error <= 0.05 * 0.05 * size);  // the mean of V lacks one value
    }
}

// Codes of 127 and -127 in all of 256 columns give sums of 4129024 and -4129024, the ends of the
// range that floats have next to the bias. lse, unaffected by the rounding of P, shows S.
TEST_CASE("the largest and the smallest integer sums are exact", "[emulated]") {
  for (const Step& step : chapter().steps | std::views::filter(prefills)) {
    if (step.name == "q7_int4_qk") continue;  // codes up to 7
    Problem p = problem(128, 128, 256, quantises_to(step));
    p.heads = p.kv_heads = p.batch = 1, p.causal = true;
    p.softmax_scale = 1.0f / 16;
    p.finish();
    HostTensors in = draw_inputs(p, forward().inputs(p));
    for (std::size_t i = 0; i < in.at("q").data.size(); ++i) {
      // The mean of the keys is 0, and so is that of the queries where it is subtracted.
      in.at("k").data[i] = i < 64 * 256 ? -1.0f : 1.0f;
      in.at("q").data[i] = step.name == "q6_smooth_q" && i / 256 % 2 == 1 ? -1.0f : 1.0f;
    }
    const HostTensors out = outputs_of(step, p, in);
    for (int64_t i = 0; i < 128; ++i) {
      const double sign = in.at("q").data[static_cast<std::size_t>(i * 256)];
      const double least = std::min(i + 1.0, 64.0), most = std::max(i - 63.0, 0.0);
      const double lse = std::log(least * std::exp(-16 * sign) + most * std::exp(16 * sign));
      INFO(step.name << ", query " << i);
      CHECK(out.at("lse").row(0, 0, i)[0] == Approx(lse).epsilon(2e-6));
    }
  }
}

// The reference values must be independent of the kernel: by hand, at ties, at the ends, for zeros.
TEST_CASE("stored values of an int8 step by hand", "[quantise]") {
  Problem p = problem(130, 3, 64, DType::int8);
  p.batch = p.heads = p.kv_heads = 1;
  p.finish();
  HostTensors in;
  for (const TensorSpec& spec : forward().inputs(p)) {
    CHECK(spec.dtype == DType::bf16);
    in.emplace(spec.name, zeros(spec));
  }
  std::vector<float>& q = in.at("q").data;
  q[0] = -254, q[1] = 3, q[2] = 5, q[64] = -1;  // a scale of 1/2: 1.5, 2.5, -0.5 are ties
  q[128 * 64] = 0.75f, q[129 * 64] = 0.75f;     // of the next tile
  const HostTensors stored = int8_blocks(p, in);
  const std::vector<float>& s = stored.at("q").data;
  CHECK(s[0] == -254);
  CHECK(s[1] == 4);  // ties to even
  CHECK(s[2] == 4);
  CHECK(s[64] == 0);
  CHECK(s[128 * 64] == Approx(0.75f).epsilon(1e-6));
  CHECK(s[129 * 64] == s[128 * 64]);
  CHECK(stored.at("k").data[0] == 0);  // zeros, no 0/0
  // And V in e4m3 with per-channel scales: 1 stays 1 where the maximum is 448; other values where
  // it is 0.25.
  std::vector<float>& v = in.at("v").data;
  v[0] = 448, v[64] = 1.0625f, v[1] = 0.25f, v[65] = 0.25f;
  const std::vector<float> codes = fp8_pv(p, in).at("v").data;
  CHECK(codes[0] == 448);
  CHECK(codes[64] == 1);  // ties to even
  CHECK(codes[1] == 0.25f);
  CHECK(codes[65] == 0.25f);
  CHECK(codes[2] == 0);
}

// Smooth V: the mean of a chunk is subtracted from V, and each channel has one scale per chunk.
TEST_CASE("smooth V per chunk by hand", "[quantise]") {
  Problem p = problem(1, 4098, 64, DType::e4m3);
  p.batch = p.heads = p.kv_heads = 1;
  p.finish();
  HostTensors in;
  for (const TensorSpec& spec : forward().inputs(p)) in.emplace(spec.name, zeros(spec));
  std::vector<float>& v = in.at("v").data;
  for (std::size_t key = 0; key < 4096; ++key) {
    v[key * 64] = key % 2 == 0 ? 1008 : 992;  // mean 1000, plus or minus 8
    v[key * 64 + 1] = key == 5 ? 4096.0f : 0.0f;
  }
  v[4096 * 64] = 3, v[4097 * 64] = 5;  // the next chunk: a mean of 4
  const std::vector<float> stored = fp8_chunks(p, in).at("v").data;
  CHECK(stored[0] == 1008);
  CHECK(stored[64] == 992);
  CHECK(stored[4096 * 64] == 3);
  CHECK(stored[4097 * 64] == 5);
  CHECK(std::abs(stored[5 * 64 + 1] - 4096) < 1e-3);
  CHECK(std::abs(stored[1] - 0) < 0.1);  // minus mean 1, with the scale of 4095: -1 is in range
  CHECK(stored[2] == 0);
}

namespace {

Problem one_head_of(int64_t queries, int64_t keys, int64_t d, InputKind kind = InputKind::random) {
  Problem p = one_head(problem(queries, keys, d, DType::int8, kind));
  p.finish();
  return p;
}

}  // namespace

// The solution of ex08a agrees with the chapter's functions and cost model.
TEST_CASE("the answers of ex08a", "[quantise]") {
  //! [answers]
  std::ifstream file(std::string(ATTN_SOURCE_DIR) + "/08_quant_sparse/exercises/a.solution.txt");
  std::map<std::string, double> answers;
  for (std::string name, equals; file >> name >> equals;) file >> answers[name];
  CHECK(answers.at("code") == to_int8(1.225f * (127 / 6.35f)));
  CHECK(answers.at("outlier") == to_int8(1.225f * (127 / 635.0f)));
  CHECK(to_int8(static_cast<float>(answers.at("vanishes")) / 10 / 5) == 0);
  CHECK(to_int8((static_cast<float>(answers.at("vanishes")) + 1) / 10 / 5) == 1);
  CHECK(answers.at("largest") == 127 * 127 * 256);
  CHECK(answers.at("lse") == 100 * (4 + 3 * 2 / 8.0));
  const double weight = answers.at("weight") / 100;
  CHECK(weight == std::exp2((5 + std::log2(1 / 64.0)) - (3 + std::log2(1 / 4.0))));
  CHECK(answers.at("sum") == 1 * 4 + weight * 64);
  // Shared scales: one large element in Q and K, and which rows lose digits by it.
  Problem p = one_head_of(128, 128, 64);
  HostTensors in;
  for (const TensorSpec& spec : forward().inputs(p)) in.emplace(spec.name, zeros(spec));
  for (const char* name : {"q", "k"}) {
    std::vector<float>& x = in.at(name).data;
    for (std::size_t row = 0; row < 128; ++row) x[64 * row] = 1;
    x[64 * (name[0] == 'q' ? 27 : 77) + 1] = 10000;
  }
  const HostTensors stored = smoothed_threads(p, in);
  const auto lost = [&](const char* name) {
    std::vector<double> rows;
    for (std::size_t row = 0; row < 128; ++row)
      if (std::abs(stored.at(name).data[64 * row] - 1) > 0.5f) rows.push_back(double(row));
    return rows;
  };
  CHECK(lost("q") == std::vector<double>{answers.at("partner"), 27});
  in.at("k").data[64 * 3] = -127;  // so that the mean is 0 and does not change the 1
  const std::vector<float> k = smoothed_threads(p, in).at("k").data;
  std::vector<double> sharing;
  for (std::size_t row = 0; row < 128; ++row)
    if (row != 3 && std::abs(k[64 * row] - 1) > 0.5f) sharing.push_back(double(row));
  CHECK(sharing.size() == answers.at("shares"));
  CHECK(sharing.front() == answers.at("first_key"));
  // Bytes per token and KV head, from the cost of one more key.
  for (const auto& [step, name] :
       {std::pair("d1_int8_kv", "bytes"), {"d3_int4_kv", "bytes_of_4"}}) {
    const Step& one = step_named(step);
    Problem few = problem(1, 1000, 128, quantises_to(one));
    few.heads = few.kv_heads = 1;
    few.finish();
    Problem more = few;
    ++more.seqlen_k;
    CHECK(one.cost(more)[0].hbm_read - one.cost(few)[0].hbm_read == answers.at(name));
  }
  //! [answers]
}

TEST_CASE("prefill steps match the reference on several query and key tiles", "[emulated]") {
  for (const DType type : kTypes) {
    Problem p = problem(150, 395, 64, type, InputKind::needle);
    p.heads = 2, p.kv_heads = 1, p.causal = true;
    check_steps("forward", p, Backend::emulated);
    p = problem(300, 290, 128, type, InputKind::peaked);
    p.heads = p.kv_heads = 1, p.window_left = 130, p.window_right = 40;
    check_steps("forward", p, Backend::emulated);
  }
}
