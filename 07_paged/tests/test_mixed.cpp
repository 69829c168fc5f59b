// Mixed batches of chapter 07: plans cover everything, and the step is correct for any ticket
// order.
#include <memory>
#include <random>

#include "07_paged/host/mixed_plan.h"
#include "07_paged/host/paged.h"
#include "07_paged/kernels/splits.h"
#include "tests/test_pages.h"

using namespace attn;
using namespace attn::tests;

namespace {

const Step& mixed_step() {
  for (const Step& step : chapter().steps)
    if (step.name == "v11_mixed") return step;
  throw std::logic_error("no v11_mixed");
}

struct Batch {
  Problem problem;
  int64_t sms;
};
Batch random_batch(std::mt19937_64& random) {
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  Problem p = problem(1, 1, below(4) == 0 ? 256 : 128, DType::bf16);
  p.kv_heads = 1 + below(8), p.heads = p.kv_heads * (1 + below(17));
  p.causal = below(2) == 0;
  if (below(4) == 0) p.window_left = below(500), p.window_right = 0;
  const int64_t most_q[] = {2, 2, 18, 700}, most_k[] = {3, 200, 2000, 100000};
  for (int64_t b = 1 + below(below(4) == 0 ? 300 : 20); b > 0; --b) {
    p.varlen_q.push_back(below(most_q[below(4)]));
    p.varlen_k.push_back(below(5) == 0 ? 0 : below(most_k[below(below(8) == 0 ? 4 : 3)]));
  }
  p.varlen_q[0] = std::max<int64_t>(1, p.varlen_q[0]);
  p.varlen_k[0] = std::max<int64_t>(1, p.varlen_k[0]);
  p.finish();
  return {p, 1 + below(below(2) == 0 ? 8 : 132)};
}

// "" if every query of every head with all of its visible keys is in exactly one entry of the plan,
// within the bounds; otherwise the error. Tiles are counted independently, from Problem.
std::string wrong_with(const Batch& batch, const plans::MixedPlan& plan) {
  const Problem& p = batch.problem;
  std::map<std::vector<int64_t>, std::vector<plans::MixedWork>> pieces;  // per row block
  std::map<std::vector<int64_t>, int> tiles_of_queries;
  for (const plans::MixedWork& w : plan.prefill) ++tiles_of_queries[{w.sequence, w.head, w.row0}];
  for (const plans::MixedWork& w : plan.decode) pieces[{w.sequence, w.head, w.row0}].push_back(w);
  std::vector<int> places(static_cast<std::size_t>(plan.parts)), counters;
  counters.resize(static_cast<std::size_t>(plan.row_blocks));
  std::size_t used = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Problem one = p.sequence(b);
    if (one.seqlen_q > 16) {
      const int64_t rows = splits::prefill_rows(p.head_dim);
      for (int64_t head = 0; head < p.heads; ++head)
        for (int64_t row0 = 0; row0 < one.seqlen_q; row0 += rows, ++used)
          if (tiles_of_queries[{b, head, row0}] != 1) return "a tile of queries";
      continue;
    }
    if (one.seqlen_q == 0) continue;
    const int64_t keys = one.visible(one.seqlen_q - 1).end - one.visible(0).begin;
    const int64_t tiles = std::max<int64_t>(1, (std::max<int64_t>(0, keys) + 63) / 64);
    for (int64_t head = 0; head < p.kv_heads; ++head)
      for (int64_t row0 = 0; row0 < p.group() * one.seqlen_q; row0 += 16) {
        std::vector<plans::MixedWork>& own = pieces[{b, head, row0}];
        std::ranges::sort(own, std::less(), &plans::MixedWork::part);
        int64_t covered = 0;
        for (std::size_t n = 0; n < own.size(); ++n) {
          const plans::MixedWork& w = own[n];
          if (w.tile != covered || w.count < 1) return "a tile of keys is in two pieces or in none";
          if (w.part != static_cast<int>(n)) return "the parts are not in the order of the keys";
          if (w.num_parts != static_cast<int>(own.size())) return "another number of parts";
          if (w.first_part != own[0].first_part) return "the parts lie apart";
          if (w.row_block != own[0].row_block) return "two counters of a row block";
          if (w.num_parts > 1 && places.at(static_cast<std::size_t>(w.first_part + w.part))++)
            return "a place of two parts";
          covered += w.count, ++used;
        }
        if (covered != tiles) return "a row block is not covered";
        if (counters.at(static_cast<std::size_t>(own[0].row_block))++)
          return "a counter of two row blocks";
      }
  }
  if (used != plan.prefill.size() + plan.decode.size()) return "an entry that no query needs";
  if (!std::ranges::is_sorted(plan.decode, std::greater(), &plans::MixedWork::count) ||
      !std::ranges::is_sorted(plan.prefill, std::greater(), &plans::MixedWork::count))
    return "the longest is not first";
  const plans::MixedBounds most = plans::mixed_bounds(p);
  return static_cast<int64_t>(used) <= most.work && plan.parts <= most.parts &&
                 plan.row_blocks <= most.row_blocks
             ? ""
             : "more than there is room for";
}

