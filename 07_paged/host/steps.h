// Kinds of steps of chapter 07: supported problems, costs, workspaces and plans.
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

/// Why no step supports the problem, or nothing: element type, head dim, lengths, size of the pool.
Reason refuse_all(const Problem& p);
/// One block per query head, without splits (v1).
Step one_block(std::string name, std::string idea, Launch launch);
/// Blocks that take runs of tiles across heads and sequences (v2, v3).
Step runs(std::string name, std::string idea, Launch launch);
/// Blocks with a host plan: `make` plans for the cost model, `tensors` for the kernel (v4, v5,
// v14).
Step planned(std::string name, std::string idea, Launch launch, MakePlan make,
             HostTensors (*tensors)(const Problem&, const HostTensors&));
/// planned() with softcap, ALiBi, sinks and RoPE on Q (v10).
Step with_variants(std::string name, std::string idea, Launch launch);
/// Planning kernel as the first phase of the launch (v6).
Step device_planned(std::string name, std::string idea, Launch launch);
/// Many queries per sequence. `takes`: supported features (v7).
Step prefill(std::string name, std::string idea, std::vector<std::string> takes, Launch launch);
/// prefill() with a tree mask (v9).
Step with_trees(std::string name, std::string idea, Launch launch);
/// prefill() with TMA and wgmma: page sizes that are multiples of 8 (v15).
Step hopper_prefill(std::string name, std::string idea, Launch launch);
/// Prefill and decoding in one launch (v11).
Step mixed(std::string name, std::string idea, Launch launch);
/// planned() plus shared prefixes, read once. `tiles_of`: tiles of the prefix kernel (v8).
Step shared(std::string name, std::string idea, Launch launch, TilesOf tiles_of);
/// shared() with TMA and wgmma (v17).
Step hopper_shared(std::string name, std::string idea, Launch launch);
/// Latent attention with `rows` rows per block (v12).
Step latent(std::string name, std::string idea, Launch launch, int64_t rows);
/// latent() with wgmma (v13).
Step latent_wgmma(std::string name, std::string idea, Launch launch);
/// latent_wgmma() with pages loaded as TMA boxes (v16).
Step latent_boxes(std::string name, std::string idea, Launch launch);
/// refuse_all(), and the number of new tokens.
Reason refuse_append(const Problem& p);
/// Steps that copy tokens: one phase, named `phase` (a1, c1).
Step copies(std::string name, std::string idea, const Operation& operation, const char* phase,
            Launch launch, Reason (*refuses)(const Problem&));

}  // namespace attn::builders
