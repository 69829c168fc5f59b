// The decode steps with a quantised cache: their cost model, what they refuse, and what they store.
// The reference computes attention over exactly those stored values.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "check/operation.h"
#include "check/quantise.h"
#include "kernels/groups.h"
#include "host/quantised.h"
#include "kernels/decode/splits.h"

ATTN_DECLARE_STEP(d1_int8_kv);
ATTN_DECLARE_LAUNCH(d1_int8_kv, prepare);
ATTN_DECLARE_STEP(d2_fp8_kv);
ATTN_DECLARE_LAUNCH(d2_fp8_kv, prepare);
ATTN_DECLARE_STEP(d3_int4_kv);
ATTN_DECLARE_LAUNCH(d3_int4_kv, prepare);
ATTN_DECLARE_STEP(d5_swap_ab);
ATTN_DECLARE_LAUNCH(d5_swap_ab, prepare);
ATTN_DECLARE_STEP(d6_subnormal_operands);
ATTN_DECLARE_LAUNCH(d6_subnormal_operands, prepare);
ATTN_DECLARE_STEP(d7_wide_tiles);
ATTN_DECLARE_LAUNCH(d7_wide_tiles, prepare);
ATTN_DECLARE_STEP(d8_int8_swap_ab);
ATTN_DECLARE_LAUNCH(d8_int8_swap_ab, prepare);
ATTN_DECLARE_STEP(d9_kivi);
ATTN_DECLARE_LAUNCH(d9_kivi, prepare);

