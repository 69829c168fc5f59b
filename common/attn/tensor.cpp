#include "attn/tensor.h"

#include <fmt/format.h>

#include <Eigen/Core>
#include <cmath>
#include <cstring>
#include <numeric>

#include "attn/error.h"
#include "attn/parallel_for.h"
#include "attn/small_types.h"

namespace attn {
namespace {

// Calls body(to_device, to_float) with the conversions of an element type, except int4, which has
// no whole bytes.
template <class Body>
void with_element(DType dtype, Body body) {
  const auto same = [](auto element) {
    using Element = decltype(element);
    return std::pair([](float x) { return static_cast<Element>(x); },
                     [](Element x) { return static_cast<float>(x); });
  };
  const auto call = [&](auto pair) { body(pair.first, pair.second); };
  switch (dtype) {
    case DType::fp32: return call(same(float()));
    case DType::fp16: return call(same(Eigen::half()));
    case DType::bf16: return call(same(Eigen::bfloat16()));
    case DType::int32: return call(same(int32_t()));
    case DType::int64: return call(same(int64_t()));
    case DType::int8:
      return call(std::pair([](float x) { return static_cast<int8_t>(to_int8(x)); },
                            [](int8_t x) { return static_cast<float>(x); }));
    case DType::e4m3: return call(std::pair(&E4M3::encode, &E4M3::decode));
    case DType::e5m2: return call(std::pair(&E5M2::encode, &E5M2::decode));
    case DType::int4: break;
  }
}

// Large tensors are converted on all cores, 2^20 elements at a time.
template <class Body>
void in_chunks(std::size_t count, Body body) {
  constexpr std::size_t kChunk = std::size_t{1} << 20;
  parallel_for(static_cast<int64_t>((count + kChunk - 1) / kChunk), [&](int64_t c) {
    const std::size_t first = static_cast<std::size_t>(c) * kChunk;
    body(first, std::min(kChunk, count - first));
  });
}

TensorSpec tokens(const Problem& p, std::string name, const std::vector<int64_t>& varlen,
                  int64_t heads, int64_t rows) {
  const DType dtype = bits_of(p.dtype) < 16 ? DType::bf16 : p.dtype;  // the step quantises
  if (!p.varlen()) return {std::move(name), {p.batch, heads, rows, p.head_dim}, dtype};
  const std::vector<int64_t> begins = cumulative(varlen);
  return {std::move(name),
          {1, begins.back(), heads, p.head_dim},
          dtype,
          Layout::packed(begins, heads),
          nullptr,
          false,
          3};
}

Layout packed(const std::vector<int64_t>& begins, int64_t head_step, int64_t row_step) {
  Layout l{.page_size = std::max<int64_t>(1, begins.back()),
           .head_step = head_step,
           .row_step = row_step};
  for (std::size_t b = 0; b + 1 < begins.size(); ++b) {
    l.pages.push_back(begins[b] * row_step);
    l.lengths.push_back(begins[b + 1] - begins[b]);
  }
  return l;
}

}  // namespace

Layout Layout::packed(const std::vector<int64_t>& begins, int64_t heads) {
  return attn::packed(begins, 1, heads);
}
Layout Layout::packed_by_head(const std::vector<int64_t>& begins) {
  return attn::packed(begins, begins.back(), 1);
}

Layout Layout::paged(const HostTensor& page_table, const std::vector<int64_t>& lengths,
                     int64_t num_pages, int64_t page_size, int64_t heads) {
  Layout l{.page_size = page_size,
           .head_step = 1,
           .row_step = heads,
           .pages_a_sequence = page_table.spec.columns(),
           .pages = std::vector<int64_t>(page_table.numbers.size()),
           .lengths = lengths};
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    const int64_t first = static_cast<int64_t>(b) * l.pages_a_sequence,
                  used = (lengths[b] + page_size - 1) / page_size;
    if (used > l.pages_a_sequence)
      throw InputError(fmt::format("{}: sequence {} has {} rows, its {} pages hold {}",
                                   page_table.spec.name, b, lengths[b], l.pages_a_sequence,
                                   l.pages_a_sequence * page_size));
    for (int64_t n = 0; n < used; ++n) {
      const int64_t page = page_table.numbers[static_cast<std::size_t>(first + n)];
      if (page < 0 || page >= num_pages)
        throw InputError(fmt::format("{}: entry [{}, {}] is page {}, must be from 0 to {}",
                                     page_table.spec.name, b, n, page, num_pages - 1));
      l.pages[static_cast<std::size_t>(first + n)] = page * page_size * heads;
    }
  }
  return l;
}

