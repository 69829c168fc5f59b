/// \file
/// One attention problem: its shape, its mask, its element type and how its inputs are drawn.
#pragma once

#include <climits>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace attn {

/// int32 is for tensors of indices; a problem is in one of the other three.
enum class DType { fp32, fp16, bf16, int32 };
enum class InputKind { random, needle, peaked, outlier, files };

std::string_view name(DType);
std::string_view name(InputKind);
/// Bytes of one element.
constexpr int64_t size_of(DType t) { return t == DType::fp16 || t == DType::bf16 ? 2 : 4; }

/// Half-open range of keys.
struct KeyRange {
  int64_t begin, end;
  int64_t size() const { return end > begin ? end - begin : 0; }
};

/// Shapes as everywhere in the suite: Q, O, dO, dQ `[batch, heads, seqlen_q, head_dim]`, K, V, dK, dV
/// `[batch, kv_heads, seqlen_k, head_dim]`, lse `[batch, heads, seqlen_q]`, all contiguous. Those of a batch of
/// sequences of several lengths (varlen) are packed: see tensor.h.
struct Problem {
  /// Of a varlen batch: whoever walks the sequences copies the problem, lists and all, for each.
  static constexpr int64_t kMostSequences = int64_t{1} << 14;

  int64_t batch = 1, heads = 2, kv_heads = 2;
  int64_t seqlen_q = 128, seqlen_k = 128, head_dim = 64;
  /// Queries and keys of each sequence, 0 among them; empty: all have seqlen_q and seqlen_k. `finish()` sets batch,
  /// seqlen_q and seqlen_k (those of the longest) from them, and varlen_k to varlen_q if it is empty.
  std::vector<int64_t> varlen_q, varlen_k;
  DType dtype = DType::bf16;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;  ///< keys seen to each side; -1: no limit
  double softmax_scale = 0;                     ///< set by `finish()` if 0: 1/sqrt(head_dim)
  /// Caps the scores: softcap tanh(softmax_scale q.k / softcap) in place of softmax_scale q.k, before masks. 0: no cap.
  double softcap = 0;
  /// Adds -slope_h |i + seqlen_k - seqlen_q - j| to the (capped) score of query i and key j, whose slope is that of
  /// the query head: the input `alibi`, see inputs.h.
  bool alibi = false;
  /// Share of the probabilities that dropout sets to 0, a multiple of 1/256 (see philox.h).
  double dropout = 0;
  int64_t top_k = 0;  ///< how many of a row softmax_topk keeps; 0: the operation has no such thing
  InputKind inputs = InputKind::random;
  uint64_t seed = 1;

  /// Fills what depends on the rest. Throws InputError, in one line, for a problem that has no
  /// meaning: a size below 1 (a sequence may be empty, a tensor may not), heads that kv_heads does not
  /// divide, a size that overflows 63 bits. Rounds `dropout` to a multiple of 1/256.
  void finish();

  int64_t group() const { return heads / kv_heads; }  ///< query heads that share one K/V head
  bool varlen() const { return !varlen_q.empty(); }
  /// Sequence `b` of the batch as a problem of its own: a batch of 1, with the lengths of that sequence.
  Problem sequence(int64_t b) const;
  int64_t tokens_q() const;  ///< queries of all sequences together
  int64_t tokens_k() const;
  /// With varlen visible() and visible_pairs() are those of a sequence(b).
  /// The keys that query `i` sees. The diagonal ends at the last key (bottom-right aligned):
  /// i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k - seqlen_q + window_right.
  KeyRange visible(int64_t i) const;
  /// Pairs (query, key) that are computed, over one head: the sum of visible(i).size().
  double visible_pairs() const;
  /// The same over all heads of all sequences.
  double total_pairs() const;
  bool masked() const { return causal || window_left >= 0 || window_right >= 0; }
  /// e.g. "B=1 Hq=2 Hkv=2 seqlen_q=128 seqlen_k=128 d=64 bf16 causal random seed=1"
  std::string text() const;
};

/// The part of a problem that kernels need, in 32 bits. Window widths are at most kNoWindow, so that
/// adding one to a position cannot overflow. Causal is window_right = 0.
struct Shape {
  static constexpr int kNoWindow = 1 << 30;
  int heads, kv_heads, seqlen_q, seqlen_k, head_dim;  ///< with varlen the lengths are those of the longest
  int window_left, window_right;
  float softmax_scale;
  float softcap;  ///< 0: none
  int dropped;  ///< of 256 probabilities, how many dropout sets to 0
  int tokens_q;  ///< with varlen the queries of all sequences, so that lse is [heads, tokens_q]; else 0
};
Shape shape_of(const Problem&);

}  // namespace attn
