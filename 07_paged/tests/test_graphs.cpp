// Repeated launches of chapter 07: in any schedule; replayed with other lengths and pages, as in a
// CUDA graph; with wrong plans and page tables.
#include "07_paged/kernels/splits.h"
#include "tests/test_pages.h"

using namespace attn;
using namespace attn::tests;

TEST_CASE("every schedule gives the same bits", "[emulated]") {
  for (const Step* step : decode_steps()) {
    if (!step->deterministic) continue;
    Problem p = paged(2, 900, 64, 16, DType::bf16);
    p.batch = 2, p.heads = 4, p.kv_heads = 1, p.causal = true;
    p.seqused_k = {900, 333};
    p.own["blocks"] = {3};
    p.finish();
    check_schedules(*step, p);
  }
}

namespace {
// A captured launch is replayed with other lengths, pages and plans in device memory, and with the
// counters that the previous launch left. On a GPU it is a CUDA graph.
void replay(Backend backend) {
  for (const Step* step : decode_steps()) {
    Problem p = paged(1, 900, 128, 16, DType::bf16);
    p.batch = 3, p.heads = 4, p.kv_heads = 1;
    p.own["num_pages"] = {200}, p.own["blocks"] = {5};
    p.seqused_k = {900, 900, 900};
    p.finish();
    Session session(p, *step->operation, backend, draw(*step->operation, p).tensors);
    REQUIRE(session.prepare(*step).ok());
    REQUIRE(session.capture().ok());
    for (const auto& lengths : std::vector<std::vector<int64_t>>{
             {900, 250, 0}, {900, 250, 0}, {0, 0, 0}, {3, 800, 130}, {900, 900, 900}}) {
      p.seqused_k = lengths, ++p.seed;
      INFO(step->name << " with lengths " << lengths[0] << ", " << lengths[1] << ", "
                      << lengths[2]);
      check_replay(session, *step, p, backend);
    }
  }
}
}  // namespace

TEST_CASE("a replayed launch is correct with other pages", "[emulated]") {
  replay(Backend::emulated);
}
TEST_CASE("a replayed launch is correct with other pages on the GPU", "[gpu]") {
  replay(Backend::gpu);
}

TEST_CASE("a wrong page table and a wrong length are detected", "[emulated]") {
  for (const Step* step : decode_steps()) {
    Problem p = paged(1, 200, 64, 16, DType::bf16);
    p.batch = 3, p.heads = 4, p.kv_heads = 2;
    p.seqused_k = {187, 187, 33};  // no sequence fills its last page
    p.finish();
    check_wrong_pages(*step, p);
  }
}

namespace {
// A graph, or a launch, with a stale plan.
void stale_plan(Backend backend) {
  for (const Step* step : decode_steps()) {
    if (!step->plan) continue;
    Problem p = paged(1, 900, 64, 16, DType::bf16);
    p.batch = 2, p.heads = 4, p.kv_heads = 1;
    p.own["num_pages"] = {200}, p.own["blocks"] = {3};
    p.seqused_k = {500, 300};
    p.finish();
    Session session(p, *step->operation, backend, draw(*step->operation, p).tensors);
    REQUIRE(session.prepare(*step).ok());
    REQUIRE(session.capture().ok());
    p.seqused_k = {900, 100};
    const Case other(p, *step->operation);
    session.replace(other.inputs);
    CHECK(session.launch().ok());
    INFO(step->name);
    CHECK(!check(session.outputs().at("o"), other.expected[0]).pass);
    // With a plan for these lengths the result is correct.
    session.replan(other.inputs);
    CHECK(session.launch().ok());
    CHECK(check(session.outputs().at("o"), other.expected[0]).pass);
  }
}
}  // namespace

TEST_CASE("a stale plan gives a wrong result", "[emulated]") { stale_plan(Backend::emulated); }
TEST_CASE("a stale plan gives a wrong result on the GPU", "[gpu]") { stale_plan(Backend::gpu); }

TEST_CASE("1000 repeats give the same bits", "[gpu]") {
  for (const Step* step : decode_steps()) {
    if (!step->deterministic) continue;
    Problem p = paged(1, 5000, 128, 16, DType::bf16);
    p.batch = 3, p.heads = 8, p.kv_heads = 2;
    p.seqused_k = {5000, 1, 3333};
    p.finish();
    check_gpu_repeats(*step, p);
  }
}
