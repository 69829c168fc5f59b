// Latent attention of chapter 07: any lengths, page sizes and numbers of heads.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "07_paged/host/paged.h"
#include "07_paged/host/plan.h"
#include "07_paged/kernels/splits.h"
#include "files/tensor_files.h"
#include "run/runner.h"
#include "tests/test_pages.h"

using namespace attn;
using namespace attn::tests;

namespace {

const std::vector<int64_t> kLatentLengths{1, 15, 63, 64, 65, 128, 129, 300, 700};

std::vector<const Step*> latent_steps() {
  std::vector<const Step*> steps;
  for (const Step& step : chapter().steps)
    if (step.operation == &paged_mla()) steps.push_back(&step);
  return steps;
}

Problem latent(int64_t heads, int64_t queries, int64_t room, int64_t page,
               DType dtype = DType::bf16) {
  Problem p = problem(queries, room, splits::kLatentDim, dtype);
  p.heads = heads, p.kv_heads = 1;
  p.own["page_size"] = {static_cast<double>(page)};
  return p;
}

// Further limits of v16_mla_seesaw: TMA boxes, no left window edge.
bool is_in_boxes(const Problem& p) { return splits::page_size_of(p) % 8 == 0 && p.window_left < 0; }

// Problems that combine every length with some page sizes and numbers of heads.
template <class Body>
int latent_problems(const std::vector<int64_t>& lengths, Body body) {
  constexpr InputKind kInputs[] = {InputKind::needle, InputKind::random, InputKind::peaked,
                                   InputKind::outlier};
  constexpr int64_t kPages[] = {64, 16, 1, 5, 256}, kHeads[] = {16, 3, 128, 1, 20, 64, 9};
  constexpr int64_t kQueries[] = {1, 2, 1, 16, 1, 1, 7};
  int n = 0;
  for (const int64_t length : lengths)
    for (int repeat = 0; repeat < 2; ++repeat, ++n) {
      Problem p = latent(kHeads[n % 7], kQueries[n % 7], length, kPages[n % 5],
                         n % 3 == 1 ? DType::fp16 : DType::bf16);
      p.inputs = kInputs[n % 4];
      p.causal = n % 2 == 0;
      if (n % 5 == 3) p.window_left = n * 37 % 150, p.window_right = 0;
      p.batch = 3;
      p.seqused_k = {length / 2, length, n % 4 == 0 ? 0 : std::min<int64_t>(length, 65)};
      if (n % 4 != 0) p.own["blocks"] = {static_cast<double>(1 + n * 7 % 9)};
      p.seed = static_cast<uint64_t>(n + 1);
      body(p);
    }
  return n;
}

// Every length with boxes of 8 to 64 rows; work tiles of all sequences, with odd and even numbers
// of KV tiles; up to 112 and 128 rows.
void boxes(Backend backend, const std::vector<int64_t>& lengths) {
  constexpr int64_t kPages[] = {8, 16, 64, 256}, kHeads[] = {16, 9, 128, 16};
  constexpr int64_t kQueries[] = {1, 2, 1, 7}, kBlocks[] = {1, 40, 14, 6};
  Counts ran;
  for (std::size_t n = 0; n < 4; ++n) {
    Problem p = latent(kHeads[n], kQueries[n], lengths.back(), kPages[n],
                       n == 1 ? DType::fp16 : DType::bf16);
    p.inputs = n % 2 == 0 ? InputKind::peaked : InputKind::random;
    p.causal = kQueries[n] > 1;
    p.batch = static_cast<int64_t>(lengths.size()), p.seqused_k = lengths;
    p.own["blocks"] = {static_cast<double>(kBlocks[n])};
    p.seed = n + 1;
    ran += check_steps("paged_mla", p, backend,
                       [](const Step& step, int) { return step.name == "v16_mla_seesaw"; });
  }
  CHECK(ran.of == std::map<std::string, int>{{"v16_mla_seesaw", 4}});
}

}  // namespace

TEST_CASE("latent attention is correct for any heads and lengths and pages", "[emulated]") {
  Counts ran;
  int in_boxes = 0;
  const int problems = latent_problems(kLatentLengths, [&](const Problem& p) {
    ran += check_steps("paged_mla", p, Backend::emulated);
    in_boxes += is_in_boxes(p) ? 1 : 0;
  });
  for (const Step* step : latent_steps())
    CHECK(ran.of[step->name] == (step->name == "v16_mla_seesaw" ? in_boxes : problems));
}
TEST_CASE("latent attention on the GPU", "[gpu]") {
  std::vector<int64_t> lengths = kLatentLengths;
  lengths.insert(lengths.end(), {4096, 32789});
  latent_problems(lengths, [](const Problem& p) { check_steps("paged_mla", p, Backend::gpu); });
}

TEST_CASE("latent attention with TMA boxes of any size", "[emulated]") {
  boxes(Backend::emulated, kLatentLengths);
}
TEST_CASE("latent attention with TMA boxes of any size on the GPU", "[gpu]") {
  std::vector<int64_t> lengths = kLatentLengths;
  lengths.push_back(4096);
  boxes(Backend::gpu, lengths);
}

