// d4_sparq: exact if it reads all tokens, and otherwise attention to the tokens that the host model
// of the algorithm chooses.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "host/quantised.h"
#include "kernels/sparq.h"
#include "tests/on_page.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

Problem cache_of(int64_t keys, int64_t d, int64_t heads, int64_t kv_heads,
                 InputKind kind = InputKind::random) {
  Problem p = problem(1, keys, d, DType::bf16, kind);
  p.heads = heads, p.kv_heads = kv_heads, p.batch = 1;
  return p;
}
void choose(Problem& p, double columns, double keys, double newest) {
  p.own["top_columns"] = {columns}, p.own["top_keys"] = {keys}, p.own["newest_keys"] = {newest};
}
HostTensors outputs_of(const Problem& p, const HostTensors& in) {
  return attn::tests::outputs_of(step_named("d4_sparq"), p, in);
}

void check_sparq(Backend backend, const std::vector<int64_t>& lengths) {
  constexpr int64_t kHeads[][2] = {{1, 1}, {4, 1}, {7, 1}, {8, 2}, {2, 2}, {3, 1}, {16, 1}};
  constexpr int64_t kDims[] = {64, 128, 256};
  constexpr InputKind kKinds[] = {InputKind::random, InputKind::needle, InputKind::outlier,
                                  InputKind::peaked};
  Counts ran;
  for (std::size_t n = 0; n < lengths.size(); ++n)
    for (std::size_t way = 0; way < 2; ++way) {
      const auto [heads, kv_heads] = kHeads[(2 * n + way) % 7];
      Problem p = cache_of(lengths[n], kDims[(n + way) % 3], heads, kv_heads, kKinds[n % 4]);
      if (n % 2 == 1) {
        p.batch = 3;
        p.seqused_k = {lengths[n], lengths[n] / 2, n % 4 == 1 ? 0 : lengths[n] / 3};
      }
      if (way == 1) choose(p, n % 3 == 0 ? 17 : 64, n % 2 == 0 ? 40 : 5, n % 2 == 0 ? 9 : 1);
      ran += check_steps("sparq", p, backend);
    }
  CHECK(ran.of["d4_sparq"] == 2 * static_cast<int>(lengths.size()));
}

}  // namespace

TEST_CASE("SparQ matches its model at any length", "[emulated]") {
  check_sparq(Backend::emulated, {1, 5, 31, 33, 127, 129, 255, 300, 1000, 2049, 2311});
}
TEST_CASE("SparQ on the GPU", "[gpu]") {
  check_sparq(Backend::gpu, {1, 5, 31, 33, 127, 129, 255, 300, 1000, 2049, 4096, 32789});
}

TEST_CASE("SparQ equals attention if it reads all tokens", "[emulated]") {
  for (const int64_t d : {64, 128, 256})
    for (const int64_t keys : {1, 100, 300}) {
      Problem p = cache_of(keys, d, 4, 2);
      choose(p, double(d), double(keys), 1);
      p.finish();
      const HostTensors in = draw(*step_named("d4_sparq").operation, p).tensors;
      const HostTensors out = outputs_of(p, in);
      for (const Expected& e : forward_reference(p, in, {.full = true})) {
        const Verdict v = check(out.at(e.spec.name), e);
        INFO(p.text() << ": " << v.failure);
        CHECK(v.pass);
      }
    }
}

// By hand: among equal shares the first tokens are taken, the newest in any case; among equal
// columns the first.
TEST_CASE("SparQ takes the first of equal tokens and columns", "[sparq]") {
  Problem p = cache_of(50, 64, 2, 1);
  choose(p, 3, 10, 4);
  p.finish();
  HostTensors in;
  for (const TensorSpec& spec : attention_inputs(p)) in.emplace(spec.name, zeros(spec));
  std::vector<float>&q = in.at("q").data, &k = in.at("k").data;
  std::fill(q.begin(), q.end(), 1.0f);
  q[40] = -5;  // of the first head
  const auto chosen = [&] { return sparq::chosen_of(p, in, 0, 0); };
  CHECK(chosen().columns == std::vector<int64_t>{0, 1, 40});
  CHECK(chosen().keys == std::vector<int64_t>{0, 1, 2, 3, 4, 5, 46, 47, 48, 49});
  CHECK(chosen().alpha[0] == Approx(10 / 50.0));
  k[20 * 64 + 40] = -4;  // in the first head only
  CHECK(chosen().keys == std::vector<int64_t>{0, 1, 2, 3, 4, 20, 46, 47, 48, 49});
  CHECK(chosen().alpha[0] > chosen().alpha[1]);
  in.emplace("seqused_k", HostTensor{seqused_of(p), {}, {50}});
  INFO(p.text());
  CHECK(run_step(step_named("d4_sparq"), p, Backend::emulated) == "");
  const HostTensors out = outputs_of(p, in);
  CHECK(out.at("o").data[0] == 0);  // of values of 0
}