Problem mix(std::vector<int64_t> queries, std::vector<int64_t> keys, int64_t head_dim,
            DType dtype = DType::bf16) {
  Problem p = problem(1, 1, head_dim, dtype);
  p.varlen_q = std::move(queries), p.varlen_k = std::move(keys);
  p.heads = 4, p.kv_heads = 2, p.causal = true;
  p.own["blocks"] = {2};
  return p;
}

// One launch, two serial ones, two in two streams.
constexpr const char* kSchedules[] = {"", "serial", "streams"};
Problem in_schedule(Problem p, const std::string& schedule) {
  if (!schedule.empty()) p.own[schedule] = {1};
  return p;
}

// Chunks together with decoding sequences: many keys, few, none; groups of more than 16 rows.
std::vector<Problem> mixes() {
  std::vector<Problem> all{
      mix({1, 1, 200, 1, 0}, {700, 65, 300, 3, 9}, 128),
      mix({16, 130, 17, 3, 2}, {900, 130, 17, 0, 64}, 64, DType::fp16),
      mix({1, 64, 1, 5}, {500, 129, 257, 4}, 256),
      mix({1, 1, 1}, {1, 640, 63}, 128),
      mix({100, 17}, {100, 400}, 64),
      mix({7, 40}, {300, 300}, 128),
  };
  all[1].heads = 3, all[1].kv_heads = 1, all[1].window_left = 100, all[1].window_right = 0;
  all[3].heads = 20, all[3].kv_heads = 1;
  all[5].causal = false;
  for (std::size_t n = 0; n < all.size(); ++n) {
    constexpr double kPages[] = {16, 5, 64, 1, 256, 16};
    constexpr InputKind kInputs[] = {InputKind::random, InputKind::needle, InputKind::peaked};
    all[n].own["page_size"] = {kPages[n]};
    all[n].inputs = kInputs[n % 3];
  }
  return all;
}

}  // namespace

TEST_CASE("mixed plans cover every query and every key once", "[emulated]") {
  std::mt19937_64 random(3);
  for (int n = 0; n < 10'000; ++n) {
    Batch batch = random_batch(random);
    batch.problem.own["blocks"] = {static_cast<double>(batch.sms)};
    INFO(n << ": " << batch.problem.text() << " on " << batch.sms << " SMs");
    const plans::MixedPlan plan =
        plans::mixed_plan(batch.problem, batch.problem.varlen_q, batch.problem.varlen_k, batch.sms);
    REQUIRE(wrong_with(batch, plan) == "");
  }
}