namespace attn {
namespace {

using namespace splits;
using Reason = std::optional<std::string>;

Reason refuse(const Problem& p) {
  const double tiles = double(row_blocks(p, kMmaRows)) * double(p.seqlen_k / 64 + 1);
  if (tiles >= 0x1p30) return fmt::format("{:.0f} tiles of keys: at most 2^30 - 1", tiles);
  return std::nullopt;
}

int64_t rows_of(const Problem& p) { return p.batch * p.heads * p.seqlen_q; }
int64_t kv_rows(const Problem& p) { return p.batch * p.kv_heads * p.seqlen_k; }
// As in quantise_kv.h.
int64_t padded_rows(const Problem& p) {
  return p.batch * p.kv_heads * ((p.seqlen_k + 1) / 2 * 2);
}
// Keys visible to any query, summed over sequences, each rounded up to a multiple of `tile`.
double keys_of(const Problem& p, int64_t tile = 1) {
  double keys = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Problem one = p.sequence(b);
    const int64_t seen = one.visible(one.seqlen_q - 1).end - one.visible(0).begin;
    keys += double((std::max<int64_t>(0, seen) + tile - 1) / tile * tile);
  }
  return keys;
}

// `kv` bytes of keys, values and scales come from HBM once, and through L2. A work tile that ends
// inside a head writes a partial result, which is read again.
Cost cost_of_bytes(const Problem& p, double kv, int64_t mma_rows) {
  const double d = double(p.head_dim), q = double(rows_of(p)) * d * 2;
  const int64_t heads = row_blocks(p, mma_rows);
  const double pairs = keys_of(p, 16) * double(heads / p.batch * mma_rows);
  const double parts = heads % kSms == 0 ? 0 : double(std::min(heads, kSms) + kSms);
  const double rows = double(std::min(mma_rows, p.group() * p.seqlen_q));
  return {{.name = "attention",
           .tensor_flop = 4 * d * pairs,
           .exp = pairs,
           .hbm_read = kv + q,
           .hbm_write = q + 4 * double(rows_of(p)),
           .l2_bytes = kv + 2 * q + 2 * parts * rows * (d + 1) * 4}};
}

Cost cache_cost(const Problem& p, double token_bytes, int64_t mma_rows = kMmaRows) {
  return cost_of_bytes(p, keys_of(p) * double(p.kv_heads) * token_bytes, mma_rows);
}

constexpr int64_t kSwappedRows = 8;  // columns of B of an MMA
// Keys per tile of a block: 16 per warp.
int64_t tile_keys(const Problem& p) { return p.head_dim == 256 ? 128 : 256; }
EvenSplits even(const Problem& p, int64_t mma_rows) {
  return even_splits(p, mma_rows, tile_keys(p), kSms);
}

// Two partials per resident block, or as many as there are splits with --split-keys; counters; the
// cache.
std::vector<Workspace> workspaces(const Problem& p, int64_t code_bits,
                                  int64_t mma_rows = kMmaRows) {
  int64_t places = int64_t{kMaxRuns} * 2;
  if (p.own.contains("split_keys")) places = std::max(places, even(p, mma_rows).blocks);
  const int64_t codes = kv_rows(p) * p.head_dim * code_bits / 8;
  return {{"o_partial", places * mma_rows * p.head_dim * 4},
          {"lse_partial", places * mma_rows * 4},
          {"arrived", row_blocks(p, mma_rows) * 4, true},
          {"k8", codes, true},
          {"v8", codes, true},
          {"descale", padded_rows(p) * 8, true}};
}

// d9's visible tokens in codes and in fp16. q z of a group is a product with 16 equal rows.
Cost groups_cost(const Problem& p) {
  const double d = double(p.head_dim);
  double coded = 0, newest = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Problem one = p.sequence(b);
    const int64_t begin = one.visible(0).begin, end = one.visible(one.seqlen_q - 1).end;
    const int64_t codes = groups::coded_of(static_cast<int>(one.seqlen_k));
    coded += double(std::max<int64_t>(0, std::min(end, codes) - begin));
    newest += double(std::max<int64_t>(0, end - std::max(begin, codes)));
  }
  const double of_groups = double(groups::group_bytes(int(p.head_dim))) / groups::kGroup;
  const double kv = coded * (d + 4 + of_groups) + newest * (4 * d + 8);
  Cost cost = cost_of_bytes(p, kv * double(p.kv_heads), kSwappedRows);
  const double rows = double(row_blocks(p, kSwappedRows) / p.batch * kSwappedRows);
  cost.front().tensor_flop += 2 * d * coded / groups::kGroup * 16 * rows;
  return cost;
}
std::vector<Workspace> groups_workspaces(const Problem& p) {
  std::vector<Workspace> all = workspaces(p, 4, kSwappedRows);
  const int64_t heads = p.batch * p.kv_heads, room = heads * groups::kNewestRoom;
  const int64_t rows = heads * groups::room_of(static_cast<int>(p.seqlen_k));
  for (Workspace& w : all) {
    if (w.name == "k8" || w.name == "v8") w.bytes = rows * p.head_dim / 2;
    if (w.name == "descale") w.bytes = rows * 4;  // of values only
  }
  const int64_t bytes = groups::group_bytes(static_cast<int>(p.head_dim));
  all.push_back({"groups", rows / groups::kGroup * bytes, true});
  all.push_back({"k_newest", room * p.head_dim * 2, true});
  all.push_back({"v_newest", room * p.head_dim * 2, true});
  all.push_back({"newest_scale", room * 8, true});
  return all;
}

Step cache_step(std::string name, std::string idea, std::string type, Launch launch,
                Launch prepare) {
  return {
      .name = std::move(name),
      .operation = &decode(),
      .idea = std::move(idea),
      .support = "causal, windows, GQA",
      .limits = {.head_dims = {64, 128, 256}, .most_queries = 16, .most_keys = (1 << 30) - 1},
      .refuses = [](const Problem& p) -> Reason {
        if (Reason reason = refuse(p)) return reason;
        if (const auto given = p.own.find("split_keys"); given != p.own.end()) {
          if (std::fmod(given->second[0], double(tile_keys(p))) != 0)
            return fmt::format("--split-keys {}: must be a multiple of {}, the keys of a tile",
                               given->second[0], tile_keys(p));
          if (const int64_t blocks = even(p, kSwappedRows).blocks; blocks >= int64_t{1} << 31)
            return fmt::format("{} splits: at most 2^31 - 1 fit in a grid", blocks);
        }
        return std::nullopt;
      },
      .workspaces = [](const Problem& p) { return workspaces(p, 8); },
      .cost = [](const Problem& p) { return cache_cost(p, 2 * double(p.head_dim) + 8); },
      .launch = launch,
      .prepare = prepare,
      .needs = kAmpere,
      .takes = {type, "seqused", "split_keys"},
      .logical = type == "int4" ? cache_of_4_bits : cache_of_8_bits,
  };
}

}  // namespace

