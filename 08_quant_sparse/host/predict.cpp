// The block selection rule on the host. It is an independent implementation: it sorts, and adds in
// the order of the kernels.
#define ATTN_EMULATED
#include "host/predict.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "attn/error.h"
#include "attn/parallel_for.h"
#include "attn/tensor.h"
#include "check/field.h"
#include "check/operation.h"
#include "kernels/sparse.h"
#include "host/token_order.h"
#include "kernels/visits.h"

namespace attn {
namespace {

using ::emulated::hopper::KvBlockRange;

constexpr double kKeptShare = 0.5, kLeastSimilarity = 0.1;  // defaults

int64_t blocks_of(int64_t rows, int64_t block) { return (rows + block - 1) / block; }

// A block of rows: their mean, and the mean cosine over all pairs; -1 if that is NaN.
struct Pool {
  std::vector<float> mean;
  float similarity = -1;
};

// Pairwise sum: neighbours first, then pairs of neighbours, as lanes do by shuffles.
float tree_sum(std::vector<float> x) {
  for (std::size_t n = x.size(); n > 1; n /= 2)
    for (std::size_t i = 0; i < n / 2; ++i) x[i] = x[2 * i] + x[2 * i + 1];
  return x[0];
}

// `row(i)`: d numbers. kPoolThreads threads have eight columns each, of every at_once-th row.
template <class Row>
Pool pool(Row row, int64_t count, int64_t d) {
  const int64_t lanes = d / 8, at_once = kPoolThreads / lanes;
  std::vector<float> inverse;
  for (int64_t i = 0; i < count; ++i) {
    std::vector<float> squares(static_cast<std::size_t>(lanes));
    for (int64_t c = 0; c < d; ++c) {
      float& sum = squares[static_cast<std::size_t>(c / 8)];
      sum = std::fma(row(i)[c], row(i)[c], sum);
    }
    const float square = tree_sum(std::move(squares));
    inverse.push_back(square > 0 ? 1 / std::sqrt(square) : 0);
  }
  Pool p;
  bool finite = true;
  std::vector<float> lengths(32);
  for (int64_t c = 0; c < d; ++c) {
    float all = 0, of_directions = 0;
    for (int64_t own = 0; own < at_once; ++own) {
      float sum = 0, direction = 0;
      for (int64_t i = own; i < count; i += at_once) {
        sum += row(i)[c];
        direction = std::fma(row(i)[c], inverse[static_cast<std::size_t>(i)], direction);
      }
      all += sum, of_directions += direction;
    }
    p.mean.push_back(all / static_cast<float>(count));
    finite = finite && std::isfinite(p.mean.back());
    of_directions /= static_cast<float>(count);
    float& length = lengths[static_cast<std::size_t>(c % 32)];
    length = std::fma(of_directions, of_directions, length);
  }
  const float length = tree_sum(std::move(lengths));
  if (finite && length >= 0) p.similarity = length;
  return p;
}

std::vector<Pool> pools(const HostTensor& t, int64_t batch, int64_t heads, int64_t rows,
                        int64_t block, int64_t d) {
  const int64_t blocks = blocks_of(rows, block);
  std::vector<Pool> all(static_cast<std::size_t>(batch * heads * blocks));
  parallel_for(batch * heads * blocks, [&](int64_t n) {
    const int64_t b = n / blocks / heads, h = n / blocks % heads, row0 = n % blocks * block;
    all[static_cast<std::size_t>(n)] =
        pool([&](int64_t i) { return t.row(b, h, row0 + i); }, std::min(block, rows - row0), d);
  });
  return all;
}

// Q or K as the choice uses it: the original inputs of a step that quantises.
const HostTensor& given(const HostTensors& inputs, const std::string& name) {
  const auto found = inputs.find(name + "_given");
  return found == inputs.end() ? inputs.at(name) : found->second;
}

// Which blocks of [begin, end) are kept, given their scores; NaN: no representative mean.
std::vector<bool> kept(const PredictRule& rule, const std::vector<float>& scores, float scale) {
  std::vector<float> ranked;
  for (const float s : scores)
    if (!std::isnan(s)) ranked.push_back(s);
  std::ranges::sort(ranked, std::greater());
  unsigned of_all = 0;
  std::vector<unsigned> worth;
  for (const float s : ranked) {
    worth.push_back(rule.by_mass ? weight_of((s - ranked[0]) * scale) : 1);
    of_all += worth.back();
  }
  // The lowest score that is still needed; equal scores are kept with it.
  float least = ranked.empty() ? 0 : ranked[0];
  const unsigned enough = needed(rule, of_all);
  for (std::size_t n = 0, sum = 0; n < ranked.size() && sum < enough; ++n)
    sum += worth[n], least = ranked[n];
  std::vector<bool> keep;
  for (const float s : scores) keep.push_back(std::isnan(s) || s >= least);
  return keep;
}

double option(const Problem& p, const char* name, double otherwise) {
  const auto given = p.own.find(name);
  return given == p.own.end() ? otherwise : given->second.at(0);
}

// If P V of tiles is skipped, each row of O may lack the keys whose P is below the threshold. A
// tile is skipped only if all of its P is below, relative to the running max, which is at most the
// row's final max. The denominator includes them, so lse is exact.
void allow_skipped(const Problem& p, const HostTensors& in, double threshold, Expected& o) {
  const auto d = static_cast<std::size_t>(p.head_dim);
  parallel_for(static_cast<int64_t>(o.rows.size()), [&](int64_t r) {
    const auto [b, h, i] = o.rows[static_cast<std::size_t>(r)];
    const float* const q = in.at("q").row(b, h, i);
    std::vector<double> scores;
    std::vector<const float*> values;
    p.sequence(b).for_each_range(h, i, [&](KeyRange run) {
      for (int64_t j = run.begin; j < run.end; ++j) {
        const float* const k = in.at("k").row(b, h / p.group(), j);
        double dot = 0;
        for (std::size_t c = 0; c < d; ++c) dot += double{q[c]} * k[c];
        scores.push_back(dot * p.softmax_scale * std::numbers::log2e);
        values.push_back(in.at("v").row(b, h / p.group(), j));
      }
    });
    if (scores.empty()) return;
    const double most = *std::ranges::max_element(scores);
    // Error bound of the fp32 scores.
    const double below = most - threshold + 0.01 + 1e-5 * std::abs(most);
    double sum = 0, lacks2 = 0;
    std::vector<double> lacks(d);
    for (std::size_t n = 0; n < scores.size(); ++n) {
      const double weight = std::exp2(scores[n] - most);
      sum += weight;
      if (scores[n] < below)
        for (std::size_t c = 0; c < d; ++c) lacks[c] += weight * std::abs(values[n][c]);
    }
    for (const double x : lacks) lacks2 += x / sum * (x / sum);
    const auto row = static_cast<std::size_t>(r);
    if (lacks2 > 0) o.given[row] += std::sqrt(lacks2) + o.row_bound * o.scale[row];
  });
}

KvBlockRange ranges(const Problem& p, int64_t m_block) {
  return ::emulated::hopper::kv_block_range(
      shape_of(p), static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k),
      static_cast<int>(m_block * kSparseBlockM), kSparseBlockM, sparse_block_n(p.head_dim));
}

// "33.3 %".
std::string share_of_blocks(const Problem& p, const HostTensors& inputs) {
  const auto mask = chosen_blocks(p, inputs);
  double visited = 0, of = 0;
  for (int64_t bh = 0; bh < p.batch * p.heads; ++bh)
    for (int64_t m = 0; m < tiles_of_queries(p); ++m) {
      const KvBlockRange seen = ranges(p, m);
      for (int64_t n = seen.begin; n < seen.end; ++n) {
        ++of;
        visited += mask->open(bh / p.heads, bh % p.heads, m, n);
      }
    }
  return fmt::format("{:.1f} %", of > 0 ? 100 * visited / of : 0);
}

constexpr std::pair<const char*, TokenOrder> kOrders[] = {
    {"rows", TokenOrder::rows}, {"hilbert", TokenOrder::hilbert}, {"random", TokenOrder::random}};
std::vector<double> read_order(const std::string& text) {
  for (const auto& [name, order] : kOrders)
    if (text == name) return {double(order)};
  throw InputError(fmt::format("--order {}: must be rows, hilbert or random", text));
}

// "choice: visited 33.3 % of blocks": in the given token order, and in the order of --order.
std::string choice(const Problem& p, const HostTensors& inputs) {
  std::string text = "choice: visited " + share_of_blocks(p, inputs) + " of " +
                     (p.masked() ? "the blocks that causal and window leave" : "blocks");
  if (!has_field(p) || p.masked()) return text;
  const HostTensors ordered =
      in_order(p, {{"q", inputs.at("q")}, {"k", inputs.at("k")}}, order_of(p));
  return text + "; with --order " + kOrders[static_cast<std::size_t>(order_of(p))].first + " " +
         share_of_blocks(p, ordered);
}

}  // namespace

