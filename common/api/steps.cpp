#include "api/steps.h"

#include <algorithm>
#include <cctype>

#include "attn/mask.h"
#include "device/device.h"

namespace attn::api {

const std::vector<NamedStep>& all_steps() {
  static const std::vector<NamedStep> all = [] {
    std::vector<NamedStep> some;
    for (const Chapter* chapter : chapters())
      for (const Step& step : chapter->steps)
        some.push_back({chapter->name + "/" + step.name, &step});
    return some;
  }();
  return all;
}

std::string in_fields(const std::string& line) {
  std::string fields;
  bool option = false;
  for (std::size_t n = 0; n < line.size(); ++n) {
    const auto is_letter = [&](std::size_t at) {
      return at < line.size() && std::islower(line[at]);
    };
    if (!option && line.compare(n, 2, "--") == 0 && is_letter(n + 2)) {
      option = true, ++n;
      continue;
    }
    option = option && (is_letter(n) || (line[n] == '-' && is_letter(n + 1)));
    fields += option && line[n] == '-' ? '_' : line[n];
  }
  return fields;
}

std::optional<std::string> reason_against(const NamedStep& named, const Known& known) {
  const Step& step = *named.step;
  if (const auto reason = refusal(step, known.problem)) return in_fields(*reason);
  if (known.device.backend == Backend::gpu) {
    const GpuInfo& gpu = gpu_info();
    if (auto reason = lacks(step, gpu.name, 10 * gpu.cc_major + gpu.cc_minor)) return reason;
  }
  if (!step.launch.on(known.device.backend)) return "not built for this device";
  if (known.deterministic && !step.deterministic)
    return "deterministic 1: results differ from run to run (order of atomics)";
  if (step.plan && !known.host_lengths)
    return "schedules on the host: needs lengths on the host (lengths_k)";
  return std::nullopt;
}

namespace {
// Of each operation the steps that are tried first: the last of their ladders, as measured in the
// chapters' RESULTS.md. The others follow, later chapters and later steps first.
struct Preferred {
  std::string_view operation;
  std::vector<std::string_view> steps;
};
const std::vector<Preferred>& preferred() {
  static const std::vector<Preferred> all{
      {"forward",
       {"06_flash_v3_hopper/v14_tuned", "04_flash_v2/v13_tuned", "03_flash_v1/v10_exp2"}},
      {"forward with blocks", {"08_quant_sparse/s1_block_mask"}},
      {"forward with columns", {"08_quant_sparse/s2_flashmask"}},
      {"quantised", {"08_quant_sparse/q8_tuned", "06_flash_v3_hopper/f8_q_in_registers"}},
      {"backward of many short sequences",
       {"06_flash_v3_hopper/b10_deterministic", "06_flash_v3_hopper/b11_deterministic_cluster",
        "06_flash_v3_hopper/b12_features", "06_flash_v3_hopper/b15_packed_d256",
        "04_flash_v2/b7_tuned"}},
      {"backward",
       {"06_flash_v3_hopper/b13_v_in_registers", "06_flash_v3_hopper/b7_dependent_launches",
        "06_flash_v3_hopper/b12_features", "06_flash_v3_hopper/b16_issue_order",
        "06_flash_v3_hopper/b15_packed_d256", "04_flash_v2/b7_tuned"}},
      {"decode",
       {"05_flash_decoding/v14_unified_max", "05_flash_decoding/v13_even_splits",
        "05_flash_decoding/v16_features"}},
      {"paged_decode",
       {"07_paged/v14_cross_work_tile", "07_paged/v10_variants", "07_paged/v6_device_plan"}},
      {"paged_prefill", {"07_paged/v15_prefill_tma", "07_paged/v7_prefill"}},
      {"paged_mla", {"07_paged/v16_mla_seesaw", "07_paged/v13_mla_wgmma"}},
  };
  return all;
}

// There b10 was 1.00 to 1.18 times as fast as b7 on an H200 (N from 256 to 1024), and b11 0.98 to
// 1.16 times as fast as b16 (N=512 and 1024). A key tile waits for later ones of its head: that
// takes little time if other heads are between them in the order of the tiles.
bool is_many_short(const Problem& p) {
  return p.seqlen_q <= 1024 && p.seqlen_k == p.seqlen_q && p.group() == 1 &&
         p.batch * p.heads >= 128;
}
}  // namespace

std::vector<const NamedStep*> by_preference(std::string_view operation, const Problem& p) {
  std::string_view row = operation;
  if (operation == "forward" && bits_of(p.dtype) < 16)
    row = "quantised";
  else if (operation == "forward" && p.mask)
    row = dynamic_cast<const BlockMask*>(p.mask.get()) ? "forward with blocks"
                                                       : "forward with columns";
  else if (operation == "backward" && is_many_short(p))
    row = "backward of many short sequences";
  std::vector<const NamedStep*> steps;
  for (const NamedStep& named : all_steps())
    if (named.step->operation->name == operation) steps.insert(steps.begin(), &named);
  for (const Preferred& first : preferred()) {
    if (first.operation != row) continue;
    const auto rank = [&](const NamedStep* named) {
      return std::ranges::find(first.steps, named->name) - first.steps.begin();
    };
    std::ranges::stable_sort(steps, {}, rank);
  }
  return steps;
}

}  // namespace attn::api
