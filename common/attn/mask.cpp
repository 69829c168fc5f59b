#include "attn/mask.h"

#include <fmt/format.h>

#include <algorithm>

#include "attn/error.h"
#include "attn/tensor.h"

namespace attn {
namespace {

// Calls `seen` for each contiguous range of open blocks, clipped to `within`. Block n starts at key
// n * `step`.
template <class Open>
void runs(KeyRange within, int64_t step, Open open, const std::function<void(KeyRange)>& seen) {
  KeyRange run{within.begin, within.begin};
  for (int64_t n = within.begin / step; n * step < within.end; ++n) {
    if (open(n)) {
      run.end = std::min((n + 1) * step, within.end);
      continue;
    }
    if (run.size() > 0) seen(run);
    run.begin = run.end = (n + 1) * step;
  }
  if (run.size() > 0) seen(run);
}

// Row index of head h of sequence b; dimensions of size 1 are broadcast.
int64_t head_of_shape(const std::vector<int64_t>& shape, int64_t b, int64_t h) {
  return (shape[0] == 1 ? 0 : b) * shape[1] + (shape[1] == 1 ? 0 : h);
}

int64_t elements_of(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t side : shape) n *= side;
  return n;
}

// Batch and heads must be the problem's or 1 (broadcast); the other dimensions must match.
void must_be(const char* name, const std::vector<int64_t>& s, const Problem& p, int64_t rows,
             int64_t columns) {
  if ((s[0] != 1 && s[0] != p.batch) || (s[1] != 1 && s[1] != p.heads) || s[2] != rows ||
      s[3] != columns)
    throw InputError(fmt::format("{}: is [{}], must be [{} or 1, {} or 1, {}, {}]", name,
                                 fmt::join(s, ", "), p.batch, p.heads, rows, columns));
}

TensorSpec spec_of(const char* name, const std::vector<int64_t>& s, DType t) {
  return {name, {s[0], s[1], s[2], s[3]}, t};
}

}  // namespace

double KeyMask::visible_pairs(const Problem& one, int64_t b, int64_t h) const {
  double pairs = 0;
  const auto add = [&](KeyRange keys) { pairs += static_cast<double>(keys.size()); };
  for (int64_t i = 0; i < one.seqlen_q; ++i)
    if (const KeyRange range = one.visible(i); range.size() > 0)
      for_each_range(b, h, i, range, add);
  return pairs;
}

BlockMask::BlockMask(int64_t block_m, int64_t block_n, std::vector<int64_t> shape,
                     std::vector<bool> blocks)
    : block_m_(block_m), block_n_(block_n), shape_(std::move(shape)), blocks_(std::move(blocks)) {
  if (shape_.size() != 4 || elements_of(shape_) != static_cast<int64_t>(blocks_.size()))
    throw InputError(fmt::format("block_mask: {} blocks, must be [{}]", blocks_.size(),
                                 fmt::join(shape_, ", ")));
}

void BlockMask::for_each_range(int64_t b, int64_t h, int64_t i, KeyRange within,
                               const std::function<void(KeyRange)>& seen) const {
  const int64_t first = (head_of_shape(shape_, b, h) * shape_[2] + i / block_m_) * shape_[3];
  runs(
      within, block_n_, [&](int64_t n) { return blocks_[static_cast<std::size_t>(first + n)]; },
      seen);
}

bool BlockMask::open(int64_t b, int64_t h, int64_t m_block, int64_t n_block) const {
  const int64_t row = head_of_shape(shape_, b, h) * shape_[2] + m_block;
  return blocks_[static_cast<std::size_t>(row * shape_[3] + n_block)];
}

void BlockMask::fits(const Problem& p) const {
  const auto blocks = [](int64_t length, int64_t block) { return (length + block - 1) / block; };
  must_be("block_mask", shape_, p, blocks(p.seqlen_q, block_m_), blocks(p.seqlen_k, block_n_));
}

std::string BlockMask::text() const {
  return fmt::format(
      "blocks:{}x{}:{:.3g}", block_m_, block_n_,
      static_cast<double>(std::ranges::count(blocks_, true)) / static_cast<double>(blocks_.size()));
}

std::vector<HostTensor> BlockMask::tensors() const {
  return {{spec_of("block_mask", shape_, DType::int8), {blocks_.begin(), blocks_.end()}}};
}

ColumnIntervals::ColumnIntervals(std::vector<int64_t> shape, std::vector<int64_t> begin,
                                 std::vector<int64_t> end, std::string name)
    : shape_(std::move(shape)),
      begin_(std::move(begin)),
      end_(std::move(end)),
      name_(std::move(name)) {
  if (shape_.size() != 4 || shape_[2] < 1 || shape_[2] > 2 ||
      elements_of(shape_) != static_cast<int64_t>(begin_.size()) || begin_.size() != end_.size())
    throw InputError(
        fmt::format("hidden_begin, hidden_end: {} and {} numbers, must be [{}] with 1 or 2 "
                    "intervals per column",
                    begin_.size(), end_.size(), fmt::join(shape_, ", ")));
}

void ColumnIntervals::for_each_range(int64_t b, int64_t h, int64_t i, KeyRange within,
                                     const std::function<void(KeyRange)>& seen) const {
  const int64_t first = head_of_shape(shape_, b, h) * shape_[2] * shape_[3];
  const auto open = [&](int64_t j) {
    for (int64_t interval = 0; interval < shape_[2]; ++interval) {
      const auto at = static_cast<std::size_t>(first + interval * shape_[3] + j);
      if (i >= begin_[at] && i < end_[at]) return false;
    }
    return true;
  };
  runs(within, 1, open, seen);
}

// Key by key, since only a key's own intervals hide it: row by row a mask of 32,768 keys took a
// billion steps a head.
double ColumnIntervals::visible_pairs(const Problem& one, int64_t b, int64_t h) const {
  Problem keys = one;  // with queries and keys exchanged, visible(j) are the queries that see key j
  std::swap(keys.seqlen_q, keys.seqlen_k);
  keys.causal = false;
  keys.window_left = one.causal ? 0 : one.window_right;
  keys.window_right = one.window_left;
  const auto common = [](KeyRange x, KeyRange y) {
    const int64_t begin = std::max(x.begin, y.begin);
    return KeyRange{begin, std::max(begin, std::min(x.end, y.end))};
  };
  const int64_t first = head_of_shape(shape_, b, h) * shape_[2] * shape_[3];
  double pairs = 0;
  for (int64_t j = 0; j < one.seqlen_k; ++j) {
    const KeyRange rows = keys.visible(j);
    int64_t visible = rows.size();
    KeyRange earlier{0, 0};
    for (int64_t interval = 0; interval < shape_[2]; ++interval) {
      const auto at = static_cast<std::size_t>(first + interval * shape_[3] + j);
      const KeyRange hidden = common({begin_[at], end_[at]}, rows);
      visible -= hidden.size() - common(hidden, earlier).size();
      earlier = hidden;
    }
    pairs += static_cast<double>(visible);
  }
  return pairs;
}

void ColumnIntervals::fits(const Problem& p) const {
  must_be("hidden_begin", shape_, p, shape_[2], p.seqlen_k);
}

std::string ColumnIntervals::text() const { return name_; }

std::vector<HostTensor> ColumnIntervals::tensors() const {
  return {{spec_of("hidden_begin", shape_, DType::int32), {}, begin_},
          {spec_of("hidden_end", shape_, DType::int32), {}, end_}};
}

}  // namespace attn
