/// \file
/// A model kernel for the checker's own tests: attention in float32, tile by tile, correct in
/// several ways or with one of many faults.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check/check.h"
#include "check/inputs.h"
#include "tests/catch.h"

namespace attn::tests {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Correct variants of the algorithm.
struct Method {
  int64_t tile = 16;  // keys per tile
  bool backwards = false;     // last tile first
  bool normalise_p = false;  // divides P, not O, by the row sum (three passes, as in chapter 01)
  bool round_p = true;  // P in the element type, as for tensor cores
  float tanh_error = 0;  // relative error; the hardware's is 2^-11

  float tanh(float s, float cap) const { return cap * std::tanh(s / cap) * (1 + tanh_error); }
};

enum class Fault {
  none,
  nan_output,
  one_nan,
  no_op,
  zeros,
  tile_short,
  last_key_skipped,
  tile_missing_from_sum,
  mask_one_more,
  mask_one_less,
  heads_swapped,
  k_shifted,
  no_rescale,
  gqa_modulo,
  no_scale,
  lse_base_2,
  no_softcap,
  no_alibi,
  alibi_of_kv_head,
  alibi_top_left,
  next_sequence_read,
  keys_at_queries,
  diagonal_of_longest,
  no_keys_not_written,
  lse_as_tokens,
  not_normalised,
  v_of_next_batch,
  one_row_wrong
};
// Features that a problem needs for a fault to matter.
enum Needs : unsigned { kNothing = 0, kCausal = 1, kSoftcap = 2, kAlibi = 4, kVarlen = 8 };
// The tensors that a fault affects.
struct Planted {
  Fault fault;
  const char* name;
  bool spoils_o, spoils_lse;
  unsigned needs = kNothing;
  bool matters(const Problem& p) const {
    return (!(needs & kCausal) || p.causal) && (!(needs & kSoftcap) || p.softcap > 0) &&
           (!(needs & kAlibi) || p.alibi) && (!(needs & kVarlen) || p.varlen());
  }
};
inline const Planted kPlanted[] = {
    {Fault::nan_output, "NaN output", true, true},
    {Fault::one_nan, "one NaN", true, true},
    {Fault::no_op, "output never written", true, true},
    {Fault::zeros, "zeros", true, true},
    {Fault::tile_short, "one tile short", true, true},
    {Fault::last_key_skipped, "last key skipped", true, true},
    {Fault::tile_missing_from_sum, "last tile missing from the row sum", true, true},
    {Fault::mask_one_more, "mask one key too wide", true, true, kCausal},
    {Fault::mask_one_less, "mask one key too narrow", true, true, kCausal},
    {Fault::heads_swapped, "two heads swapped", true, true},
    {Fault::k_shifted, "K shifted by one row", true, true},
    {Fault::no_rescale, "no rescale when the maximum grows", true, true},
    {Fault::gqa_modulo, "K/V head h % Hkv", true, true},
    {Fault::no_scale, "softmax scale missing", true, true},
    {Fault::lse_base_2, "lse in base 2", false, true},
    {Fault::no_softcap, "softcap missing", true, true, kSoftcap},
    {Fault::no_alibi, "ALiBi missing", true, true, kAlibi},
    {Fault::alibi_of_kv_head, "the slope of the K/V head", true, true, kAlibi},
    {Fault::alibi_top_left, "distance to the top-left diagonal", true, true, kAlibi},
    {Fault::next_sequence_read, "keys up to the longest length", true, true, kVarlen},
    {Fault::keys_at_queries, "K and V where the queries begin", true, true, kVarlen},
    {Fault::diagonal_of_longest, "the diagonal of the longest sequence", true, true,
     kVarlen | kCausal},
    {Fault::no_keys_not_written, "a sequence without keys not written", true, true, kVarlen},
    {Fault::lse_as_tokens, "lse [tokens, heads]", false, true, kVarlen},
    {Fault::not_normalised, "P not normalised", true, false},
    {Fault::v_of_next_batch, "V of the next batch", true, false},
    {Fault::one_row_wrong, "one row of one head wrong by 5 %", true, true},
};

inline float* row_of(HostTensor& t, int64_t b, int64_t h, int64_t i) {
  return const_cast<float*>(t.row(b, h, i));
}
inline auto vector_of(const HostTensor& t, int64_t b, int64_t h, int64_t i) {
  return Eigen::Map<const Eigen::VectorXf>(t.row(b, h, i), t.spec.shape[3]);
}

// One query of the model kernel.
inline void query(const Problem& batch, const HostTensors& in, const Method& method, Fault fault,
                  int64_t b, int64_t h, int64_t i, float* o, float& lse) {
  const Problem p = batch.sequence(b);
  const HostTensor &q = in.at("q"), &k = in.at("k"), &v = in.at("v");
  const int64_t hkv = fault == Fault::gqa_modulo ? h % p.kv_heads : h / p.group();
  const int64_t bv = fault == Fault::v_of_next_batch ? (b + 1) % batch.batch : b;
  // Keeps faulty accesses within the tensor.
  const auto key_row = [&](const HostTensor& t, int64_t sequence, int64_t j) {
    int64_t row = t.spec.row(sequence, hkv, j);
    if (fault == Fault::keys_at_queries)
      row += q.spec.row(b, 0, 0) / batch.group() - t.spec.row(b, 0, 0);
    row = std::min(row, t.spec.rows() - batch.kv_heads + hkv);
    return Eigen::Map<const Eigen::VectorXf>(t.data.data() + row * t.spec.columns(),
                                             t.spec.columns());
  };
  const auto scale = fault == Fault::no_scale ? 1.0f : static_cast<float>(p.softmax_scale);
  KeyRange keys = p.visible(i);
  if (fault == Fault::diagonal_of_longest) {
    keys = batch.visible(i);
    keys.end = std::min(keys.end, p.seqlen_k);
  }
  if (fault == Fault::next_sequence_read && keys.end == p.seqlen_k) keys.end = batch.seqlen_k;
  if (fault == Fault::mask_one_more) keys.end = std::min(keys.end + 1, p.seqlen_k);
  if (fault == Fault::mask_one_less && keys.end < p.seqlen_k) --keys.end;
  if (fault == Fault::tile_short) keys.end = std::min(keys.end, p.seqlen_k - 16);
  if (fault == Fault::last_key_skipped) keys.end = std::min(keys.end, p.seqlen_k - 1);

  const int64_t first_tile = keys.begin / method.tile;
  const int64_t last_tile = std::max(first_tile, (keys.end + method.tile - 1) / method.tile);
  float row_max = -kInf, row_sum = 0;
  Eigen::VectorXf acc = Eigen::VectorXf::Zero(p.head_dim);
  std::vector<float> scores(static_cast<std::size_t>(batch.seqlen_k));
  const auto pass = [&](float known_max, float known_sum) {
    for (int64_t n = first_tile; n < last_tile; ++n) {
      const int64_t tile = method.backwards ? last_tile - 1 - (n - first_tile) : n;
      const int64_t begin = std::max(keys.begin, tile * method.tile);
      const int64_t end = std::min(keys.end, (tile + 1) * method.tile);
      float new_max = row_max;
      for (int64_t j = begin; j < end; ++j) {
        const int64_t key = fault == Fault::k_shifted ? std::min(j + 1, p.seqlen_k - 1) : j;
        float& s = scores[static_cast<std::size_t>(j)];
        s = scale * vector_of(q, b, h, i).dot(key_row(k, b, key));
        if (p.softcap > 0 && fault != Fault::no_softcap)
          s = method.tanh(s, static_cast<float>(p.softcap));
        if (p.alibi && fault != Fault::no_alibi) {
          const int64_t head = fault == Fault::alibi_of_kv_head ? hkv : h;
          const int64_t diagonal =
              i + (fault == Fault::alibi_top_left ? 0 : p.seqlen_k - p.seqlen_q);
          s -= in.at("alibi").row(0, 0, 0)[head] * static_cast<float>(std::abs(diagonal - j));
        }
        new_max = std::max(new_max, s);
      }
      if (known_sum > 0) new_max = known_max;
      const float rescale = row_max == -kInf ? 0 : std::exp(row_max - new_max);
      if (fault != Fault::no_rescale) row_sum *= rescale, acc *= rescale;
      row_max = new_max;
      for (int64_t j = begin; j < end; ++j) {
        float e = std::exp(scores[static_cast<std::size_t>(j)] - row_max);
        if (fault != Fault::tile_missing_from_sum || end < keys.end) row_sum += e;
        if (known_sum > 0) e /= known_sum;
        acc += (method.round_p ? round_to(p.dtype, e) : e) * key_row(v, bv, j);
      }
    }
  };
  pass(0, 0);
  if (method.normalise_p && row_sum > 0) {
    const float known_max = row_max, known_sum = row_sum;
    acc.setZero(), row_sum = 0;
    pass(known_max, known_sum);
    row_sum = known_sum;
  } else if (row_sum > 0 && fault != Fault::not_normalised) {
    acc /= row_sum;
  }
  for (int64_t c = 0; c < p.head_dim; ++c) o[c] = round_to(p.dtype, acc[c]);
  lse = row_sum > 0 ? row_max + std::log(row_sum) : -kInf;
  if (fault == Fault::lse_base_2) lse *= 1.44269504f;
}

// The complete kernel: o and lse, poisoned first.
inline HostTensors model(const Problem& p, const HostTensors& in, const Method& method,
                         Fault fault) {
  HostTensors out;
  for (const TensorSpec& spec : {like_q(p, "o"), lse_of(p)})
    out[spec.name] = {spec, std::vector<float>(static_cast<std::size_t>(spec.elements()), kNaN)};
  HostTensor &o = out["o"], &lse = out["lse"];
  if (fault == Fault::no_op) return out;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Problem sequence = p.sequence(b);
    if (fault == Fault::no_keys_not_written && sequence.seqlen_k == 0) continue;
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t to = fault == Fault::heads_swapped && h < 2 ? 1 - h : h;
      for (int64_t i = 0; i < sequence.seqlen_q; ++i)
        query(p, in, method, fault, b, h, i, row_of(o, b, to, i), *row_of(lse, b, to, i));
    }
  }
  float* last_row = o.data.data() + o.data.size() - p.head_dim;  // of the last head, in any layout
  if (fault == Fault::lse_as_tokens) {
    const std::vector<float> right = lse.data;
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t token = 0; token < p.tokens_q(); ++token)
        lse.data[static_cast<std::size_t>(token * p.heads + h)] =
            right[static_cast<std::size_t>(h * p.tokens_q() + token)];
  }
  for (HostTensor* t : {&o, &lse}) {
    if (fault == Fault::nan_output) t->data.assign(t->data.size(), kNaN);
    if (fault == Fault::zeros) t->data.assign(t->data.size(), 0);
    if (fault == Fault::one_nan) t->data[t->data.size() / 2] = kNaN;
  }
  if (fault == Fault::one_row_wrong) {
    for (int64_t c = 0; c < p.head_dim; ++c) last_row[c] = round_to(p.dtype, 1.05f * last_row[c]);
    lse.data.back() += 0.05f * std::max(1.0f, std::abs(lse.data.back()));
  }
  return out;
}

