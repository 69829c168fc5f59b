// The table of chapter 05: its steps, what each costs and what each refuses.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "check/operation.h"
#include "kernels/row_tiles.h"
#include "kernels/splits.h"

ATTN_DECLARE_STEP(v1_one_block);
ATTN_DECLARE_STEP(v2_split_kv);
ATTN_DECLARE_STEP(v3_bytes_in_flight);
ATTN_DECLARE_STEP(v4_gqa);
ATTN_DECLARE_STEP(v5_packed_rows);
ATTN_DECLARE_STEP(v6_heuristic);
ATTN_DECLARE_STEP(v7_fused_combine);
ATTN_DECLARE_STEP(v8_stream_k);
ATTN_DECLARE_STEP(v9_eight_warps);
ATTN_DECLARE_STEP(v10_vectorised_combine);
ATTN_DECLARE_STEP(v11_shared_p);
ATTN_DECLARE_STEP(v12_more_rows);
ATTN_DECLARE_STEP(v13_even_splits);
ATTN_DECLARE_STEP(v14_unified_max);
ATTN_DECLARE_STEP(v15_wgmma);
ATTN_DECLARE_STEP(v16_features);
ATTN_DECLARE_STEP(arrived);

namespace attn {
namespace {

using namespace splits;
using Reason = std::optional<std::string>;

Reason refuse(const Problem& p) {
  if (row_blocks(p, 1) >= int64_t{1} << 31)
    return fmt::format("{} blocks: at most 2^31 - 1 fit in a grid", row_blocks(p, 1));
  return std::nullopt;
}

int64_t rows_of(const Problem& p) { return p.batch * p.heads * p.seqlen_q; }
// Keys that some query sees, of all sequences; in whole tiles of `tile`.
double keys_of(const Problem& p, int64_t tile = 1) {
  double keys = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Problem one = p.sequence(b);
    const int64_t seen = one.visible(one.seqlen_q - 1).end - one.visible(0).begin;
    keys += double((std::max<int64_t>(0, seen) + tile - 1) / tile * tile);
  }
  return keys;
}

// K and V come from HBM once, and from L2 at least once: blocks that read the same keys at the same
// time may find them in L1, or share an answer of L2. Steps on CUDA cores have two multiply-adds
// for each number and row, those on tensor cores for each number and 16 rows, there or not.
Phase attention(const Problem& p, int64_t block_rows) {
  const double element = double(size_of(p.dtype)), d = double(p.head_dim);
  const double kv = 2 * keys_of(p) * double(p.kv_heads) * d * element;
  const double q = double(rows_of(p)) * d * element;
  const bool mma = block_rows % kMmaRows == 0;
  const double pairs = p.total_pairs();
  const double mma_pairs =
      keys_of(p, 16) * double(row_blocks(p, block_rows) / p.batch * block_rows);
  return {.name = "attention",
          .tensor_flop = mma ? 4 * d * mma_pairs : 0,
          .fp32_flop = mma ? 0 : 4 * d * pairs,
          .exp = mma ? mma_pairs : pairs,
          .hbm_read = kv + q,
          .hbm_write = q + 4 * double(rows_of(p)),
          .l2_bytes = kv + 2 * q};
}

std::vector<Workspace> no_workspace(const Problem&) { return {}; }
std::vector<Workspace> partials(const Problem& p, int64_t num_splits) {
  return {{"o_partial", rows_of(p) * num_splits * p.head_dim * 4},
          {"lse_partial", rows_of(p) * num_splits * 4}};
}
// Partial results are written and read again, most of it in L2.
Cost split_cost(const Problem& p, int64_t block_rows, int64_t num_splits) {
  Phase main = attention(p, block_rows);
  const double rows = double(rows_of(p)),
               partial = rows * double(num_splits * (p.head_dim + 1)) * 4;
  const double out = main.hbm_write;
  main.hbm_write = 0, main.l2_bytes += partial - out;
  return {main,
          {.name = "combine",
           .fp32_flop = 2 * rows * double(num_splits * p.head_dim),
           .exp = rows * double(num_splits),
           .hbm_write = out,
           .l2_bytes = partial + out}};
}

const char* const kSupport = "causal, windows, GQA";
const Limits kLimits{
    .dtypes = k16Bits, .head_dims = {64, 128, 256}, .most_queries = 16, .most_keys = (1 << 30) - 1};

// A single split is stored as it is: no merge is launched.
Cost stored_or_split_cost(const Problem& p, int64_t block_rows, int64_t num_splits) {
  if (num_splits == 1) return {attention(p, block_rows)};
  return split_cost(p, block_rows, num_splits);
}

int64_t one_row(const Problem&) { return 1; }
int64_t mma_rows(const Problem&) { return kMmaRows; }
int64_t one_per_sm(const Problem&) { return 1; }
int64_t more_rows(const Problem& p) { return kMmaRows * row_tiles_of_a_block(p); }
int64_t wgmma_rows(const Problem&) { return 64; }
int64_t filling(const Problem& p, int64_t block_rows) { return splits_that_fill(p, block_rows); }

Step split_step(std::string name, std::string idea, int64_t (*block_rows)(const Problem&),
                Launch launch, int64_t (*splits_of)(const Problem&, int64_t) = filling,
                Cost (*cost)(const Problem&, int64_t, int64_t) = split_cost) {
  const auto splits = [=](const Problem& p) { return splits_of(p, block_rows(p)); };
  return {.name = std::move(name),
          .operation = &decode(),
          .idea = std::move(idea),
          .support = kSupport,
          .limits = kLimits,
          .refuses = refuse,
          .workspaces = [=](const Problem& p) { return partials(p, splits(p)); },
          .cost = [=](const Problem& p) { return cost(p, block_rows(p), splits(p)); },
          .launch = launch,
          .needs = kAmpere,
          .takes = {"seqused"}};
}

// The counters lie beside the partial results, and the merge is part of the launch.
Step one_launch(Step step) {
  step.workspaces = [partial = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = partial(p);
    all.push_back({"arrived", row_blocks(p, kMmaRows) * 4, true});
    return all;
  };
  step.cost = [parts = step.cost](const Problem& p) {
    const Cost cost = parts(p);
    Phase all = cost[0];
    if (cost.size() > 1) all += cost[1];
    all.name = "attention";
    return Cost{all};
  };
  step.prepare = ATTN_LAUNCH(arrived);
  return step;
}

// Two parts a resident block, whatever the lengths. Tiles are counted in 32 bits.
Step stream_k(std::string name, std::string idea, Launch launch,
              int64_t (*resident)(const Problem&) = one_per_sm,
              int64_t (*block_rows)(const Problem&) = mma_rows) {
  Step step = one_launch(split_step(std::move(name), std::move(idea), mma_rows, launch));
  step.refuses = [](const Problem& p) -> Reason {
    if (Reason reason = refuse(p)) return reason;
    const double tiles = double(row_blocks(p, kMmaRows)) * double(p.seqlen_k / 64 + 1);
    if (tiles >= 0x1p30) return fmt::format("{:.0f} tiles of keys: at most 2^30 - 1", tiles);
    return std::nullopt;
  };
  step.workspaces = [=](const Problem& p) {
    const int64_t rows = int64_t{kMaxRuns} * 2 * block_rows(p);
    return std::vector<Workspace>{{"o_partial", rows * p.head_dim * 4},
                                  {"lse_partial", rows * 4},
                                  {"arrived", row_blocks(p, kMmaRows) * 4, true}};
  };
  step.cost = [=](const Problem& p) {
    const int64_t heads = row_blocks(p, block_rows(p)), blocks = kSms * resident(p);
    Phase all = attention(p, block_rows(p));
    // Where a run ends a head is cut, if runs do not end where heads do.
    const double parts = heads % blocks == 0 ? 0 : double(std::min(heads, blocks) + blocks);
    const double rows = double(std::min(block_rows(p), p.group() * p.seqlen_q));
    all.l2_bytes += 2 * parts * rows * double(p.head_dim + 1) * 4;
    return Cost{all};
  };
  return step;
}

// Even splits or runs. With --split-keys there may be more splits than blocks are resident.
Step even_or_runs(std::string name, std::string idea, Launch launch,
                  int64_t (*block_rows)(const Problem&), int64_t tile_keys) {
  Step step = stream_k(std::move(name), std::move(idea), launch, one_per_sm, block_rows);
  step.takes.push_back("split_keys");
  const auto even = [=](const Problem& p) {
    return even_splits(p, block_rows(p), p.head_dim == 256 ? 64 : tile_keys, kSms);
  };
  step.refuses = [=, of_runs = step.refuses](const Problem& p) -> Reason {
    if (Reason reason = of_runs(p)) return reason;
    if (const auto given = p.own.find("split_keys"); given != p.own.end()) {
      if (std::fmod(given->second[0], 128) != 0)
        return fmt::format("--split-keys {}: must be a multiple of 128", given->second[0]);
      if (even(p).blocks >= int64_t{1} << 31)
        return fmt::format("{} splits: at most 2^31 - 1 fit in a grid", even(p).blocks);
    }
    return std::nullopt;
  };
  step.workspaces = [=, of_runs = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = of_runs(p);
    if (p.own.contains("split_keys"))
      for (auto& w : all) {
        const int64_t rows = even(p).blocks * block_rows(p);
        if (w.name == "o_partial") w.bytes = std::max(w.bytes, rows * p.head_dim * 4);
        if (w.name == "lse_partial") w.bytes = std::max(w.bytes, rows * 4);
      }
    return all;
  };
  return step;
}

Chapter make_chapter() {
  Chapter c{"05_flash_decoding", "one query, a long cache, the whole GPU", {}};
  c.steps.push_back({
      .name = "v1_one_block",
      .operation = &decode(),
      .idea = "a block for each query, which reads all keys",
      .support = kSupport,
      .limits = kLimits,
      .refuses = refuse,
      .workspaces = no_workspace,
      .cost = [](const Problem& p) { return Cost{attention(p, 1)}; },
      .launch = ATTN_LAUNCH(v1_one_block),
      .needs = kAmpere,
      .takes = {"seqused"},
  });
  c.steps.push_back(split_step(
      "v2_split_kv", "the keys of a sequence split among blocks, and a kernel that merges", one_row,
      ATTN_LAUNCH(v2_split_kv)));
  c.steps.push_back(split_step("v3_bytes_in_flight", "copies that run ahead, without a barrier",
                               one_row, ATTN_LAUNCH(v3_bytes_in_flight)));
  c.steps.push_back(split_step("v4_gqa", "a block serves several query heads of a K/V head",
                               rows_of_a_block, ATTN_LAUNCH(v4_gqa)));
  c.steps.push_back(split_step("v5_packed_rows", "the rows that share keys are those of an MMA",
                               mma_rows, ATTN_LAUNCH(v5_packed_rows)));
  c.steps.push_back(split_step("v6_heuristic", "how many splits, from a model of their time",
                               mma_rows, ATTN_LAUNCH(v6_heuristic), best_splits,
                               stored_or_split_cost));
  c.steps.push_back(one_launch(
      split_step("v7_fused_combine", "the last block of a row to arrive merges its splits",
                 mma_rows, ATTN_LAUNCH(v7_fused_combine), best_splits, stored_or_split_cost)));
  for (std::size_t last = c.steps.size(), n = last - 2; n < last; ++n)  // v6 and v7
    c.steps[n].takes.push_back("num_splits");
  c.steps.push_back(stream_k("v8_stream_k",
                             "every block gets the same number of tiles, wherever they are",
                             ATTN_LAUNCH(v8_stream_k), blocks_per_sm));
  c.steps.push_back(stream_k("v9_eight_warps", "one block an SM, of twice as many warps",
                             ATTN_LAUNCH(v9_eight_warps)));
  c.steps.push_back(stream_k("v10_vectorised_combine", "merges with less latency",
                             ATTN_LAUNCH(v10_vectorised_combine)));
  c.steps.push_back(stream_k("v11_shared_p", "warps share P, and own columns of O in place of keys",
                             ATTN_LAUNCH(v11_shared_p)));
  c.steps.push_back(stream_k("v12_more_rows", "up to 64 rows in a block",
                             ATTN_LAUNCH(v12_more_rows), one_per_sm, more_rows));
  c.steps.push_back(even_or_runs("v13_even_splits", "even splits where all lengths are the same",
                                 ATTN_LAUNCH(v13_even_splits), mma_rows, 128));
  c.steps.push_back(even_or_runs("v14_unified_max",
                                 "one fixed number in place of the running maximum",
                                 ATTN_LAUNCH(v14_unified_max), mma_rows, 128));
  c.steps.push_back(even_or_runs("v15_wgmma", "up to 64 rows by wgmma, a tile for a warpgroup",
                                 ATTN_LAUNCH(v15_wgmma), wgmma_rows, 64));
  c.steps.back().needs = kHopper;
  Step features = even_or_runs("v16_features", "softcap and ALiBi, compiled in where they are used",
                               ATTN_LAUNCH(v16_features), mma_rows, 128);
  features.support = "causal, windows, GQA, softcap, ALiBi";
  features.takes.insert(features.takes.end(), {"softcap", "alibi"});
  c.steps.push_back(features);
  return c;
}

}  // namespace

const Chapter& chapter() {
  static const Chapter c = make_chapter();
  return c;
}

}  // namespace attn
