#include "attn/problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attn/error.h"

namespace attn {

std::string_view name(DType t) {
  switch (t) {
    case DType::fp32: return "fp32";
    case DType::fp16: return "fp16";
    case DType::bf16: return "bf16";
    case DType::int32: return "int32";
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

// Models cap at 15 to 50. Far outside, a float32 quotient by the cap would lose the score or overflow.
constexpr double kLeastSoftcap = 1e-3, kMostSoftcap = 1e6;

void Problem::finish() {
  const auto positive = [](int64_t value, const char* option) {
    if (value < 1)
      throw InputError(fmt::format("{} {}: must be at least 1", option, value));
  };
  positive(batch, "--batch");
  positive(heads, "--heads");
  positive(kv_heads, "--kv-heads");
  positive(seqlen_q, "--seqlen-q");
  positive(seqlen_k, "--seqlen-k");
  positive(head_dim, "--head-dim");
  if (heads % kv_heads != 0)
    throw InputError(fmt::format(
        "--heads {} --kv-heads {}: the query heads must be a multiple of the key/value heads",
        heads, kv_heads));
  const auto below = [](int64_t value, const char* option) {  // kernels count in 32 bits
    if (value >= int64_t{1} << 30)
      throw InputError(fmt::format("{} {}: must be below 2^30", option, value));
  };
  below(std::max(seqlen_q, seqlen_k), "--seqlen");
  below(head_dim, "--head-dim");
  if (window_left < -1 || window_right < -1)
    throw InputError(fmt::format(
        "--window {},{}: each side is a width of at least 0, or -1 for no limit", window_left,
        window_right));
  if (!std::isfinite(softmax_scale))
    throw InputError("--scale: must be a finite number");
  if (!(softcap == 0 || (softcap >= kLeastSoftcap && softcap <= kMostSoftcap)))
    throw InputError(fmt::format("--softcap {}: must be from {} to {}, or 0 for none", softcap, kLeastSoftcap,
                                 kMostSoftcap));
  // Q, K and the score matrix, in bytes of the widest type, have to be addressable.
  const auto product_fits = [](std::initializer_list<int64_t> factors) {
    int64_t product = 64;  // 8 bytes an element, and room to add a few tensors
    for (int64_t f : factors)
      if (__builtin_mul_overflow(product, f, &product)) return false;
    return true;
  };
  if (!product_fits({batch, heads, seqlen_q, head_dim}) ||
      !product_fits({batch, kv_heads, seqlen_k, head_dim}) ||
      !product_fits({batch, heads, seqlen_q, seqlen_k}))
    throw InputError(fmt::format(
        "{}: the bytes of a tensor overflow 63 bits; fewer heads, shorter lengths or a smaller head "
        "dim are accepted",
        text()));
  if (!(dropout >= 0 && dropout <= 255.0 / 256))
    throw InputError(fmt::format("--dropout {}: must be from 0 to 255/256", dropout));
  dropout = std::round(dropout * 256) / 256;
  if (top_k < 0) throw InputError(fmt::format("--top-k {}: must be at least 1", top_k));
  if (softmax_scale == 0) softmax_scale = 1 / std::sqrt(static_cast<double>(head_dim));
}

KeyRange Problem::visible(int64_t i) const {
  const int64_t diagonal = i + seqlen_k - seqlen_q;
  KeyRange range{0, seqlen_k};
  const int64_t right = causal ? 0 : window_right;
  // Widths beyond both lengths limit nothing (and could overflow the sum).
  const int64_t widest = seqlen_q + seqlen_k;
  if (right >= 0 && right < widest) range.end = std::min(seqlen_k, diagonal + right + 1);
  if (window_left >= 0 && window_left < widest)
    range.begin = std::max<int64_t>(0, diagonal - window_left);
  range.end = std::max(range.end, range.begin);  // a row with nothing to attend
  return range;
}

double Problem::visible_pairs() const {
  if (!masked()) return static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k);
  double pairs = 0;
  for (int64_t i = 0; i < seqlen_q; ++i) pairs += static_cast<double>(visible(i).size());
  return pairs;
}

std::string Problem::text() const {
  std::string s = fmt::format("B={} Hq={} Hkv={} seqlen_q={} seqlen_k={} d={} {}", batch, heads,
                              kv_heads, seqlen_q, seqlen_k, head_dim, name(dtype));
  if (causal) s += " causal";
  if (window_left >= 0 || window_right >= 0)
    s += fmt::format(" window={},{}", window_left, window_right);
  if (softcap > 0) s += fmt::format(" softcap={}", softcap);
  if (alibi) s += " alibi";
  if (dropout > 0) s += fmt::format(" dropout={}", dropout);
  if (top_k > 0) s += fmt::format(" top_k={}", top_k);
  s += fmt::format(" inputs={}", name(inputs));
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
          static_cast<int>(p.dropout * 256)};
}

}  // namespace attn
