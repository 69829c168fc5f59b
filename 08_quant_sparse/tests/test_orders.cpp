// Token orders of a canvas: a curve that visits every token, from neighbour to neighbour, and its
// effect on blocks.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "08_quant_sparse/host/predict.h"
#include "08_quant_sparse/host/token_order.h"
#include "check/field.h"
#include "check/inputs.h"
#include "check/operation.h"
#include "tests/catch.h"
#include "tests/on_page.h"

using namespace attn;
using namespace attn::tests;

namespace {

constexpr std::pair<const char*, TokenOrder> kOrders[] = {
    {"row by row", TokenOrder::rows},
    {"along a Hilbert curve", TokenOrder::hilbert},
    {"at random", TokenOrder::random}};

Problem on_canvas(const std::string& canvas, int64_t text) {
  Problem p;
  p.heads = p.kv_heads = 4, p.head_dim = 64;
  p.own["field"] = read_field(canvas);
  p.own["similarity"] = {0};
  p.seqlen_q = p.seqlen_k = field_of(p).tokens() + text;
  p.finish();
  return p;
}

// The relative L1 distance from attention over all keys when a share of the blocks is kept, on
// sampled rows.
double error_of(Problem p, const HostTensors& in, double keep, const std::vector<Expected>& all) {
  p.own["keep"] = {keep};
  Problem chosen = p;
  chosen.mask = chosen_blocks(p, in);
  const Expected o = forward_reference(chosen, in, {.full = false, .budget = 4e6})[0];
  double off = 0, size = 0;
  REQUIRE(o.reference.size() == all[0].reference.size());
  for (std::size_t n = 0; n < o.reference.size(); ++n)
    off += std::abs(o.reference[n] - all[0].reference[n]), size += std::abs(all[0].reference[n]);
  return off / size;
}

}  // namespace

TEST_CASE("a Hilbert curve visits each point once and steps to neighbours", "[orders]") {
  for (const int bits : {1, 2, 3}) {
    const uint32_t side = uint32_t{1} << bits;
    std::vector<std::array<int, 3>> at(side * side * side, {-1, -1, -1});
    for (uint32_t x = 0; x < side; ++x)
      for (uint32_t y = 0; y < side; ++y)
        for (uint32_t z = 0; z < side; ++z) {
          const uint64_t place = hilbert_place({x, y, z}, bits);
          REQUIRE(place < at.size());
          CHECK(at[place][0] == -1);  // not visited before
          at[place] = {int(x), int(y), int(z)};
        }
    for (std::size_t n = 1; n < at.size(); ++n) {
      int steps = 0;
      for (std::size_t i = 0; i < 3; ++i) steps += std::abs(at[n][i] - at[n - 1][i]);
      CHECK(steps == 1);
    }
  }
}

TEST_CASE("a token order has each token once and leaves text in place", "[orders]") {
  const Problem p = on_canvas("3x5x9", 7);
  for (const auto& [name, order] : kOrders) {
    const std::vector<int64_t> tokens = token_order(p, order);
    INFO(name);
    CHECK(std::set<int64_t>(tokens.begin(), tokens.end()).size() == 142);
    for (int64_t n = 135; n < 142; ++n) CHECK(tokens[static_cast<std::size_t>(n)] == n);
    CHECK(std::ranges::is_sorted(tokens) == (order == TokenOrder::rows));
    CHECK(token_order(p, order) == tokens);
    const HostTensors in = draw_inputs(p, attention_inputs(p)), ordered = in_order(p, in, order);
    for (const int64_t n : {0, 60, 134, 140})
      CHECK(ordered.at("k").row(0, 3, n)[5] ==
            in.at("k").row(0, 3, tokens[static_cast<std::size_t>(n)])[5]);
  }
}

TEST_CASE("blocks along a Hilbert curve are more self-similar than rows and these than random ones",
          "[orders]") {
  const Problem p = on_canvas("8x16x16", 0);
  const HostTensors in = draw_inputs(p, attention_inputs(p));
  const auto of = [&](TokenOrder order) { return mean_similarity(p, in_order(p, in, order)); };
  const Similarity hilbert = of(TokenOrder::hilbert), rows = of(TokenOrder::rows),
                   random = of(TokenOrder::random);
  CHECK(hilbert.q > 1.1 * rows.q);
  CHECK(hilbert.k > 1.1 * rows.k);
  CHECK(rows.q > 1.5 * random.q);
  CHECK(rows.k > 1.5 * random.k);
}

// The table of SPARSE.md, looked up in the page.
TEST_CASE("similarity and sparsity by order for SPARSE.md", "[figures][orders]") {
  const Problem p = on_canvas("16x16x16", 0);
  const HostTensors in = draw_inputs(p, attention_inputs(p));
  for (const auto& [name, order] : kOrders) {
    const HostTensors ordered = in_order(p, in, order);
    const std::vector<Expected> all = forward_reference(p, ordered, {.full = false, .budget = 4e6});
    const Similarity similarity = mean_similarity(p, ordered);
    double keep = 1 / 32.0;  // one more block of 32 each time
    while (keep < 1 && error_of(p, ordered, keep, all) > 0.05) keep += 1 / 32.0;
    const std::string row =
        fmt::format("{:.3f} | {:.3f} | {:.0f} % | {:.4f}", similarity.q, similarity.k,
                    100 * (1 - keep), error_of(p, ordered, keep, all));
    INFO(name << " | " << row);
    CHECK(on_page("08_quant_sparse/SPARSE.md", name, row));
  }
}
