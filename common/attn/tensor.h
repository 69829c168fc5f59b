/// \file
/// Tensors on the host, and the element types that devices use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "attn/problem.h"

namespace attn {

/// The name, shape and element type of a tensor. Shapes have rank 4, `[batch, heads, rows, columns]`;
/// lse has one column. The sequences of a varlen batch lie one behind the other, without padding (packed), as
/// flash_attn_varlen_func takes and gives them: tokens are `[1, rows of all, heads, columns]`, lse is
/// `[1, heads, rows of all, 1]`, and sequence `b` begins at row cu_seqlens[b].
struct TensorSpec {
  std::string name;
  int64_t shape[4];
  DType dtype;
  std::vector<int64_t> cu_seqlens = {};  ///< batch + 1 numbers of rows; empty: not packed
  bool heads_first = false;              ///< of a packed tensor: lse
  int64_t elements() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
  int64_t bytes() const { return elements() * size_of(dtype); }
  int64_t rows() const { return shape[0] * shape[1] * shape[2]; }
  int64_t columns() const { return shape[3]; }

  /// Where row `i` of head `h` of sequence `b` lies, counted in rows, and how far the next row of it is.
  int64_t row(int64_t b, int64_t h, int64_t i) const {
    if (cu_seqlens.empty()) return (b * shape[1] + h) * shape[2] + i;
    const int64_t token = cu_seqlens[static_cast<std::size_t>(b)] + i;
    return heads_first ? h * shape[2] + token : token * shape[2] + h;
  }
  int64_t row_step() const { return cu_seqlens.empty() || heads_first ? 1 : shape[2]; }
  /// Rows of a head of sequence `b`.
  int64_t rows_of(int64_t b) const {
    const auto n = static_cast<std::size_t>(b);
    return cu_seqlens.empty() ? shape[2] : cu_seqlens[n + 1] - cu_seqlens[n];
  }
};

/// The tensors of attention, packed or not: like Q, like K, and lse.
TensorSpec like_q(const Problem&, std::string name);
TensorSpec like_k(const Problem&, std::string name);
TensorSpec lse_of(const Problem&);
/// Where sequences of these lengths begin, and where the last one ends.
std::vector<int64_t> cumulative(const std::vector<int64_t>& lengths);

/// A tensor on the host in float32. Values of a 16-bit tensor are already rounded to its type; those of
/// an int32 tensor are whole numbers up to 2^24, which a float32 holds exactly.
struct HostTensor {
  TensorSpec spec;
  std::vector<float> data;  ///< all of it; of a very large input some sequences, which come again to its end
  const float* row(int64_t b, int64_t h, int64_t i) const {
    return data.data() + spec.row(b, h, i) * spec.columns() % static_cast<int64_t>(data.size());
  }
};

using HostTensors = std::map<std::string, HostTensor>;

/// `x` rounded to the nearest value of `dtype` (ties to even), as float.
float round_to(DType dtype, float x);
void round_to(DType dtype, float* values, std::size_t count);
/// Float32 values to device bytes and back; `device` holds `count` elements of `dtype`.
void encode(DType dtype, const float* values, std::size_t count, void* device);
void decode(DType dtype, const void* device, std::size_t count, float* values);

}  // namespace attn
