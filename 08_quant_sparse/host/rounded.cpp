// The values that the quantising steps store, decoded. Rounding and summation order are those of
// the kernels, so the reference computes exact attention over exactly these values.
#include <algorithm>
#include <cmath>

#include "attn/small_types.h"
#include "kernels/block_sums.h"
#include "kernels/mean_parts.h"
#include "host/quantised.h"
#include "kernels/sparse.h"

namespace attn {
namespace {

// As in quantise.h.
constexpr float kSmallestMax = 1e-10f, kSmallestV = 0x1p-80f;

// Which rows of a tile share a scale: row -> group.
using GroupOf = int (*)(int64_t row);
int one_group(int64_t) { return 0; }
int thread_group_q(int64_t row) { return static_cast<int>(row / 16 * 8 + row % 8); }
int thread_group_k(int64_t key) { return static_cast<int>(key % 8 / 2); }

// Rounds each tile of 128 rows of each head to int8. Each group of rows has the scale of its
// absolute maximum, whose code is `most_code`. The kernel's arithmetic: a product, rounded to an
// integer, times the descale.
void round_to_int8(const Problem& p, HostTensor& t, GroupOf group_of, float most_code = 127) {
  t.spec.dtype = DType::fp32;
  const int64_t rows = t.spec.shape[2], d = p.head_dim;
  const int64_t heads = static_cast<int64_t>(t.data.size()) / (rows * d);  // existing rows
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t row0 = 0; row0 < rows; row0 += kTileRows) {
      const int64_t count = std::min(kTileRows, rows - row0);
      const auto row = [&](int64_t r) { return t.data.data() + (head * rows + row0 + r) * d; };
      float largest[kTileRows];
      std::fill_n(largest, kTileRows, kSmallestMax);
      for (int64_t r = 0; r < count; ++r)
        for (int64_t c = 0; c < d; ++c) {
          float& most = largest[group_of(r)];
          most = std::max(most, std::abs(row(r)[c]));
        }
      for (int64_t r = 0; r < count; ++r) {
        const float most = largest[group_of(r)];
        const float scale = most_code / most, descale = most / most_code;
        for (int64_t c = 0; c < d; ++c)
          row(r)[c] = static_cast<float>(to_int8(row(r)[c] * scale)) * descale;
      }
    }
}

// The mean of K of a head over its keys, in the kernels' summation order.
std::vector<float> mean_of_keys(const float* k, int64_t keys, int64_t d) {
  const int64_t of_part = mean_part_keys(keys), at_once = 256 / (d / 8);
  std::vector<float> mean(static_cast<std::size_t>(d));
  for (int64_t c = 0; c < d; ++c) {
    float sum = 0;
    for (int64_t first = 0; first < keys; first += of_part) {
      float part = 0;
      for (int64_t own = 0; own < at_once; ++own) {
        float mine = 0;
        for (int64_t key = first + own; key < std::min(keys, first + of_part); key += at_once)
          mine += k[key * d + c];
        part += mine;
      }
      sum += part;
    }
    mean[static_cast<std::size_t>(c)] = sum / static_cast<float>(keys);
  }
  return mean;
}

// The mean of a column of a head over its keys, in the order of two_readings.h. `add` adds a
// block's sum, over `count` rows.
template <class Add>
float mean_of_blocks(const float* x, int64_t keys, int64_t d, Add add) {
  const int64_t block = sparse_block_n(d);
  float all = 0;
  for (int64_t owner = 0; owner < block_owners(d); ++owner) {
    float sum = 0;
    for (int64_t key0 = owner * block; key0 < keys; key0 += block_owners(d) * block) {
      const int64_t end = std::min(keys, key0 + block);
      float of_rows = 0;
      for (int64_t row = 0; row < column_owners(d); ++row) {
        float part = 0;
        for (int64_t key = key0 + row; key < end; key += column_owners(d)) part += x[key * d];
        of_rows += part;
      }
      sum = add(sum, of_rows, static_cast<float>(end - key0));
    }
    all += sum;
  }
  return all / static_cast<float>(keys);
}
// The mean of K, from the means of its blocks.
std::vector<float> mean_of_means(const float* k, int64_t keys, int64_t d) {
  std::vector<float> mean;
  for (int64_t c = 0; c < d; ++c)
    mean.push_back(mean_of_blocks(k + c, keys, d, [](float sum, float of_rows, float count) {
      return std::fma(of_rows / count, count, sum);
    }));
  return mean;
}

// Rounds Q and K, with smooth K. The mean is added back afterwards, so that lse includes it.
HostTensors smoothed(const Problem& p, const HostTensors& inputs, GroupOf of_q, GroupOf of_k,
                     float most_code = 127, decltype(&mean_of_keys) mean_of = mean_of_keys) {
  HostTensors stored = inputs;
  HostTensor& k = stored.at("k");
  const int64_t keys = p.seqlen_k, d = p.head_dim;
  const int64_t heads = static_cast<int64_t>(k.data.size()) / (keys * d);  // existing rows
  const auto add = [&](const std::vector<std::vector<float>>& means, float sign) {
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t i = 0; i < keys * d; ++i)
        k.data[static_cast<std::size_t>(head * keys * d + i)] +=
            sign * means[static_cast<std::size_t>(head)][static_cast<std::size_t>(i % d)];
  };
  std::vector<std::vector<float>> means;
  for (int64_t head = 0; head < heads; ++head)
    means.push_back(mean_of(k.data.data() + head * keys * d, keys, d));
  add(means, -1);
  round_to_int8(p, k, of_k, most_code);
  add(means, 1);
  round_to_int8(p, stored.at("q"), of_q, most_code);
  return stored;
}

