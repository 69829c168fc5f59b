// The backward steps of chapter 04: cost models and limits. For chapter.cpp only.
#pragma once

#include <algorithm>
#include <string>

#include "attn/backward_cost.h"
#include "check/operation.h"

ATTN_DECLARE_STEP(v13_tuned);
ATTN_DECLARE_STEP(b1_kv_parallel);
ATTN_DECLARE_STEP(b2_transposed);
ATTN_DECLARE_STEP(b3_warp_pairs);
ATTN_DECLARE_STEP(b4_staggered_dq);
ATTN_DECLARE_STEP(b5_l2_order);
ATTN_DECLARE_STEP(b6_features);
ATTN_DECLARE_STEP(b7_tuned);
ATTN_DECLARE_STEP(b8_deterministic);

namespace attn::backward_host {

using Tiles = BackwardTiles;

// Tiles of b1 to b6, as in their Config.
inline Tiles first_tiles(const Problem& p) { return {p.head_dim == 128 ? 64 : 128, 128}; }

// Tiles of b7 and b8.
inline Tiles tuned_tiles(const Problem& p) {
  const bool features = p.dropout > 0 || p.softcap > 0 || p.softmax_scale < 1e-37;
  if (p.head_dim > 128 || (p.head_dim == 64 && !features)) return {64, 64};
  if (p.head_dim == 128) return {features ? 32 : 64, 128};
  return {p.head_dim == 96 || features ? 64 : 128, 128};
}

// b8: slices of dQ per head, the same rule as in its file.
inline int64_t slices_of(const Problem& p) {
  constexpr int64_t kMost = 8;
  const bool three_blocks = p.head_dim == 64 && tuned_tiles(p).block_n == 64;  // per SM
  const int64_t at_once = 132 * (three_blocks ? 3 : 1);
  const int64_t heads = p.batch * p.kv_heads, tiles = tuned_tiles(p).key_tiles(p);
  const auto waves = [=](int64_t slices) { return (slices * heads + at_once - 1) / at_once; };
  int64_t best = 1;
  for (int64_t n = 2; n <= std::min(tiles, std::max(kMost, at_once / heads)); ++n)
    if (waves(n) * best < waves(best) * n) best = n;
  return best;
}
inline int64_t one_slice(const Problem&) { return 1; }

inline Step step(std::string name, std::string idea, Tiles (*tiles)(const Problem&),
                 int64_t (*slices)(const Problem&), Launch launch) {
  return {
      .name = std::move(name),
      .operation = &backward(),
      .idea = std::move(idea),
      .support = {},
      .limits = {.dtypes = k16Bits, .head_dims = {32, 64, 128}},
      .refuses = [tiles](const Problem& p) { return refuse_grid(p, tiles(p)); },
      .workspaces =
          [tiles, slices](const Problem& p) {
            return gradient_workspaces(p, tiles(p), slices(p));
          },
      .cost =
          [tiles, slices](const Problem& p) {
            const auto n = double(slices(p));
            return Cost{dot_phase(p, n), gradient_phase(p, tiles(p)), convert_phase(p, n)};
          },
      .launch = launch,
      .prepare = ATTN_LAUNCH(v13_tuned),
      .deterministic = slices != one_slice,
      .needs = kAmpere,
  };
}

// b1 to b6.
inline Step first_step(std::string name, std::string idea, Launch launch) {
  Step first = step(std::move(name), std::move(idea), first_tiles, one_slice, launch);
  first.support = "any lengths, packed sequences, masks, GQA";
  first.limits.least_scale = kLeastScale;
  first.takes = {"varlen"};
  return first;
}

inline Step features_step(std::string name, std::string idea, Launch launch) {
  Step features = step(std::move(name), std::move(idea), first_tiles, one_slice, launch);
  features.support = "any lengths, packed sequences, masks, GQA, softcap, dropout";
  features.takes = {"dropout", "softcap", "varlen"};
  return features;
}

// b7 and b8.
inline Step tuned_step(std::string name, std::string idea, int64_t (*slices)(const Problem&),
                       Launch launch) {
  Step tuned = step(std::move(name), std::move(idea), tuned_tiles, slices, launch);
  tuned.support = "any lengths, packed sequences, masks, GQA, softcap, dropout";
  tuned.limits.head_dims = {32, 64, 96, 128, 192, 256};
  tuned.takes = {"dropout", "softcap", "varlen"};
  return tuned;
}

inline void add_steps(Chapter& c) {
  c.steps.push_back(first_step("b1_kv_parallel",
                               "parallel over key tiles; query tiles skipped, masked, unmasked",
                               ATTN_LAUNCH(b1_kv_parallel)));
  c.steps.push_back(first_step("b2_transposed", "transposed scores: P and dS are register operands",
                               ATTN_LAUNCH(b2_transposed)));
  c.steps.push_back(first_step("b3_warp_pairs",
                               "pairs of warps: one owns P and dV, the other dS and dK",
                               ATTN_LAUNCH(b3_warp_pairs)));
  c.steps.push_back(first_step("b4_staggered_dq",
                               "half of the warps add to dQ one tile later: one barrier per tile",
                               ATTN_LAUNCH(b4_staggered_dq)));
  c.steps.push_back(first_step("b5_l2_order",
                               "sections of heads; blocks of a head start at different rows",
                               ATTN_LAUNCH(b5_l2_order)));
  c.steps.push_back(features_step("b6_features", "softcap and dropout", ATTN_LAUNCH(b6_features)));
  c.steps.push_back(
      tuned_step("b7_tuned", "tiles per head dim, from a sweep", one_slice, ATTN_LAUNCH(b7_tuned)));
  c.steps.push_back(tuned_step("b8_deterministic",
                               "split dQ accumulators, reduced in a fixed order", slices_of,
                               ATTN_LAUNCH(b8_deterministic)));
}

}  // namespace attn::backward_host
