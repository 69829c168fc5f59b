// Attention by the textbook formula, three loops in double: the references are compared with it.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "attn/feature.h"
#include "attn/mask.h"
#include "attn/philox.h"
#include "check/inputs.h"
#include "tests/catch.h"

namespace attn::tests {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline Problem make(int64_t seqlen_q, int64_t seqlen_k, bool causal = false, int64_t left = -1,
                    int64_t right = -1) {
  Problem p;
  p.batch = 2, p.heads = 4, p.kv_heads = 2, p.head_dim = 5;
  p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
  p.causal = causal, p.window_left = left, p.window_right = right;
  p.dtype = DType::fp32;
  return p;
}

inline HostTensors draw(const Problem& p) {
  return draw_inputs(p, std::vector<TensorSpec>{like_q(p, "q"), like_k(p, "k"), like_k(p, "v"),
                                                like_q(p, "do"), alibi_slopes(p)});
}

// Queries and keys of sequence b.
struct Lengths {
  int64_t q, k;
};
inline Lengths lengths(const Problem& p, int64_t b) {
  if (p.varlen_q.empty()) return {p.seqlen_q, p.seqlen_k};
  return {p.varlen_q[static_cast<std::size_t>(b)], p.varlen_k[static_cast<std::size_t>(b)]};
}

// A mask of blocks of 2 queries and 3 keys, or of column intervals, per query head. `hides` states
// it pair by pair.
struct Hidden {
  bool blocks = false, columns = false;
  bool block(int64_t b, int64_t h, int64_t m, int64_t n) const {
    return (5 * b + 3 * h + 2 * m + n) % 3 == 1;
  }
  int64_t begin(int64_t h, int64_t j) const { return (j + h) % 4; }
  int64_t end(int64_t h, int64_t j) const { return begin(h, j) + j % 3; }
  bool hides(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return (blocks && block(b, h, i / 2, j / 3)) || (columns && i >= begin(h, j) && i < end(h, j));
  }
  std::shared_ptr<const KeyMask> mask(const Problem& p) const {
    if (blocks) {
      const int64_t m = (p.seqlen_q + 1) / 2, n = (p.seqlen_k + 2) / 3;
      std::vector<bool> seen;
      for (int64_t at = 0; at < p.batch * p.heads * m * n; ++at)
        seen.push_back(!block(at / (n * m * p.heads), at / (n * m) % p.heads, at / n % m, at % n));
      return std::make_shared<BlockMask>(2, 3, std::vector{p.batch, p.heads, m, n}, seen);
    }
    if (!columns) return nullptr;
    std::vector<int64_t> begins, ends;  // shared by all sequences
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t j = 0; j < p.seqlen_k; ++j)
        begins.push_back(begin(h, j)), ends.push_back(end(h, j));
    return std::make_shared<ColumnIntervals>(std::vector<int64_t>{1, p.heads, 1, p.seqlen_k},
                                             begins, ends);
  }
};
inline Hidden hidden;  // of the current problem

// The masks as defined in the documentation, pair by pair.
inline bool sees(const Problem& p, Lengths n, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (hidden.hides(b, h, i, j)) return false;
  const int64_t diagonal = i + n.k - n.q;  // the last query's diagonal is the last key
  if (p.causal && j > diagonal) return false;
  if (p.window_right >= 0 && j > diagonal + p.window_right) return false;
  return p.window_left < 0 || j >= diagonal - p.window_left;
}

// Tensors are doubles, so that they can be differentiated: [batch][heads][rows][d], with varlen
// [rows of all][heads][d].
using Tensor = std::vector<double>;
inline std::size_t place(const Problem& p, bool of_queries, int64_t b, int64_t h, int64_t i,
                         int64_t c) {
  const int64_t heads = of_queries ? p.heads : p.kv_heads;
  int64_t row = (b * heads + h) * (of_queries ? p.seqlen_q : p.seqlen_k) + i;
  if (!p.varlen_q.empty()) {
    row = i;
    for (int64_t before = 0; before < b; ++before)
      row += of_queries ? lengths(p, before).q : lengths(p, before).k;
    row = row * heads + h;
  }
  return static_cast<std::size_t>(row * p.head_dim + c);
}

// One query: o [d], then lse.
inline std::vector<double> attend(const Problem& p, const Tensor& q, const Tensor& k,
                                  const Tensor& v, int64_t b, int64_t h, int64_t i) {
  const int64_t hkv = h / (p.heads / p.kv_heads);
  const Lengths n = lengths(p, b);
  std::vector<double> s(static_cast<std::size_t>(n.k), -kInfinity);
  double max = -kInfinity;
  for (int64_t j = 0; j < n.k; ++j) {
    if (!sees(p, n, b, h, i, j)) continue;
    double dot = 0;
    for (int64_t c = 0; c < p.head_dim; ++c)
      dot += q[place(p, true, b, h, i, c)] * k[place(p, false, b, hkv, j, c)];
    double& score = s[static_cast<std::size_t>(j)];
    score = p.softmax_scale * dot;
    if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
    if (p.alibi) {
      REQUIRE((p.heads & (p.heads - 1)) == 0);
      const double slope =
          std::pow(2.0, -8.0 * static_cast<double>(h + 1) / static_cast<double>(p.heads));
      score -= slope * static_cast<double>(std::abs(i + n.k - n.q - j));
    }
    max = std::max(max, score);
  }
  std::vector<double> row(static_cast<std::size_t>(p.head_dim) + 1, 0.0);
  row.back() = -kInfinity;
  if (max == -kInfinity) return row;
  double sum = 0;
  for (const double score : s) sum += std::exp(score - max);
  for (int64_t j = 0; j < n.k; ++j) {
    double weight = std::exp(s[static_cast<std::size_t>(j)] - max) / sum;
    if (p.dropout > 0) {
      const bool kept = dropout_keeps(p.seed, b * p.heads + h, static_cast<int>(i),
                                      static_cast<int>(j), static_cast<int>(p.dropout * 256));
      weight *= kept ? 1 / (1 - p.dropout) : 0;
    }
    for (int64_t c = 0; c < p.head_dim; ++c)
      row[static_cast<std::size_t>(c)] += weight * v[place(p, false, b, hkv, j, c)];
  }
  row.back() = max + std::log(sum);
  return row;
}
inline Tensor doubles(const HostTensor& t) { return Tensor(t.data.begin(), t.data.end()); }

// Five sequences: without queries, without keys, without either, and two with both. Each option is
// tested alone and together with the others.
inline Problem with_options(unsigned options) {
  Problem p = make(6, 5);
  if (options & 1) p.varlen_q = {4, 0, 3, 0, 5}, p.varlen_k = {3, 2, 0, 0, 6};
  if (options & 2) p.causal = true;
  if (options & 4) p.window_left = 2, p.window_right = 1;
  if (options & 8) p.softcap = 2, p.softmax_scale = 1.5;
  if (options & 16) p.alibi = true;
  if (options & 32) p.dropout = 0.25;
  hidden = {.blocks = (options & 192) == 64, .columns = (options & 192) == 128};
  Problem lengths = p;
  lengths.finish();
  p.mask = hidden.mask(lengths);
  return p;
}

}  // namespace attn::tests