struct Verdicts {
  Verdict o, lse;
};
inline Verdicts verdicts(const HostTensors& out, const std::vector<Expected>& expected) {
  REQUIRE(expected.size() == 2);
  return {check(out.at("o"), expected[0]), check(out.at("lse"), expected[1])};
}

// Sequences of mixed lengths; the third has no keys, the first no queries.
inline constexpr int64_t kSeveral = 0;

inline Problem problem_of(DType dtype, InputKind inputs, int64_t seqlen, bool causal) {
  Problem p;
  p.batch = 2, p.heads = 4, p.kv_heads = 2, p.head_dim = 32;
  p.seqlen_q = p.seqlen_k = seqlen;
  if (seqlen == kSeveral) p.varlen_q = {0, 33, 17, 113, 1, 40}, p.varlen_k = {5, 33, 0, 97, 20, 64};
  p.dtype = dtype, p.inputs = inputs, p.causal = causal;
  p.finish();
  return p;
}

inline HostTensors draw(const Problem& p) {
  return draw_inputs(p, std::vector<TensorSpec>{like_q(p, "q"), like_k(p, "k"), like_k(p, "v"),
                                                like_q(p, "do"), alibi_slopes(p)});
}

inline constexpr DType kTypes[] = {DType::fp32, DType::fp16, DType::bf16};
inline constexpr int64_t kLengths[] = {17, 33, 113, 203, kSeveral};

// The largest row error of a fault, relative to the row, as a multiple of the checker's bound. Some
// faults have no effect, such as a skipped key without a needle.
inline double damage(const HostTensor& out, const HostTensor& good, const Expected& e) {
  double worst = 0;
  for (std::size_t r = 0; r < e.rows.size(); ++r) {
    const auto [b, h, i] = e.rows[r];
    const auto a = vector_of(out, b, h, i), c = vector_of(good, b, h, i);
    if (a == c) continue;  // e.g. both -inf
    const double difference = (a - c).norm();
    if (std::isnan(difference)) return INFINITY;
    worst = std::max(worst, difference / (e.row_bound * e.scale[r]));
  }
  return worst;
}

}  // namespace attn::tests