// A group of zero queries, and equal keys: no 0/0.
TEST_CASE("SparQ with zeros and with NaN", "[emulated]") {
  Problem p = cache_of(300, 64, 4, 2);
  p.finish();
  const Operation& op = *step_named("d4_sparq").operation;
  HostTensors in = draw(op, p).tensors;
  std::fill_n(in.at("q").data.begin(), 2 * 64, 0.0f);
  std::fill_n(in.at("k").data.begin() + 300 * 64, 300 * 64, 0.5f);
  const HostTensors right = outputs_of(p, in);
  for (const Expected& e : op.reference(p, in, {})) {
    const Verdict v = check(right.at(e.spec.name), e);
    INFO(v.failure);
    CHECK(v.pass);
  }
  const auto numbers = [](const HostTensors& out, std::size_t head) {
    const auto at = out.at("o").data.begin() + static_cast<std::ptrdiff_t>(64 * head);
    return std::count_if(at, at + 64, [](float x) { return std::isfinite(x); });
  };
  for (const float bad : {NAN, INFINITY}) {
    HostTensors with = in;
    with.at("q").data[3 * 64 + 5] = bad;
    HostTensors out = outputs_of(p, with);
    CHECK((numbers(out, 3) == 0 && numbers(out, 0) == 64));
    with = in;
    // The newest token of the second KV head. A score of -Inf is a weight of 0.
    with.at("k").data[(300 + 299) * 64 + 5] = bad;
    out = outputs_of(p, with);
    for (const std::size_t head : {2, 3})
      CHECK((numbers(out, head) == 0 ||
             (std::isinf(bad) && in.at("q").data[head * 64 + 5] < 0 && numbers(out, head) == 64)));
    CHECK(numbers(out, 1) == 64);
    with = in;
    with.at("v").data[(300 + 2) * 64 + 5] = bad;  // read or not, it is in the mean
    out = outputs_of(p, with);
    CHECK((numbers(out, 2) == 63 && numbers(out, 3) == 63 && numbers(out, 0) == 64));
  }
}

TEST_CASE("SparQ refuses unsupported problems with a reason", "[emulated]") {
  const auto reason = [](auto change) {
    Problem p = cache_of(100, 64, 2, 1);
    change(p);
    p.finish();
    return refusal(step_named("d4_sparq"), p).value_or("");
  };
  CHECK(reason([](Problem&) {}) == "");
  CHECK(reason([](Problem& p) { p.seqlen_q = 2; }) == "--seqlen-q 2: this step takes at most 1");
  CHECK(reason([](Problem& p) { p.dtype = DType::fp16; }) == "--dtype fp16: this step takes bf16");
  CHECK(reason([](Problem& p) { choose(p, 65, 9, 1); }) ==
        "--top-columns 65: at most --head-dim, 64");
  CHECK(reason([](Problem& p) { choose(p, 9, 9, 10); }) ==
        "--newest-keys 10: at most --top-keys, 9");
  CHECK(reason([](Problem& p) { p.heads = 65; }) == "65 query heads of a K/V head: at most 64");
  CHECK(reason([](Problem& p) { p.window_left = 9; }) ==
        "--window: this step chooses among all tokens");
}

// The paper's count, per KV head of one query head: S r + 2 k d of 2 S d elements.
TEST_CASE("the cost of SparQ is the paper's count of bytes", "[sparq]") {
  Problem p = cache_of(4096, 128, 1, 1);
  p.finish();
  const Cost cost = step_named("d4_sparq").cost(p);
  CHECK(cost[0].hbm_read == 2 * (4096 * 32 + 128));
  CHECK(cost[2].hbm_read == 2 * (2 * 128 * 128 + 128) + 4 * 128 + 4 * 128);
  const double dense = 2 * 2 * 4096.0 * 128;
  CHECK(dense / (cost[0].hbm_read + cost[2].hbm_read) == Approx(6.4).epsilon(0.01));
}

// The table of CACHES.md, looked up in the page.
TEST_CASE("errors of SparQ by number of tokens read for CACHES.md", "[figures]") {
  for (const InputKind kind : {InputKind::random, InputKind::needle}) {
    std::string row;
    for (const double keys : {64, 128, 256, 512, 4096}) {
      Problem p = cache_of(4096, 128, 8, 2, kind);
      choose(p, 32, keys, 32);
      p.finish();
      const HostTensors in = draw(*step_named("d4_sparq").operation, p).tensors;
      const Distance d = distance(outputs_of(p, in).at("o"), forward_reference(p, in, {})[0]);
      row += fmt::format("{}{:.{}f}", row.empty() ? "" : " | ", d.relative_l1,
                         d.relative_l1 > 0.1 ? 2 : 4);
    }
    const char* const what = kind == InputKind::random ? "normal" : "needle";
    INFO(what << " | " << row);
    CHECK(on_page("08_quant_sparse/CACHES.md", what, row));
  }
}