// A few long prefill tiles, which need one wave more on half of the blocks than on all; short ones;
// and many, which overlap with decoding in any case. On 132 SMs, as the mixes of RESULTS.md.
TEST_CASE("the mixed plan chooses the blocks that prefer prefill", "[emulated]") {
  const auto first = [](int64_t chunk, int64_t keys, int64_t sequences, int64_t own_keys) {
    Problem p = problem(1, 1, 128, DType::bf16);
    p.heads = 32, p.kv_heads = 8, p.causal = true;
    p.varlen_q.assign(static_cast<std::size_t>(sequences), 1);
    p.varlen_k.assign(static_cast<std::size_t>(sequences), own_keys);
    p.varlen_q.push_back(chunk), p.varlen_k.push_back(keys);
    p.finish();
    return plans::mixed_plan(p, p.varlen_q, p.varlen_k, 132).prefill_first;
  };
  CHECK(first(1024, 8192, 64, 4096));  // 256 tiles: two waves on 132 blocks, one on 264
  CHECK(!first(512, 4096, 32, 4096));  // 128 tiles: one wave in any case
  CHECK(!first(512, 16384, 32, 8192));
  CHECK(!first(2048, 2048, 64, 2048));  // 512 tiles of 128 to 2048 keys
  CHECK(first(2048, 16384, 64, 4096));  // 512 tiles of 14000 keys and more
  CHECK(!first(1024, 8192, 1, 1));      // little decoding
  // By hand, one SM with two blocks: decoding takes 10 * 20, and 1.2 times that on one of them.
  const auto work = [](int count) { return plans::MixedWork{0, 0, 0, 0, 0, count, 0, 1, 0}; };
  const auto by_hand = [&](int tiles, int keys) {
    return plans::prefill_first(std::vector(static_cast<std::size_t>(tiles), work(keys)),
                                {work(10)}, 1);
  };
  CHECK(by_hand(2, 1000));   // 1200, not 1240
  CHECK(!by_hand(1, 1000));  // 1000 either way
  CHECK(!by_hand(20, 50));   // 700, not 640
  CHECK(!by_hand(0, 50));    // no prefill
}

// Any ticket order, in one launch and in two, serial and concurrent.
TEST_CASE("mixed batches are bitwise equal in any schedule and in two launches", "[emulated]") {
  const Step& step = mixed_step();
  for (Problem mix : mixes()) {
    mix.finish();
    HostTensors first;
    CHECK(run_step(step, mix, Backend::emulated, &first) == "");
    for (const std::string schedule : kSchedules) {
      const Problem p = in_schedule(mix, schedule);
      INFO(p.text());
      Session session(p, *step.operation, Backend::emulated, draw(*step.operation, p).tensors);
      REQUIRE(session.prepare(step).ok());
      for (uint64_t seed = 100; seed < 103; ++seed) {  // with the counters of the previous launch
        emulator::schedule_seed = seed;
        REQUIRE(session.launch().message == "");
        for (const auto& [name, t] : session.outputs()) CHECK(same(t, first.at(name)));
        // All counters are reset: no ticket taken, no block on any SM.
        for (const int32_t counter : session.workspace("tickets")) REQUIRE(counter == 0);
      }
    }
  }
}

