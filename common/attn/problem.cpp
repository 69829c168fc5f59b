#include "attn/problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

#include "attn/error.h"
#include "attn/mask.h"

namespace attn {

std::string_view name(DType t) {
  switch (t) {
    case DType::fp32: return "fp32";
    case DType::fp16: return "fp16";
    case DType::bf16: return "bf16";
    case DType::int32: return "int32";
    case DType::int64: return "int64";
    case DType::int8: return "int8";
    case DType::e4m3: return "e4m3";
    case DType::e5m2: return "e5m2";
    case DType::int4: return "int4";
  }
  return "?";
}

std::string_view name(InputKind k) {
  switch (k) {
    case InputKind::random: return "random";
    case InputKind::needle: return "needle";
    case InputKind::peaked: return "peaked";
    case InputKind::outlier: return "outlier";
    case InputKind::files: return "files";
  }
  return "?";
}

// Models use caps of 15 to 50. Far outside, score / cap in fp32 would lose the score or overflow.
constexpr double kLeastSoftcap = 1e-3, kMaxSoftcap = 1e6;

// Maximum tokens of a varlen batch: fp32 elements of HostTensor represent integers up to here.
constexpr int64_t kMaxTokens = int64_t{1} << 24;

namespace {

std::string list_text(const std::vector<int64_t>& lengths) {
  return fmt::format("{}", fmt::join(lengths, ","));
}

// The maximum of a list, all of whose elements are checked.
int64_t longest_of(const std::vector<int64_t>& lengths, const char* option) {
  int64_t tokens = 0;
  for (const int64_t n : lengths) {
    if (n < 0 || n > kMaxTokens)
      throw InputError(fmt::format("{}: a length of {}, must be from 0 to 2^24", option, n));
    tokens = std::min(tokens + n, kMaxTokens + 1);
  }
  if (tokens > kMaxTokens)
    throw InputError(fmt::format("{}: the lengths must add up to at most 2^24 tokens", option));
  return *std::max_element(lengths.begin(), lengths.end());
}

}  // namespace

void Problem::finish() {
  if (varlen_k.empty()) varlen_k = varlen_q;
  if (varlen_q.size() != varlen_k.size())
    throw InputError(fmt::format("--varlen-k: {} lengths, must be {}, as in --varlen",
                                 varlen_k.size(), varlen_q.size()));
  if (varlen()) {
    batch = static_cast<int64_t>(varlen_q.size());
    if (batch > kMaxSequences)
      throw InputError(
          fmt::format("--varlen: {} sequences, must be at most {}", batch, kMaxSequences));
    seqlen_q = longest_of(varlen_q, "--varlen");
    seqlen_k = longest_of(varlen_k, "--varlen-k");
  }
  if (matrix) head_dim = 1, softmax_scale = 1;
  const auto at_least = [](int64_t least, int64_t value, const char* option) {
    if (value < least)
      throw InputError(fmt::format("{} {}: must be at least {}", option, value, least));
  };
  at_least(0, batch, "--batch");
  at_least(1, heads, "--heads");
  at_least(1, kv_heads, "--kv-heads");
  at_least(0, seqlen_q, "--seqlen-q");
  at_least(0, seqlen_k, "--seqlen-k");
  at_least(1, head_dim, "--head-dim");
  if (heads % kv_heads != 0)
    throw InputError(fmt::format(
        "--heads {} --kv-heads {}: the query heads must be a multiple of the key/value heads",
        heads, kv_heads));
  const auto below = [](int64_t value, const char* option) {  // kernels use 32-bit indices
    if (value >= int64_t{1} << 30)
      throw InputError(fmt::format("{} {}: must be below 2^30", option, value));
  };
  below(std::max(seqlen_q, seqlen_k), "--seqlen");
  below(head_dim, "--head-dim");
  if (!seqused_k.empty()) {
    if (varlen()) throw InputError("--seqused: not together with --varlen");
    if (static_cast<int64_t>(seqused_k.size()) != batch)
      throw InputError(fmt::format("--seqused: {} lengths, must be {}, one per sequence",
                                   seqused_k.size(), batch));
    for (const int64_t n : seqused_k)
      if (n < 0 || n > seqlen_k)
        throw InputError(
            fmt::format("--seqused: a length of {}, must be from 0 to {}, the length of the cache",
                        n, seqlen_k));
  }
  if (mask) mask->fits(*this);
  if (window_left < -1 || window_right < -1)
    throw InputError(
        fmt::format("--window {},{}: each side is a width of at least 0, or -1 for no limit",
                    window_left, window_right));
  if (!std::isfinite(softmax_scale)) throw InputError("--scale: must be a finite number");
  if (!(softcap == 0 || (softcap >= kLeastSoftcap && softcap <= kMaxSoftcap)))
    throw InputError(fmt::format("--softcap {}: must be from {} to {}, or 0 for none", softcap,
                                 kLeastSoftcap, kMaxSoftcap));
  // Q, K and the score matrix must be addressable, in bytes of the widest type.
  const auto product_fits = [](std::initializer_list<int64_t> factors) {
    int64_t product = 64;  // 8 bytes per element; sums of a few tensors must not overflow
    for (int64_t f : factors)
      if (__builtin_mul_overflow(product, f, &product)) return false;
    return true;
  };
  if (!product_fits({batch, heads, seqlen_q, head_dim}) ||
      !product_fits({batch, kv_heads, seqlen_k, head_dim}) ||
      !product_fits({batch, heads, seqlen_q, seqlen_k}))
    throw InputError(
        fmt::format("{}: the bytes of a tensor overflow 63 bits; fewer heads, shorter lengths or a "
                    "smaller head "
                    "dim are accepted",
                    text()));
  if (!(dropout >= 0 && dropout <= 255.0 / 256))
    throw InputError(fmt::format("--dropout {}: must be from 0 to 255/256", dropout));
  dropout = std::round(dropout * 256) / 256;
  if (top_k < 0) throw InputError(fmt::format("--top-k {}: must be at least 1", top_k));
  if (softmax_scale == 0) softmax_scale = 1 / std::sqrt(static_cast<double>(head_dim));
}

bool Problem::empty() const { return tokens_q() == 0 || tokens_k() == 0; }

Problem Problem::at_least_one() const {
  Problem p = *this;
  p.batch = std::max<int64_t>(1, batch);
  p.seqlen_q = std::max<int64_t>(1, seqlen_q), p.seqlen_k = std::max<int64_t>(1, seqlen_k);
  if (varlen() && tokens_q() == 0) p.varlen_q[0] = 1;
  if (!varlen_k.empty() && tokens_k() == 0) p.varlen_k[0] = 1;  // before finish() it may be empty
  if (!seqused_k.empty()) p.seqused_k.resize(static_cast<std::size_t>(p.batch), 0);
  return p;
}

Problem Problem::sequence(int64_t b) const {
  Problem one = *this;
  one.batch = 1;
  one.first_sequence += b;
  one.seqused_k.clear();
  if (!seqused_k.empty()) one.seqlen_k = seqused_k[static_cast<std::size_t>(b)];
  if (!varlen()) return one;
  one.seqlen_q = varlen_q[static_cast<std::size_t>(b)];
  one.seqlen_k = varlen_k[static_cast<std::size_t>(b)];
  one.varlen_q.clear();
  one.varlen_k.clear();
  return one;
}

int64_t Problem::tokens_q() const {
  return varlen() ? std::accumulate(varlen_q.begin(), varlen_q.end(), int64_t{0})
                  : batch * seqlen_q;
}

int64_t Problem::tokens_k() const {
  return varlen() ? std::accumulate(varlen_k.begin(), varlen_k.end(), int64_t{0})
                  : batch * seqlen_k;
}

KeyRange Problem::visible(int64_t i) const {
  const int64_t diagonal = i + seqlen_k - seqlen_q;
  KeyRange range{0, seqlen_k};
  const int64_t right = causal ? 0 : window_right;
  // Widths beyond both lengths have no effect, and could overflow the sum.
  const int64_t widest = seqlen_q + seqlen_k;
  if (right >= 0 && right < widest) range.end = std::min(seqlen_k, diagonal + right + 1);
  if (window_left >= 0 && window_left < widest)
    range.begin = std::max<int64_t>(0, diagonal - window_left);
  range.end = std::max(range.end, range.begin);  // a fully masked row
  return range;
}

void Problem::for_each_range(int64_t h, int64_t i,
                             const std::function<void(KeyRange)>& seen) const {
  const KeyRange range = visible(i);
  if (range.size() == 0) return;
  if (mask)
    mask->for_each_range(first_sequence, h, i, range, seen);
  else
    seen(range);
}

double Problem::visible_pairs() const {
  if (mask) return total_pairs() / static_cast<double>(batch * heads);
  if (!masked()) return static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k);
  double pairs = 0;
  for (int64_t i = 0; i < seqlen_q; ++i) pairs += static_cast<double>(visible(i).size());
  return pairs;
}