PredictRule rule_of(const Problem& p) {
  const bool by_mass = p.own.contains("keep_mass");
  return {.by_mass = by_mass,
          .amount = static_cast<float>(by_mass ? option(p, "keep_mass", 1)
                                               : option(p, "keep", kKeptShare)),
          .least_similarity = static_cast<float>(option(p, "similarity", kLeastSimilarity)),
          .sink = p.own.contains("keep_sink"),
          .diagonal = p.own.contains("keep_diagonal"),
          .skip_below = static_cast<float>(option(p, "skip_below", 0))};
}

TokenOrder order_of(const Problem& p) {
  return static_cast<TokenOrder>(option(p, "order", double(TokenOrder::hilbert)));
}

std::shared_ptr<const BlockMask> chosen_blocks(const Problem& p, const HostTensors& inputs) {
  const PredictRule rule = rule_of(p);
  const int64_t d = p.head_dim, block_n = sparse_block_n(d);
  const int64_t m_blocks = tiles_of_queries(p), n_blocks = blocks_of(p.seqlen_k, block_n);
  const std::vector<Pool> q =
      pools(given(inputs, "q"), p.batch, p.heads, p.seqlen_q, kSparseBlockM, d);
  const std::vector<Pool> k =
      pools(given(inputs, "k"), p.batch, p.kv_heads, p.seqlen_k, block_n, d);
  const float scale = static_cast<float>(p.softmax_scale) * 1.44269504f;
  std::vector<bool> open(static_cast<std::size_t>(p.batch * p.heads * m_blocks * n_blocks));
  for (int64_t bh = 0; bh < p.batch * p.heads; ++bh)
    for (int64_t m = 0; m < m_blocks; ++m) {
      const Pool& of_q = q[static_cast<std::size_t>(bh * m_blocks + m)];
      const KvBlockRange seen = ranges(p, m);
      std::vector<float> scores;
      for (int64_t n = seen.begin; n < seen.end; ++n) {
        const Pool& of_k = k[static_cast<std::size_t>(bh / p.group() * n_blocks + n)];
        scores.push_back(NAN);
        if (of_q.similarity < rule.least_similarity || of_k.similarity < rule.least_similarity)
          continue;
        float dot = 0;
        for (std::size_t c = 0; c < of_q.mean.size(); ++c)
          dot = std::fma(of_q.mean[c], of_k.mean[c], dot);
        if (std::isfinite(dot)) scores.back() = dot;
      }
      const std::vector<bool> keep = kept(rule, scores, scale);
      const int64_t shift = p.seqlen_k - p.seqlen_q, row0 = m * kSparseBlockM;
      const int64_t last = std::min(p.seqlen_q, row0 + kSparseBlockM) - 1;
      for (int64_t n = seen.begin; n < seen.end; ++n) {
        // Whether the block contains the position of a query of the tile.
        const bool diagonal = n * block_n <= last + shift && (n + 1) * block_n > row0 + shift;
        open[static_cast<std::size_t>((bh * m_blocks + m) * n_blocks + n)] =
            keep[static_cast<std::size_t>(n - seen.begin)] || (rule.sink && n == 0) ||
            (rule.diagonal && diagonal);
      }
    }
  return std::make_shared<BlockMask>(
      kSparseBlockM, block_n, std::vector<int64_t>{p.batch, p.heads, m_blocks, n_blocks}, open);
}

