#include "check/operation.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>

#include "attn/mask.h"
#include "attn/rotary.h"
#include "attn/tiling.h"
#include "check/inputs.h"

namespace attn {
namespace {

// Cumulative sequence lengths of a varlen batch: the first row of each sequence, and the end of the
// last.
TensorSpec cu_seqlens(const Problem& p, const char* name,
                      void (*made)(const Problem&, HostTensor&)) {
  return {name, {1, 1, 1, p.batch + 1}, DType::int32, {}, made, true, 1};
}
void begins_of_q(const Problem& p, HostTensor& t) { t.numbers = cumulative(p.varlen_q); }
void begins_of_k(const Problem& p, HostTensor& t) { t.numbers = cumulative(p.varlen_k); }

// The tensors of a mask; the mask fills them itself.
std::vector<TensorSpec> mask_specs(const Problem& p) {
  std::vector<TensorSpec> specs;
  for (const HostTensor& t : p.mask->tensors()) {
    specs.push_back(t.spec);
    specs.back().derived = true;
    specs.back().made = [](const Problem& problem, HostTensor& made) {
      for (HostTensor& own : problem.mask->tensors())
        if (own.spec.name == made.spec.name) made.data = own.data, made.numbers = own.numbers;
    };
  }
  return specs;
}

}  // namespace

std::vector<TensorSpec> attention_inputs(const Problem& p) {
  std::vector specs{like_q(p, "q"), like_k(p, "k"), like_k(p, "v")};
  if (p.alibi) specs.push_back(alibi_slopes(p));
  if (p.varlen()) {
    specs.push_back(cu_seqlens(p, "cu_seqlens_q", begins_of_q));
    specs.push_back(cu_seqlens(p, "cu_seqlens_k", begins_of_k));
  }
  if (p.mask) std::ranges::move(mask_specs(p), std::back_inserter(specs));
  return specs;
}

namespace {
// Two matrix products: d multiply-adds each per visible pair of query and key.
double forward_flop(const Problem& p) {
  return 4.0 * static_cast<double>(p.head_dim) * p.total_pairs();
}
std::vector<TensorSpec> no_tensors(const Problem&) { return {}; }
std::vector<TensorSpec> o_and_lse(const Problem& p) { return {like_q(p, "o"), lse_of(p)}; }

}  // namespace

const Operation& forward() {
  static const Operation operation{
      .name = "forward",
      .inputs =
          [](const Problem& p) {
            std::vector specs = attention_inputs(p);
            if (has_rotary(p)) specs.push_back(rotary_table(p));
            return specs;
          },
      .saved = no_tensors,
      .outputs = o_and_lse,
      .flop = forward_flop,
      .reference =
          [](const Problem& p, const HostTensors& inputs, Selection selection) {
            return attention_reference(p, inputs, selection, forward().own);
          },
      .own = {rotary_feature()},
  };
  return operation;
}

const Operation& backward() {
  static const Operation operation{
      .name = "backward",
      .inputs =
          [](const Problem& p) {
            std::vector specs = attention_inputs(p);
            specs.push_back(like_q(p, "do"));
            return specs;
          },
      .saved = o_and_lse,
      .outputs =
          [](const Problem& p) {
            return std::vector{like_q(p, "dq"), like_k(p, "dk"), like_k(p, "dv")};
          },
      .flop = [](const Problem& p) { return 2.5 * forward_flop(p); },
      .reference = backward_reference,
  };
  return operation;
}

TensorSpec seqused_of(const Problem& p) {
  const auto made = [](const Problem& problem, HostTensor& t) {
    for (int64_t b = 0; b < problem.batch; ++b)
      t.numbers[static_cast<std::size_t>(b)] = problem.sequence(b).seqlen_k;
  };
  return {"seqused_k", {1, 1, 1, p.batch}, DType::int32, {}, made, true, 1};
}

const Operation& decode() {
  static const Operation operation{
      .name = "decode",
      .inputs =
          [](const Problem& p) {
            std::vector specs = attention_inputs(p);
            specs.push_back(seqused_of(p));
            return specs;
          },
      .saved = no_tensors,
      .outputs = o_and_lse,
      .flop = forward_flop,
      .reference = forward_reference,
      .few_queries = 1,
      .own = {{.name = "num_splits",
               .lacking = "choice of the number of splits",
               .help = "number of splits per row (default: by the step's model)",
               .kind = Feature::Kind::number,
               .least = 1,
               .most = 128,
               .whole = true},
              {.name = "split_keys",
               .lacking = "splits of so many keys",
               .help = "N keys per split, whatever else is in the batch (a multiple of 128)",
               .kind = Feature::Kind::number,
               .least = 128,
               .most = 1 << 30,
               .whole = true}},
      // Each key and value in use once, regardless of the cache's capacity.
      .useful_bytes =
          [](const Problem& p) {
            double rows = 0;  // rows visible to at least one query
            for (int64_t b = 0; b < p.batch; ++b) {
              const int64_t keys = p.sequence(b).seqlen_k;
              rows += static_cast<double>(
                  p.window_left < 0 ? keys : std::min(keys, p.seqlen_q + p.window_left));
            }
            const double kv =
                2 * rows * static_cast<double>(bytes_of(p.dtype, p.kv_heads * p.head_dim));
            double rest = static_cast<double>(like_q(p, "q").bytes());
            for (const TensorSpec& spec : o_and_lse(p)) rest += static_cast<double>(spec.bytes());
            return kv + rest;
          },
      .products_of_16_bits = true,
  };
  return operation;
}

DType type_of_products(const Operation& op, const Problem& p) {
  return op.products_of_16_bits && bits_of(p.dtype) < 16 ? DType::bf16 : p.dtype;
}

Inputs draw(const Operation& op, const Problem& p) {
  if (!op.store) return {draw_inputs(p, op.inputs(p)), {}};
  HostTensors originals = draw_inputs(p, op.originals(p));
  return {op.store(p, originals), std::move(originals)};
}

namespace {
// For a page pool: the tokens in use, shared pages counted once. The pages of a table that is yet
// to be loaded are unknown here, so each sequence then counts separately.
double bytes_in_use(const TensorSpec& spec, const Problem& p) {
  const Layout& l = spec.layout;
  if (spec.contiguous() || spec.shape[0] == 1) return static_cast<double>(spec.bytes());
  std::map<int64_t, int64_t> counted;  // first row of a page -> tokens counted
  int64_t tokens = 0;
  for (std::size_t b = 0; b < l.lengths.size(); ++b)
    for (int64_t n = 0; n * l.page_size < l.lengths[b]; ++n) {
      const int64_t here = std::min(l.page_size, l.lengths[b] - n * l.page_size);
      const auto page = static_cast<std::size_t>(static_cast<int64_t>(b) * l.pages_a_sequence + n);
      int64_t& before = counted[l.pages[page]];
      if (p.inputs == InputKind::files) before = 0;
      if (here > before) tokens += here - before, before = here;
    }
  return static_cast<double>(bytes_of(spec.dtype, tokens * spec.shape[2] * spec.columns()));
}
}  // namespace

double Operation::compulsory_bytes(const Problem& p) const {
  if (useful_bytes) return useful_bytes(p);
  double all = 0;
  for (const auto* specs : {&inputs, &saved, &outputs})
    for (const TensorSpec& spec : (*specs)(p)) all += bytes_in_use(spec, p);
  return all;
}

namespace {
// For a problem whose sequences have equal lengths; `launched`: the same as the step sees it.
Cost cost_with_order(const Step& step, const Problem& p, const Problem& launched,
                     const Machine& machine) {
  Cost cost = step.cost(launched);
  if (const auto tiling = tiling_of(step, p)) {
    const auto phase = std::ranges::find(cost, "attention", &Phase::name);
    phase->hbm_read +=
        kv_bytes_from_hbm(p, *tiling, machine) -
        2 * double(p.batch * p.kv_heads * p.seqlen_k * p.head_dim * size_of(p.dtype));
  }
  return cost;
}
}  // namespace

Cost cost_of(const Step& step, const Problem& p, const Machine& machine) {
  if (!p.varlen()) return cost_with_order(step, p, p, machine);
  // A packed batch of one, since the kernels of a launch may depend on whether it is packed.
  const auto packed = [](Problem one) {
    one.varlen_q = {one.seqlen_q}, one.varlen_k = {one.seqlen_k};
    return one;
  };
  Problem smallest = p.sequence(0);
  smallest.seqlen_q = smallest.seqlen_k = 1;
  Cost total = step.cost(packed(smallest));
  for (Phase& phase : total) phase = Phase{.name = phase.name};
  double written = 0;  // bytes written for sequences without visible pairs
  for (int64_t b = 0; b < p.batch; ++b) {
    const Problem one = p.sequence(b);
    if (one.seqlen_q == 0 || one.seqlen_k == 0) {
      for (const TensorSpec& spec : step.operation->outputs(one))
        written += static_cast<double>(spec.bytes());
      continue;
    }
    const Cost cost = cost_with_order(step, one, packed(one), machine);
    if (cost.size() != total.size())
      throw std::logic_error(step.name + ": sequences of one batch have different kernels");
    for (std::size_t n = 0; n < cost.size(); ++n) total[n] += cost[n];
  }
  total.back().hbm_write += written;
  if (total.back().l2_bytes > 0) total.back().l2_bytes += written;  // 0: not modelled
  return total;
}

std::vector<const Operation*> operations_of(const Chapter& chapter) {
  std::vector<const Operation*> all;
  for (const Step& step : chapter.steps)
    if (std::ranges::find(all, step.operation) == all.end()) all.push_back(step.operation);
  return all;
}

const Operation* find_operation(const Chapter& chapter, std::string_view name) {
  for (const Operation* op : operations_of(chapter))
    if (op->name == name) return op;
  return nullptr;
}

// "32, 64 and 128".
template <class T>
static std::string words(const std::vector<T>& values) {
  std::string text;
  for (std::size_t n = 0; n < values.size(); ++n)
    text += fmt::format("{}{}", n == 0 ? "" : n + 1 < values.size() ? ", " : " and ", values[n]);
  return text;
}

// The first option with a value outside the limits, or "".
static std::string outside(const Limits& limits, const Problem& p) {
  const auto missing = [](const auto& all, const auto& value) {
    return !all.empty() && std::ranges::find(all, value) == all.end();
  };
  if (missing(limits.dtypes, p.dtype)) {
    std::vector<std::string_view> names;
    for (const DType type : limits.dtypes) names.push_back(name(type));
    return fmt::format("--dtype {}: this step takes {}", name(p.dtype), words(names));
  }
  if (missing(limits.head_dims, p.head_dim))
    return fmt::format("--head-dim {}: this step takes {}", p.head_dim,
                       words(limits.head_dims));
  if (limits.most_queries > 0 && p.seqlen_q > limits.most_queries)
    return fmt::format("--seqlen-q {}: this step takes at most {}", p.seqlen_q,
                       limits.most_queries);
  if (limits.most_keys > 0 && p.seqlen_k > limits.most_keys)
    return fmt::format("--seqlen-k {}: this step takes at most {}", p.seqlen_k, limits.most_keys);
  if (limits.least_scale > 0 && p.softmax_scale < limits.least_scale)
    return fmt::format("--scale {}: this step takes at least {}", p.softmax_scale,
                       limits.least_scale);
  return "";
}

std::optional<std::string> refusal(const Step& step, const Problem& p) {
  const auto check = [&](const Feature& f) -> std::optional<std::string> {
    const std::vector<double> values = f.values(p);
    if (values.empty() || f.everywhere || takes(step, f.name)) return std::nullopt;
    // A word that `read` stores as a number is not shown.
    const bool number = f.kind == Feature::Kind::number && !f.read;
    const std::string value = number ? fmt::format(" {}", values[0]) : std::string();
    return fmt::format("{}{}: this step has no {}", f.option(), value, f.lacking);
  };
  for (const Feature& f : shared_features())
    if (auto reason = check(f)) return reason;
  for (const Feature& f : step.operation->own)
    if (auto reason = check(f)) return reason;
  const DType to = quantises_to(step);
  if (bits_of(p.dtype) < 16 && to == DType::bf16)
    return fmt::format("--dtype {}: this step does not quantise its inputs", name(p.dtype));
  if (to != DType::bf16 && p.dtype != to)
    return fmt::format("--dtype {}: this step quantises its inputs to {}", name(p.dtype), name(to));
  if (std::string reason = outside(step.limits, p); !reason.empty()) return reason;
  return step.refuses ? step.refuses(p) : std::nullopt;
}

std::vector<Expected> expected_of(const Step& step, const Problem& p, const HostTensors& inputs,
                                  Selection selection) {
  if (!step.logical) return step.operation->reference(p, inputs, selection);
  return step.operation->reference(p, step.logical(p, inputs), selection);
}

DType quantises_to(const Step& step) {
  for (const DType type : {DType::int8, DType::e4m3, DType::int4})
    if (takes(step, name(type))) return type;
  return DType::bf16;
}

bool takes(const Step& step, std::string_view feature) {
  return std::ranges::find(step.takes, feature) != step.takes.end();
}

HostTensors outputs_without_keys(const Problem& p, const Operation& op, const HostTensors& inputs) {
  HostTensors outputs;
  for (const TensorSpec& spec : op.outputs(p)) {
    HostTensor t = inputs.contains(spec.name) ? inputs.at(spec.name) : zeros(spec);
    if (spec.name == "lse") {
      // A sink is a key without a value. lse is [batch, heads, seqlen_q].
      for (std::size_t r = 0; r < t.data.size(); ++r)
        t.data[r] = inputs.contains("sinks")
                        ? inputs.at("sinks").data[r / static_cast<std::size_t>(p.seqlen_q) %
                                                  static_cast<std::size_t>(p.heads)]
                        : -std::numeric_limits<float>::infinity();
    }
    outputs.emplace(spec.name, std::move(t));
  }
  return outputs;
}

}  // namespace attn
