/// \file
/// A row of the table of a small chapter of the tests: attention in fp32, without a mask.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "check/operation.h"

namespace attn::tests {

inline Step small_step(const char* name, LaunchFunction function) {
  return {.name = name,
          .operation = &forward(),
          .idea = "one thread per row",
          .support = "fp32 without a mask",
          .refuses = [](const Problem& p) -> std::optional<std::string> {
            if (p.dtype == DType::fp32 && !p.causal && p.heads == p.kv_heads) return std::nullopt;
            return "fp32 without a mask only";
          },
          .workspaces = [](const Problem&) { return std::vector<Workspace>{}; },
          .cost = [](const Problem&) { return Cost{Phase{.name = "attention"}}; },
          .launch = {nullptr, function}};
}

}  // namespace attn::tests
