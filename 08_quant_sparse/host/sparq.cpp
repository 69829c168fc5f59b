// d4_sparq: its operation, whose reference chooses tokens as the step does, and its entry in the
// step table.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "attn/parallel_for.h"
#include "check/operation.h"
#include "host/quantised.h"
#include "kernels/sparq.h"

ATTN_DECLARE_STEP(d4_sparq);
ATTN_DECLARE_LAUNCH(d4_sparq, prepare);

namespace attn {
namespace sparq {
namespace {

// A KV head of a sequence: its queries, keys and values.
struct Head {
  const Problem& p;  // of the sequence
  const HostTensors& in;
  int64_t b, hkv;
  const float* q(int64_t h) const { return in.at("q").row(b, hkv * p.group() + h, 0); }
  const float* k(int64_t key) const { return in.at("k").row(b, hkv, key); }
  const float* v(int64_t key) const { return in.at("v").row(b, hkv, key); }
};

float sum_in_pairs(std::vector<float> s) {  // of kSumThreads
  for (std::size_t distance = kSumThreads / 2; distance > 0; distance /= 2)
    for (std::size_t t = 0; t < distance; ++t) s[t] += s[t + distance];
  return s[0];
}

}  // namespace

Chosen chosen_of(const Problem& p, const HostTensors& in, int64_t b, int64_t hkv) {
  const Head head{p, in, b, hkv};
  const Choice choice = choice_of(p);
  const auto d = static_cast<std::size_t>(p.head_dim), group = static_cast<std::size_t>(p.group());
  const auto keys = static_cast<std::size_t>(p.seqlen_k);
  Chosen result;
  // Among equal columns the first; the sort is stable.
  std::vector<float> sums(d);
  for (std::size_t h = 0; h < group; ++h)
    for (std::size_t c = 0; c < d; ++c) sums[c] += std::abs(head.q(static_cast<int64_t>(h))[c]);
  result.columns.resize(d);
  std::iota(result.columns.begin(), result.columns.end(), 0);
  std::ranges::stable_sort(result.columns, [&](int64_t x, int64_t y) {
    return std::bit_cast<uint32_t>(sums[static_cast<std::size_t>(x)]) >
           std::bit_cast<uint32_t>(sums[static_cast<std::size_t>(y)]);
  });
  result.columns.resize(std::min(d, static_cast<std::size_t>(choice.columns)));
  std::ranges::sort(result.columns);

  std::vector<float> shares(keys);
  std::vector<std::vector<float>> parts(group, std::vector<float>(keys));
  const float scale_log2 = static_cast<float>(p.softmax_scale) * 1.44269504f;
  for (std::size_t h = 0; h < group; ++h) {
    const float* const q = head.q(static_cast<int64_t>(h));
    float all = 0, part = 0, max = -std::numeric_limits<float>::infinity();
    for (std::size_t c = 0; c < d; ++c) all += std::abs(q[c]);
    for (const int64_t c : result.columns) part += std::abs(q[c]);
    const float scale = guess_scale(scale_log2, all, part);
    std::vector<float>& x = parts[h];
    for (std::size_t key = 0; key < keys; ++key) {
      const float* const k = head.k(static_cast<int64_t>(key));
      float sum = 0;
      for (const int64_t c : result.columns) sum = std::fma(q[c], k[c], sum);
      x[key] = sum * scale;
      max = std::fmax(max, x[key]);
    }
    std::vector<float> partial(kSumThreads);
    for (std::size_t key = 0; key < keys; ++key) {
      x[key] = exp2_of(x[key] - max);
      partial[key % kSumThreads] += x[key];
    }
    const float sum = sum_in_pairs(std::move(partial));
    for (std::size_t key = 0; key < keys; ++key) {
      x[key] /= sum;
      shares[key] += x[key];
    }
  }
  const auto bits = [&](int64_t key) {
    return key >= p.seqlen_k - choice.newest
               ? ~0u
               : std::bit_cast<uint32_t>(shares[static_cast<std::size_t>(key)]) & 0x7FFFFFFFu;
  };
  result.keys.resize(keys);
  std::iota(result.keys.begin(), result.keys.end(), 0);
  std::ranges::stable_sort(result.keys, [&](int64_t x, int64_t y) { return bits(x) > bits(y); });
  result.keys.resize(std::min(keys, static_cast<std::size_t>(choice.keys)));
  std::ranges::sort(result.keys);
  for (std::size_t h = 0; h < group; ++h) {
    double alpha = 0;
    for (const int64_t key : result.keys) alpha += parts[h][static_cast<std::size_t>(key)];
    result.alpha.push_back(alpha);
  }
  return result;
}

namespace {

// o and lse of one KV head: exact attention to the chosen tokens, then the mean of V.
std::vector<Expected> reference_of(const Problem& p, const HostTensors& in, int64_t b,
                                   int64_t hkv) {
  const Head head{p, in, b, hkv};
  const Chosen chosen = chosen_of(p, in, b, hkv);
  const auto d = static_cast<std::size_t>(p.head_dim);
  Problem one = p;
  one.heads = p.group(), one.kv_heads = 1;
  one.seqlen_k = static_cast<int64_t>(chosen.keys.size());
  one.causal = false;
  HostTensors few;
  for (const TensorSpec& spec : attention_inputs(one)) few.emplace(spec.name, zeros(spec));
  for (int64_t h = 0; h < p.group(); ++h)
    std::copy_n(head.q(h), d, few.at("q").data.begin() + h * p.head_dim);
  for (std::size_t n = 0; n < chosen.keys.size(); ++n) {
    const auto to = static_cast<std::ptrdiff_t>(n * d);
    std::copy_n(head.k(chosen.keys[n]), d, few.at("k").data.begin() + to);
    std::copy_n(head.v(chosen.keys[n]), d, few.at("v").data.begin() + to);
  }
  std::vector<Expected> expected = forward_reference(one, few, {.full = true});
  std::vector<double> mean(d);
  for (int64_t key = 0; key < p.seqlen_k; ++key)
    for (std::size_t c = 0; c < d; ++c) mean[c] += head.v(key)[c] / double(p.seqlen_k);
  Expected& o = expected[0];
  for (std::size_t r = 0; r < o.rows.size() && p.seqlen_k > 0; ++r) {
    const double alpha = chosen.alpha[static_cast<std::size_t>(o.rows[r].h)];
    double size = 0;
    for (std::size_t c = 0; c < d; ++c) {
      double& x = o.reference[r * d + c];
      float& low = o.low[r * d + c];
      x = alpha * x + (1 - alpha) * mean[c];
      low = round_to(p.dtype, static_cast<float>(alpha * low + (1 - alpha) * mean[c]));
      size += x * x;
    }
    o.scale[r] = std::max(alpha * o.scale[r], std::sqrt(size));
  }
  for (Expected& e : expected)
    for (Expected::Row& row : e.rows) row = {b, hkv * p.group() + row.h, row.i};
  return expected;
}

std::vector<Expected> reference(const Problem& p, const HostTensors& in, Selection) {
  std::vector<std::vector<Expected>> of(static_cast<std::size_t>(p.batch * p.kv_heads));
  for (std::size_t n = 0; n < of.size(); ++n) {
    const auto b = static_cast<int64_t>(n) / p.kv_heads;
    of[n] = reference_of(p.sequence(b), in, b, static_cast<int64_t>(n) % p.kv_heads);
  }
  std::vector<Expected> all = of[0];
  all[0].spec = like_q(p, "o"), all[1].spec = lse_of(p);
  for (std::size_t n = 1; n < of.size(); ++n)
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto append = [](auto& to, const auto& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      Expected &to = all[i], &from = of[n][i];
      append(to.rows, from.rows), append(to.reference, from.reference), append(to.low, from.low);
      append(to.scale, from.scale), append(to.slack, from.slack), append(to.given, from.given);
    }
  return all;
}

double keys_in_use(const Problem& p) {
  double keys = 0;
  for (int64_t b = 0; b < p.batch; ++b) keys += double(p.sequence(b).seqlen_k);
  return keys;
}
double keys_read(const Problem& p) {
  double keys = 0;
  for (int64_t b = 0; b < p.batch; ++b)
    keys += double(std::min<int64_t>(choice_of(p).keys, p.sequence(b).seqlen_k));
  return keys;
}
double bytes_of_q(const Problem& p) { return double(p.batch * p.heads * p.head_dim) * 2; }

Cost cost(const Problem& p) {
  const double heads = double(p.kv_heads), d = double(p.head_dim), used = keys_in_use(p);
  const double guesses = 4 * used * double(p.heads), read = keys_read(p) * heads;
  return {{.name = "guess",
           .fp32_flop = 2 * used * double(p.heads) * choice_of(p).columns,
           .hbm_read = used * heads * 2 * choice_of(p).columns + bytes_of_q(p),
           .hbm_write = guesses},
          {.name = "choose",
           .exp = 3 * used * double(p.heads),
           .hbm_read = guesses,
           .hbm_write = 4 * read},
          {.name = "attention",
           .fp32_flop = 4 * d * keys_read(p) * double(p.heads),
           .exp = keys_read(p) * double(p.heads),
           .hbm_read = read * (4 * d + 4) + bytes_of_q(p) + double(p.batch) * heads * d * 4,
           .hbm_write = bytes_of_q(p) + 4 * double(p.batch * p.heads)}};
}

std::optional<std::string> refuse(const Problem& p) {
  const Choice choice = choice_of(p);
  if (p.window_left >= 0) return "--window: this step chooses among all tokens";
  if (p.group() > kMaxGroup)
    return fmt::format("{} query heads of a K/V head: at most {}", p.group(), kMaxGroup);
  if (choice.columns > p.head_dim)
    return fmt::format("--top-columns {}: at most --head-dim, {}", choice.columns, p.head_dim);
  if (choice.newest > choice.keys)
    return fmt::format("--newest-keys {}: at most --top-keys, {}", choice.newest, choice.keys);
  return std::nullopt;
}

Feature number(const char* name, const char* help, double otherwise, double most) {
  return {.name = name, .lacking = name, .help = help, .kind = Feature::Kind::number, .least = 1,
          .most = most, .whole = true, .otherwise = otherwise, .everywhere = true};
}

}  // namespace

const Operation& operation() {
  static const Operation sparq = [] {
    Operation op = decode();
    op.name = "sparq";
    op.reference = reference;
    op.own = {number("top_columns", "r: columns of K for the estimate (default 32)", 32, 256),
              number("top_keys", "k: tokens whose K and V are read (default 128)", 128, 1 << 20),
              number("newest_keys", "l: the newest tokens, always among those k (default k / 4)", 0,
                     1 << 20)};
    op.complete = [](Problem& p, const std::set<std::string>&) {  // so that it is printed
      p.own["newest_keys"] = {double(choice_of(p).newest)};
    };
    op.useful_bytes = [](const Problem& p) {
      double all = 0;
      for (const Phase& phase : cost(p))
        if (phase.name != "choose") all += phase.hbm_read;
      return all;
    };
    return op;
  }();
  return sparq;
}

}  // namespace sparq

Step sparq_step() {
  using namespace sparq;
  return {
      .name = "d4_sparq",
      .operation = &operation(),
      .idea = "tokens are chosen by part of each key; only these are read",
      .support = "GQA; --top-columns, --top-keys, --newest-keys",
      .limits = {.dtypes = {DType::bf16}, .head_dims = {64, 128, 256}, .most_queries = 1,
                 .most_keys = (1 << 21) - 1},
      .refuses = refuse,
      .workspaces =
          [](const Problem& p) {
            const int64_t heads_k = p.batch * p.kv_heads, heads = p.batch * p.heads;
            const int64_t padded = (p.seqlen_k + 7) / 8 * 8, keys = choice_of(p).keys;
            return std::vector<Workspace>{{"kt", heads_k * p.head_dim * padded * 2, true},
                                          {"v_mean", heads_k * p.head_dim * 4, true},
                                          {"guesses", heads * padded * 4},
                                          {"shares", heads_k * padded * 4},
                                          {"chosen", heads_k * keys * 4},
                                          {"alpha", heads * 4},
                                          {"weights", heads * keys * 4}};
          },
      .cost = cost,
      .launch = ATTN_LAUNCH(d4_sparq),
      .prepare = ATTN_LAUNCH_OF(d4_sparq, prepare),
      .needs = kAmpere,
      .takes = {"seqused"},
      // The original inputs. Returned so that the distance from attention to all tokens is printed.
      .logical = [](const Problem&, const HostTensors& inputs) { return inputs; },
  };
}

}  // namespace attn
