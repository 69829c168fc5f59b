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
/// lse has one column.
struct TensorSpec {
  std::string name;
  int64_t shape[4];
  DType dtype;
  int64_t elements() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
  int64_t bytes() const { return elements() * size_of(dtype); }
  int64_t rows() const { return shape[0] * shape[1] * shape[2]; }
  int64_t columns() const { return shape[3]; }
};

/// A tensor on the host in float32. Values of a 16-bit tensor are already rounded to its type; those of
/// an int32 tensor are whole numbers up to 2^24, which a float32 holds exactly.
struct HostTensor {
  TensorSpec spec;
  std::vector<float> data;
  const float* row(int64_t b, int64_t h, int64_t i) const {
    return data.data() + ((b * spec.shape[1] + h) * spec.shape[2] + i) * spec.shape[3];
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