// The mean of each tile of Q, in the kernels' summation order; and Q minus that mean.
HostTensor take_off_tile_means(const Problem& p, HostTensor& q) {
  HostTensor means = q;
  const int64_t rows = p.seqlen_q, d = p.head_dim;
  for (std::size_t head = 0; head < q.data.size(); head += static_cast<std::size_t>(rows * d))
    for (int64_t row0 = 0; row0 < rows; row0 += kTileRows) {
      const int64_t count = std::min(kTileRows, rows - row0);
      float* const x = q.data.data() + head + row0 * d;
      // mean_of_keys() of so few rows has one part.
      const std::vector<float> mean = mean_of_keys(x, count, d);
      for (int64_t i = 0; i < count * d; ++i) {
        float& of_tile = means.data[head + static_cast<std::size_t>(row0 * d + i)];
        of_tile = mean[static_cast<std::size_t>(i % d)];
        x[i] -= of_tile;
      }
    }
  return means;
}

// The columns of `a`, then those of `b`: a product with another such matrix is the sum of two
// products.
HostTensor concatenate_columns(const HostTensor& a, const HostTensor& b) {
  HostTensor both{a.spec, {}};
  const auto d = static_cast<std::size_t>(a.spec.columns());
  both.spec.shape[3] *= 2;
  for (std::size_t at = 0; at < a.data.size(); at += d)
    for (const HostTensor* t : {&a, &b})
      both.data.insert(both.data.end(), t->data.begin() + static_cast<std::ptrdiff_t>(at),
                       t->data.begin() + static_cast<std::ptrdiff_t>(at + d));
  return both;
}

// Rounds V to e4m3, each channel of each head with the scale of its absolute maximum.
void round_channels(const Problem& p, HostTensor& v) {
  v.spec.dtype = DType::fp32;
  const int64_t keys = p.seqlen_k, d = p.head_dim;
  for (std::size_t at = 0; at < v.data.size(); at += static_cast<std::size_t>(keys * d))
    for (int64_t c = 0; c < d; ++c) {
      float* const x = v.data.data() + at + c;
      float largest = kSmallestV;
      for (int64_t j = 0; j < keys; ++j) largest = std::max(largest, std::abs(x[j * d]));
      const float scale = 448 / largest, descale = largest / 448;
      for (int64_t j = 0; j < keys; ++j)
        x[j * d] = round_to(DType::e4m3, x[j * d] * scale) * descale;
    }
}

// Rounds `count` elements of a column of V, minus their mean, to e4m3, then applies scale and mean
// again.
void round_about(float mean, float* x, int64_t count, int64_t d) {
  float low = x[0], high = x[0];
  for (int64_t j = 0; j < count; ++j)
    low = std::min(low, x[j * d]), high = std::max(high, x[j * d]);
  const float descale = std::max({high - mean, mean - low, kSmallestV}) / 448;
  for (int64_t j = 0; j < count; ++j)
    x[j * d] = mean + round_to(DType::e4m3, (x[j * d] - mean) * (1 / descale)) * descale;
}