std::vector<int64_t> TensorSpec::unused_rows(int64_t batch, int64_t heads) const {
  if (layout.lengths.empty()) return {};
  std::vector<bool> used(static_cast<std::size_t>(rows()));
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < rows_of(b); ++i) used[static_cast<std::size_t>(row(b, h, i))] = true;
  std::vector<int64_t> unused;
  for (int64_t r = 0; r < rows(); ++r)
    if (!used[static_cast<std::size_t>(r)]) unused.push_back(r);
  return unused;
}

std::vector<int64_t> cumulative(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> begins(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), begins.begin() + 1);
  return begins;
}

TensorSpec like_q(const Problem& p, std::string name) {
  return tokens(p, std::move(name), p.varlen_q, p.heads, p.seqlen_q);
}
TensorSpec like_k(const Problem& p, std::string name) {
  TensorSpec spec = tokens(p, std::move(name), p.varlen_k, p.kv_heads, p.seqlen_k);
  if (!p.seqused_k.empty()) spec.layout.lengths = p.seqused_k;
  return spec;
}
TensorSpec lse_of(const Problem& p) {
  if (!p.varlen()) return {"lse", {p.batch, p.heads, p.seqlen_q, 1}, DType::fp32};
  return {"lse",
          {1, p.heads, p.tokens_q(), 1},
          DType::fp32,
          Layout::packed_by_head(cumulative(p.varlen_q)),
          nullptr,
          false,
          3};
}

HostTensor zeros(const TensorSpec& spec) {
  HostTensor t{spec};
  if (is_index(spec.dtype))
    t.numbers.resize(static_cast<std::size_t>(spec.elements()));
  else
    t.data.resize(static_cast<std::size_t>(spec.elements()));
  return t;
}

float round_to(DType dtype, float x) {
  switch (dtype) {
    case DType::fp32: return x;
    case DType::fp16: return static_cast<float>(Eigen::half(x));
    case DType::bf16: return static_cast<float>(Eigen::bfloat16(x));
    case DType::int32: return std::round(x);
    case DType::int64: return std::round(x);
    case DType::int8: return static_cast<float>(to_int8(x));
    case DType::e4m3: return E4M3::decode(E4M3::encode(x));
    case DType::e5m2: return E5M2::decode(E5M2::encode(x));
    case DType::int4: return static_cast<float>(to_int4(x));
  }
  return x;
}

void round_to(DType dtype, float* values, std::size_t count) {
  if (dtype == DType::fp32) return;
  in_chunks(count, [&](std::size_t first, std::size_t n) {
    for (std::size_t i = first; i < first + n; ++i) values[i] = round_to(dtype, values[i]);
  });
}

// A 16-bit NaN keeps the leading bits of its payload, which identify its origin; so an unwritten
// element remains recognisable. Eigen would make one NaN of all.
static std::uint16_t nan_bits(DType dtype, float nan) {
  const auto bits = std::bit_cast<std::uint32_t>(nan);
  if (bits == kUnwritten) return static_cast<std::uint16_t>(unwritten_bits(dtype));
  return static_cast<std::uint16_t>(dtype == DType::bf16
                                        ? bits >> 16 | 0x40
                                        : (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x1FF));
}

