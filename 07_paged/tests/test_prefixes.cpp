// Shared prefixes of chapter 07: groups, and the steps that read a prefix once.
#include "07_paged/host/paged.h"
#include "07_paged/host/plan.h"
#include "07_paged/host/prefix_plan.h"
#include "07_paged/kernels/splits.h"
#include "attn/error.h"
#include "tests/test_pages.h"

using namespace attn;
using namespace attn::tests;

namespace {

Problem sharing(int64_t tokens, int64_t sequences, std::vector<int64_t> lengths, int64_t page,
                int64_t head_dim = 128) {
  Problem p = problem(1, *std::ranges::max_element(lengths), head_dim, DType::bf16);
  p.batch = static_cast<int64_t>(lengths.size());
  p.seqused_k = std::move(lengths);
  p.heads = 4, p.kv_heads = 2;
  p.own["page_size"] = {static_cast<double>(page)};
  p.own["shared_prefix"] = {static_cast<double>(tokens), static_cast<double>(sequences)};
  p.own["blocks"] = {3};
  return p;
}
plans::PrefixPlan plan_of(const Problem& p, plans::PrefixTiles tiles) {
  return plans::prefix_plan(p, drawn_table(p).numbers, p.seqused_k, plans::planned_blocks(p),
                            tiles);
}
plans::PrefixPlan plan_of(const Problem& p) {
  return plan_of(p, plans::mma_prefix_tiles(p.head_dim));
}
bool reads_once(const Step& step) {
  return one_of_steps(step, {"v8_shared_prefix", "v17_prefix_tma"});
}

void shared_prefixes(Backend backend, int64_t times) {
  Counts ran;
  int problems = 0, of_boxes = 0;
  std::size_t n = 0;
  for (const int64_t page : {1, 5, 16, 64, 256})
    for (const int64_t head_dim : {128, 64, 256})
      for (int kind = 0; kind < 4; ++kind, ++n) {
        if (backend == Backend::emulated && n % 3 != 0) continue;  // long runs
        // Two groups and a single sequence; a sequence that is all prefix; one that ends before it.
        Problem p = sharing(300 * times, 3, {301, 700, 310, 600, 420, 200, 500}, page, head_dim);
        for (int64_t& length : p.seqused_k) length *= times;
        p.seqlen_k = *std::ranges::max_element(p.seqused_k);
        if (kind == 1) p.own["shared_prefix"] = {300.0 * double(times), 100}, p.causal = true;
        if (kind == 2) p.seqlen_q = 5, p.causal = true, p.seqused_k[3] = 0;
        if (kind == 3) p.window_left = 250, p.window_right = 0;
        constexpr int64_t kHeads[] = {10, 8, 4, 16, 6, 32, 14};  // boxes of 1 to 16 rows of Q
        p.heads = kHeads[n % 7], p.dtype = n % 4 < 2 ? DType::bf16 : DType::fp16;
        p.seed = n + 1;
        // Other steps read shared pages like any: checked occasionally.
        ran += check_steps(
            "paged_decode", p, backend,
            [](const Step& step, int number) { return reads_once(step) || number % 6 == 0; },
            problems);
        ++problems;
        of_boxes += page % 8 == 0;
      }
  CHECK(ran.of["v8_shared_prefix"] == problems);
  CHECK(ran.of["v17_prefix_tma"] == of_boxes);
}

// A captured launch is replayed with other prefixes, or none.
void replay(Backend backend) {
  for (const Step& step : chapter().steps) {
    if (!reads_once(step)) continue;
    Problem p = sharing(300, 3, {301, 700, 310, 600, 420, 400, 500}, 16);
    p.own["num_pages"] = {300};
    p.finish();
    Session session(p, *step.operation, backend, draw(*step.operation, p).tensors);
    REQUIRE(session.prepare(step).ok());
    REQUIRE(session.capture().ok());
    for (const auto& [tokens, sequences] :
         std::vector<std::pair<double, double>>{{300, 7}, {100, 7}, {200, 2}, {290, 3}}) {
      p.own["shared_prefix"] = {tokens, sequences}, ++p.seed;
      INFO(sequences << " share " << tokens);
      check_replay(session, step, p, backend);
    }
  }
}

}  // namespace

