// INT8 / FP8 steps that choose: s4's choices, tiles in LPT order, chunks of visited blocks.
#define ATTN_EMULATED  // length_class as a host function
#include <cmath>
#include <functional>
#include <random>
#include <set>

#include "08_quant_sparse/kernels/lpt_order.h"
#include "08_quant_sparse/host/predict.h"
#include "08_quant_sparse/kernels/sparse.h"
#include "run/runner.h"
#include "tests/test_predict.h"

using namespace attn;
using namespace attn::tests;

// They choose by the original inputs, as the 16-bit steps do.
TEST_CASE("8-bit steps that choose blocks are exact over the chosen blocks", "[emulated]") {
  Counts ran;
  const int problems = chosen_problems([&](Problem p) {
    p.dtype = DType::e4m3;
    ran += check_steps("predict", p, Backend::emulated);
  });
  CHECK(ran.of == std::map<std::string, int>{{"s7_int8", problems},
                                             {"s8_lpt_order", problems},
                                             {"s9_tuned", problems}});
}
TEST_CASE("longer lists are in an earlier class for any number of blocks", "[predict]") {
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
// Per section all its tiles, longer lists before shorter ones.
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
// Sections with more tiles than the kernel has threads, and a smaller last section.
TEST_CASE("the longest lists of a section come first", "[emulated]") {
  using namespace ::emulated::hopper;
  constexpr int kBlocks = 300;
  Problem p = problem(140 * kSparseBlockM, 1, 64, DType::e4m3);
  p.batch = 1, p.heads = 5;
  TileOrder tiles(p, kSparseBlockM);
  std::mt19937 random(7);
  std::vector<BlockList> visits(tiles.count());
  for (BlockList& v : visits) v.first = 10, v.end = 10 + static_cast<int>(random() % (kBlocks + 1));
  const BlockLists lists{visits.data(), nullptr, 5 * 140, 140};
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
// And for a step's own lists, as the launch left both in device memory.
TEST_CASE("tiles are processed in LPT order", "[emulated]") {
  for (const char* name : {"s8_lpt_order", "s9_tuned"}) {
    Problem p = problem(8 * 128, 8 * 128, 64, DType::e4m3);
    p.batch = 1, p.heads = 3, p.kv_heads = 1, p.causal = true;  // which gives lists their lengths
    p.own = {{"keep", {0.5}}, {"similarity", {0}}};
    p.finish();
    Session session(p, predict(), Backend::emulated, draw_inputs(p, predict().inputs(p)));
    REQUIRE(session.prepare(step_named(name)).ok());
    REQUIRE(session.launch().message == "");
    ::emulated::hopper::TileOrder tiles(p, kSparseBlockM);
    tiles.section = ::emulated::hopper::section_of_codes(p, tiles.num_m_blocks);
    const std::vector<int32_t> visits = session.workspace("visits");  // three numbers per list
    std::set<int> lengths;
    const auto length = [&](std::size_t list) {
      return *lengths.insert(visits[3 * list + 2] - visits[3 * list]).first;
    };
    check_order(session.workspace("tile_order"), tiles, length, 8);
    CHECK(lengths.size() > 1);
  }
}
// The order of the tiles changes no bit.
TEST_CASE("the order of the tiles changes no bit", "[emulated]") {
  Problem p = on_canvas("8x8x12", 77, 64, DType::e4m3);
  p.own["keep"] = {0.3}, p.own["similarity"] = {0.05};
  p.heads = 4, p.kv_heads = 2;
  p.finish();
  HostTensors s7, s8;
  CHECK(run_step(step_named("s7_int8"), p, Backend::emulated, &s7) == "");
  CHECK(run_step(step_named("s8_lpt_order"), p, Backend::emulated, &s8) == "");
  CHECK(same(s7.at("o"), s8.at("o")));
  CHECK(same(s7.at("lse"), s8.at("lse")));
}
// More than the 32 blocks of a chunk: one more, several chunks, tiles that visit few blocks next to
// tiles that visit many, so that one tile's workspace is not taken for another's.
TEST_CASE("s9 merges chunks of the blocks that it visits", "[emulated]") {
  const auto check = [](Problem p, double keep) {
    p.own["similarity"] = {0}, p.own["keep"] = {keep};
    p.dtype = DType::e4m3;
    const Counts ran = check_steps("predict", p, Backend::emulated, [](const Step& step, int) {
      return step.name == "s9_tuned";
    });
    CHECK(ran.text() == "s9_tuned 1");
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
  // A window whose edges are some 30 blocks in: the last of the first 32 blocks is masked, too.
  p = problem(140, 6000, 64, DType::e4m3, InputKind::needle);
  p.batch = p.heads = p.kv_heads = 1, p.window_left = 3950, p.window_right = 0;
  check(p, 1);
}
TEST_CASE("stored values of an 8-bit step come with the originals of its choice", "[predict]") {
  Problem p = on_canvas("4x8x12", 50, 64, DType::e4m3);
  p.own["keep"] = {0.5};
  p.finish();
  const HostTensors in = draw_inputs(p, predict().inputs(p));
  for (const char* step : {"s7_int8", "s9_tuned"}) {
    const HostTensors stored = step_named(step).logical(p, in);
    CHECK_FALSE(same(stored.at("q"), in.at("q")));
    CHECK(same(stored.at("q_given"), in.at("q")));
    CHECK(same(stored.at("k_given"), in.at("k")));
    CHECK(rows_of(p, *chosen_blocks(p, stored)) == rows_of(p, *chosen_blocks(p, in)));
  }
}
// Means, similarities and scores of means are bitwise equal in all selection kernels, and so are
// the lists that the launches left.
TEST_CASE("8-bit steps visit the blocks that s4 visits", "[emulated]") {
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
      for (const char* name : {"s4_predict", "s7_int8", "s8_lpt_order", "s9_tuned"}) {
        INFO(name << " " << p.text());
        Problem own = p;
        if (std::string(name) != "s4_predict") own.dtype = DType::e4m3;
        Session session(own, predict(), Backend::emulated, draw_inputs(own, predict().inputs(own)));
        REQUIRE(session.prepare(step_named(name)).ok());
        REQUIRE(session.launch().message == "");
        const std::vector<int32_t> visits = session.workspace("visits"),
                                   visited = session.workspace("visited");
        std::vector<std::vector<int32_t>> lists;
        for (std::size_t at = 0; at < visits.size(); at += 3) {
          lists.emplace_back(visited.begin() + visits[at], visited.begin() + visits[at + 2]);
          lists.back().push_back(visits[at + 1] - visits[at]);  // how many of them need no mask
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
// Rows of few keys, for which the checker's own rounding of P is not representative (check.h, rule
// 2).
TEST_CASE("rows of few keys stay within the rounding bound", "[emulated]") {
  Problem p = problem(128, 129, 64, DType::e4m3);
  p.batch = 2, p.heads = 2, p.kv_heads = 1, p.seed = 389, p.own["similarity"] = {0.0078};
  CHECK(check_steps("predict", p, Backend::emulated).of.size() == 3);
  p = problem(300, 128, 64, DType::e4m3, InputKind::outlier);
  p.batch = 2, p.heads = p.kv_heads = 1, p.seed = 238, p.causal = true;
  p.own["similarity"] = {0.5};
  CHECK(check_steps("predict", p, Backend::emulated).of.size() == 3);
}
// The scale and the mean of the channel come from its finite values. All other channels are
// unchanged.
TEST_CASE("NaN in V poisons its channel in query tiles that visit its block", "[emulated]") {
  for (const char* name : {"s7_int8", "s8_lpt_order", "s9_tuned"})
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      Problem p = problem(300, 520, 64, DType::e4m3, InputKind::peaked);
      p.heads = p.kv_heads = 2;
      p.own = {{"keep", {0.4}}, {"similarity", {0}}};
      p.finish();
      INFO(name << " " << bad);
      Case c(p, predict());
      const auto blocks = chosen_blocks(p, c.inputs);
      HostTensors right;
      CHECK(run_step(step_named(name), c, Backend::emulated, &right) == "");
      c.inputs.at("v").data[500 * 64 + 7] = bad;
      const HostTensors out = outputs_of(step_named(name), p, c.inputs);
      int wrong = 0, reached = 0;
      double error = 0, size = 0;  // the channel in rows that do not attend to it
      for (int64_t h = 0; h < 2; ++h)
        for (int64_t i = 0; i < 300; ++i) {
          const bool visits = blocks->open(0, h, i / kSparseBlockM, 500 / sparse_block_n(64));
          for (int64_t c0 = 0; c0 < 64; ++c0) {
            const float got = out.at("o").row(0, h, i)[c0];
            const float before = right.at("o").row(0, h, i)[c0];
            if (h == 0 && c0 == 7 && visits)
              wrong += !std::isnan(got), ++reached;
            else if (h == 0 && c0 == 7)
              error += std::pow(double{got} - before, 2), size += std::pow(double{before}, 2);
            else
              wrong += got != before;
          }
        }
      CHECK(wrong == 0);
      CHECK(error <= 0.05 * 0.05 * size);  // the mean of V lacks one value
      CHECK(reached > 0);
      CHECK(same(out.at("lse"), right.at("lse")));
    }
}
