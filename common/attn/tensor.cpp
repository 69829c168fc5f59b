#include "attn/tensor.h"

#include <Eigen/Core>
#include <cmath>
#include <cstring>
#include <numeric>

#include "attn/parallel_for.h"

namespace attn {
namespace {

template <class Element>
void encode_as(const float* values, std::size_t count, void* device) {
  auto* out = static_cast<Element*>(device);
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<Element>(values[i]);
}

template <class Element>
void decode_as(const void* device, std::size_t count, float* values) {
  const auto* in = static_cast<const Element*>(device);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(in[i]);
}

// Large tensors are converted by all cores, a megaelement at a time.
template <class Body>
void in_chunks(std::size_t count, Body body) {
  constexpr std::size_t kChunk = std::size_t{1} << 20;
  parallel_for(static_cast<int64_t>((count + kChunk - 1) / kChunk), [&](int64_t c) {
    const std::size_t first = static_cast<std::size_t>(c) * kChunk;
    body(first, std::min(kChunk, count - first));
  });
}

TensorSpec tokens(const Problem& p, std::string name, const std::vector<int64_t>& varlen, int64_t heads, int64_t rows) {
  if (!p.varlen()) return {std::move(name), {p.batch, heads, rows, p.head_dim}, p.dtype};
  std::vector<int64_t> begins = cumulative(varlen);
  const int64_t all = begins.back();
  return {std::move(name), {1, all, heads, p.head_dim}, p.dtype, std::move(begins)};
}

}  // namespace

std::vector<int64_t> cumulative(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> begins(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), begins.begin() + 1);
  return begins;
}

TensorSpec like_q(const Problem& p, std::string name) {
  return tokens(p, std::move(name), p.varlen_q, p.heads, p.seqlen_q);
}
TensorSpec like_k(const Problem& p, std::string name) {
  return tokens(p, std::move(name), p.varlen_k, p.kv_heads, p.seqlen_k);
}
TensorSpec lse_of(const Problem& p) {
  if (!p.varlen()) return {"lse", {p.batch, p.heads, p.seqlen_q, 1}, DType::fp32};
  return {"lse", {1, p.heads, p.tokens_q(), 1}, DType::fp32, cumulative(p.varlen_q), true};
}

float round_to(DType dtype, float x) {
  switch (dtype) {
    case DType::fp32: return x;
    case DType::fp16: return static_cast<float>(Eigen::half(x));
    case DType::bf16: return static_cast<float>(Eigen::bfloat16(x));
    case DType::int32: return std::round(x);
  }
  return x;
}

void round_to(DType dtype, float* values, std::size_t count) {
  if (dtype == DType::fp32) return;
  in_chunks(count, [&](std::size_t first, std::size_t n) {
    for (std::size_t i = first; i < first + n; ++i) values[i] = round_to(dtype, values[i]);
  });
}

void encode(DType dtype, const float* values, std::size_t count, void* device) {
  auto* bytes = static_cast<std::byte*>(device);
  in_chunks(count, [&](std::size_t first, std::size_t n) {
    std::byte* to = bytes + first * static_cast<std::size_t>(size_of(dtype));
    if (dtype == DType::fp32) std::memcpy(to, values + first, n * sizeof(float));
    if (dtype == DType::fp16) encode_as<Eigen::half>(values + first, n, to);
    if (dtype == DType::bf16) encode_as<Eigen::bfloat16>(values + first, n, to);
    if (dtype == DType::int32) encode_as<int32_t>(values + first, n, to);
  });
}

void decode(DType dtype, const void* device, std::size_t count, float* values) {
  const auto* bytes = static_cast<const std::byte*>(device);
  in_chunks(count, [&](std::size_t first, std::size_t n) {
    const std::byte* from = bytes + first * static_cast<std::size_t>(size_of(dtype));
    if (dtype == DType::fp32) std::memcpy(values + first, from, n * sizeof(float));
    if (dtype == DType::fp16) decode_as<Eigen::half>(from, n, values + first);
    if (dtype == DType::bf16) decode_as<Eigen::bfloat16>(from, n, values + first);
    if (dtype == DType::int32) decode_as<int32_t>(from, n, values + first);
  });
}

}  // namespace attn