double Problem::total_pairs() const {
  if (one_length() && !mask) return static_cast<double>(batch * heads) * visible_pairs();
  double pairs = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const Problem one = sequence(b);
    if (!mask) {
      pairs += static_cast<double>(heads) * one.visible_pairs();
      continue;
    }
    for (int64_t h = 0; h < heads; ++h)
      pairs += mask->visible_pairs(one, one.first_sequence, h);
  }
  return pairs;
}

std::string Problem::text() const {
  std::string lengths = fmt::format("seqlen_q={} seqlen_k={}", seqlen_q, seqlen_k);
  if (varlen()) lengths = "varlen=" + list_text(varlen_q);
  if (varlen_k != varlen_q) lengths += " varlen_k=" + list_text(varlen_k);
  if (!seqused_k.empty()) lengths += " seqused=" + list_text(seqused_k);
  std::string s =
      matrix ? fmt::format("rows={} cols={} {}", batch * heads * seqlen_q, seqlen_k, name(dtype))
             : fmt::format("B={} Hq={} Hkv={} {} d={} {}", batch, heads, kv_heads, lengths,
                           head_dim, name(dtype));
  if (causal) s += " causal";
  if (window_left >= 0 || window_right >= 0)
    s += fmt::format(" window={},{}", window_left, window_right);
  if (softcap > 0) s += fmt::format(" softcap={}", softcap);
  if (alibi) s += " alibi";
  if (dropout > 0) s += fmt::format(" dropout={}", dropout);
  if (top_k > 0) s += fmt::format(" top_k={}", top_k);
  if (mask) s += " mask=" + mask->text();
  for (const auto& [option, values] : own)
    if (option != "field") s += fmt::format(" {}={}", option, fmt::join(values, ","));
  std::string drawn(name(inputs));
  if (const auto field = own.find("field"); field != own.end()) {
    const std::span<const double> sides = field->second;
    drawn = fmt::format("field:{}", fmt::join(sides.first(3), "x"));
    if (sides.size() > 3) drawn += fmt::format(",{}", fmt::join(sides.subspan(3), "x"));
  }
  s += " inputs=" + drawn;
  return inputs == InputKind::files ? s : s + fmt::format(" seed={}", seed);
}

Shape shape_of(const Problem& p) {
  const auto width = [](int64_t w) {
    return static_cast<int>(w < 0 ? Shape::kNoWindow : std::min<int64_t>(w, Shape::kNoWindow));
  };
  return {static_cast<int>(p.heads),
          static_cast<int>(p.kv_heads),
          static_cast<int>(p.seqlen_q),
          static_cast<int>(p.seqlen_k),
          static_cast<int>(p.head_dim),
          width(p.window_left),
          p.causal ? 0 : width(p.window_right),
          static_cast<float>(p.softmax_scale),
          static_cast<float>(p.softcap),
          static_cast<int>(p.dropout * 256),
          p.varlen() ? static_cast<int>(p.tokens_q()) : 0};
}

}  // namespace attn
