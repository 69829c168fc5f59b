/// \file
/// The choice of a step: attn_which, and the steps that a plan takes without a name.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "api/attention.h"
#include "api/steps.h"
#include "tests/catch.h"

using namespace attn;

namespace {

attn_problem emulated_problem() {
  attn_problem p;
  attn_problem_defaults(&p);
  p.backend = ATTN_EMULATED, p.batch = 2, p.heads = 4, p.kv_heads = 2;
  return p;
}

}  // namespace

TEST_CASE("attn_which names every step of an operation, and why not", "[which]") {
  attn_problem p = emulated_problem();
  p.causal = 1, p.seqlen_q = 33, p.seqlen_k = 50, p.head_dim = 64;
  const auto lines = [&] {
    std::size_t bytes = 0;
    REQUIRE(attn_which("forward", &p, nullptr, 0, &bytes) == ATTN_OK);
    std::string text(bytes, 'x');
    REQUIRE(attn_which("forward", &p, text.data(), bytes, nullptr) == ATTN_OK);
    CHECK(text.back() == 0);
    return text;
  };
  const auto best = [&] {
    attention::Plan plan(attn_forward_plan, p);
    return std::string(plan.step());
  };
  std::string text = lines();
  CHECK(text.find(best() + " ") == 0);
  CHECK(best() == "06_flash_v3_hopper/v14_tuned");
  p.head_dim = 96;
  text = lines();
  CHECK(text.find("no: head_dim 96: this step takes 64, 128 and 256") != std::string::npos);
  CHECK(best() == "04_flash_v2/v13_tuned");
  p.head_dim = 40, p.dtype = ATTN_FP32;
  text = lines();
  CHECK(text.find(fmt::format("{:<40} best\n", best())) != text.npos);
  int forwards = 0;
  for (const api::NamedStep& named : api::all_steps()) {
    if (named.step->operation->name != "forward") continue;
    ++forwards;
    CHECK(text.find(named.name) != text.npos);
  }
  CHECK(std::ranges::count(text, '\n') == forwards);
  CHECK(attn_which("backwards", &p, nullptr, 0, nullptr) == ATTN_INVALID_VALUE);
}

TEST_CASE("with deterministic, the best step is one whose results do not differ", "[which]") {
  attn_problem p = emulated_problem();
  p.deterministic = 1, p.seqlen_q = p.seqlen_k = 4096;
  const auto best = [&] {
    attention::Plan plan(attn_backward_plan, p);
    return std::string(plan.step());
  };
  p.head_dim = 64;
  CHECK(best() == "06_flash_v3_hopper/b10_deterministic");
  p.head_dim = 256;
  CHECK(best() == "06_flash_v3_hopper/b11_deterministic_cluster");
  p.head_dim = 128, p.softcap = 20;
  CHECK(best() == "04_flash_v2/b8_deterministic");
  p.step = "04_flash_v2/b7_tuned";
  attn_plan* plan = nullptr;
  CHECK(attn_backward_plan(&p, &plan) == ATTN_UNSUPPORTED);
  CHECK(std::string(attn_last_error()) ==
        "04_flash_v2/b7_tuned: deterministic 1: results differ from run to run (order of atomics)");
  p.deterministic = 0;
  CHECK(attn_backward_plan(&p, &plan) == ATTN_OK);
  attn_plan_destroy(plan);
  p.step = nullptr;
  CHECK(best() == "06_flash_v3_hopper/b12_features");
  p.seqlen_q = p.seqlen_k = 512, p.batch = 64;  // many short sequences, too
  CHECK(best() == "06_flash_v3_hopper/b12_features");
  p.head_dim = 256;
  CHECK(best() == "06_flash_v3_hopper/b15_packed_d256");
  p.softcap = 0, p.packed = 1, p.total_q = p.total_k = 64 * 512;
  CHECK(best() == "06_flash_v3_hopper/b15_packed_d256");
  p.head_dim = 64;
  CHECK(best() == "06_flash_v3_hopper/b12_features");
  p.head_dim = 128, p.batch = 1, p.packed = 0, p.seqlen_q = p.seqlen_k = 1024;
  CHECK(best() == "06_flash_v3_hopper/b13_v_in_registers");
  p.batch = 64;  // many short sequences
  CHECK(best() == "06_flash_v3_hopper/b13_v_in_registers");
  p.kv_heads = 4;  // and no groups
  CHECK(best() == "06_flash_v3_hopper/b10_deterministic");
  p.batch = 31;
  CHECK(best() == "06_flash_v3_hopper/b13_v_in_registers");
  p.batch = 32;
  CHECK(best() == "06_flash_v3_hopper/b10_deterministic");
  p.seqlen_k = 1023;
  CHECK(best() == "06_flash_v3_hopper/b13_v_in_registers");
  p.seqlen_q = p.seqlen_k = 1025;
  CHECK(best() == "06_flash_v3_hopper/b13_v_in_registers");
  p.head_dim = 64;
  CHECK(best() == "06_flash_v3_hopper/b7_dependent_launches");
  p.head_dim = 256;
  CHECK(best() == "06_flash_v3_hopper/b16_issue_order");
  p.seqlen_q = p.seqlen_k = 1024;  // many short sequences
  CHECK(best() == "06_flash_v3_hopper/b11_deterministic_cluster");
}