// Rounds V to e4m3 with smooth V: each channel of a chunk of keys has its own mean and scale. The
// mean is added back afterwards, in the summation order of chunks_kernel.
void round_chunks(const Problem& p, HostTensor& v) {
  v.spec.dtype = DType::fp32;
  constexpr int64_t kRowsPerPass = 32;
  const int64_t keys = p.seqlen_k, d = p.head_dim;
  for (std::size_t at = 0; at < v.data.size(); at += static_cast<std::size_t>(keys * d))
    for (int64_t key0 = 0; key0 < keys; key0 += kChunkKeys)
      for (int64_t c = 0; c < d; ++c) {
        float* const x = v.data.data() + at + key0 * d + c;
        const int64_t count = std::min(kChunkKeys, keys - key0);
        float sum = 0;
        for (int64_t own = 0; own < kRowsPerPass; ++own) {
          float part = 0;
          for (int64_t j = own; j < count; j += kRowsPerPass) part += x[j * d];
          sum += part;
        }
        round_about(sum / static_cast<float>(count), x, count, d);
      }
}

// The same with one mean and scale for all keys of a head.
void round_heads(const Problem& p, HostTensor& v) {
  v.spec.dtype = DType::fp32;
  const int64_t keys = p.seqlen_k, d = p.head_dim;
  for (std::size_t at = 0; at < v.data.size(); at += static_cast<std::size_t>(keys * d))
    for (int64_t c = 0; c < d; ++c) {
      float* const x = v.data.data() + at + c;
      const float mean = mean_of_blocks(
          x, keys, d, [](float sum, float of_rows, float) { return sum + of_rows; });
      round_about(mean, x, keys, d);
    }
}

// S = codes . codes + mean . (k - mean of K), and the rest of q . k goes into lse. So a query is
// its codes followed by its tile's mean; a key is its codes plus their mean, followed by the
// original key.
HostTensors with_smooth_q(const Problem& p, const HostTensors& inputs, float most_code) {
  HostTensors less = inputs;
  const HostTensor means = take_off_tile_means(p, less.at("q"));
  HostTensors stored = smoothed(p, less, thread_group_q, thread_group_k, most_code);
  round_channels(p, stored.at("v"));
  stored.at("q") = concatenate_columns(stored.at("q"), means);
  stored.at("k") = concatenate_columns(stored.at("k"), inputs.at("k"));
  return stored;
}

}  // namespace

HostTensors int8_blocks(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = inputs;
  for (const char* name : {"q", "k"}) round_to_int8(p, stored.at(name), one_group);
  return stored;
}

HostTensors smoothed_blocks(const Problem& p, const HostTensors& inputs) {
  return smoothed(p, inputs, one_group, one_group);
}
HostTensors smoothed_threads(const Problem& p, const HostTensors& inputs) {
  return smoothed(p, inputs, thread_group_q, thread_group_k);
}

HostTensors fp8_pv(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = smoothed(p, inputs, thread_group_q, thread_group_k);
  round_channels(p, stored.at("v"));
  return stored;
}

HostTensors fp8_chunks(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = smoothed(p, inputs, thread_group_q, thread_group_k);
  round_chunks(p, stored.at("v"));
  return stored;
}

HostTensors fp8_heads(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = smoothed(p, inputs, thread_group_q, thread_group_k, 127, mean_of_means);
  round_heads(p, stored.at("v"));
  return stored;
}

HostTensors smoothed_q(const Problem& p, const HostTensors& inputs) {
  return with_smooth_q(p, inputs, 127);
}
HostTensors smoothed_q_int4(const Problem& p, const HostTensors& inputs) {
  return with_smooth_q(p, inputs, 7);
}

HostTensors int4_threads(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = inputs;
  round_to_int8(p, stored.at("q"), thread_group_q, 7);
  round_to_int8(p, stored.at("k"), thread_group_k, 7);
  return stored;
}
HostTensors int4_smooth_k(const Problem& p, const HostTensors& inputs) {
  return smoothed(p, inputs, thread_group_q, thread_group_k, 7);
}

}  // namespace attn
