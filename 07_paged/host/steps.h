// Kinds of steps of chapter 07: what they take, what they cost, their workspaces and plans.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "attn/step.h"
#include "host/plan.h"
#include "host/prefix_plan.h"

namespace attn::builders {

using Reason = std::optional<std::string>;
using MakePlan = plans::Plan (*)(const Problem&, const std::vector<int64_t>&, int64_t);
using TilesOf = plans::PrefixTiles (*)(int64_t head_dim);

/// Why no step takes the problem, or nothing: element type, head dim, lengths, size of the pool.
Reason refuse_all(const Problem& p);
/// One block per query head, without splits (v1).
Step one_block(std::string name, std::string idea, Launch launch);
/// Blocks that take runs of tiles across heads and sequences (v2, v3).
Step runs(std::string name, std::string idea, Launch launch);
/// Blocks whose work the host plans: `make` for the cost, `tensors` for the kernel (v4, v5, v14).
Step planned(std::string name, std::string idea, Launch launch, MakePlan make,
             HostTensors (*tensors)(const Problem&, const HostTensors&));
/// planned() with softcap, ALiBi, sinks and a rotary embedding of queries (v10).
Step with_variants(std::string name, std::string idea, Launch launch);
/// A kernel makes the plan as the first phase of the launch (v6).
Step device_planned(std::string name, std::string idea, Launch launch);
/// Many queries per sequence. `takes`: features of the problem (v7).
Step prefill(std::string name, std::string idea, std::vector<std::string> takes, Launch launch);
/// prefill() with a tree mask (v9).
Step with_trees(std::string name, std::string idea, Launch launch);
/// prefill() by TMA and wgmma: page sizes that are a multiple of 8 (v15).
Step hopper_prefill(std::string name, std::string idea, Launch launch);
/// Prefill and decoding in one launch (v11).
Step mixed(std::string name, std::string idea, Launch launch);
/// planned(), and shared prefixes are read once. `tiles_of`: tiles of the prefix kernel (v8).
Step shared(std::string name, std::string idea, Launch launch, TilesOf tiles_of);
/// shared() by TMA and wgmma (v17).
Step hopper_shared(std::string name, std::string idea, Launch launch);
/// Latent attention with `rows` rows per block (v12).
Step latent(std::string name, std::string idea, Launch launch, int64_t rows);
/// latent() by wgmma (v13).
Step latent_wgmma(std::string name, std::string idea, Launch launch);
/// latent_wgmma() whose pages arrive as boxes of TMA (v16).
Step latent_boxes(std::string name, std::string idea, Launch launch);
/// refuse_all(), and the number of new tokens.
Reason refuse_append(const Problem& p);
/// Steps that move tokens and compute nothing: one phase, named `phase` (a1, c1).
Step copies(std::string name, std::string idea, const Operation& operation, const char* phase,
            Launch launch, Reason (*refuses)(const Problem&));

}  // namespace attn::builders
