// The effect of the tile order on HBM traffic.
#include "device/roofline.h"
#include "attn/tiling.h"
#include "check/operation.h"
#include "tests/catch.h"

namespace {

using namespace attn;

Problem long_problem(bool causal) {
  Problem p;
  p.batch = 8, p.heads = p.kv_heads = 16, p.seqlen_q = p.seqlen_k = 2048, p.head_dim = 128,
  p.causal = causal;
  p.finish();
  return p;
}
constexpr double kAll = 2.0 * 8 * 16 * 2048 * 128 * 2;  // K and V of all heads, once: 134 MB

Status two_tiles(const Arguments& args) {
  if (args.report_tiling({128, 64, 4})) return Status::success();
  return Status::device_error("launched");
}

}  // namespace

TEST_CASE("K and V come from HBM once where they stay in L2, and with every wave where they do not",
          "[tiling]") {
  const Machine h200;
  const Problem p = long_problem(false);
  CHECK(kv_bytes_from_hbm(p, {128, 128, 1}, h200) == kAll);   // head after head
  CHECK(kv_bytes_from_hbm(p, {128, 128, 12}, h200) == kAll);  // 12 MB at a time
  // All heads at once: 16 query tiles per head, and by the next one L2 has evicted K and V.
  const double all_heads = kv_bytes_from_hbm(p, {128, 128, 128}, h200);
  CHECK(all_heads > 15 * kAll);
  CHECK(all_heads <= 16 * kAll);
  // an L2 that holds everything
  CHECK(kv_bytes_from_hbm(p, {128, 128, 128}, Machine{132, 1e9}) == kAll);
  // a section that just exceeds L2
  CHECK(kv_bytes_from_hbm(p, {128, 128, 24}, h200) > 1.2 * kAll);
  CHECK(kv_bytes_from_hbm(p, {128, 128, 24}, Machine{132, 100 << 20}) == kAll);
  // A mask removes half of it; heads that share K and V load it once.
  CHECK(kv_bytes_from_hbm(long_problem(true), {128, 128, 128}, h200) ==
        Approx(8.5 * kAll).epsilon(0.05));
  Problem shared = p;
  shared.kv_heads = 2;
  CHECK(kv_bytes_from_hbm(shared, {128, 128, 128}, h200) == kAll / 8);
}

TEST_CASE("an order given as a function replaces the order by sections", "[tiling]") {
  const Machine h200;
  const Problem p = long_problem(false);
  constexpr int64_t kRowBlocks = 2048 / 128, kHeads = 8 * 16;
  Tiling head_after_head{128, 128, 128}, all_heads{128, 128, 1};
  head_after_head.order = [](int64_t n) { return QueryTile{n / kRowBlocks, n % kRowBlocks}; };
  all_heads.order = [](int64_t n) { return QueryTile{n % kHeads, n / kHeads}; };
  CHECK(kv_bytes_from_hbm(p, head_after_head, h200) == kAll);
  CHECK(kv_bytes_from_hbm(p, all_heads, h200) > 15 * kAll);
}

TEST_CASE("a launch reports its tiles, and launches nothing then", "[tiling]") {
  const Problem p = long_problem(false);
  const auto tiling = tiling_of({nullptr, two_tiles}, p);
  REQUIRE(tiling);
  CHECK(tiling->block_m == 128);
  CHECK(tiling->block_n == 64);
  CHECK(tiling->section == 4);
  CHECK(visits(p, *tiling) == 16 * 32);
  CHECK(visits(long_problem(true), *tiling) == 2 * (1 + 16) * 16 / 2);
  CHECK(visits(long_problem(true), *tiling, false) == 16 * 32);
}

TEST_CASE("HBM binds where the order of tiles makes it", "[tiling]") {
  Step step;
  step.operation = &forward();
  step.launch = {nullptr, [](const Arguments& args) {
                   return args.report_tiling({128, 128, args.problem.heads * args.problem.batch})
                              ? Status::success()
                              : Status::unsupported("");
                 }};
  step.cost = [](const Problem& p) {
    Phase phase{.name = "attention", .tensor_flop = 4.0 * 128 * 16 * 8 * 2048.0 * 2048};
    phase.hbm_read = 1.5 * kAll, phase.hbm_write = 0.5 * kAll;
    (void)p;
    return Cost{phase};
  };
  const Roofs roofs = datasheet_roofs(*find_gpu("h200"));
  CHECK(predict(cost_of(step, long_problem(false), roofs.machine), roofs, DType::bf16).binding ==
        "tensor");
  step.tiled = true;
  CHECK(predict(cost_of(step, long_problem(false), roofs.machine), roofs, DType::bf16).binding ==
        "HBM");
}