HostTensors cache_of_8_bits(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = inputs;
  for (const char* name : {"k", "v"}) {
    HostTensor& t = stored.at(name);
    round_to_codes(t, p.dtype == DType::int8 ? int8_codes(t) : e4m3_codes(t),
                   [rows = t.spec.shape[2]](int64_t head, int64_t row, int64_t) {
                     return head * rows + row;
                   });
  }
  return stored;
}

// The kernel's arithmetic: scale and middle are bf16, and the codes are relative to these.
HostTensors cache_of_4_bits(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = inputs;
  for (const char* name : {"k", "v"}) {
    HostTensor& t = stored.at(name);
    t.spec.dtype = DType::fp32;
    const auto d = static_cast<std::size_t>(p.head_dim);
    for (std::size_t at = 0; at < t.data.size(); at += d) {
      float* const x = t.data.data() + at;
      const auto [least, most] = std::minmax_element(x, x + d);
      const float from = *least, to = *most;
      const float width = (to - from) / 15, smallest = smallest_maximum(t);
      const float scale = round_to(DType::bf16, std::max(width, smallest)), inverse = 1 / scale;
      const float middle =
          round_to(DType::bf16, width < smallest ? 0.5f * (from + to) : from + 8 * scale);
      for (std::size_t c = 0; c < d; ++c) {
        const float code = std::clamp(std::nearbyint((x[c] - middle) * inverse), -8.0f, 7.0f);
        x[c] = code * scale + middle;
      }
    }
  }
  return stored;
}

namespace {

float power_of_two(float x, float smallest = 1e-10f) {
  return std::ldexp(1.0f, std::clamp(std::ilogb(std::max(x, smallest)), -126, 126));
}
// `x` over a power of 2 in fp16, or a sixteenth of it if that is what is stored.
float in_fp16(float x, float unit, float part = 1) {
  return round_to(DType::fp16, x * (1 / unit) * part) / part * unit;
}
// Channel `c` of the 32 keys of the group that starts at `k`, with these units of the group.
void round_channel(float* k, std::size_t d, float least, float width, float of_scales,
                   float of_zeros) {
  int exponent = 0;  // three significant bits, rounded up
  const float digits = std::ceil(8 * std::frexp(width / of_scales, &exponent));
  const float scale = std::max(std::ldexp(digits / 8, exponent), 0x1p-14f) * of_scales;
  const float zero = in_fp16(least, of_zeros, 0.0625f), inverse = 1 / scale;
  for (std::size_t i = 0; i < groups::kGroup; ++i)
    k[i * d] = std::clamp(std::nearbyint((k[i * d] - zero) * inverse), 0.0f, 15.0f) * scale + zero;
}
void round_group(float* k, std::size_t d) {
  std::vector<float> least(d), width(d);
  float widest = 0, farthest = 0;
  for (std::size_t c = 0; c < d; ++c) {
    float most = least[c] = k[c];
    for (std::size_t i = 1; i < groups::kGroup; ++i)
      least[c] = std::min(least[c], k[i * d + c]), most = std::max(most, k[i * d + c]);
    width[c] = std::max((most - least[c]) / 15, 1e-10f);
    widest = std::max(widest, width[c]), farthest = std::max(farthest, std::abs(least[c]));
  }
  for (std::size_t c = 0; c < d; ++c)
    round_channel(k + c, d, least[c], width[c], 2 * power_of_two(widest), power_of_two(farthest));
}
void round_newest(float* x, std::size_t d, float part, float smallest) {
  float largest = 0;
  for (std::size_t c = 0; c < d; ++c) largest = std::max(largest, std::abs(x[c]));
  for (std::size_t c = 0; c < d; ++c) x[c] = in_fp16(x[c], power_of_two(largest, smallest), part);
}

}  // namespace