Similarity mean_similarity(const Problem& p, const HostTensors& inputs) {
  const auto mean = [](const std::vector<Pool>& all) {
    double sum = 0;
    for (const Pool& one : all) sum += one.similarity;
    return sum / double(all.size());
  };
  const int64_t d = p.head_dim, block_n = sparse_block_n(d);
  return {mean(pools(inputs.at("q"), p.batch, p.heads, p.seqlen_q, kSparseBlockM, d)),
          mean(pools(inputs.at("k"), p.batch, p.kv_heads, p.seqlen_k, block_n, d))};
}

const Operation& predict() {
  using Kind = Feature::Kind;
  static const Operation operation{
      .name = "predict",
      .inputs = attention_inputs,
      .saved = forward().saved,
      .outputs = forward().outputs,
      .flop = forward().flop,  // as if all blocks were visited: a step that skips has a higher rate
      .reference =
          [](const Problem& p, const HostTensors& inputs, Selection selection) {
            Problem chosen = p;
            chosen.mask = chosen_blocks(p, inputs);
            std::vector<Expected> expected = forward_reference(chosen, inputs, selection);
            const double threshold = rule_of(p).skip_below;
            for (Expected& e : expected)
              if (threshold > 0 && e.spec.name == "o") allow_skipped(chosen, inputs, threshold, e);
            // If the inputs are reordered, the rows of O and lse are not.
            if (const auto order = inputs.find("token_order"); order != inputs.end())
              for (Expected& e : expected)
                for (Expected::Row& row : e.rows)
                  row.i = order->second.numbers[static_cast<std::size_t>(row.i)];
            return expected;
          },
      .own = {{.name = "keep",
               .lacking = "choice of blocks",
               .help = fmt::format("top-k: fraction of the key blocks that a query tile keeps ({})",
                                   kKeptShare),
               .kind = Kind::number,
               .most = 1},
              {.name = "keep_mass",
               .lacking = "choice of blocks by probability",
               .help = "top-p, not with --keep: as many blocks as have this share of the predicted "
                       "probability",
               .kind = Kind::number,
               .most = 1},
              {.name = "similarity",
               .lacking = "least similarity",
               .help = fmt::format(
                   "least mean cosine similarity at which a block's mean represents its rows ({})",
                   kLeastSimilarity),
               .kind = Kind::number,
               .most = 1},
              {.name = "keep_sink", .lacking = "sink", .help = "always keep the first key block"},
              {.name = "keep_diagonal",
               .lacking = "diagonal",
               .help = "always keep the blocks on the diagonal"},
              {.name = "skip_below",
               .lacking = "skipped P V",
               .help = "skip P V of a tile if all of P is below 2^-N, relative to the running max",
               .kind = Kind::number,
               .least = 1,
               .most = 126},
              {.name = "order",
               .lacking = "token order of its own",
               .help = "rows, hilbert or random: the order of a field's tokens (hilbert)",
               .kind = Kind::list,
               .read = read_order}},
      .complete =
          [](Problem& p, const std::set<std::string>&) {
            if (p.own.contains("keep") && p.own.contains("keep_mass"))
              throw InputError("--keep-mass: not together with --keep");
          },
      .note = choice,
  };
  return operation;
}

}  // namespace attn
