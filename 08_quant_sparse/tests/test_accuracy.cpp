// Accuracy of chapter 08's prefill steps relative to the original inputs: what each step improves,
// on inputs that show it, and the README's tables.
#include <algorithm>
#include <cmath>
#include <ranges>

#include "attn/small_types.h"
#include "check/field.h"
#include "host/quantised.h"
#include "tests/on_page.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

Problem one_head_of(int64_t queries, int64_t keys, int64_t d, InputKind kind = InputKind::random) {
  Problem p = one_head(problem(queries, keys, d, DType::int8, kind));
  p.finish();
  return p;
}

// Distance of a step's O from attention over the original inputs.
Distance from_originals(const char* name, const Problem& of_any_type, const HostTensors& in,
                        const char* tensor = "o") {
  const Step& step = step_named(name);
  Problem p = of_any_type;
  p.dtype = quantises_to(step);
  const HostTensors out = outputs_of(step, p, in);
  for (const Expected& e : forward_reference(p, in, {.full = true, .budget = 1e12}))
    if (e.spec.name == tensor) return distance(out.at(tensor), e);
  throw std::logic_error("no such output");
}

// As in models: some channels of Q and K have a mean of their own, the same for all tokens.
HostTensors with_biased_channels(const Problem& p, const Operation& op = forward()) {
  HostTensors in = draw(op, p).tensors;
  const auto d = static_cast<std::size_t>(p.head_dim);
  for (const char* name : {"q", "k"}) {
    std::vector<float>& x = in.at(name).data;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t channel = i % d;
      const float bias = channel % 8 == 3 ? (channel % 16 == 3 ? 6.0f : -6.0f) : 0.0f;
      x[i] = round_to(DType::bf16, x[i] + (name[0] == 'k' ? 1.5f : 0.5f) * bias);
    }
  }
  return in;
}

// An attention sink: a first key 8 above the others, with V = 0.
HostTensors with_sink(const Problem& p) {
  HostTensors in = draw_inputs(p, forward().inputs(p));
  const auto d = static_cast<std::size_t>(p.head_dim);
  for (std::size_t i = 0; i < in.at("q").data.size(); i += d) in.at("q").data[i] = 8;
  for (std::size_t i = 0; i < d; ++i) {
    in.at("k").data[i] = i == 0 ? 11 : 0;
    in.at("v").data[i] = 0;
  }
  return in;
}

// A smooth field over a canvas of 16 x 16 x 16 tokens, with 128 of them as queries.
HostTensors of_field(const Problem& p) {
  Problem all = p;
  all.seqlen_q = all.seqlen_k;
  all.own["field"] = read_field("16x16x16");
  all.finish();
  HostTensors in = draw_inputs(all, forward().inputs(all));
  HostTensor& q = in.at("q");
  const auto first = q.data.begin() + p.seqlen_k / 2 * p.head_dim;
  q = {like_q(p, "q"), {first, first + p.seqlen_q * p.head_dim}};
  return in;
}

bool prefills(const Step& step) { return step.name.starts_with("q"); }

// Exact attention over a step's stored values, compared with attention over the originals: the
// error of Q K^T alone, without that of P.
Distance of_stored(const Problem& p, const HostTensors& in,
                   HostTensors (*stored)(const Problem&, const HostTensors&)) {
  HostTensors what = stored(p, in);
  what.at("v") = in.at("v");
  const Expected exact = forward_reference(p, in, {.full = true, .budget = 1e12})[0];
  Expected of_codes = forward_reference(p, what, {.full = true, .budget = 1e12})[0];
  HostTensor o = zeros(exact.spec);
  for (std::size_t r = 0; r < exact.rows.size(); ++r) {
    const auto [b, h, i] = exact.rows[r];
    const auto columns = static_cast<std::size_t>(exact.spec.columns());
    float* const row = const_cast<float*>(o.row(b, h, i));
    for (std::size_t c = 0; c < columns; ++c)
      row[c] = static_cast<float>(of_codes.reference[r * columns + c]);
  }
  return distance(o, exact);
}

}  // namespace

