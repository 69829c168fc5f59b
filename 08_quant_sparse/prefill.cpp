// The steps that quantise: what each costs and refuses, and what it stores, so that it is checked
// against the reference of just that.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attn/small_types.h"
#include "attn/tiling.h"
#include "block_sums.h"
#include "check/operation.h"
#include "device/device.h"
#include "mean_parts.h"
#include "quantised.h"
#include "sparse.h"

ATTN_DECLARE_STEP(q1_int8_qk);
ATTN_DECLARE_STEP(q2_smooth_k);
ATTN_DECLARE_STEP(q3_per_thread);
ATTN_DECLARE_STEP(q4_fp8_pv);
ATTN_DECLARE_STEP(q5_diet);
ATTN_DECLARE_STEP(q6_smooth_q);
ATTN_DECLARE_STEP(q7_int4_lesson);
ATTN_DECLARE_STEP(q8_tuned);
ATTN_DECLARE_STEP(q9_mma_sync);
ATTN_DECLARE_STEP(tile_counter);

namespace attn {
namespace {

// As in quantise.h.
constexpr float kSmallestMax = 1e-10f;
constexpr int64_t kTileRows = 128;

// Which rows of a tile share a scale: row -> group.
using GroupOf = int (*)(int64_t row);
int one_group(int64_t) { return 0; }
int thread_group_q(int64_t row) { return static_cast<int>(row / 16 * 8 + row % 8); }
int thread_group_k(int64_t key) { return static_cast<int>(key % 8 / 2); }

// Rounds each tile of 128 rows of each head to int8, each group of its rows with the scale of their
// largest number, whose code is `most_code`. The kernel's arithmetic: a product, rounded to a whole
// number, times the descale.
void round_to_int8(const Problem& p, HostTensor& t, GroupOf group_of, float most_code = 127) {
  t.spec.dtype = DType::fp32;
  const int64_t rows = t.spec.shape[2], d = p.head_dim;
  const int64_t heads = static_cast<int64_t>(t.data.size()) / (rows * d);  // that are there
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

// The mean of K of a head over its keys, in the order in which the kernels add up.
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

// The mean of a column of a head over its keys, in the order of two_readings.h: `add` adds to a sum
// that of a block's rows, of which there are `count`.
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
// The mean of K, of means of its blocks.
std::vector<float> mean_of_means(const float* k, int64_t keys, int64_t d) {
  std::vector<float> mean;
  for (int64_t c = 0; c < d; ++c)
    mean.push_back(mean_of_blocks(k + c, keys, d, [](float sum, float of_rows, float count) {
      return std::fma(of_rows / count, count, sum);
    }));
  return mean;
}

// Rounds Q and K, K less its mean, which it has again afterwards: so that lse is to have it.
HostTensors smoothed(const Problem& p, const HostTensors& inputs, GroupOf of_q, GroupOf of_k,
                     float most_code = 127, decltype(&mean_of_keys) mean_of = mean_of_keys) {
  HostTensors stored = inputs;
  HostTensor& k = stored.at("k");
  const int64_t keys = p.seqlen_k, d = p.head_dim;
  const int64_t heads = static_cast<int64_t>(k.data.size()) / (keys * d);  // that are there
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

// The mean of each tile of Q, in the order in which the kernels add up; and Q less that.
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

// The columns of `a`, then those of `b`: a product with such another one is the sum of two.
HostTensor beside(const HostTensor& a, const HostTensor& b) {
  HostTensor both{a.spec, {}};
  const auto d = static_cast<std::size_t>(a.spec.columns());
  both.spec.shape[3] *= 2;
  for (std::size_t at = 0; at < a.data.size(); at += d)
    for (const HostTensor* t : {&a, &b})
      both.data.insert(both.data.end(), t->data.begin() + static_cast<std::ptrdiff_t>(at),
                       t->data.begin() + static_cast<std::ptrdiff_t>(at + d));
  return both;
}

// Rounds V to e4m3, each column of each head with the scale of its largest number.
void round_channels(const Problem& p, HostTensor& v) {
  v.spec.dtype = DType::fp32;
  const int64_t keys = p.seqlen_k, d = p.head_dim;
  for (std::size_t at = 0; at < v.data.size(); at += static_cast<std::size_t>(keys * d))
    for (int64_t c = 0; c < d; ++c) {
      float* const x = v.data.data() + at + c;
      float largest = kSmallestMax;
      for (int64_t j = 0; j < keys; ++j) largest = std::max(largest, std::abs(x[j * d]));
      const float scale = 448 / largest, descale = largest / 448;
      for (int64_t j = 0; j < keys; ++j)
        x[j * d] = round_to(DType::e4m3, x[j * d] * scale) * descale;
    }
}

// Rounds V to e4m3 less its mean, each column of a window of keys with its own mean and scale: the
// mean that it has again afterwards, in the order in which windows_kernel adds up.
constexpr int64_t kWindowKeys = 4096;  // as in quantise_windows.h
void round_windows(const Problem& p, HostTensor& v) {
  v.spec.dtype = DType::fp32;
  constexpr int64_t kRowsAtOnce = 32;
  const int64_t keys = p.seqlen_k, d = p.head_dim;
  for (std::size_t at = 0; at < v.data.size(); at += static_cast<std::size_t>(keys * d))
    for (int64_t key0 = 0; key0 < keys; key0 += kWindowKeys)
      for (int64_t c = 0; c < d; ++c) {
        float* const x = v.data.data() + at + key0 * d + c;
        const int64_t count = std::min(kWindowKeys, keys - key0);
        float sum = 0, low = x[0], high = x[0];
        for (int64_t own = 0; own < kRowsAtOnce; ++own) {
          float part = 0;
          for (int64_t j = own; j < count; j += kRowsAtOnce) {
            part += x[j * d];
            low = std::min(low, x[j * d]), high = std::max(high, x[j * d]);
          }
          sum += part;
        }
        const float mean = sum / static_cast<float>(count);
        const float descale = std::max({high - mean, mean - low, kSmallestMax}) / 448;
        for (int64_t j = 0; j < count; ++j)
          x[j * d] = mean + round_to(DType::e4m3, (x[j * d] - mean) * (1 / descale)) * descale;
      }
}

// The same with a mean and a scale of all keys of a head.
void round_heads(const Problem& p, HostTensor& v) {
  v.spec.dtype = DType::fp32;
  const int64_t keys = p.seqlen_k, d = p.head_dim;
  for (std::size_t at = 0; at < v.data.size(); at += static_cast<std::size_t>(keys * d))
    for (int64_t c = 0; c < d; ++c) {
      float* const x = v.data.data() + at + c;
      float low = x[0], high = x[0];
      for (int64_t j = 0; j < keys; ++j)
        low = std::min(low, x[j * d]), high = std::max(high, x[j * d]);
      const float mean = mean_of_blocks(
          x, keys, d, [](float sum, float of_rows, float) { return sum + of_rows; });
      const float descale = std::max({high - mean, mean - low, kSmallestMax}) / 448;
      for (int64_t j = 0; j < keys; ++j)
        x[j * d] = mean + round_to(DType::e4m3, (x[j * d] - mean) * (1 / descale)) * descale;
    }
}

int64_t heads_q(const Problem& p) { return p.batch * p.heads; }
int64_t heads_k(const Problem& p) { return p.batch * p.kv_heads; }
int64_t tiles_of(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }
double elements_q(const Problem& p) { return double(heads_q(p) * p.seqlen_q * p.head_dim); }
double elements_k(const Problem& p) { return double(heads_k(p) * p.seqlen_k * p.head_dim); }

// Q and K of a byte, V of two: what HBM gives once, and what passes between L2 and the SMs.
Phase attention_phase(const Problem& p, const Tiling& t) {
  const double heads = double(heads_q(p)), d = double(p.head_dim);
  const double q_rows = heads * double(p.seqlen_q), pairs = heads * visits(p, t);
  Phase phase{.name = "attention"};
  // A warp may skip a block of keys for its own rows, which come from L2 all the same.
  Tiling computed = t;
  if (t.rows_together > 0) computed.block_m = t.rows_together;
  phase.exp = heads * visits(p, computed) * double(computed.block_m * t.block_n);
  phase.tensor_flop = 4 * d * phase.exp;
  phase.hbm_read = elements_q(p) + 3 * elements_k(p);
  phase.hbm_write = q_rows * (2 * d + 4);
  phase.l2_bytes = q_rows * (3 * d + 4) + pairs * 3 * double(t.block_n) * d;
  return phase;
}

Cost int8_cost(const Problem& p, Launch launch) {
  const double read = 2 * (elements_q(p) + elements_k(p));
  return {{.name = "quantise", .hbm_read = read, .hbm_write = read / 2},
          attention_phase(p, *tiling_of(launch, p))};
}

std::optional<std::string> refuse(const Problem& p, Launch launch) {
  if (p.head_dim != 64 && p.head_dim != 128 && p.head_dim != 256)
    return fmt::format("--head-dim {}: this step has 64, 128 and 256", p.head_dim);
  if (p.softmax_scale < 1e-10)
    return "--scale below 1e-10: this step multiplies it by the scales of Q and of K";
  const int64_t block_m = tiling_of(launch, p)->block_m;
  const int64_t row_tiles = (p.seqlen_q + block_m - 1) / block_m;
  if (heads_q(p) > ((int64_t{1} << 31) - 1) / row_tiles)
    return fmt::format("{} heads of {} tiles of queries: at most 2^31 - 1 blocks fit in a grid",
                       heads_q(p), row_tiles);
  return std::nullopt;
}

// Codes, and `q_groups` and `k_groups` scales a tile.
std::vector<Workspace> int8_workspaces(const Problem& p, int64_t q_groups, int64_t k_groups) {
  return {{"tile_counter", 4, true},
          {"q8", heads_q(p) * p.seqlen_q * p.head_dim},
          {"k8", heads_k(p) * p.seqlen_k * p.head_dim},
          {"q_descale", heads_q(p) * tiles_of(p.seqlen_q) * q_groups * 4},
          {"k_descale", heads_k(p) * tiles_of(p.seqlen_k) * k_groups * 4}};
}

Step int8_step(std::string name, std::string idea, Launch launch,
               HostTensors (*logical)(const Problem&, const HostTensors&)) {
  return {
      .name = std::move(name),
      .operation = &forward(),
      .idea = std::move(idea),
      .support = "sm_90a; int8, given in bf16; head dims 64, 128, 256; any lengths, masks, GQA; "
                 "softmax scale (--scale) at least 1e-10",
      .refuses = [launch](const Problem& p) { return refuse(p, launch); },
      .workspaces = [](const Problem& p) { return int8_workspaces(p, 1, 1); },
      .cost = [launch](const Problem& p) { return int8_cost(p, launch); },
      .launch = launch,
      .prepare = ATTN_LAUNCH(tile_counter),
      .needs = kHopper,
      .tiled = true,
      .takes = {"int8"},
      .logical = logical,
  };
}

// With the mean of K taken off: one more phase, and lse's correction.
Step smooth_step(std::string name, std::string idea, Launch launch,
                 HostTensors (*logical)(const Problem&, const HostTensors&), int64_t q_groups,
                 int64_t k_groups) {
  Step step = int8_step(std::move(name), std::move(idea), launch, logical);
  step.workspaces = [=](const Problem& p) {
    std::vector<Workspace> all = int8_workspaces(p, q_groups, k_groups);
    all.push_back({"k_parts", heads_k(p) * mean_parts(p.seqlen_k) * p.head_dim * 4});
    all.push_back({"k_mean", heads_k(p) * p.head_dim * 4});
    all.push_back({"lse_shift", heads_q(p) * p.seqlen_q * 4});
    return all;
  };
  step.cost = [launch](const Problem& p) {
    Cost cost = int8_cost(p, launch);
    cost.insert(cost.begin(), {.name = "mean", .hbm_read = 2 * elements_k(p)});
    return cost;
  };
  return step;
}

// For GPUs without wgmma: a block a tile of queries, whose number needs no counter.
Step mma_step(std::string name, std::string idea, Launch launch) {
  Step step = smooth_step(std::move(name), std::move(idea), launch, smoothed_threads, 64, 4);
  step.support.replace(0, step.support.find(';'), "sm_80 and later");
  step.needs = kAmpere;
  step.prepare = {};
  step.workspaces = [before = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = before(p);
    std::erase_if(all, [](const Workspace& w) { return w.name == "tile_counter"; });
    return all;
  };
  return step;
}

}  // namespace

// And with P and V in e4m3: V's scales and transposition, which take no more than two readings of
// V.
Step fp8_pv_step(std::string name, std::string idea, Launch launch) {
  Step step = smooth_step(std::move(name), std::move(idea), launch, fp8_pv, 64, 4);
  step.support.replace(step.support.find("int8"), 4, "e4m3");
  step.takes = {"e4m3"};
  step.refuses = [of_int8 = step.refuses](const Problem& p) -> std::optional<std::string> {
    if (p.seqlen_k > 65535 * kTileRows)
      return fmt::format("--seqlen-k {}: V is transposed in a grid of up to 65535 x 128 keys",
                         p.seqlen_k);
    return of_int8(p);
  };
  step.workspaces = [of_int8 = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = of_int8(p);
    all.push_back({"v_parts", heads_k(p) * mean_parts(p.seqlen_k) * p.head_dim * 4});
    all.push_back({"v_descale", heads_k(p) * p.head_dim * 4});
    all.push_back({"v8", heads_k(p) * p.head_dim * ((p.seqlen_k + 15) / 16 * 16)});
    return all;
  };
  step.cost = [launch, of_int8 = step.cost](const Problem& p) {
    Cost cost = of_int8(p);
    Phase& attention = cost.back();
    attention.hbm_read -= elements_k(p);
    const Tiling t = *tiling_of(launch, p);
    attention.l2_bytes -= double(heads_q(p)) * visits(p, t) * double(t.block_n * p.head_dim);
    const double v = elements_k(p);
    cost.insert(cost.end() - 1, {{.name = "scales", .hbm_read = 2 * v},
                                 {.name = "transpose", .hbm_read = 2 * v, .hbm_write = v}});
    return cost;
  };
  return step;
}

namespace {

// And with a vector over the keys for each tile of Q: Q's sums, a phase that reads K for up to 16
// tiles at a time, and the vectors, written and read once.
Step smooth_q_step(std::string name, std::string idea, Launch launch,
                   HostTensors (*logical)(const Problem&, const HostTensors&)) {
  Step step = fp8_pv_step(std::move(name), std::move(idea), launch);
  const auto vector_bytes = [](const Problem& p) {
    return heads_q(p) * tiles_of(p.seqlen_q) * ((p.seqlen_k + 3) / 4 * 4) * 4;
  };
  step.workspaces = [=, before = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = before(p);
    all.push_back({"q_sums", heads_q(p) * tiles_of(p.seqlen_q) * p.head_dim * 4});
    all.push_back({"vectors", vector_bytes(p)});
    return all;
  };
  step.cost = [=, before = step.cost](const Problem& p) {
    Cost cost = before(p);
    const double vectors = double(vector_bytes(p)), d = double(p.head_dim);
    cost[0].hbm_read += 2 * elements_q(p);
    cost.back().hbm_read += vectors, cost.back().l2_bytes += vectors;
    cost.insert(cost.begin() + 2, {.name = "vectors",
                                   .fp32_flop = 2 * d * vectors / 4,
                                   .hbm_read = 2 * elements_k(p),
                                   .hbm_write = vectors});
    return cost;
  };
  step.logical = logical;
  return step;
}

// And with V less its mean, by windows: the means and scales, and what each block that runs leaves
// of O, l and the maximum for its next window. V is read twice, as before; in L2 all windows of a
// tile but its first cost a write and a read of O.
int64_t windows_of(const Problem& p) { return (p.seqlen_k + kWindowKeys - 1) / kWindowKeys; }
Step windows_step(std::string name, std::string idea, Launch launch) {
  Step step = fp8_pv_step(std::move(name), std::move(idea), launch);
  step.workspaces = [before = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = before(p);
    std::erase_if(
        all, [](const Workspace& w) { return w.name == "v_parts" || w.name == "v_descale"; });
    const int64_t rows = p.head_dim == 64 ? 192 : 128, threads = 2 * rows;  // of its tiles
    const int64_t tiles = heads_q(p) * ((p.seqlen_q + rows - 1) / rows);
    const int64_t sms = gpu_info().available ? gpu_info().num_sms : 132;
    all.push_back({"v_window", heads_k(p) * windows_of(p) * p.head_dim * 8});
    all.push_back({"sums", std::min(tiles, sms) * (p.head_dim / 8 + 1) * threads * 16});
    return all;
  };
  step.cost = [before = step.cost](const Problem& p) {
    Cost cost = before(p);
    Phase& windows = cost[cost.size() - 3];
    windows.name = "windows";
    windows.hbm_write = double(heads_k(p) * windows_of(p) * p.head_dim) * 8;
    cost.back().l2_bytes += double(heads_q(p) * p.seqlen_q * (windows_of(p) - 1)) *
                            (8 * double(p.head_dim) + 32);
    return cost;
  };
  step.logical = fp8_windows;
  return step;
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

HostTensors fp8_windows(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = smoothed(p, inputs, thread_group_q, thread_group_k);
  round_windows(p, stored.at("v"));
  return stored;
}

HostTensors fp8_heads(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = smoothed(p, inputs, thread_group_q, thread_group_k, 127, mean_of_means);
  round_heads(p, stored.at("v"));
  return stored;
}

namespace {

// S = codes . codes + mean . (k - mean of K), and lse has what is left of q . k. So a query is its
// codes and its tile's mean, side by side, a key its codes with their mean, and what it was.
HostTensors with_smooth_q(const Problem& p, const HostTensors& inputs, float most_code) {
  HostTensors less = inputs;
  const HostTensor means = take_off_tile_means(p, less.at("q"));
  HostTensors stored = smoothed(p, less, thread_group_q, thread_group_k, most_code);
  round_channels(p, stored.at("v"));
  stored.at("q") = beside(stored.at("q"), means);
  stored.at("k") = beside(stored.at("k"), inputs.at("k"));
  return stored;
}

}  // namespace

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

std::vector<Step> prefill_steps() {
  return {int8_step("q1_int8_qk", "Q K^T in int8, a scale for each tile of 128 rows",
                    ATTN_LAUNCH(q1_int8_qk), int8_blocks),
          smooth_step("q2_smooth_k", "the mean of K is taken off before K is rounded",
                      ATTN_LAUNCH(q2_smooth_k), smoothed_blocks, 1, 1),
          smooth_step("q3_per_thread", "scales of two rows of Q and of 32 keys, where they lie",
                      ATTN_LAUNCH(q3_per_thread), smoothed_threads, 64, 4),
          fp8_pv_step("q4_fp8_pv", "P and V in e4m3, V with a scale a channel",
                      ATTN_LAUNCH(q4_fp8_pv)),
          fp8_pv_step("q5_diet", "sums that are floats as they are, O rescaled where P V is added",
                      ATTN_LAUNCH(q5_diet)),
          smooth_q_step("q6_smooth_q", "the mean of each tile of Q is taken off before rounding",
                        ATTN_LAUNCH(q6_smooth_q), smoothed_q),
          smooth_q_step("q7_int4_lesson", "Q and K of four bits: what they cost, and no time",
                        ATTN_LAUNCH(q7_int4_lesson), smoothed_q_int4),
          windows_step("q8_tuned", "P V of 4096 keys summed in the tensor core, V less its mean",
                       ATTN_LAUNCH(q8_tuned)),
          mma_step("q9_mma_sync", "the scores of q3 by mma.sync, P V in 16 bits: 04's loop",
                   ATTN_LAUNCH(q9_mma_sync))};
}

}  // namespace attn
