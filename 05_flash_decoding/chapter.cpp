// The steps of chapter 05: cost models and limits.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "check/operation.h"
#include "host/rank_steps.h"
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

// K and V are read from HBM once and from L2 at least once: concurrent blocks that read the same
// keys may hit L1 or share an L2 response. On CUDA cores a step does two multiply-adds per element
// of the cache and row; on tensor cores per element and 16 rows, padding included.
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
// Partial results are written and read back, mostly in L2.
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

// With a single split no combine kernel is launched.
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

// Fused combine: arrival counters in the workspace, and one phase for attention and reduction.
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

// Stream-K: two partial results per resident block, for any lengths. Tile indices have 32 bits.
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
    // A run that does not end at the end of a head leaves partial results.
    const double parts = heads % blocks == 0 ? 0 : double(std::min(heads, blocks) + blocks);
    const double rows = double(std::min(block_rows(p), p.group() * p.seqlen_q));
    all.l2_bytes += 2 * parts * rows * double(p.head_dim + 1) * 4;
    return Cost{all};
  };
  return step;
}

// Even splits or stream-K runs. With --split-keys there may be more splits than resident blocks.
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
  Chapter c{"05_flash_decoding", "split-KV attention for decoding", {}};
  c.steps.push_back({
      .name = "v1_one_block",
      .operation = &decode(),
      .idea = "one thread block per query, looping over all keys",
      .support = kSupport,
      .limits = kLimits,
      .refuses = refuse,
      .workspaces = no_workspace,
      .cost = [](const Problem& p) { return Cost{attention(p, 1)}; },
      .launch = ATTN_LAUNCH(v1_one_block),
      .needs = kAmpere,
      .takes = {"seqused"},
  });
  c.steps.push_back(split_step("v2_split_kv",
                               "split-KV: keys split among thread blocks, and a combine kernel",
                               one_row, ATTN_LAUNCH(v2_split_kv)));
  c.steps.push_back(split_step("v3_bytes_in_flight",
                               "multi-stage cp.async pipeline per lane, without a barrier", one_row,
                               ATTN_LAUNCH(v3_bytes_in_flight)));
  c.steps.push_back(split_step("v4_gqa",
                               "one thread block serves several query heads of a K/V head",
                               rows_of_a_block, ATTN_LAUNCH(v4_gqa)));
  c.steps.push_back(split_step("v5_packed_rows",
                               "PackGQA: the rows of a K/V head fill the M dimension of an MMA",
                               mma_rows, ATTN_LAUNCH(v5_packed_rows)));
  c.steps.push_back(split_step("v6_heuristic", "number of splits from a cost model", mma_rows,
                               ATTN_LAUNCH(v6_heuristic), best_splits, stored_or_split_cost));
  c.steps.push_back(one_launch(
      split_step("v7_fused_combine", "the last block of a row to arrive reduces its splits",
                 mma_rows, ATTN_LAUNCH(v7_fused_combine), best_splits, stored_or_split_cost)));
  for (std::size_t last = c.steps.size(), n = last - 2; n < last; ++n)  // v6 and v7
    c.steps[n].takes.push_back("num_splits");
  c.steps.push_back(stream_k("v8_stream_k",
                             "stream-K: the same number of KV tiles for each thread block",
                             ATTN_LAUNCH(v8_stream_k), blocks_per_sm));
  c.steps.push_back(stream_k("v9_eight_warps", "one thread block of eight warps per SM",
                             ATTN_LAUNCH(v9_eight_warps)));
  c.steps.push_back(stream_k("v10_vectorised_combine", "lower latency of both reductions",
                             ATTN_LAUNCH(v10_vectorised_combine)));
  c.steps.push_back(stream_k("v11_shared_p", "P through shared memory; each warp owns columns of O",
                             ATTN_LAUNCH(v11_shared_p)));
  c.steps.push_back(stream_k("v12_more_rows", "up to 64 rows per thread block",
                             ATTN_LAUNCH(v12_more_rows), one_per_sm, more_rows));
  c.steps.push_back(even_or_runs("v13_even_splits",
                                 "even splits if all sequences have the same length",
                                 ATTN_LAUNCH(v13_even_splits), mma_rows, 128));
  c.steps.push_back(even_or_runs("v14_unified_max", "a constant instead of the running max",
                                 ATTN_LAUNCH(v14_unified_max), mma_rows, 128));
  c.steps.push_back(even_or_runs("v15_wgmma", "64 rows per thread block with wgmma",
                                 ATTN_LAUNCH(v15_wgmma), wgmma_rows, 64));
  c.steps.back().needs = kHopper;
  Step features = even_or_runs("v16_features", "softcap and ALiBi, compiled in where used",
                               ATTN_LAUNCH(v16_features), mma_rows, 128);
  features.support = "causal, windows, GQA, softcap, ALiBi";
  features.takes.insert(features.takes.end(), {"softcap", "alibi"});
  c.steps.push_back(features);
  return c;
}

}  // namespace

const Chapter& chapter() {
  static const Chapter c = rank_steps::with_ranks(make_chapter());
  return c;
}

}  // namespace attn
