/// \file
/// One attention problem: its shape, its mask, its element type and how its inputs are drawn.
#pragma once

#include <climits>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace attn {

/// A problem is in one of the first three, or in e4m3: then tensors are given and returned in bf16,
/// and steps quantise them. int32 and int64 are for indices and lengths, the last four for what is
/// stored in few bits: a number of int8, e4m3, e5m2 or int4 is one of a scale that lies beside it.
enum class DType { fp32, fp16, bf16, int32, int64, int8, e4m3, e5m2, int4 };
enum class InputKind { random, needle, peaked, outlier, files };

std::string_view name(DType);
std::string_view name(InputKind);
/// Bits of one element; int4 lies two a byte, the first in the low half.
constexpr int bits_of(DType t) {
  switch (t) {
    case DType::fp32: return 32;
    case DType::fp16: return 16;
    case DType::bf16: return 16;
    case DType::int32: return 32;
    case DType::int64: return 64;
    case DType::int8: return 8;
    case DType::e4m3: return 8;
    case DType::e5m2: return 8;
    case DType::int4: return 4;
  }
  throw std::logic_error("no such type");
}
/// Bytes of one element, of a type that has whole ones.
constexpr int64_t size_of(DType t) {
  return bits_of(t) >= 8 ? bits_of(t) / 8
                         : throw std::logic_error("int4 has no whole bytes: bytes_of counts them");
}
/// Bytes of `elements` in a row.
constexpr int64_t bytes_of(DType t, int64_t elements) { return (elements * bits_of(t) + 7) / 8; }
/// Tensors of these hold whole numbers of up to 63 bits: indices, lengths, page tables.
constexpr bool is_index(DType t) { return t == DType::int32 || t == DType::int64; }

/// Half-open range of keys.
struct KeyRange {
  int64_t begin, end;
  int64_t size() const { return end > begin ? end - begin : 0; }
};

class KeyMask;  // mask.h

/// Shapes as everywhere in the suite: Q, O, dO, dQ `[batch, heads, seqlen_q, head_dim]`, K, V, dK,
/// dV
/// `[batch, kv_heads, seqlen_k, head_dim]`, lse `[batch, heads, seqlen_q]`, all contiguous. Those
/// of a batch of sequences of several lengths (varlen) are packed: see tensor.h.
struct Problem {
  /// Of a varlen batch: whoever walks the sequences copies the problem, lists and all, for each.
  static constexpr int64_t kMaxSequences = int64_t{1} << 14;

  int64_t batch = 1, heads = 2, kv_heads = 2;
  int64_t seqlen_q = 128, seqlen_k = 128, head_dim = 64;
  /// Queries and keys of each sequence, 0 among them; empty: all have seqlen_q and seqlen_k.
  /// `finish()` sets batch, seqlen_q and seqlen_k (those of the longest) from them, and varlen_k to
  /// varlen_q if it is empty.
  std::vector<int64_t> varlen_q, varlen_k;
  /// Keys of each sequence that are in use, of a cache with room for seqlen_k; empty: all. The rest
  /// is never read.
  std::vector<int64_t> seqused_k;
  DType dtype = DType::bf16;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;  ///< keys seen to each side; -1: no limit
  double softmax_scale = 0;                     ///< set by `finish()` if 0: 1/sqrt(head_dim)
  /// Caps the scores: softcap tanh(softmax_scale q.k / softcap) in place of softmax_scale q.k,
  /// before masks. 0: no cap.
  double softcap = 0;
  /// Adds -slope_h |i + seqlen_k - seqlen_q - j| to the (capped) score of query i and key j, whose
  /// slope is that of the query head: the input `alibi`, see inputs.h.
  bool alibi = false;
  /// Share of the probabilities that dropout sets to 0, a multiple of 1/256 (see philox.h).
  double dropout = 0;
  int64_t top_k = 0;  ///< how many of a row are kept; 0: the operation has no such thing
  /// Hides keys besides causal and window: blocks, intervals of a column; null: none.
  std::shared_ptr<const KeyMask> mask = {};
  int64_t first_sequence = 0;  ///< what `mask` calls the first sequence: of a sequence(b) it is b
  /// Options that the operation has for itself (feature.h): name and numbers.
  std::map<std::string, std::vector<double>> own = {};
  /// There are rows of scores alone, `[batch, heads, seqlen_q, seqlen_k]`: B Hq seqlen_q rows and
  /// seqlen_k columns. Then `finish()` sets head_dim and softmax_scale to 1.
  bool matrix = false;
  InputKind inputs = InputKind::random;
  /// Files of q, k, v, o and their gradients are `[batch, seqlen, heads, head_dim]`, as
  /// FlashAttention has them, and not `[batch, heads, seqlen, head_dim]`: `--layout bnhd`.
  bool files_bnhd = false;
  uint64_t seed = 1;