TEST_CASE("latent attention without keys gives O = 0 and lse = -inf", "[emulated]") {
  Problem p = latent(16, 2, 100, 16);
  p.batch = 2, p.seqused_k = {0, 0};
  p.finish();
  for (const Step* step : latent_steps()) {
    HostTensors out;
    INFO(step->name);
    CHECK(run_step(*step, p, Backend::emulated, &out) == "");
    for (const float x : out.at("o").data) CHECK(x == 0);
    for (const float x : out.at("lse").data) CHECK((std::isinf(x) && x < 0));
  }
}

// Results are bitwise independent of the schedule and of what the previous launch left; and a
// captured launch works with other lengths, pages and plans.
TEST_CASE("replayed latent attention is bitwise equal with other lengths", "[emulated]") {
  for (const Step* step : latent_steps()) {
    Problem p = latent(40, 1, 900, 16);
    p.batch = 3, p.own["num_pages"] = {200}, p.own["blocks"] = {5};
    p.seqused_k = {900, 900, 900};
    p.finish();
    Session session(p, *step->operation, Backend::emulated, draw(*step->operation, p).tensors);
    REQUIRE(session.prepare(*step).ok());
    REQUIRE(session.capture().ok());
    for (const auto& lengths :
         std::vector<std::vector<int64_t>>{{900, 250, 0}, {0, 0, 0}, {3, 800, 130}}) {
      p.seqused_k = lengths, ++p.seed;
      HostTensors expected;
      INFO(step->name << " with lengths " << lengths[0] << ", " << lengths[1]);
      CHECK(run_step(*step, p, Backend::emulated, &expected) == "");
      const HostTensors inputs = draw(*step->operation, p).tensors;
      session.replace(inputs);
      session.replan(inputs);
      for (uint64_t seed = 100; seed < 102; ++seed) {
        emulator::schedule_seed = seed;
        CHECK(session.launch().ok());
        for (const auto& [name, t] : session.outputs()) CHECK(same(t, expected.at(name)));
      }
      CHECK(!session.damage());
    }
  }
}

// combine_kernel; and, where the launch was captured with lengths that need none, the last block.
TEST_CASE("a sequence of many parts is reduced in a launch of its own, or by the last block",
          "[emulated]") {
  const Step& step = *latent_steps().back();
  REQUIRE(step.name == "v16_mla_seesaw");
  for (const int64_t queries : {1, 2}) {  // one row tile, two
    Problem p = latent(64 * queries, 1, 1000, 16);
    p.heads -= 3, p.batch = 3;
    p.own["num_pages"] = {200}, p.own["blocks"] = {12.0 * static_cast<double>(queries)};
    p.seqused_k = {1000, 1000, 1000};
    p.finish();
    CHECK(!plans::combines(p, splits::kWgmmaRows));
    Session session(p, *step.operation, Backend::emulated, draw(*step.operation, p).tensors);
    REQUIRE(session.prepare(step).ok());
    REQUIRE(session.capture().ok());

    p.seqused_k = {1000, 0, 70};
    CHECK(plans::combines(p, splits::kWgmmaRows));
    const HostTensors inputs = draw(*step.operation, p).tensors;
    CHECK(step.plan(p, inputs).at("splits").numbers[1] > plans::few_parts(p, splits::kWgmmaRows));
    HostTensors expected;
    CHECK(run_step(step, p, Backend::emulated, &expected) == "");
    session.replace(inputs);
    session.replan(inputs);
    CHECK(session.launch().ok());
    for (const auto& [name, t] : session.outputs())  // summed in another order
      for (std::size_t i = 0; i < t.data.size(); ++i)
        if (const float x = t.data[i], y = expected.at(name).data[i]; x != y)
          CHECK(std::abs(x - y) <= 0x1p-7F * std::abs(y) + 0x1p-12F);
    CHECK(!session.damage());
  }
}

TEST_CASE("a wrong table or length and a stale plan of latent attention are detected",
          "[emulated]") {
  for (const Step* step : latent_steps()) {
    Problem p = latent(16, 1, 300, 16);
    p.batch = 3, p.own["num_pages"] = {80}, p.own["blocks"] = {4};
    p.seqused_k = {187, 187, 33};  // no sequence fills its last page
    p.finish();
    check_wrong_pages(*step, p, true);
  }
}

namespace {
// A pool with periodic contents, as in test.cpp.
void large_pool(Backend backend, int64_t pages, int64_t length, int64_t most) {
  Problem p = latent(16, 1, length, 16);
  p.batch = 4;
  p.own["num_pages"] = {static_cast<double>(pages)};
  check_large_steps("paged_mla", p, backend, most);
}
}  // namespace

TEST_CASE("a pool of latent vectors with periodic contents", "[emulated]") {
  large_pool(Backend::emulated, 36, 130, 1000);
}
TEST_CASE("a pool of latent vectors past 2^32 elements", "[gpu][large]") {
  large_pool(Backend::gpu, (1 << 19) + 4, 60000, int64_t{1} << 27);
}