TEST_CASE("sequences that share a prefix get correct results", "[emulated]") {
  shared_prefixes(Backend::emulated, 1);
}
TEST_CASE("sequences that share a prefix get correct results on the GPU", "[gpu]") {
  shared_prefixes(Backend::gpu, 1);
  shared_prefixes(Backend::gpu, 11);
}

TEST_CASE("a replayed launch is correct with other prefixes", "[emulated]") {
  replay(Backend::emulated);
}
TEST_CASE("a replayed launch is correct with other prefixes on the GPU", "[gpu]") {
  replay(Backend::gpu);
}

TEST_CASE("groups follow from the page table", "[emulated]") {
  Problem p = sharing(300, 3, {301, 700, 310, 600, 420, 200, 500}, 16);
  p.finish();
  CHECK(num_pages_of(p) == 19 + 44 + 20 + 38 + 27 + 13 + 32 - (2 * 18 + 18 + 12) + 15);
  CHECK(saved_tokens(p) == 16 * (2 * 18 + 18 + 12));
  // The third sequence of the second group is shorter than the prefix; the group shares its length.
  CHECK(plan_of(p).keys == std::vector<int64_t>{288, 288, 288, 192, 192, 192, 0});
  CHECK(plan_of(p).members == std::vector<int>{0, 1, 2, 3, 4, 5});
  p.seqlen_q = 30;  // 170 keys of the short one, and 271 of the first, are visible to all queries
  CHECK(plan_of(p).keys == std::vector<int64_t>{256, 256, 256, 160, 160, 160, 0});
  p.window_left = 1000;
  CHECK(plan_of(p).keys == std::vector<int64_t>(7));
  p.window_left = -1, p.own["shared_prefix"] = {100, 3};  // shorter than the minimum
  CHECK(plan_of(p).keys == std::vector<int64_t>(7));
}

TEST_CASE("prefix work tiles cover a prefix once", "[emulated]") {
  for (const int64_t head_dim : {64, 128, 256})
    for (const int64_t blocks : {1, 3, 40, 132})
      for (const int64_t tokens : {131, 1000, 5000})
        for (const auto tiles_of : {plans::mma_prefix_tiles, plans::wgmma_prefix_tiles}) {
          const plans::PrefixTiles tiles = tiles_of(head_dim);
          Problem p = sharing(tokens, 9, std::vector<int64_t>(40, tokens + 77), 5, head_dim);
          p.heads = 34, p.own["blocks"] = {static_cast<double>(blocks)};
          p.finish();
          const plans::PrefixPlan plan = plan_of(p, tiles);
          REQUIRE(static_cast<int64_t>(plan.work.size()) <= plans::most_prefix_work(p));
          REQUIRE(plan.places <= plans::most_prefix_places(p));
          // Per sequence and K/V head: key blocks in order, each part with its own partial result.
          std::map<std::pair<int, int>, int> covered;  // first member and head: key blocks so far
          std::vector<int> places(static_cast<std::size_t>(plan.places));
          for (const plans::PrefixWork& w : plan.work) {
            int& at = covered[{w.first_member, w.kv_head}];
            CHECK(w.begin == (w.row0 == 0 ? at : w.begin));
            CHECK(w.end > w.begin);
            at = w.end;
            for (int row = w.row0; row < std::min(w.rows, w.row0 + static_cast<int>(tiles.rows));
                 ++row)
              ++places[static_cast<std::size_t>(w.place + row)];
            CHECK(w.sequence == plan.members[static_cast<std::size_t>(w.first_member)]);
          }
          for (const int n : places) REQUIRE(n == 1);
          for (const auto& [who, kv_block_range] : covered)
            CHECK(kv_block_range == (tokens / 5 * 5 + tiles.keys - 1) / tiles.keys);
          CHECK(covered.size() == 5 * 2);  // four groups of nine and one of four
        }
}

TEST_CASE("the option --shared-prefix is parsed or refused in one line", "[emulated]") {
  for (const Feature& f : paged_decode().own) {
    if (f.name != "shared_prefix") continue;
    CHECK(f.read("300,3") == std::vector<double>{300, 3});
    CHECK(f.read("300").at(0) == 300);
    for (const char* text : {"", "0", "3,", "3,0", "3,4,5", "x", "-1", "3;4"})
      CHECK_THROWS_AS(f.read(text), InputError);
  }
}
