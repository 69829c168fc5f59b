/// \file
/// Masks that hide more than the two ends of a row: they are inputs of a kernel, and here what they
/// mean.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "attn/problem.h"

namespace attn {

struct HostTensor;  // tensor.h

/// Which keys a query sees, of those that causal and window leave.
class KeyMask {
 public:
  virtual ~KeyMask() = default;
  /// Calls `seen` for each part of `within` that query `i` of head `h` of sequence `b` sees, in
  /// rising order.
  virtual void for_each_range(int64_t b, int64_t h, int64_t i, KeyRange within,
                              const std::function<void(KeyRange)>& seen) const = 0;
  /// Throws InputError where it has not the shape of a problem.
  virtual void fits(const Problem&) const = 0;
  virtual std::string text() const = 0;  ///< in Problem::text()
  /// As kernels get it.
  virtual std::vector<HostTensor> tensors() const = 0;
};

/// `block_mask` [B, Hq, num_m_blocks, num_n_blocks], int8: 1 where tiles of block_m queries and
/// block_n keys meet, 0 where they do not. One of batch 1 is that of all sequences, one of head 1
/// that of all heads.
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
  /// Whether the tiles with these numbers meet; `b` and `h` of the problem.
  bool open(int64_t b, int64_t h, int64_t m_block, int64_t n_block) const;

 private:
  int64_t block_m_, block_n_;
  std::vector<int64_t> shape_;
  std::vector<bool> blocks_;
};

/// `hidden_begin`, `hidden_end` [B, Hq, 1 or 2, seqlen_k], int32: queries from begin to end do not
/// see that key (FlashMask, arXiv 2410.01359, section 3.1: one or two intervals a column). Of batch
/// 1 and head 1 as above.
class ColumnIntervals : public KeyMask {
 public:
  /// `name`: what text() calls it.
  ColumnIntervals(std::vector<int64_t> shape, std::vector<int64_t> begin, std::vector<int64_t> end,
                  std::string name = "columns");
  void for_each_range(int64_t b, int64_t h, int64_t i, KeyRange within,
                      const std::function<void(KeyRange)>& seen) const override;
  void fits(const Problem&) const override;
  std::string text() const override;
  std::vector<HostTensor> tensors() const override;

  const std::vector<int64_t>& shape() const { return shape_; }

 private:
  std::vector<int64_t> shape_, begin_, end_;
  std::string name_;
};

}  // namespace attn