TEST_CASE("smooth K removes the error of biased channels of K", "[accuracy]") {
  const Problem p = one_head_of(128, 512, 64);
  const HostTensors in = with_biased_channels(p);
  const double q1 = from_originals("q1_int8_qk", p, in).relative_l1;
  const double q2 = from_originals("q2_smooth_k", p, in).relative_l1;
  const double lse = from_originals("q2_smooth_k", p, in, "lse").rmse;
  INFO("relative L1: q1 " << q1 << ", q2 " << q2 << "; lse of q2, RMSE " << lse);
  CHECK(q2 < 0.6 * q1);
  CHECK(lse < 0.1);  // q . mean is about 100
}

// The only key tile has seven keys. Its other rows would be minus the mean if they were centred.
TEST_CASE("rows past the end do not increase the scale of a tile", "[accuracy]") {
  const Problem p = one_head_of(128, 7, 64);
  HostTensors in = draw_inputs(p, forward().inputs(p));
  HostTensors biased = in;
  for (float& x : biased.at("k").data) x = round_to(DType::bf16, x + 100);
  for (float& x : in.at("k").data) x = round_to(DType::bf16, x + 100) - 100;
  for (const Step& step : chapter().steps) {
    if (!prefills(step) || step.name < "q2") continue;
    const double plain = from_originals(step.name.c_str(), p, in).rmse;
    const double of_biased = from_originals(step.name.c_str(), p, biased).rmse;
    INFO(step.name << ": RMSE " << plain << ", with a mean of 100 " << of_biased);
    CHECK(of_biased < 1.05 * plain);
  }
}

// Measured in lse: in O, the rounding of P and V exceeds that of Q and K.
TEST_CASE("smooth Q removes the error of biased channels of Q", "[accuracy]") {
  const Problem p = one_head_of(128, 512, 64);
  const HostTensors in = with_biased_channels(p);
  const double q4 = from_originals("q4_fp8_pv", p, in, "lse").rmse;
  const double q6 = from_originals("q6_smooth_q", p, in, "lse").rmse;
  INFO("lse, RMSE: q4 " << q4 << ", q6 " << q6);
  CHECK(q6 < 0.75 * q4);
  const double o4 = from_originals("q4_fp8_pv", p, in).cosine;
  const double o6 = from_originals("q6_smooth_q", p, in).cosine;
  INFO("cosine of O: q4 " << o4 << ", q6 " << o6);
  CHECK(o6 > o4);
}

// Values with a mean: the codes encode the rest, whose sums do not grow, so accumulating 4096 keys
// in the tensor core is as accurate as in fp32.
TEST_CASE("smooth V removes the error of a nonzero mean and of long sums", "[accuracy]") {
  const Problem p = one_head_of(64, 4096, 64);
  HostTensors in = draw_inputs(p, forward().inputs(p));
  const double q5_centred = from_originals("q5_fewer_instructions", p, in).rmse;
  const double q8_centred = from_originals("q8_tuned", p, in).rmse;
  for (float& x : in.at("v").data) x = round_to(DType::bf16, x + 8.5f);
  const double q5 = from_originals("q5_fewer_instructions", p, in).relative_l1;
  const double q8 = from_originals("q8_tuned", p, in).relative_l1;
  INFO("RMSE without a mean: q5 " << q5_centred << ", q8 " << q8_centred);
  Problem chosen = p;  // all key blocks, by a step that chooses
  chosen.own = {{"keep", {1}}, {"similarity", {0}}};
  const double s9 = from_originals("s9_tuned", chosen, in).relative_l1;
  INFO("relative L1 with a mean of 8.5: q5 " << q5 << ", q8 " << q8 << ", s9 " << s9);
  CHECK(q8_centred < 1.05 * q5_centred);
  CHECK(q8 < 0.0019);  // the rounding to bf16 of an O of about 8.5
  CHECK(q8 < q5);
  CHECK(s9 < 0.0019);
}

// INT4 on biased channels: why SageAttention2 smooths both Q and K.
TEST_CASE("int4 needs smooth Q and smooth K", "[accuracy]") {
  const Problem p = one_head_of(128, 1024, 128);
  const HostTensors in = with_biased_channels(p);
  const double none = of_stored(p, in, int4_threads).cosine;
  const double of_k = of_stored(p, in, int4_smooth_k).cosine;
  const double both = of_stored(p, in, smoothed_q_int4).cosine;
  INFO("cosine: none " << none << ", K " << of_k << ", Q and K " << both);
  CHECK(none < 0.85);
  CHECK(of_k > none + 0.1);
  CHECK(1 - both < 0.6 * (1 - of_k));
}

