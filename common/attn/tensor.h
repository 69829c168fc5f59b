/// \file
/// Tensors on the host, where their rows lie, and the element types that devices use.
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

/// Where row `i` of head `h` of sequence `b` lies, counted in rows of a tensor. A sequence is a
/// list of pages; the rows of a page follow each other `row_step` rows apart, its heads
/// `head_step`:
///
/// | layout | tensor | a sequence |
/// |---|---|---|
/// | contiguous | `[batch, heads, rows]` | one page, of all its heads |
/// | packed | `[tokens, heads]` | one page, from its first token on |
/// | packed by head (lse) | `[heads, tokens]` | one page, from its first token on |
/// | paged | `[pages, page_size, heads]` | the pages of its row of the page table |
struct Layout {
  int64_t page_size =
      0;  ///< rows of a head in a page; 0: a tensor's own shape says all (contiguous)
  int64_t head_step = 0, row_step = 0;
  int64_t pages_a_sequence = 1;
  std::vector<int64_t> pages = {};  ///< [batch, pages_a_sequence]: row 0 of head 0 of each
  std::vector<int64_t> lengths =
      {};  ///< rows of a head of each sequence; empty: all that there are

  /// Sequences that follow each other without padding; `begins` has the first token of each, and
  /// the end.
  static Layout packed(const std::vector<int64_t>& begins, int64_t heads);
  static Layout packed_by_head(const std::vector<int64_t>& begins);
  /// `page_table` [batch, pages a sequence] names pages of page_size rows of all heads. Entries
  /// behind a sequence's length are never looked at. Throws InputError for one that is not below
  /// `num_pages`.
  static Layout paged(const HostTensor& page_table, const std::vector<int64_t>& lengths,
                      int64_t num_pages, int64_t page_size, int64_t heads);

  int64_t row(int64_t b, int64_t h, int64_t i) const {
    const auto page = static_cast<std::size_t>(b * pages_a_sequence + i / page_size);
    return pages[page] + i % page_size * row_step + h * head_step;
  }
};

/// The name, shape and element type of a tensor. Shapes have rank 4, `[batch, heads, rows,
/// columns]`; lse has one column. The sequences of a varlen batch lie one behind the other, without
/// padding (packed), as flash_attn_varlen_func takes and gives them: tokens are `[1, rows of all,
/// heads, columns]`, lse is
/// `[1, heads, rows of all, 1]`. A cache in pages is `[num_pages, page_size, heads, columns]`.
struct TensorSpec {
  std::string name;
  int64_t shape[4];
  DType dtype;
  Layout layout = {};
  /// Fills a tensor that is not drawn; null: drawn (inputs.h).
  void (*made)(const Problem&, HostTensor&) = nullptr;
  /// Made from the options alone. A file of that name must say the same.
  bool derived = false;
  int rank = 4;          ///< how many of its sides a file has: the last ones
  std::string file = {};  ///< its name in --load and --save, without .npy; empty: `name`
  int64_t elements() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
  int64_t bytes() const { return bytes_of(dtype, elements()); }
  int64_t rows() const { return shape[0] * shape[1] * shape[2]; }
  int64_t columns() const { return shape[3]; }

  bool contiguous() const { return layout.page_size == 0; }
  /// Where row `i` of head `h` of sequence `b` lies, counted in rows.
  int64_t row(int64_t b, int64_t h, int64_t i) const {
    return contiguous() ? (b * shape[1] + h) * shape[2] + i : layout.row(b, h, i);
  }
  /// Rows of a head of sequence `b`.
  int64_t rows_of(int64_t b) const {
    return layout.lengths.empty() ? shape[2] : layout.lengths[static_cast<std::size_t>(b)];
  }
  /// The numbers of the rows that belong to no sequence: behind the end of what is in use, and in
  /// pages of nobody.
  std::vector<int64_t> unused_rows(int64_t batch, int64_t heads) const;
};

/// The tensors of attention, packed or not: like Q, like K, and lse.
TensorSpec like_q(const Problem&, std::string name);
TensorSpec like_k(const Problem&, std::string name);
TensorSpec lse_of(const Problem&);
/// Where sequences of these lengths begin, and where the last one ends.
std::vector<int64_t> cumulative(const std::vector<int64_t>& lengths);

/// What the elements of an output are before a launch, and the numbers in a decoded one that nobody
/// wrote.
///
/// It is a signalling NaN. Arithmetic and conversions make quiet ones of it (IEEE 754; a GPU makes
/// its canonical NaN), so that whatever a kernel computed is another NaN, even from an element that
/// nobody wrote: only a copy of such an element looks like one. Other NaN that a kernel may read,
/// shared memory and workspaces, are all bits 1. Of the 8-bit types e5m2 has such a NaN; e4m3 has
/// two, and conversions make the positive one.
inline constexpr std::uint32_t kUnwritten = 0x7FA5A5A5;
inline bool unwritten(float x) { return std::bit_cast<std::uint32_t>(x) == kUnwritten; }
/// That element in 32 bits of memory, as often as it fits there. A whole number of that pattern is
/// larger than any index.
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
/// Whether an index is one that nobody wrote.
constexpr bool unwritten(DType t, int64_t index) {
  return index ==
         (t == DType::int64 ? int64_t{kUnwritten} << 32 | kUnwritten : int64_t{kUnwritten});
}

/// A tensor on the host: numbers in float32, already rounded to its type, or, of an index type,
/// whole numbers.
struct HostTensor {
  TensorSpec spec;
  std::vector<float> data =
      {};  ///< all of it; of a very large input some sequences, which come again to its end
  std::vector<int64_t> numbers = {};  ///< in place of `data`, where is_index(spec.dtype)
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
/// Float32 values to device bytes and back; `device` holds `count` elements of `dtype`; those that
/// nobody wrote are kUnwritten in float32 as well. Of int4 an
/// even number, or all.
void encode(DType dtype, const float* values, std::size_t count, void* device);
void decode(DType dtype, const void* device, std::size_t count, float* values);

/// The same for a whole tensor; of a repeated one what is there.
std::vector<std::byte> to_bytes(const HostTensor&);
HostTensor from_bytes(const TensorSpec&, const std::vector<std::byte>&);

}  // namespace attn
