// The backward steps of chapter 06: cost models and limits. For chapter.cpp only.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "attn/backward_cost.h"
#include "check/operation.h"
#include "kernels/whole_heads.h"

ATTN_DECLARE_STEP(v8_persistent);
ATTN_DECLARE_STEP(b1_wgmma);
ATTN_DECLARE_STEP(b2_warp_specialised);
ATTN_DECLARE_STEP(b3_overlap);
ATTN_DECLARE_STEP(b4_persistent);
ATTN_DECLARE_STEP(b5_whole_heads);
ATTN_DECLARE_STEP(b6_tuned);
ATTN_DECLARE_STEP(b7_dependent_launches);
ATTN_DECLARE_STEP(b8_split_columns);
ATTN_DECLARE_STEP(b9_cluster);
ATTN_DECLARE_STEP(b10_deterministic);
ATTN_DECLARE_STEP(b11_deterministic_cluster);
ATTN_DECLARE_STEP(b12_features);
ATTN_DECLARE_STEP(b13_v_in_registers);
ATTN_DECLARE_STEP(b14_softcap_d256);
ATTN_DECLARE_STEP(b15_packed_d256);
ATTN_DECLARE_STEP(b16_issue_order);
ATTN_DECLARE_LAUNCH(b12_features, prepare);