TEST_CASE("the cost model of latent attention counts tensor operations", "[emulated]") {
  for (const Step* step : latent_steps())
    for (const int64_t heads : {16, 64}) {
      Problem p = latent(heads, 1, 320, 64);
      p.batch = 2, p.own["blocks"] = {3};
      p.finish();
      const std::uint64_t before = emulator::tensor_flop;
      CHECK(run_step(*step, p, Backend::emulated) == "");
      double model = 0;
      for (const Phase& phase : cost_of(*step, p)) model += phase.tensor_flop;
      INFO(step->name << " with " << heads << " heads");
      CHECK(static_cast<double>(emulator::tensor_flop - before) == model);
    }
}

TEST_CASE("problems that are not latent attention are refused", "[emulated]") {
  const auto refused = [](Problem p, const char* why) {
    p.finish();
    for (const Step* step : latent_steps()) {
      const auto reason = refusal(*step, p);
      REQUIRE(reason);
      INFO(step->name << ": " << *reason);
      CHECK(reason->find(why) != std::string::npos);
    }
  };
  Problem p = latent(16, 1, 64, 16);
  p.kv_heads = 2;
  refused(p, "--kv-heads 2: must be 1, shared by all query heads");
  p = latent(16, 1, 64, 16);
  p.head_dim = 512;
  refused(p, "--head-dim 512: this step takes 576");
  p = latent(16, 1, 64, 16);
  p.softmax_scale = 1e-38;
  p.finish();
  for (const Step* step : latent_steps())
    CHECK((refusal(*step, p) == std::nullopt) == (step->name == "v12_mla"));
  refused(latent(16, 17, 64, 16), "--seqlen-q 17: this step takes at most 16");
  refused(latent(16, 1, 64, 16, DType::fp32), "--dtype fp32: this step takes fp16 and bf16");
  const auto refused_by_boxes = [](Problem q, const std::string& why) {
    q.finish();
    for (const Step* step : latent_steps())
      CHECK(refusal(*step, q).value_or("").find(why) ==
            (step->name == "v16_mla_seesaw" ? 0 : std::string::npos));
  };
  refused_by_boxes(latent(16, 1, 64, 12), "--page-size 12: must be a multiple of 8");
  p = latent(16, 2, 64, 16);
  p.window_left = 30, p.window_right = 0;
  refused_by_boxes(p, "--window 30,0: accepted are -1 to the left and --causal");
}

TEST_CASE("the answers of exercise e follow from the shapes", "[emulated]") {
  //! [answers]
  using namespace splits;
  const auto rate = [](int64_t rows) {
    return 2 * (kLatentDim + kLatentValues) * rows / (2 * kLatentDim);
  };
  constexpr int64_t kTile = 2 * 64 * kLatentDim, kShared = 232448, kRegisters = 4 * 65536;
  int64_t heads = 1, queries = 1;
  while (2.0 * (kLatentDim + kLatentValues) * double(heads) < 206.0 * 2 * kLatentDim) ++heads;
  while (16 * queries < heads) ++queries;
  Problem two = latent(128, 2, 1000, 64), one = latent(128, 1, 1000, 64);
  two.own["blocks"] = {132};
  const std::map<std::string, int64_t> is{
      {"token", 2 * kLatentDim},
      {"times", 128 * (192 + 128) / kLatentDim},
      {"rate", rate(16)},
      {"heads", heads},
      {"queries", queries},
      {"tiles", (kShared - 2 * kWgmmaRows * (kLatentDim + 64)) / kTile},
      {"share", 100 * kWgmmaRows * kLatentValues * 4 / kRegisters},
      {"empty", 100 - 100 * 16 / kWgmmaRows},
      {"teams", plans::teams(two, kWgmmaRows)},
      {"l2", (one.heads + kWgmmaRows - 1) / kWgmmaRows * 1000 * 2 * kLatentDim}};
  std::ifstream in(std::string(ATTN_SOURCE_DIR) + "/07_paged/exercises/e.solution.txt");
  const std::string answers{std::istreambuf_iterator<char>(in), {}};
  for (const auto& [name, value] : is) {
    INFO(name << " = " << value);
    CHECK(answers.find(name + " = " + std::to_string(value) + "\n") != std::string::npos);
  }
  //! [answers]
}

TEST_CASE("latent attention is saved and loaded", "[emulated]") {
  const auto status = [](std::vector<const char*> options) {
    options.insert(options.begin(),
                   {"07_paged", "--device", "emulated", "--operation", "paged_mla"});
    return run_chapter(chapter(), static_cast<int>(options.size()), options.data());
  };
  CHECK(status({"--batch", "2", "--seqused", "9,30", "--seqlen-k", "30", "--save",
                "latent_files"}) == 0);
  CHECK(std::filesystem::exists("latent_files/kv_pages.npy"));
  CHECK(status({"--load", "latent_files"}) == 0);
  CHECK(status({"--load", "latent_files", "--heads", "3"}) == 2);
  CHECK(status({"--head-dim", "128"}) == 3);
  std::filesystem::remove_all("latent_files");
}
