/// \file
/// One attention problem: shape, mask, element type and distribution of its inputs.
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

/// A problem has one of the first three types, or e4m3: then tensors are given and returned in bf16
/// and steps quantise them. int32 and int64 are for indices and lengths. The last four are storage
/// types; a value in int8, e4m3, e5m2 or int4 is multiplied by a scale that is stored next to it.
enum class DType { fp32, fp16, bf16, int32, int64, int8, e4m3, e5m2, int4 };
enum class InputKind { random, needle, peaked, outlier, files };

std::string_view name(DType);
std::string_view name(InputKind);
/// Bits per element. Two int4 share a byte, the first in the low half.
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
/// Bytes per element, for types of whole bytes.
constexpr int64_t size_of(DType t) {
  return bits_of(t) >= 8 ? bits_of(t) / 8
                         : throw std::logic_error("int4 has no whole bytes: bytes_of counts them");
}
/// Bytes of `elements` contiguous elements.
constexpr int64_t bytes_of(DType t, int64_t elements) { return (elements * bits_of(t) + 7) / 8; }
/// Types of integer tensors, up to 63 bits: indices, lengths, page tables.
constexpr bool is_index(DType t) { return t == DType::int32 || t == DType::int64; }

/// Half-open range of keys.
struct KeyRange {
  int64_t begin, end;
  int64_t size() const { return end > begin ? end - begin : 0; }
};

class KeyMask;  // mask.h

/// Shapes: Q, O, dO, dQ `[batch, heads, seqlen_q, head_dim]`, K, V, dK, dV `[batch, kv_heads,
/// seqlen_k, head_dim]`, lse `[batch, heads, seqlen_q]`, all contiguous. Batches of sequences of
/// different lengths (varlen) are packed: see tensor.h.
struct Problem {
  /// Limit of a varlen batch: loops over sequences copy the problem, with its lists, for each.
  static constexpr int64_t kMaxSequences = int64_t{1} << 14;

  int64_t batch = 1, heads = 2, kv_heads = 2;
  int64_t seqlen_q = 128, seqlen_k = 128, head_dim = 64;
  /// Queries and keys of each sequence, possibly 0; empty: all have seqlen_q and seqlen_k.
  /// `finish()` sets batch, seqlen_q and seqlen_k (of the longest) from them, and varlen_k to
  /// varlen_q if it is empty.
  std::vector<int64_t> varlen_q, varlen_k;
  /// Valid keys of each sequence, in a cache with capacity for seqlen_k; empty: all. Kernels must
  /// not use the rest.
  std::vector<int64_t> seqused_k;
  DType dtype = DType::bf16;
  bool causal = false;
  /// visible keys to each side of the diagonal; -1: no limit
  int64_t window_left = -1, window_right = -1;
  double softmax_scale = 0;  ///< set by `finish()` if 0: 1/sqrt(head_dim)
  /// Softcap: the score is softcap * tanh(softmax_scale q.k / softcap), not softmax_scale q.k,
  /// before masks. 0: off.
  double softcap = 0;
  /// ALiBi: adds -slope_h |i + seqlen_k - seqlen_q - j| to the (capped) score of query i and key j,
  /// with the slope of the query head: the input `alibi`, see inputs.h.
  bool alibi = false;
  /// Fraction of probabilities that dropout sets to 0, a multiple of 1/256 (see philox.h).
  double dropout = 0;
  int64_t top_k = 0;  ///< number of elements kept per row; 0: not a top-k operation
  /// Mask beyond causal and window: blocks, or intervals per column; null: none.
  std::shared_ptr<const KeyMask> mask = {};
  int64_t first_sequence = 0;  ///< batch index of the first sequence in `mask`; b for sequence(b)
  /// The operation's own options (feature.h): name and values.
  std::map<std::string, std::vector<double>> own = {};
  /// The input is a matrix of scores only, `[batch, heads, seqlen_q, seqlen_k]`: B Hq seqlen_q rows
  /// and seqlen_k columns. `finish()` then sets head_dim and softmax_scale to 1.
  bool matrix = false;
  InputKind inputs = InputKind::random;
  /// Files of q, k, v, o and their gradients are `[batch, seqlen, heads, head_dim]`, as in
  /// FlashAttention, instead of `[batch, heads, seqlen, head_dim]`: `--layout bnhd`.
  bool files_bnhd = false;
  uint64_t seed = 1;

  /// Fills in derived members. Throws InputError, with one line, for an invalid problem: heads or a
  /// head dim below 1, heads that are not a multiple of kv_heads, a size that overflows 63 bits.
  /// Batch and lengths may be 0. Rounds `dropout` to a multiple of 1/256.
  void finish();

  /// No query or no key at all: a batch or length of 0. The result needs no launch: O = 0 and
  /// lse = -inf for all rows, as in PyTorch. (FlashAttention-2 refuses a batch of 0 and writes
  /// lse = +inf without keys.)
  bool empty() const;
  /// The same problem with sizes of at least 1, to ask whether a step supports it.
  Problem at_least_one() const;

  int64_t group() const { return heads / kv_heads; }  ///< query heads that share one K/V head
  bool varlen() const { return !varlen_q.empty(); }
  /// Sequence `b` as its own problem: a batch of 1, with the lengths of that sequence and only its
  /// valid keys.
  Problem sequence(int64_t b) const;
  int64_t tokens_q() const;  ///< queries of all sequences together
  int64_t tokens_k() const;
  /// With varlen, call visible() and visible_pairs() on a sequence(b).
  /// Keys visible to query `i`. The diagonal is bottom-right aligned, it ends at the last key:
  /// i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k - seqlen_q + window_right.
  KeyRange visible(int64_t i) const;
  /// Calls `seen` for each range of keys visible to query `i` of head `h`, in ascending order:
  /// visible() without the keys that `mask` hides. With several lengths or a mask, call it on a
  /// sequence(b).
  void for_each_range(int64_t h, int64_t i, const std::function<void(KeyRange)>& seen) const;
  /// Visible (query, key) pairs of one head: the sum of visible(i).size(); with a mask the mean
  /// over heads.
  double visible_pairs() const;
  /// The same over all heads of all sequences.
  double total_pairs() const;
  bool one_length() const { return varlen_q.empty() && seqused_k.empty(); }
  bool masked() const { return causal || window_left >= 0 || window_right >= 0; }
  /// e.g. "B=1 Hq=2 Hkv=2 seqlen_q=128 seqlen_k=128 d=64 bf16 causal random seed=1"
  std::string text() const;
};

/// The problem as kernels need it, in 32 bits. Window widths are at most kNoWindow, so adding one
/// to a position cannot overflow. Causal is window_right = 0.
struct Shape {
  static constexpr int kNoWindow = 1 << 30;
  /// with varlen: lengths of the longest sequence
  int heads, kv_heads, seqlen_q, seqlen_k, head_dim;
  int window_left, window_right;
  float softmax_scale;
  float softcap;  ///< 0: off
  int dropped;    ///< dropout * 256
  /// with varlen: queries of all sequences, lse is [heads, tokens_q]; else 0
  int tokens_q;
};
Shape shape_of(const Problem&);

}  // namespace attn