namespace {
// A captured launch, on a GPU a CUDA graph, is replayed with other keys, pages and plans, and with
// the counters that the previous launch left. `times`: lengths of keys per replay; the longest stay
// equal, and so do the tensors.
void replay(Problem p, const std::vector<std::vector<int64_t>>& all, Backend backend, int times) {
  const Step& step = mixed_step();
  p.varlen_k = all[0];
  p.finish();
  p.own["num_pages"] = {static_cast<double>(p.batch * splits::max_pages_of(p))};
  std::vector<std::unique_ptr<Session>> sessions;
  for (const std::string schedule : kSchedules) {
    const Problem own = in_schedule(p, schedule);
    sessions.push_back(std::make_unique<Session>(own, *step.operation, backend,
                                                 draw(*step.operation, own).tensors));
    REQUIRE(sessions.back()->prepare(step).ok());
    REQUIRE(sessions.back()->capture().message == "");
  }
  for (const std::vector<int64_t>& lengths : all) {
    p.varlen_k = lengths, ++p.seed;
    p.finish();
    INFO(p.text());
    HostTensors expected;
    CHECK(run_step(step, p, backend, &expected) == "");
    const HostTensors inputs = draw(*step.operation, p).tensors;
    for (std::size_t n = 0; n < sessions.size(); ++n) {
      INFO("schedule " << kSchedules[n]);
      sessions[n]->replace(inputs);
      sessions[n]->replan(inputs);
      for (int time = 0; time < times; ++time) {
        REQUIRE(sessions[n]->launch().message == "");
        for (const auto& [name, t] : sessions[n]->outputs()) REQUIRE(same(t, expected.at(name)));
      }
      CHECK(!sessions[n]->damage());
    }
  }
}
}  // namespace
TEST_CASE("a replayed mixed batch is correct with other keys and pages", "[emulated]") {
  replay(mixes()[0], {{700, 65, 300, 3, 9}, {700, 0, 20, 700, 0}, {700, 65, 300, 3, 9}},
         Backend::emulated, 2);
}
TEST_CASE("a replayed mixed batch is correct with other keys and pages on the GPU", "[gpu]") {
  Problem p = mix({1, 1, 1024, 3, 300, 1}, {}, 128);
  p.heads = 8, p.own.erase("blocks");
  replay(p, {{8192, 5000, 4096, 700, 300, 77}, {8192, 0, 1100, 8000, 0, 1}}, Backend::gpu, 100);
}
TEST_CASE("mixed batches on the GPU", "[gpu]") {
  std::vector<Problem> all = mixes();
  all.push_back(mix({1, 1, 2048, 1, 300, 1}, {32789, 1000, 4096, 20000, 300, 77}, 128));
  all.back().heads = 8, all.back().own.erase("blocks");
  for (Problem p : all)
    for (const std::string schedule : kSchedules)
      check_steps("paged_prefill", in_schedule(p, schedule), Backend::gpu);
}

TEST_CASE("options --serial and --streams exclude each other and are of v11 only", "[emulated]") {
  Problem p = mixes()[0];
  p.finish();
  const auto reason = [&](const char* step, std::initializer_list<const char*> options) {
    Problem q = p;
    for (const char* option : options) q.own[option] = {1};
    return refusal(step_named(step), q).value_or("");
  };
  CHECK(reason("v11_mixed", {"serial"}) == "");
  CHECK(reason("v11_mixed", {"streams"}) == "");
  CHECK(reason("v11_mixed", {"serial", "streams"}) ==
        "--serial --streams: at most one of the two is accepted");
  CHECK(reason("v7_prefill", {"serial"}) ==
        "--serial: this step has no launch for each of the two");
  CHECK(reason("v7_prefill", {"streams"}) == "--streams: this step has no second stream");
}
TEST_CASE("a serial mixed batch has two phases", "[emulated]") {
  const Step& step = mixed_step();
  for (const std::string schedule : kSchedules) {
    Problem p = in_schedule(mixes()[0], schedule);
    p.finish();
    std::vector<std::string> costs;
    for (const Phase& phase : cost_of(step, p)) costs.push_back(phase.name);
    CHECK(costs == (schedule == "serial" ? std::vector<std::string>{"prefill", "decode"}
                                         : std::vector<std::string>{"attention"}));
  }
}

TEST_CASE("a wrong table or length and a stale plan of a mixed batch are detected", "[emulated]") {
  const Step& step = mixed_step();
  Problem p = problem(1, 200, 64, DType::bf16);
  p.batch = 3, p.heads = 4, p.kv_heads = 2, p.seqlen_q = 3;
  p.own["num_pages"] = {60}, p.own["blocks"] = {2};
  p.seqused_k = {187, 187, 33};  // no sequence fills its last page
  for (const int64_t queries : {3, 40}) {
    p.seqlen_q = queries;
    p.finish();
    // The visible keys of a prefill tile depend on the length alone.
    check_wrong_pages(step, p, queries <= 16);
  }
}
