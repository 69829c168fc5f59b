#include "attn/feature.h"

#include <algorithm>
#include <cmath>

#include "attn/error.h"
#include "attn/philox.h"

namespace attn {
namespace {

using Values = std::vector<double>;

// Softcap: score = C tanh(score / C).
template <class Scalar>
void cap(const ScoreRow<Scalar>& row) {
  const auto most = static_cast<Scalar>(row.problem.softcap);
  for (std::size_t j = 0; j < row.scores.size(); ++j) {
    const Scalar t = std::tanh(row.scores[j] / most);
    row.scores[j] = most * t;
    row.slopes[j] *= 1 - t * t;
  }
}
// Relative error of tanh. Kernels for 16-bit types may use tanh.approx.f32: 2^-11 (PTX ISA,
// "tanh").
double tanh_error(const Problem& p) { return p.dtype == DType::fp32 ? 4 * 0x1p-24 : 0x1p-11; }
double cap_error(const Problem& p, const HostTensors&, int64_t, double largest) {
  return tanh_error(p) * std::min(largest, p.softcap);
}
// 1 - tanh^2 has slightly more than twice the absolute error of tanh. Where the cap saturates, this
// is a large relative error.
double cap_slope_error(const Problem& p) { return 3 * tanh_error(p); }

double slope_of(const HostTensors& inputs, int64_t h) {
  return double{inputs.at("alibi").row(0, 0, 0)[h]};
}

template <class Scalar>
void bias(const ScoreRow<Scalar>& row) {
  const auto slope = static_cast<Scalar>(slope_of(row.inputs, row.h));
  const int64_t diagonal = row.i + row.problem.seqlen_k - row.problem.seqlen_q - row.first_key;
  for (std::size_t j = 0; j < row.scores.size(); ++j)
    row.scores[j] -= slope * static_cast<Scalar>(std::abs(diagonal - static_cast<int64_t>(j)));
}
double bias_error(const Problem& p, const HostTensors& inputs, int64_t h, double) {
  return 4 * 0x1p-24 * slope_of(inputs, h) * static_cast<double>(std::max(p.seqlen_q, p.seqlen_k));
}

void drop(const Problem& p, int64_t b, int64_t h, int64_t i, std::span<double> factors) {
  const int dropped = shape_of(p).dropped;
  for (std::size_t j = 0; j < factors.size(); ++j)
    if (!dropout_keeps(p.seed, b * p.heads + h, static_cast<int>(i), static_cast<int>(j), dropped))
      factors[j] = 0;
    else
      factors[j] /= 1 - p.dropout;
}

Values number(double x) { return x > 0 ? Values{x} : Values{}; }
Values flag(bool x) { return x ? Values{1} : Values{}; }
Values list(const std::vector<int64_t>& x) { return {x.begin(), x.end()}; }

std::vector<Feature> make_features() {
  using Kind = Feature::Kind;
  std::vector<Feature> all;
  all.push_back({.name = "causal",
                 .lacking = "causal mask",
                 .help = "causal mask, aligned at the bottom right",
                 .get = [](const Problem& p) { return flag(p.causal); },
                 .set = [](Problem& p, const Values& v) { p.causal = !v.empty(); },
                 .everywhere = true,
                 .on_matrix = true});
  all.push_back({.name = "window",
                 .lacking = "window",
                 .kind = Kind::list,
                 .get =
                     [](const Problem& p) {
                       return p.window_left < 0 && p.window_right < 0
                                  ? Values{}
                                  : list({p.window_left, p.window_right});
                     },
                 .everywhere = true,
                 .on_matrix = true});
  all.push_back({.name = "mask",
                 .lacking = "masks of blocks or columns",
                 .kind = Kind::list,
                 .get = [](const Problem& p) { return flag(p.mask != nullptr); }});
  all.push_back({.name = "softcap",
                 .lacking = "softcap",
                 .help = "C: scores become C tanh(score / C), before masks (0: none)",
                 .kind = Kind::number,
                 .most = 1e30,
                 .get = [](const Problem& p) { return number(p.softcap); },
                 .set = [](Problem& p, const Values& v) { p.softcap = v.empty() ? 0 : v[0]; },
                 .scores = cap<double>,
                 .scores_low = cap<float>,
                 .error = cap_error,
                 .slope_error = cap_slope_error});
  all.push_back({.name = "alibi",
                 .lacking = "ALiBi",
                 .help =
                     "ALiBi: subtract slope * |distance to the diagonal| from scores, one slope "
                     "per head",
                 .get = [](const Problem& p) { return flag(p.alibi); },
                 .set = [](Problem& p, const Values& v) { p.alibi = !v.empty(); },
                 .scores = bias<double>,
                 .scores_low = bias<float>,
                 .error = bias_error});
  all.push_back({.name = "dropout",
                 .lacking = "dropout",
                 .help = "fraction of P that is dropped, rounded to a multiple of 1/256 (0)",
                 .kind = Kind::number,
                 .most = 1,
                 .get = [](const Problem& p) { return number(p.dropout); },
                 .set = [](Problem& p, const Values& v) { p.dropout = v.empty() ? 0 : v[0]; },
                 .factors = drop});
  all.push_back({.name = "varlen",
                 .lacking = "packed sequences",
                 .kind = Kind::list,
                 .get = [](const Problem& p) { return list(p.varlen_q); }});
  all.push_back(
      {.name = "seqused",
       .lacking = "partly filled cache",
       .help = "N,N,...: valid keys of each sequence (all)",
       .kind = Kind::list,
       .most = 0x1p30,
       .whole = true,
       .get = [](const Problem& p) { return list(p.seqused_k); },
       .set = [](Problem& p, const Values& v) { p.seqused_k.assign(v.begin(), v.end()); }});
  all.push_back({.name = "devices",
                 .lacking = "exchange between devices",
                 .help = "N,N,...: GPUs, one rank each; emulated: a rank for each number",
                 .kind = Kind::list,
                 .most = 1023,
                 .whole = true});
  all.push_back({.name = "timeout",
                 .lacking = "exchange between devices",
                 .help = "seconds after which a rank that waits for a message gives up (30)",
                 .kind = Kind::number,
                 .least = 0.01,
                 .most = 3600});
  all.push_back({.name = "transport",
                 .lacking = "exchange between devices",
                 .help = "how messages travel between GPUs: nccl (default) or copies",
                 .kind = Kind::number,
                 .read = [](const std::string& text) -> Values {
                   if (text == "nccl") return {0};
                   if (text == "copies") return {1};
                   throw InputError("--transport " + text + ": must be nccl or copies");
                 }});
  all.push_back({.name = "rank",
                 .lacking = "exchange between processes",
                 .help = "this process is one rank of several, on the GPU of --devices",
                 .kind = Kind::number,
                 .most = 1022,
                 .whole = true});
  all.push_back({.name = "world",
                 .lacking = "exchange between processes",
                 .help = "how many processes with --rank there are",
                 .kind = Kind::number,
                 .least = 1,
                 .most = 1023,
                 .whole = true});
  all.push_back({.name = "nccl_id",
                 .lacking = "exchange between processes",
                 .help = "FILE that all processes see: rank 0 makes it, the others wait for it",
                 .kind = Kind::number,
                 .read = [](const std::string& text) -> Values {
                   nccl_id_file = text;
                   return {1};
                 }});
  all.push_back({.name = "collective",
                 .lacking = "all-reduce",
                 .help = "how the ranks' O and lse meet: all-gather (default) or all-reduce",
                 .kind = Kind::number,
                 .read = [](const std::string& text) -> Values {
                   if (text == "all-gather") return {0};
                   if (text == "all-reduce") return {1};
                   throw InputError("--collective " + text + ": must be all-gather or all-reduce");
                 }});
  return all;
}

}  // namespace

std::vector<double> Feature::values(const Problem& p) const {
  if (get) return get(p);
  const auto found = p.own.find(name);
  return found == p.own.end() ? std::vector<double>{} : found->second;
}

void Feature::give(Problem& p, const std::vector<double>& values) const {
  if (set)
    set(p, values);
  else if (values.empty())
    p.own.erase(name);
  else
    p.own[name] = values;
}

std::string Feature::option() const {
  std::string text = "--" + name;
  std::ranges::replace(text, '_', '-');
  return text;
}

const std::vector<Feature>& shared_features() {
  static const std::vector<Feature> all = make_features();
  return all;
}

TensorSpec alibi_slopes(const Problem& p) {
  const auto slopes = [](const Problem& problem, HostTensor& t) {
    for (std::size_t h = 0; h < t.data.size(); ++h)
      t.data[h] = static_cast<float>(alibi_slope(static_cast<int64_t>(h), problem.heads));
  };
  return {"alibi", {1, 1, 1, p.heads}, DType::fp32, {}, slopes, false, 1};
}

double alibi_slope(int64_t head, int64_t heads) {
  int64_t power = 1;
  while (2 * power <= heads) power *= 2;
  const double exponent =
      head < power ? static_cast<double>(head + 1) / static_cast<double>(power)
                   : static_cast<double>(2 * (head - power) + 1) / static_cast<double>(2 * power);
  return std::exp2(-8 * exponent);
}

}  // namespace attn
