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

Reason refuse_all(const Problem& p);
Step one_block(std::string name, std::string idea, Launch launch);
Step runs(std::string name, std::string idea, Launch launch);
Step planned(std::string name, std::string idea, Launch launch, MakePlan make,
             HostTensors (*tensors)(const Problem&, const HostTensors&));
Step with_variants(std::string name, std::string idea, Launch launch);
Step device_planned(std::string name, std::string idea, Launch launch);
Step prefill(std::string name, std::string idea, std::vector<std::string> takes, Launch launch);
Step with_trees(std::string name, std::string idea, Launch launch);
Step hopper_prefill(std::string name, std::string idea, Launch launch);
Step mixed(std::string name, std::string idea, Launch launch);
Step shared(std::string name, std::string idea, Launch launch, TilesOf tiles_of);
Step hopper_shared(std::string name, std::string idea, Launch launch);
Step latent(std::string name, std::string idea, Launch launch, int64_t rows);
Step latent_wgmma(std::string name, std::string idea, Launch launch);
Step latent_boxes(std::string name, std::string idea, Launch launch);
Reason refuse_append(const Problem& p);
Step copies(std::string name, std::string idea, const Operation& operation, const char* phase,
            Launch launch, Reason (*refuses)(const Problem&));

}  // namespace attn::builders