HostTensors cache_of_groups(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = cache_of_4_bits(p, inputs);  // V, as far as it is encoded
  const auto d = static_cast<std::size_t>(p.head_dim);
  const auto room = static_cast<std::size_t>(p.seqlen_k);
  for (const char* name : {"k", "v"}) {
    const std::vector<float>& given = inputs.at(name).data;
    std::vector<float>& data = stored.at(name).data;
    for (std::size_t head = 0; head < data.size() / (room * d); ++head) {
      const auto b = static_cast<int64_t>(head) / p.kv_heads;
      const auto used = static_cast<int>(p.sequence(b).seqlen_k);
      const auto coded = static_cast<std::size_t>(groups::coded_of(used));
      float* const x = data.data() + head * room * d;
      const float* const from = given.data() + head * room * d;
      const bool of_k = name[0] == 'k';
      std::copy(from + (of_k ? 0 : coded * d), from + room * d, x + (of_k ? 0 : coded * d));
      for (std::size_t key = 0; of_k && key < coded; key += groups::kGroup)
        round_group(x + key * d, d);
      for (std::size_t key = coded; key < static_cast<std::size_t>(used); ++key)
        round_newest(x + key * d, d, of_k ? 0.0625f : 1, smallest_maximum(stored.at(name)));
    }
  }
  return stored;
}

std::vector<Step> decode_steps() {
  Step int4 =
      cache_step("d3_int4_kv", "int4 KV cache with zero points per key and value", "int4",
                 ATTN_LAUNCH(d3_int4_kv), ATTN_LAUNCH_OF(d3_int4_kv, prepare));
  int4.workspaces = [](const Problem& p) { return workspaces(p, 4); };
  int4.cost = [](const Problem& p) { return cache_cost(p, double(p.head_dim) + 8); };
  // The same cache, with K and V as the A operands.
  const auto swapped = [](Step step, int64_t code_bits) {
    step.workspaces = [=](const Problem& p) { return workspaces(p, code_bits, kSwappedRows); };
    step.cost = [=](const Problem& p) {
      return cache_cost(p, 2 * double(p.head_dim * code_bits) / 8 + 8, kSwappedRows);
    };
    return step;
  };
  Step groups =
      cache_step("d9_kivi", "per-channel scales of K for 32 tokens; the newest in fp16", "int4",
                 ATTN_LAUNCH(d9_kivi), ATTN_LAUNCH_OF(d9_kivi, prepare));
  groups.logical = cache_of_groups;
  groups.workspaces = groups_workspaces;
  groups.cost = groups_cost;
  return {
      cache_step("d1_int8_kv", "int8 KV cache, one scale per key and value", "int8",
                 ATTN_LAUNCH(d1_int8_kv), ATTN_LAUNCH_OF(d1_int8_kv, prepare)),
      cache_step("d2_fp8_kv", "e4m3 KV cache, one scale per key and value", "e4m3",
                 ATTN_LAUNCH(d2_fp8_kv), ATTN_LAUNCH_OF(d2_fp8_kv, prepare)),
      int4,
      swapped(cache_step("d5_swap_ab", "K and V as the A operands: half the MMAs and scores",
                         "int4", ATTN_LAUNCH(d5_swap_ab), ATTN_LAUNCH_OF(d5_swap_ab, prepare)),
              4),
      swapped(
          cache_step("d6_subnormal_operands", "int4 codes used directly as fp16 subnormals",
                     "int4", ATTN_LAUNCH(d6_subnormal_operands),
                     ATTN_LAUNCH_OF(d6_subnormal_operands, prepare)),
          4),
      swapped(cache_step("d7_wide_tiles", "32 keys per warp, two blocks per SM", "int4",
                         ATTN_LAUNCH(d7_wide_tiles), ATTN_LAUNCH_OF(d7_wide_tiles, prepare)),
              4),
      swapped(cache_step("d8_int8_swap_ab", "the same for an int8 cache", "int8",
                         ATTN_LAUNCH(d8_int8_swap_ab), ATTN_LAUNCH_OF(d8_int8_swap_ab, prepare)),
              8),
      groups};
}

}  // namespace attn
