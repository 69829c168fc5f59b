// Table of chapter 06: its steps, their cost models, the problems that they refuse.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <ranges>
#include <string>

#include "check/operation.h"
#include "attn/tiling.h"
#include "host/backward_host.h"
#include "host/fp8.h"

ATTN_DECLARE_STEP(v1_sections);
ATTN_DECLARE_STEP(v2_separate_phases);
ATTN_DECLARE_STEP(v3_wgmma);
ATTN_DECLARE_STEP(v4_tma);
ATTN_DECLARE_STEP(v5_warp_specialised);
ATTN_DECLARE_STEP(v6_pingpong);
ATTN_DECLARE_STEP(v7_overlap);
ATTN_DECLARE_STEP(v8_persistent);
ATTN_DECLARE_STEP(v9_dynamic_scheduler);
ATTN_DECLARE_STEP(v10_double_buffered_q);
ATTN_DECLARE_STEP(v11_cross_tile);
ATTN_DECLARE_STEP(v12_lazy_rescale);
ATTN_DECLARE_STEP(v13_features);
ATTN_DECLARE_STEP(v14_tuned);
ATTN_DECLARE_STEP(tile_counter);

namespace attn {
namespace {

using Reason = std::optional<std::string>;

// L2 traffic: Q once, one tile of K and of V per visit, O and lse once. HBM traffic: the compulsory
// bytes; cost_of adds what the tile order makes L2 fetch again.
Cost forward_cost(const Problem& p, const Tiling& t) {
  const double heads = double(p.batch * p.heads), d = double(p.head_dim),
               element = double(size_of(p.dtype));
  const double q_rows = heads * double(p.seqlen_q), pairs = heads * visits(p, t);
  Tiling computed = t;  // warps skip fully masked rows, so they compute less than is loaded
  if (t.rows_together > 0) computed.block_m = t.rows_together;
  Phase phase{.name = "attention"};
  phase.exp = heads * visits(p, computed) * double(computed.block_m * t.block_n);
  phase.tensor_flop = 4 * d * phase.exp;
  phase.hbm_read =
      q_rows * d * element + 2 * double(p.batch * p.kv_heads * p.seqlen_k) * d * element;
  phase.hbm_write = q_rows * (d * element + 4);
  // The model counts a partial last key tile as a whole one.
  phase.l2_bytes = q_rows * (2 * d * element + 4) + pairs * 2 * double(t.block_n) * d * element;
  return {phase};
}

Reason refuse(const Problem& p, const Launch& launch) {
  const int64_t heads = p.batch * p.heads, block_m = tiling_of(launch, p)->block_m;
  const int64_t row_tiles = (p.seqlen_q + block_m - 1) / block_m;
  if (heads > ((int64_t{1} << 31) - 1) / row_tiles)
    return fmt::format("{} heads of {} tiles of queries: at most 2^31 - 1 blocks fit in a grid",
                       heads, row_tiles);
  return std::nullopt;
}

Step forward_step(std::string name, std::string idea, Launch launch) {
  return {
      .name = std::move(name),
      .operation = &forward(),
      .idea = std::move(idea),
      .support = "any lengths, masks, GQA",
      .limits = {.dtypes = k16Bits, .head_dims = {64, 128, 256}, .least_scale = kLeastScale},
      .refuses = [launch](const Problem& p) { return refuse(p, launch); },
      .workspaces = [](const Problem&) { return std::vector<Workspace>{}; },
      .cost = [launch](const Problem& p) { return forward_cost(p, *tiling_of(launch, p)); },
      .launch = launch,
      .needs = kHopper,
      .tiled = true,
  };
}

// With a dynamic tile scheduler: its counter is 0 before the first launch and after each one.
Step dynamic_step(std::string name, std::string idea, Launch launch) {
  Step step = forward_step(std::move(name), std::move(idea), launch);
  step.workspaces = [](const Problem&) {
    return std::vector<Workspace>{{"tile_counter", 4, true}};
  };
  step.prepare = ATTN_LAUNCH(tile_counter);
  return step;
}

// With the features of the last two steps.
Step featured_step(std::string name, std::string idea, Launch launch) {
  Step step = dynamic_step(std::move(name), std::move(idea), launch);
  step.support = "any lengths, packed sequences, masks, GQA, softcap";
  step.takes = {"softcap", "varlen"};
  return step;
}

Chapter make_chapter() {
  Chapter c{
      "06_flash_v3_hopper", "FlashAttention-3: asynchronous MMAs that overlap with softmax", {}};
  c.steps = {
      forward_step("v1_sections", "tile scheduler, head sections that fit in L2, register epilogue",
                   ATTN_LAUNCH(v1_sections)),
      forward_step("v2_separate_phases", "S, softmax and P V as separate phases of a whole tile",
                   ATTN_LAUNCH(v2_separate_phases)),
      forward_step("v3_wgmma", "wgmma: warpgroup-wide MMAs, operands from shared memory",
                   ATTN_LAUNCH(v3_wgmma)),
      forward_step("v4_tma", "TMA and mbarriers replace cp.async", ATTN_LAUNCH(v4_tma)),
      forward_step("v5_warp_specialised", "producer and consumer warps, two-stage pipeline",
                   ATTN_LAUNCH(v5_warp_specialised)),
      forward_step("v6_pingpong", "ping-pong: one warpgroup's MMAs run during the other's softmax",
                   ATTN_LAUNCH(v6_pingpong)),
      forward_step("v7_overlap", "intra-warpgroup overlap: softmax with P V of the previous block",
                   ATTN_LAUNCH(v7_overlap)),
      forward_step("v8_persistent",
                   "static persistent scheduler: one block per SM, tiles in snake order",
                   ATTN_LAUNCH(v8_persistent)),
      dynamic_step("v9_dynamic_scheduler",
                   "dynamic tile scheduler: the next tile from an atomic counter",
                   ATTN_LAUNCH(v9_dynamic_scheduler)),
      dynamic_step("v10_double_buffered_q", "double-buffered Q: the next tile's Q is prefetched",
                   ATTN_LAUNCH(v10_double_buffered_q)),
      dynamic_step("v11_cross_tile",
                   "cross-tile overlap: a tile's first S before the previous tile's last P V",
                   ATTN_LAUNCH(v11_cross_tile)),
      dynamic_step("v12_lazy_rescale",
                   "lazy rescale: only if a row max has grown by more than 8 (log2 units)",
                   ATTN_LAUNCH(v12_lazy_rescale)),
      featured_step("v13_features", "softcap, and packed sequences of different lengths",
                    ATTN_LAUNCH(v13_features)),
      featured_step("v14_tuned", "tile sizes per head dim, from a sweep", ATTN_LAUNCH(v14_tuned)),
  };
  for (Step& step : c.steps | std::views::take(2)) step.needs = kHopperTarget;  // with mma.sync
  backward_host::add_steps(c);
  c.steps.push_back(backward_host::d256_step(
      "b8_split_columns", "d=256: one warpgroup for S, one for dP; each half of dK and dV",
      ATTN_LAUNCH(b8_split_columns), {64, 64}));
  c.steps.push_back(backward_host::d256_step(
      "b9_cluster", "d=256: two blocks share the sum of dQ, and loads of Q and dO",
      ATTN_LAUNCH(b9_cluster), {64, 128}));
  c.steps.push_back(backward_host::deterministic_step(
      "b10_deterministic", "dQ in a fixed order by semaphores: bitwise equal",
      ATTN_LAUNCH(b10_deterministic)));
  c.steps.push_back(backward_host::deterministic_d256_step(
      "b11_deterministic_cluster", "d=256: the two blocks of a cluster add to dQ in a fixed order",
      ATTN_LAUNCH(b11_deterministic_cluster)));
  c.steps.push_back(backward_host::featured_backward_step(
      "b12_features", "softcap, and packed sequences of different lengths",
      ATTN_LAUNCH(b12_features)));
  c.steps.push_back(backward_host::d128_step(
      "b13_v_in_registers", "d=128: half of V is an operand in registers",
      ATTN_LAUNCH(b13_v_in_registers)));
  c.steps.push_back(backward_host::softcap_d256_step(
      "b14_softcap_d256", "d=256 with softcap", ATTN_LAUNCH(b14_softcap_d256)));
  c.steps.push_back(backward_host::packed_d256_step(
      "b15_packed_d256", "d=256: packed sequences of different lengths",
      ATTN_LAUNCH(b15_packed_d256)));
  c.steps.push_back(backward_host::d256_step(
      "b16_issue_order", "d=256: a product is issued when its operands have come",
      ATTN_LAUNCH(b16_issue_order), {64, 128}));
  std::ranges::move(fp8_steps(), std::back_inserter(c.steps));
  return c;
}

}  // namespace

const Chapter& chapter() {
  static const Chapter c = make_chapter();
  return c;
}

}  // namespace attn