namespace {
Problem decoding(InputKind kind = InputKind::random, int64_t keys = 4096) {
  Problem p = problem(1, keys, 128, DType::int4, kind);
  p.batch = 1, p.heads = 8, p.kv_heads = 2;
  p.finish();
  return p;
}
}  // namespace

// Why KIVI has per-channel scales: a per-token scale has to cover the biased channels.
TEST_CASE("an int4 cache with per-channel scales keeps biased channels", "[accuracy]") {
  const Problem p = decoding(InputKind::random, 1024);
  const HostTensors biased = with_biased_channels(p, decode());
  const double d7 = from_originals("d7_wide_tiles", p, biased, "lse").rmse;
  const double d9 = from_originals("d9_kivi", p, biased, "lse").rmse;
  const double o7 = from_originals("d7_wide_tiles", p, biased).relative_l1;
  const double o9 = from_originals("d9_kivi", p, biased).relative_l1;
  INFO("lse, RMSE: d7 " << d7 << ", d9 " << d9 << "; relative L1 of O: " << o7 << ", " << o9);
  CHECK(d9 < 0.3 * d7);
  CHECK(o9 < 0.6 * o7);
}

// Table 3 of FlashAttention-3: entries N(0, 1) + N(0, 100) Bernoulli(0.001).
TEST_CASE("per-thread scales reduce the error of outliers", "[accuracy]") {
  const Problem p = one_head_of(128, 1024, 128, InputKind::outlier);
  const HostTensors in = draw_inputs(p, forward().inputs(p));
  const double q2 = from_originals("q2_smooth_k", p, in).rmse;
  const double q3 = from_originals("q3_per_thread", p, in).rmse;
  INFO("RMSE: q2 " << q2 << ", q3 " << q3);
  CHECK(q3 < 0.8 * q2);
}

// The table of CACHES.md, looked up in the page.
TEST_CASE("errors of caches by kind of input for CACHES.md", "[figures]") {
  const auto compare = [](const char* what, const Problem& p, const HostTensors& in) {
    std::string row;
    for (const char* step : {"d1_int8_kv", "d2_fp8_kv", "d3_int4_kv", "d9_kivi"}) {
      const Distance d = from_originals(step, p, in);
      row += fmt::format("{}{:.4f}, {}", row.empty() ? "" : " | ", d.relative_l1,
                         short_exponent(fmt::format("{:.1e}", d.rmse)));
    }
    INFO(what << " | " << row);
    CHECK(on_page("08_quant_sparse/CACHES.md", what, row));
  };
  const Problem normal = decoding(), outliers = decoding(InputKind::outlier);
  compare("normal", normal, draw(decode(), normal).tensors);
  compare("outliers", outliers, draw(decode(), outliers).tensors);
  compare("biased", normal, with_biased_channels(normal, decode()));
}

// Both tables of the README, looked up in the page.
TEST_CASE("errors by kind of input for the README", "[figures]") {
  const auto compare = [](const char* what, const Problem& p, const HostTensors& in) {
    std::string row;
    for (const Step& step : chapter().steps | std::views::filter(prefills)) {
      if (step.name == "q9_mma_sync") continue;
      const Distance d = from_originals(step.name.c_str(), p, in);
      row += fmt::format("{}{:.4f}, {}", row.empty() ? "" : " | ", d.relative_l1,
                         short_exponent(fmt::format("{:.1e}", d.rmse)));
    }
    INFO(what << " | " << row);
    CHECK(on_page("08_quant_sparse/README.md", what, row));
    std::string cosines;
    for (const auto stored :
         {smoothed_threads, smoothed_q, int4_threads, int4_smooth_k, smoothed_q_int4}) {
      const double cosine = of_stored(p, in, stored).cosine;
      cosines += fmt::format("{}{:.7f}", cosines.empty() ? "" : " | ", cosine);
    }
    INFO(what << " | " << cosines);
    CHECK(on_page("08_quant_sparse/README.md", what, cosines));
  };
  constexpr int64_t kKeys = 4096;
  for (const InputKind kind : {InputKind::random, InputKind::outlier}) {
    const Problem p = one_head_of(128, kKeys, 128, kind);
    compare(kind == InputKind::random ? "normal" : "outliers", p,
            draw_inputs(p, forward().inputs(p)));
  }
  const Problem p = one_head_of(128, kKeys, 128);
  compare("biased", p, with_biased_channels(p));
  compare("sink", p, with_sink(p));
  compare("field", p, of_field(p));
}
