#include "check/refusals.h"

#include <algorithm>
#include <functional>
#include <set>

#include "attn/feature.h"
#include "check/operation.h"

namespace attn {
namespace {

// Returns "--head-dim" for "--head-dim 96: this step takes 32, 64 and 128".
std::string option_of(const std::string& reason) {
  return reason.substr(0, reason.find_first_of(" :"));
}

void drop(const Feature& f, Problem& p) {
  if (f.name == "mask")
    p.mask = nullptr;
  else if (f.name == "varlen")
    p.varlen_q.clear(), p.varlen_k.clear();
  else
    f.give(p, {});
}

// A replacement for the value that a reason names.
struct Repair {
  std::string option;
  std::function<void(Problem&)> change;
};
const std::vector<Repair>& repairs() {
  static const std::vector<Repair> all = [] {
    std::vector<Repair> some;
    for (const DType type : {DType::bf16, DType::fp16, DType::fp32})
      some.push_back({"--dtype", [=](Problem& p) { p.dtype = type; }});
    for (const int64_t d : {64, 128, 32, 256})
      some.push_back({"--head-dim", [=](Problem& p) { p.head_dim = d; }});
    some.push_back({"--causal", [](Problem& p) { p.causal = false; }});
    some.push_back({"--window", [](Problem& p) { p.window_left = p.window_right = -1; }});
    some.push_back({"--scale", [](Problem& p) { p.softmax_scale = 1; }});
    for (const int64_t n : {1, 128}) {
      some.push_back({"--seqlen-q", [=](Problem& p) { p.seqlen_q = n; }});
      some.push_back({"--seqlen-k", [=](Problem& p) { p.seqlen_k = n; }});
    }
    some.push_back({"--kv-heads", [](Problem& p) { p.kv_heads = p.heads; }});
    some.push_back({"--heads", [](Problem& p) { p.heads = p.kv_heads; }});
    some.push_back({"--batch", [](Problem& p) { p.batch = 1; }});
    return some;
  }();
  return all;
}

}  // namespace

std::vector<std::string> refusals(const Step& step, const Problem& problem) {
  std::vector<std::string> all;
  std::set<std::string> repaired;
  Problem p = problem;
  const auto without = [&](const Feature& f) {
    if (f.values(p).empty() || f.everywhere || takes(step, f.name)) return;
    // Earlier reasons are dropped: the first reason is the step's own.
    if (const auto reason = refusal(step, p)) all.push_back(*reason);
    drop(f, p);
  };
  std::ranges::for_each(shared_features(), without);
  std::ranges::for_each(step.operation->own, without);
  for (auto reason = refusal(step, p); reason;) {
    all.push_back(*reason);
    repaired.insert(option_of(*reason));
    // The next refused value must be the user's, not that of a repair.
    std::optional<std::string> next;
    bool found = false;
    for (const Repair& r : repairs()) {
      if (r.option != option_of(*reason)) continue;
      Problem changed = p;
      r.change(changed);
      const auto then = refusal(step, changed);
      if (then && repaired.contains(option_of(*then))) continue;
      p = changed, next = then, found = true;
      if (!then) break;
    }
    if (!found) break;
    reason = next;
  }
  return all;
}

}  // namespace attn
