/// \file
/// Tensors on the host, their layouts, and the element types of devices.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "attn/problem.h"

namespace attn {

struct HostTensor;

/// Row index of row `i` of head `h` of sequence `b` in a tensor. A sequence is a list of pages.
/// Consecutive rows of a page are `row_step` rows apart, its heads `head_step`:
///
/// | layout | tensor | a sequence |
/// |---|---|---|
/// | contiguous | `[batch, heads, rows]` | one page, of all its heads |
/// | packed | `[tokens, heads]` | one page, from its first token on |
/// | packed by head (lse) | `[heads, tokens]` | one page, from its first token on |
/// | paged | `[pages, page_size, heads]` | the pages of its row of the page table |
struct Layout {
  int64_t page_size = 0;  ///< rows per head and page; 0: given by the tensor's shape (contiguous)
  int64_t head_step = 0, row_step = 0;
  int64_t pages_a_sequence = 1;
  std::vector<int64_t> pages = {};    ///< [batch, pages_a_sequence]: row 0 of head 0 of each page
  std::vector<int64_t> lengths = {};  ///< rows per head of each sequence; empty: all

  /// Sequences packed without padding; `begins` holds the first token of each, and the end.
  static Layout packed(const std::vector<int64_t>& begins, int64_t heads);
  static Layout packed_by_head(const std::vector<int64_t>& begins);
  /// `page_table` [batch, pages per sequence] holds indices of pages of page_size rows of all
  /// heads. Entries past a sequence's length are ignored. Throws InputError for an index of
  /// `num_pages` or more.
  static Layout paged(const HostTensor& page_table, const std::vector<int64_t>& lengths,
                      int64_t num_pages, int64_t page_size, int64_t heads);

  int64_t row(int64_t b, int64_t h, int64_t i) const {
    const auto page = static_cast<std::size_t>(b * pages_a_sequence + i / page_size);
    return pages[page] + i % page_size * row_step + h * head_step;
  }
};

/// Name, shape and element type of a tensor. Shapes have rank 4, `[batch, heads, rows, columns]`;
/// lse has one column. Sequences of a varlen batch are packed without padding, as in
/// flash_attn_varlen_func: tokens are `[1, total rows, heads, columns]`, lse is `[1, heads, total
/// rows, 1]`. A paged cache is `[num_pages, page_size, heads, columns]`.
struct TensorSpec {
  std::string name;
  int64_t shape[4];
  DType dtype;
  Layout layout = {};
  /// Fills a tensor that is not random; null: random (inputs.h).
  void (*made)(const Problem&, HostTensor&) = nullptr;
  /// Determined by the options. A file of that name must contain the same.
  bool derived = false;
  int rank = 4;           ///< rank in a file: the last dimensions
  std::string file = {};  ///< name in --load and --save, without .npy; empty: `name`
  int64_t elements() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
  int64_t bytes() const { return bytes_of(dtype, elements()); }
  int64_t rows() const { return shape[0] * shape[1] * shape[2]; }
  int64_t columns() const { return shape[3]; }

  bool contiguous() const { return layout.page_size == 0; }
  /// Row index of row `i` of head `h` of sequence `b`.
  int64_t row(int64_t b, int64_t h, int64_t i) const {
    return contiguous() ? (b * shape[1] + h) * shape[2] + i : layout.row(b, h, i);
  }
  /// Rows per head of sequence `b`.
  int64_t rows_of(int64_t b) const {
    return layout.lengths.empty() ? shape[2] : layout.lengths[static_cast<std::size_t>(b)];
  }
  /// Indices of the rows that belong to no sequence: past the last valid row, and in unused pages.
  std::vector<int64_t> unused_rows(int64_t batch, int64_t heads) const;
};

/// Specs of tensors shaped like Q, like K, and like lse, packed or not.
TensorSpec like_q(const Problem&, std::string name);
TensorSpec like_k(const Problem&, std::string name);
TensorSpec lse_of(const Problem&);
/// First token of each sequence of these lengths, and the end of the last.
std::vector<int64_t> cumulative(const std::vector<int64_t>& lengths);

/// Value of output elements before a launch, and of elements in a decoded output that were not
/// written.
///
/// It is a signalling NaN. Arithmetic and conversions turn it into a quiet NaN (IEEE 754; a GPU
/// makes its canonical NaN). So a computed result is a different NaN, even if computed from an
/// unwritten element: only a copy of such an element looks like one. Other NaN that a kernel may
/// read (shared memory, workspaces) have all bits 1. Of the 8-bit types e5m2 has such a NaN; e4m3
/// has two, and conversions make the positive one.
inline constexpr std::uint32_t kUnwritten = 0x7FA5A5A5;
inline bool unwritten(float x) { return std::bit_cast<std::uint32_t>(x) == kUnwritten; }
/// That element, repeated to fill 32 bits of memory. As an integer the pattern is larger than any
/// index.
constexpr std::uint32_t unwritten_bits(DType t) {
  switch (t) {
    case DType::fp16: return 0x7DA57DA5;
    case DType::bf16: return 0x7FA57FA5;
    case DType::e4m3: return 0xFFFFFFFF;
    case DType::e5m2: return 0x7D7D7D7D;
    case DType::fp32:
    case DType::int32:
    case DType::int64:
    case DType::int8:
    case DType::int4: break;
  }
  return kUnwritten;
}
/// Whether an index was not written.
constexpr bool unwritten(DType t, int64_t index) {
  return index ==
         (t == DType::int64 ? int64_t{kUnwritten} << 32 | kUnwritten : int64_t{kUnwritten});
}

/// A tensor on the host: values in fp32, already rounded to its type, or integers for an index
/// type.
struct HostTensor {
  TensorSpec spec;
  /// All elements; of a very large input some sequences, repeated to its end.
  std::vector<float> data = {};
  std::vector<int64_t> numbers = {};  ///< instead of `data`, if is_index(spec.dtype)
  /// Of tensors given in double: value - data. References add it; kernels never see it.
  std::vector<float> rest = {};
  const float* row(int64_t b, int64_t h, int64_t i) const {
    return data.data() + spec.row(b, h, i) * spec.columns() % static_cast<int64_t>(data.size());
  }
  const int64_t* numbers_of_row(int64_t b, int64_t h, int64_t i) const {
    return numbers.data() + spec.row(b, h, i) * spec.columns();
  }
};

using HostTensors = std::map<std::string, HostTensor>;

/// A tensor of zeros.
HostTensor zeros(const TensorSpec&);

/// `x` rounded to the nearest value of `dtype` (ties to even), as float.
float round_to(DType dtype, float x);
void round_to(DType dtype, float* values, std::size_t count);
/// fp32 values to device bytes and back. `device` holds `count` elements of `dtype`; unwritten ones
/// are kUnwritten in fp32 as well. For int4, `count` must be even or cover the whole tensor.
void encode(DType dtype, const float* values, std::size_t count, void* device);
void decode(DType dtype, const void* device, std::size_t count, float* values);

/// The same for a whole tensor; for a repeated one its stored part.
std::vector<std::byte> to_bytes(const HostTensor&);
HostTensor from_bytes(const TensorSpec&, const std::vector<std::byte>&);

}  // namespace attn