namespace attn::backward_host {

// Tiles as in the steps' Config.
inline BackwardTiles tiles_of(const Problem& p) { return {p.head_dim == 128 ? 64 : 128, 128}; }

inline Step step(std::string name, std::string idea, Launch launch) {
  return {
      .name = std::move(name),
      .operation = &backward(),
      .idea = std::move(idea),
      .support = "any lengths, masks, GQA",
      .limits = {.dtypes = k16Bits, .head_dims = {64, 128}, .least_scale = kLeastScale},
      .refuses = [](const Problem& p) { return refuse_grid(p, tiles_of(p)); },
      .workspaces = [](const Problem& p) { return gradient_workspaces(p, tiles_of(p)); },
      .cost =
          [](const Problem& p) {
            return Cost{dot_phase(p), gradient_phase(p, tiles_of(p)), convert_phase(p)};
          },
      .launch = launch,
      .prepare = ATTN_LAUNCH(v8_persistent),
      .deterministic = false,
      .needs = kHopper,
  };
}

// With a tile counter, which the preprocess kernel clears.
inline Step persistent_step(std::string name, std::string idea, Launch launch) {
  Step persistent = step(std::move(name), std::move(idea), launch);
  persistent.workspaces = [](const Problem& p) {
    std::vector<Workspace> all = gradient_workspaces(p, tiles_of(p));
    all.push_back({"tile_counter", 4});
    return all;
  };
  return persistent;
}

// Blocks own whole heads if the rule for a GPU of 132 SMs says so: accumulators are not cleared and
// stay in L2, and the block converts dQ.
inline Step whole_heads_step(std::string name, std::string idea, Launch launch) {
  Step whole = persistent_step(std::move(name), std::move(idea), launch);
  whole.cost = [general = whole.cost](const Problem& p) {
    if (p.varlen() || !owns_whole_heads(p, Machine{})) return general(p);
    Cost cost{dot_phase(p, 0), gradient_phase(p, tiles_of(p))};
    const Phase convert = convert_phase(p);
    cost[1].hbm_write += convert.hbm_write - convert.hbm_read;
    cost[1].l2_bytes += convert.hbm_write + convert.hbm_read;
    return cost;
  };
  return whole;
}

inline Step featured_backward_step(std::string name, std::string idea, Launch launch) {
  Step features = whole_heads_step(std::move(name), std::move(idea), launch);
  features.support = "any lengths, packed sequences, masks, GQA, softcap";
  features.takes = {"softcap", "varlen"};
  features.prepare = ATTN_LAUNCH_OF(b12_features, prepare);
  return features;
}

inline Step d128_step(std::string name, std::string idea, Launch launch) {
  Step d128 = whole_heads_step(std::move(name), std::move(idea), launch);
  d128.limits.head_dims = {128};
  return d128;
}

// Head dim 256: 64 keys a block. `tiles`: of a block, or of the two of a cluster, where each loads
// half of the columns of Q and dO, for both, and adds half of the columns of dQ.
inline Step d256_step(std::string name, std::string idea, Launch launch, BackwardTiles tiles) {
  Step d256 = step(std::move(name), std::move(idea), launch);
  d256.limits.head_dims = {256};
  d256.refuses = [](const Problem& p) {
    Problem whole = p;  // two blocks per tile of 64 rows convert dQ
    whole.seqlen_q = (p.seqlen_q + 63) / 64 * 64;
    return refuse_grid(whole, {32, 64});
  };
  d256.workspaces = [tiles](const Problem& p) {
    std::vector<Workspace> all = gradient_workspaces(p, tiles);
    all.push_back({"tile_counter", 4});
    return all;
  };
  d256.cost = [tiles](const Problem& p) {
    return Cost{dot_phase(p), gradient_phase(p, tiles), convert_phase(p)};
  };
  return d256;
}

// The two of a cluster.
inline Step softcap_d256_step(std::string name, std::string idea, Launch launch) {
  Step softcap = d256_step(std::move(name), std::move(idea), launch, {64, 128});
  softcap.support = "any lengths, masks, GQA, softcap";
  softcap.takes = {"softcap"};
  softcap.prepare = ATTN_LAUNCH_OF(b12_features, prepare);
  return softcap;
}
inline Step packed_d256_step(std::string name, std::string idea, Launch launch) {
  Step packed = softcap_d256_step(std::move(name), std::move(idea), launch);
  packed.support = "any lengths, packed sequences, masks, GQA, softcap";
  packed.takes = {"softcap", "varlen"};
  return packed;
}

// With a semaphore per query tile, and per block of a cluster. Accumulators are not cleared, and
// the last addition converts dQ.
inline Step with_turns(Step ordered, BackwardTiles (*tiles)(const Problem&), int64_t blocks) {
  ordered.workspaces = [=, general = ordered.workspaces](const Problem& p) {
    std::vector<Workspace> all = general(p);
    all.push_back({"dq_semaphores", 4 * blocks * p.batch * p.heads * tiles(p).row_tiles(p)});
    return all;
  };
  ordered.cost = [general = ordered.cost](const Problem& p) {
    Cost cost{dot_phase(p, 0), general(p)[1]};
    const Phase convert = convert_phase(p);
    cost[1].hbm_write += convert.hbm_write;
    cost[1].l2_bytes += convert.hbm_write;
    return cost;
  };
  ordered.deterministic = true;
  return ordered;
}

inline Step deterministic_step(std::string name, std::string idea, Launch launch) {
  return with_turns(persistent_step(std::move(name), std::move(idea), launch), tiles_of, 1);
}
inline Step deterministic_d256_step(std::string name, std::string idea, Launch launch) {
  return with_turns(d256_step(std::move(name), std::move(idea), launch, {64, 128}),
                    [](const Problem&) { return BackwardTiles{64, 128}; }, 2);
}

inline void add_steps(Chapter& c) {
  c.steps.push_back(
      step("b1_wgmma", "five products by wgmma; P and dS from registers", ATTN_LAUNCH(b1_wgmma)));
  c.steps.push_back(step("b2_warp_specialised", "a producer warp loads Q and dO two stages ahead",
                         ATTN_LAUNCH(b2_warp_specialised)));
  c.steps.push_back(step("b3_overlap", "dP under exp, dV under the exchange of dS, dK under dQ",
                         ATTN_LAUNCH(b3_overlap)));
  c.steps.push_back(persistent_step("b4_persistent",
                                    "dynamic scheduler, longest key tiles first, heads in L2",
                                    ATTN_LAUNCH(b4_persistent)));
  c.steps.push_back(whole_heads_step("b5_whole_heads",
                                     "short sequences: a block owns whole heads, and their dQ",
                                     ATTN_LAUNCH(b5_whole_heads)));
  c.steps.push_back(whole_heads_step("b6_tuned",
                                     "buffers of K and V, exchange of dS, bodies, per head dim",
                                     ATTN_LAUNCH(b6_tuned)));
  c.steps.push_back(whole_heads_step("b7_dependent_launches",
                                     "launch latencies overlap with the kernel before",
                                     ATTN_LAUNCH(b7_dependent_launches)));
}

}  // namespace attn::backward_host
