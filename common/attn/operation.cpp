#include "attn/operation.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "attn/step.h"
#include "attn/tiling.h"

namespace attn {
namespace {

// The inputs of attention, and those that only some problems have.
std::vector<TensorSpec> attention_inputs(const Problem& p) {
  std::vector specs{like_q(p, "q"), like_k(p, "k"), like_k(p, "v")};
  if (p.alibi) specs.push_back({"alibi", {1, 1, 1, p.heads}, DType::fp32});
  if (p.varlen())
    for (const char* name : {"cu_seqlens_q", "cu_seqlens_k"})
      specs.push_back({name, {1, 1, 1, p.batch + 1}, DType::int32});
  return specs;
}
// Two products of d multiply-adds for each pair of a query and a key it sees.
double forward_flop(const Problem& p) {
  return 4.0 * static_cast<double>(p.head_dim) * p.total_pairs();
}

// x, y: rows of scores and of probabilities.
TensorSpec rows_like(const Problem& p, std::string name, DType t, int64_t columns) {
  return {std::move(name), {p.batch, p.heads, p.seqlen_q, columns}, t};
}
std::vector<TensorSpec> no_tensors(const Problem&) { return {}; }
double no_flop(const Problem&) { return 0; }

const std::array<Operation, 4>& operations() {
  static const std::array<Operation, 4> all{
      Operation{
          "forward",
          attention_inputs,
          no_tensors,
          [](const Problem& p) { return std::vector{like_q(p, "o"), lse_of(p)}; },
          forward_flop,
          forward_reference,
      },
      Operation{
          "backward",
          [](const Problem& p) {
            std::vector specs = attention_inputs(p);
            specs.push_back(like_q(p, "do"));
            return specs;
          },
          [](const Problem& p) { return std::vector{like_q(p, "o"), lse_of(p)}; },
          [](const Problem& p) {
            return std::vector{like_q(p, "dq"), like_k(p, "dk"), like_k(p, "dv")};
          },
          [](const Problem& p) { return 2.5 * forward_flop(p); },
          backward_reference,
      },
      Operation{
          "softmax",
          [](const Problem& p) { return std::vector{rows_like(p, "x", p.dtype, p.seqlen_k)}; },
          no_tensors,
          [](const Problem& p) { return std::vector{rows_like(p, "y", p.dtype, p.seqlen_k)}; },
          no_flop,
          softmax_reference,
      },
      Operation{
          "softmax_topk",
          [](const Problem& p) { return std::vector{rows_like(p, "x", p.dtype, p.seqlen_k)}; },
          no_tensors,
          [](const Problem& p) {
            return std::vector{rows_like(p, "values", p.dtype, p.top_k),
                               rows_like(p, "indices", DType::int32, p.top_k)};
          },
          no_flop,
          softmax_topk_reference,
      }};
  return all;
}

}  // namespace

double Operation::compulsory_bytes(const Problem& p) const {
  double bytes = 0;
  for (const auto* specs : {&inputs, &saved, &outputs})
    for (const TensorSpec& spec : (*specs)(p)) bytes += static_cast<double>(spec.bytes());
  return bytes;
}

namespace {
// Of a problem whose sequences have one length.
Cost cost_with_order(const Step& step, const Problem& p, const Machine& machine) {
  Cost cost = step.cost(p);
  if (const auto tiling = step.tiled ? tiling_of(step.launch, p) : std::nullopt) {
    const auto phase = std::ranges::find(cost, "attention", &Phase::name);
    phase->hbm_read += kv_bytes_from_hbm(p, *tiling, machine) -
                       2 * double(p.batch * p.kv_heads * p.seqlen_k * p.head_dim * size_of(p.dtype));
  }
  return cost;
}
}  // namespace

Cost cost_of(const Step& step, const Problem& p, const Machine& machine) {
  if (!p.varlen()) return cost_with_order(step, p, machine);
  Problem smallest = p.sequence(0);
  smallest.seqlen_q = smallest.seqlen_k = 1;
  Cost total = step.cost(smallest);
  for (Phase& phase : total) phase = Phase{.name = phase.name};
  double written = 0;  // of sequences without pairs
  for (int64_t b = 0; b < p.batch; ++b) {
    const Problem one = p.sequence(b);
    if (one.seqlen_q == 0 || one.seqlen_k == 0) {
      for (const TensorSpec& spec : find_operation(step.operation)->outputs(one))
        written += static_cast<double>(spec.bytes());
      continue;
    }
    const Cost cost = cost_with_order(step, one, machine);
    for (std::size_t n = 0; n < cost.size(); ++n) total[n] += cost[n];
  }
  total.back().hbm_write += written;
  if (total.back().l2_bytes > 0) total.back().l2_bytes += written;  // 0: not modelled
  return total;
}

bool works_on_rows(std::string_view operation) { return operation.starts_with("softmax"); }

std::string problem_text(const Operation& op, const Problem& p) {
  std::string text = p.text();
  if (!works_on_rows(op.name)) return text;
  text.erase(0, text.find(fmt::format(" {}", name(p.dtype))));  // the shape in front of it
  return fmt::format("rows={} cols={}{}", p.batch * p.heads * p.seqlen_q, p.seqlen_k, text);
}

const Operation* find_operation(std::string_view name) {
  for (const Operation& op : operations())
    if (op.name == name) return &op;
  return nullptr;
}

}  // namespace attn