void encode(DType dtype, const float* values, std::size_t count, void* device) {
  auto* bytes = static_cast<std::byte*>(device);
  in_chunks(count, [&](std::size_t first, std::size_t n) {
    std::byte* to = bytes + bytes_of(dtype, static_cast<int64_t>(first));
    const float* from = values + first;
    if (dtype == DType::fp32) {
      std::memcpy(to, from, n * sizeof(float));
    } else if (dtype == DType::int4) {
      for (std::size_t i = 0; i < n; i += 2) {
        const int low = to_int4(from[i]) & 15, high = i + 1 < n ? to_int4(from[i + 1]) & 15 : 0;
        to[i / 2] = static_cast<std::byte>(low | high << 4);
      }
    } else {
      with_element(dtype, [&](auto to_device, auto) {
        auto* out = reinterpret_cast<decltype(to_device(0.0f))*>(to);
        const bool keeps_nan = dtype == DType::fp16 || dtype == DType::bf16;
        for (std::size_t i = 0; i < n; ++i) {
          out[i] = to_device(from[i]);
          if (!keeps_nan || from[i] == from[i]) continue;
          const std::uint16_t bits = nan_bits(dtype, from[i]);
          std::memcpy(to + 2 * i, &bits, sizeof bits);
        }
      });
    }
  });
}

void decode(DType dtype, const void* device, std::size_t count, float* values) {
  const auto* bytes = static_cast<const std::byte*>(device);
  in_chunks(count, [&](std::size_t first, std::size_t n) {
    const std::byte* from = bytes + bytes_of(dtype, static_cast<int64_t>(first));
    float* to = values + first;
    if (dtype == DType::fp32) {
      std::memcpy(to, from, n * sizeof(float));
    } else if (dtype == DType::int4) {
      for (std::size_t i = 0; i < n; ++i) {
        const int code = static_cast<int>(from[i / 2]) >> (i % 2 * 4) & 15;
        to[i] = static_cast<float>(code < 8 ? code : code - 16);
      }
    } else {
      with_element(dtype, [&](auto to_device, auto to_float) {
        const auto* in = reinterpret_cast<const decltype(to_device(0.0f))*>(from);
        const std::uint32_t unwritten = unwritten_bits(dtype);
        const bool has_nan = dtype != DType::int8 && !is_index(dtype);
        for (std::size_t i = 0; i < n; ++i)
          to[i] = has_nan && std::memcmp(&in[i], &unwritten, sizeof in[i]) == 0
                      ? std::bit_cast<float>(kUnwritten)
                      : to_float(in[i]);
      });
    }
  });
}

std::vector<std::byte> to_bytes(const HostTensor& t) {
  const std::size_t count = is_index(t.spec.dtype) ? t.numbers.size() : t.data.size();
  std::vector<std::byte> bytes(
      static_cast<std::size_t>(bytes_of(t.spec.dtype, static_cast<int64_t>(count))));
  if (t.spec.dtype == DType::int64) {
    std::memcpy(bytes.data(), t.numbers.data(), bytes.size());
  } else if (t.spec.dtype == DType::int32) {
    auto* out = reinterpret_cast<int32_t*>(bytes.data());
    for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(t.numbers[i]);
  } else {
    encode(t.spec.dtype, t.data.data(), count, bytes.data());
  }
  return bytes;
}

HostTensor from_bytes(const TensorSpec& spec, const std::vector<std::byte>& bytes) {
  HostTensor t = zeros(spec);
  if (spec.dtype == DType::int64) {
    std::memcpy(t.numbers.data(), bytes.data(), bytes.size());
  } else if (spec.dtype == DType::int32) {
    const auto* in = reinterpret_cast<const int32_t*>(bytes.data());
    for (std::size_t i = 0; i < t.numbers.size(); ++i) t.numbers[i] = in[i];
  } else {
    decode(spec.dtype, bytes.data(), t.data.size(), t.data.data());
  }
  return t;
}

}  // namespace attn
