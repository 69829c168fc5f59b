/// \file
/// Masks beyond causal and window: inputs of a kernel, and their semantics for the reference.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "attn/problem.h"

namespace attn {

struct HostTensor;  // tensor.h

/// Visible keys of a query, among those inside the causal mask and window.
class KeyMask {
 public:
  virtual ~KeyMask() = default;
  /// Calls `seen` for each range of keys in `within` that is visible to query `i` of head `h` of
  /// sequence `b`, in ascending order.
  virtual void for_each_range(int64_t b, int64_t h, int64_t i, KeyRange within,
                              const std::function<void(KeyRange)>& seen) const = 0;
  /// Visible (query, key) pairs of head `h` of sequence `b`, whose problem is `one`.
  virtual double visible_pairs(const Problem& one, int64_t b, int64_t h) const;
  /// Throws InputError if its shape does not match the problem's.
  virtual void fits(const Problem&) const = 0;
  virtual std::string text() const = 0;  ///< the mask in Problem::text()
  /// The mask as input tensors of a kernel.
  virtual std::vector<HostTensor> tensors() const = 0;
};

/// `block_mask` [B, Hq, num_m_blocks, num_n_blocks], int8: 1 if a tile of block_m queries attends
/// to a tile of block_n keys, else 0. B = 1 or Hq = 1 is broadcast.
class BlockMask : public KeyMask {
 public:
  BlockMask(int64_t block_m, int64_t block_n, std::vector<int64_t> shape, std::vector<bool> blocks);
  void for_each_range(int64_t b, int64_t h, int64_t i, KeyRange within,
                      const std::function<void(KeyRange)>& seen) const override;
  void fits(const Problem&) const override;
  std::string text() const override;
  std::vector<HostTensor> tensors() const override;

  int64_t block_m() const { return block_m_; }
  int64_t block_n() const { return block_n_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  /// Whether query tile m_block attends to key tile n_block; `b` and `h` of the problem.
  bool open(int64_t b, int64_t h, int64_t m_block, int64_t n_block) const;

 private:
  int64_t block_m_, block_n_;
  std::vector<int64_t> shape_;
  std::vector<bool> blocks_;
};

/// `hidden_begin`, `hidden_end` [B, Hq, 1 or 2, seqlen_k], int32: queries in [begin, end) do not
/// attend to that key (FlashMask, arXiv 2410.01359, section 3.1: one or two intervals per column).
/// B = 1 or Hq = 1 is broadcast.
class ColumnIntervals : public KeyMask {
 public:
  /// `name`: the name in text().
  ColumnIntervals(std::vector<int64_t> shape, std::vector<int64_t> begin, std::vector<int64_t> end,
                  std::string name = "columns");
  void for_each_range(int64_t b, int64_t h, int64_t i, KeyRange within,
                      const std::function<void(KeyRange)>& seen) const override;
  double visible_pairs(const Problem& one, int64_t b, int64_t h) const override;
  void fits(const Problem&) const override;
  std::string text() const override;
  std::vector<HostTensor> tensors() const override;

  const std::vector<int64_t>& shape() const { return shape_; }

 private:
  std::vector<int64_t> shape_, begin_, end_;
  std::string name_;
};

}  // namespace attn