  /// Fills what depends on the rest. Throws InputError, in one line, for a problem that has no
  /// meaning: heads or a head dim below 1, heads that kv_heads does not divide, a size that
  /// overflows 63 bits. Batch and lengths may be 0. Rounds `dropout` to a multiple of 1/256.
  void finish();

  /// There is no query or no key at all: a batch or a length of 0. The result is known without a
  /// launch: O = 0 and lse = -inf in what rows there are, as in PyTorch. (FlashAttention-2 refuses
  /// a batch of 0, and writes lse = +inf without keys.)
  bool empty() const;
  /// The same with sizes of at least 1: what a step would be asked if there were something to do.
  Problem at_least_one() const;

  int64_t group() const { return heads / kv_heads; }  ///< query heads that share one K/V head
  bool varlen() const { return !varlen_q.empty(); }
  /// Sequence `b` of the batch as a problem of its own: a batch of 1, with the lengths of that
  /// sequence; its keys are those in use.
  Problem sequence(int64_t b) const;
  int64_t tokens_q() const;  ///< queries of all sequences together
  int64_t tokens_k() const;
  /// With varlen visible() and visible_pairs() are those of a sequence(b).
  /// The keys that query `i` sees. The diagonal ends at the last key (bottom-right aligned):
  /// i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k - seqlen_q + window_right.
  KeyRange visible(int64_t i) const;
  /// Calls `seen` for each run of keys that query `i` of head `h` sees, in rising order: visible()
  /// less what `mask` hides. Of a sequence(b), with several lengths or a mask.
  void for_each_range(int64_t h, int64_t i, const std::function<void(KeyRange)>& seen) const;
  /// Pairs (query, key) that are computed, over one head: the sum of visible(i).size(); with a mask
  /// the mean of heads.
  double visible_pairs() const;
  /// The same over all heads of all sequences.
  double total_pairs() const;
  bool one_length() const { return varlen_q.empty() && seqused_k.empty(); }
  bool masked() const { return causal || window_left >= 0 || window_right >= 0; }
  /// e.g. "B=1 Hq=2 Hkv=2 seqlen_q=128 seqlen_k=128 d=64 bf16 causal random seed=1"
  std::string text() const;
};

/// The part of a problem that kernels need, in 32 bits. Window widths are at most kNoWindow, so
/// that adding one to a position cannot overflow. Causal is window_right = 0.
struct Shape {
  static constexpr int kNoWindow = 1 << 30;
  /// with varlen the lengths are those of the longest
  int heads, kv_heads, seqlen_q, seqlen_k, head_dim;
  int window_left, window_right;
  float softmax_scale;
  float softcap;  ///< 0: none
  int dropped;  ///< of 256 probabilities, how many dropout sets to 0
  /// with varlen the queries of all sequences, so that lse is [heads, tokens_q]; else 0
  int tokens_q;
};
Shape shape_of(const Problem&);

}  // namespace attn
