#include "host/steps.h"

#include <fmt/format.h>

#include <algorithm>

#include "attn/rotary.h"
#include "attn/tiling.h"
#include "host/costs.h"
#include "host/mixed_plan.h"
#include "host/paged.h"
#include "kernels/boxes.h"
#include "kernels/splits.h"

ATTN_DECLARE_STEP(arrived);
ATTN_DECLARE_STEP(tile_counter);
ATTN_DECLARE_STEP(tickets);

namespace attn::builders {

using namespace splits;

// Features that no step of this chapter supports.
Reason refuse_all(const Problem& p) {
  if (num_pages_of(p) * page_size_of(p) >= int64_t{1} << 31)
    return fmt::format("--num-pages {}: of {} tokens each, a pool holds at most 2^31 - 1 tokens",
                       num_pages_of(p), page_size_of(p));
  return std::nullopt;
}
static Reason refuse(const Problem& p) {
  if (Reason reason = refuse_all(p)) return reason;
  if (row_blocks(p, 1) >= int64_t{1} << 31)
    return fmt::format("{} blocks: at most 2^31 - 1 fit in a grid", row_blocks(p, 1));
  return std::nullopt;
}
// Tiles of all row blocks, plus one each in plans, are counted in 32 bits.
static Reason refuse_runs(const Problem& p) {
  if (Reason reason = refuse(p)) return reason;
  const double tiles = double(row_blocks(p, kMmaRows)) * double(p.seqlen_k / 64 + 2);
  if (tiles >= 0x1p30) return fmt::format("{:.0f} tiles of keys: at most 2^30 - 1", tiles);
  return std::nullopt;
}

static const char* const kSupport = "any page size; causal, windows, GQA";
static const Limits kDecodeLimits{
    .dtypes = k16Bits, .head_dims = {64, 128, 256}, .most_queries = 16, .most_keys = (1 << 30) - 1};
static const Limits kPrefillLimits{.dtypes = k16Bits,
                                   .head_dims = {64, 128, 256},
                                   .most_keys = (1 << 30) - 1,
                                   .least_scale = kLeastScale};

Step one_block(std::string name, std::string idea, Launch launch) {
  return {.name = std::move(name),
          .operation = &paged_decode(),
          .idea = std::move(idea),
          .support = kSupport,
          .limits = kDecodeLimits,
          .refuses = refuse,
          .workspaces = [](const Problem&) { return std::vector<Workspace>(); },
          .cost = [](const Problem& p) { return Cost{decode_cost(p, 1)}; },
          .launch = launch,
          .needs = kAmpere,
          .takes = {"seqused"}};
}

// Two partial results per resident block, whatever the lengths, and the semaphores.
Step runs(std::string name, std::string idea, Launch launch) {
  return {.name = std::move(name),
          .operation = &paged_decode(),
          .idea = std::move(idea),
          .support = kSupport,
          .limits = kDecodeLimits,
          .refuses = refuse_runs,
          .workspaces =
              [](const Problem& p) {
                const int64_t rows = int64_t{kMaxRuns} * 2 * kMmaRows;
                return std::vector<Workspace>{{"o_partial", rows * p.head_dim * 4},
                                              {"lse_partial", rows * 4},
                                              {"arrived", row_blocks(p, kMmaRows) * 4, true}};
              },
          .cost =
              [](const Problem& p) {
                const int64_t heads = row_blocks(p, kMmaRows);
                Phase all = decode_cost(p, kMmaRows);
                // The end of a run splits a head, unless runs end at heads.
                const double parts = heads % kSms == 0 ? 0 : double(std::min(heads, kSms) + kSms);
                const double rows = double(std::min(kMmaRows, p.group() * p.seqlen_q));
                all.l2_bytes += 2 * parts * rows * double(p.head_dim + 1) * 4;
                return Cost{all};
              },
          .launch = launch,
          .prepare = ATTN_LAUNCH(arrived),
          .needs = kAmpere,
          .takes = {"seqused"}};
}

// A plan; partial results of split row blocks, and the semaphores.
Step planned(std::string name, std::string idea, Launch launch, MakePlan make,
             HostTensors (*tensors)(const Problem&, const HostTensors&)) {
  Step step = runs(std::move(name), std::move(idea), launch);
  step.workspaces = [](const Problem& p) {
    const int64_t rows = 2 * plans::planned_blocks(p) * kMmaRows;
    return std::vector<Workspace>{{"o_partial", rows * p.head_dim * 4},
                                  {"lse_partial", rows * 4},
                                  {"arrived", row_blocks(p, kMmaRows) * 4, true}};
  };
  step.cost = [make](const Problem& p) {
    const std::vector<int64_t> lengths =
        p.seqused_k.empty() ? std::vector(static_cast<std::size_t>(p.batch), p.seqlen_k)
                            : p.seqused_k;
    const plans::Plan plan = make(p, lengths, plans::planned_blocks(p));
    Phase all = decode_cost(p, kMmaRows);
    const double rows = double(std::min(kMmaRows, p.group() * p.seqlen_q));
    all.l2_bytes += 2 * plan.parts * rows * double(p.head_dim + 1) * 4;
    return Cost{all};
  };
  step.plan = tensors;
  return step;
}

// Features on scores and queries: softcap, ALiBi, sinks, RoPE on Q.
Step with_variants(std::string name, std::string idea, Launch launch) {
  Step step = planned(std::move(name), std::move(idea), launch, plans::balanced_plan,
                      plans::balanced_tensors);
  step.support += ", softcap, ALiBi, sinks, rotary embedding of queries";
  step.takes.insert(step.takes.end(), {"softcap", "alibi", "sinks", "rotary"});
  step.refuses = [](const Problem& p) -> Reason {
    // Row 0 of the table belongs to key 0; with more queries than keys to query 0.
    if (has_rotary(p) && p.seqlen_q > p.seqlen_k)
      return fmt::format("--rotary: {} queries, but room for {} keys", p.seqlen_q, p.seqlen_k);
    return refuse_runs(p);
  };
  step.cost = [of_scores = step.cost](const Problem& p) {
    Cost cost = of_scores(p);
    if (has_rotary(p)) cost[0].hbm_read += 4 * double(p.batch * p.seqlen_q * p.head_dim);
    return cost;
  };
  return step;
}

constexpr int64_t kMaxPlanned = 1 << 14;  // sequences whose starts fit into shared memory
// Planning is the first phase of the launch; the plan is in a workspace.
Step device_planned(std::string name, std::string idea, Launch launch) {
  Step step = planned(std::move(name), std::move(idea), launch, plans::line_plan, nullptr);
  step.refuses = [](const Problem& p) -> Reason {
    if (p.batch > kMaxPlanned)
      return fmt::format("--batch {}: this step plans for at most {} sequences", p.batch,
                         kMaxPlanned);
    return refuse_runs(p);
  };
  step.workspaces = [of_parts = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = of_parts(p);
    all.push_back({"work", plans::most_pieces(p) * plans::kWorkNumbers * 4});
    all.push_back({"work_range", plans::planned_blocks(p) * 2 * 4});
    return all;
  };
  step.cost = [attention = step.cost](const Problem& p) {
    const double read = 4 * double(p.batch);
    const double written =
        4 * double(plans::kWorkNumbers * plans::most_pieces(p) + 2 * plans::planned_blocks(p));
    Cost all{{.name = "plan", .hbm_read = read, .hbm_write = written, .l2_bytes = read + written}};
    all.push_back(attention(p).front());
    return all;
  };
  return step;
}

static Reason refuse_prefill(const Problem& p) {
  if (Reason reason = refuse_all(p)) return reason;
  const int64_t rows = prefill_rows(p.head_dim);
  const double blocks = double(p.batch * p.heads) * double((p.seqlen_q + rows - 1) / rows);
  if (blocks >= 0x1p31) return fmt::format("{:.0f} blocks: at most 2^31 - 1 fit in a grid", blocks);
  for (int64_t b = 0; p.own.contains("tree") && b < p.batch; ++b)
    if (const Problem one = p.sequence(b); one.seqlen_k < one.seqlen_q)
      return fmt::format("--tree: sequence {} has {} keys, fewer than its {} tokens", b,
                         one.seqlen_k, one.seqlen_q);
  return std::nullopt;
}

Step prefill(std::string name, std::string idea, std::vector<std::string> takes, Launch launch) {
  return {
      .name = std::move(name),
      .operation = &paged_prefill(),
      .idea = std::move(idea),
      .support = "any page size; ragged batches, causal, windows, GQA",
      .limits = kPrefillLimits,
      .refuses = refuse_prefill,
      .workspaces = [](const Problem&) { return std::vector<Workspace>(); },
      .cost = prefill_cost,
      .launch = launch,
      .needs = kAmpere,
      .takes = std::move(takes),
  };
}

Step with_trees(std::string name, std::string idea, Launch launch) {
  Step step = prefill(std::move(name), std::move(idea), {"seqused", "varlen", "tree"}, launch);
  step.support += ", trees";
  return step;
}

// A TMA box holds rows of one page, in whole atoms of the swizzle.
static Reason refuse_boxes(const Problem& p) {
  if (box_rows(p) % kAtomRows == 0) return std::nullopt;
  return fmt::format(
      "--page-size {}: must be a multiple of {}: a TMA box holds whole swizzle atoms",
      page_size_of(p), kAtomRows);
}

// Chapter 06's kernel; its launch reports the tile sizes.
Step hopper_prefill(std::string name, std::string idea, Launch launch) {
  Step step = prefill(std::move(name), std::move(idea), {"seqused", "varlen"}, launch);
  step.support = "page sizes that are multiples of 8; ragged batches, causal, windows, GQA";
  step.refuses = [](const Problem& p) -> Reason {
    if (Reason reason = refuse_prefill(p)) return reason;
    return refuse_boxes(p);
  };
  step.cost = [launch](const Problem& p) { return tiled_prefill_cost(p, *tiling_of(launch, p)); };
  step.workspaces = [](const Problem&) {
    return std::vector<Workspace>{{"tile_counter", 4, true}};
  };
  step.prepare = ATTN_LAUNCH(tile_counter);
  step.needs = kHopper;
  return step;
}

// Sequences with few queries decode, in 16 rows; the cost of a batch is the sum over its sequences.
// Partial results are left out: they depend on the plan of the whole batch.
Step mixed(std::string name, std::string idea, Launch launch) {
  Step step =
      prefill(std::move(name), std::move(idea), {"seqused", "varlen", "serial", "streams"}, launch);
  step.support += "; --serial, --streams";
  step.cost = [](const Problem& p) {
    const bool decodes = p.seqlen_q <= plans::kMaxDecoding;
    Phase all = decodes ? decode_cost(p, kMmaRows) : prefill_cost(p).front();
    if (!p.own.contains("serial")) return Cost{all};
    Phase none;
    all.name = decodes ? "decode" : "prefill", none.name = decodes ? "prefill" : "decode";
    return decodes ? Cost{none, all} : Cost{all, none};
  };
  step.refuses = [](const Problem& p) -> Reason {
    if (Reason reason = refuse_prefill(p)) return reason;
    if (p.own.contains("serial") && p.own.contains("streams"))
      return "--serial --streams: at most one of the two is accepted";
    const double tiles = double(row_blocks(p, kMmaRows)) * double(p.seqlen_k / 64 + 2);
    if (tiles >= 0x1p30) return fmt::format("{:.0f} tiles of keys: at most 2^30 - 1", tiles);
    return std::nullopt;
  };
  step.workspaces = [](const Problem& p) {
    const plans::MixedBounds most = plans::mixed_bounds(p);
    const int64_t rows = most.parts * kMmaRows;
    return std::vector<Workspace>{{"o_partial", rows * p.head_dim * 4},
                                  {"lse_partial", rows * 4},
                                  {"tickets", plans::kTickets * 4, true},
                                  {"arrived", (most.row_blocks + 1) * 4, true}};
  };
  step.prepare = ATTN_LAUNCH(tickets);
  step.plan = plans::mixed_tensors;
  return step;
}

// The shared prefix once, in tiles of the queries of all members; suffixes as in v5; and partial
// results, which are stored and read by a merge.
static plans::PrefixPlan prefixes_of(const Problem& p, plans::PrefixTiles tiles) {
  const std::vector<int64_t> lengths =
      p.seqused_k.empty() ? std::vector(static_cast<std::size_t>(p.batch), p.seqlen_k)
                          : p.seqused_k;
  const std::vector<int64_t> table =
      p.own.contains("shared_prefix") ? drawn_table(p).numbers : std::vector<int64_t>();
  Problem one = p;
  if (table.empty()) one.window_left = 0;  // nothing is shared, as with a window
  return plans::prefix_plan(one, table, lengths, plans::planned_blocks(p), tiles);
}
static Cost shared_cost(const Step& suffix, const Problem& p, plans::PrefixTiles tiles) {
  const plans::PrefixPlan plan = prefixes_of(p, tiles);
  const double element = double(size_of(p.dtype)), d = double(p.head_dim);
  const double rows = double(tiles.rows), partial = double(plan.places) * (d + 1) * 4;
  Phase prefix{.name = "prefix"};
  for (const plans::PrefixWork& w : plan.work) {
    const double keys = double(w.end - w.begin) * double(tiles.keys);
    prefix.exp += rows * keys;
    prefix.l2_bytes += 2 * keys * d * element;
    if (w.row0 == 0) prefix.hbm_read += 2 * keys * d * element;
  }
  prefix.tensor_flop = 4 * d * prefix.exp;
  prefix.l2_bytes += partial;
  Problem rest = p;
  rest.own.erase("shared_prefix");
  rest.seqused_k.resize(static_cast<std::size_t>(p.batch), p.seqlen_k);
  for (std::size_t b = 0; b < rest.seqused_k.size(); ++b) rest.seqused_k[b] -= plan.keys[b];
  return {prefix, suffix.cost(rest).front(), {.name = "merge", .l2_bytes = partial}};
}
Step shared(std::string name, std::string idea, Launch launch, TilesOf tiles_of) {
  Step step = planned(std::move(name), std::move(idea), launch, plans::balanced_plan, nullptr);
  step.plan = [tiles_of](const Problem& p, const HostTensors& in) {
    return plans::prefix_tensors(p, in, tiles_of(p.head_dim));
  };
  step.support += "; reads shared prefixes of at least 128 tokens once";
  step.cost = [suffix = step, tiles_of](const Problem& p) {
    return shared_cost(suffix, p, tiles_of(p.head_dim));
  };
  step.workspaces = [of_parts = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = of_parts(p);
    const int64_t places = plans::most_prefix_places(p);
    all.push_back({"prefix_o", places * p.head_dim * 4});
    all.push_back({"prefix_lse", places * 4});
    return all;
  };
  step.limits.least_scale = kLeastScale;
  return step;
}

// The same with TMA and wgmma.
Step hopper_shared(std::string name, std::string idea, Launch launch) {
  Step step = shared(std::move(name), std::move(idea), launch, plans::wgmma_prefix_tiles);
  step.support.replace(step.support.find("any page size"), 13,
                       "page sizes that are multiples of 8");
  step.refuses = [of_mma = step.refuses](const Problem& p) -> Reason {
    if (Reason reason = of_mma(p)) return reason;
    return refuse_boxes(p);
  };
  step.needs = kHopper;
  return step;
}

// Latent attention with `rows` rows per block.
static Reason refuse_latent(const Problem& p) {
  if (p.kv_heads != 1)
    return fmt::format("--kv-heads {}: must be 1, shared by all query heads", p.kv_heads);
  return refuse_runs(p);
}
Step latent(std::string name, std::string idea, Launch launch, int64_t rows) {
  return {.name = std::move(name),
          .operation = &paged_mla(),
          .idea = std::move(idea),
          .support = "512 of them V; one K/V head; any page size; causal, windows",
          .limits = {.dtypes = k16Bits,
                     .head_dims = {kLatentDim},
                     .most_queries = 16,
                     .most_keys = (1 << 30) - 1},
          .refuses = refuse_latent,
          .workspaces =
              [rows](const Problem& p) {
                const int64_t row_tiles = (p.heads * p.seqlen_q + rows - 1) / rows;
                const int64_t parts = 2 * plans::teams(p, rows) * row_tiles * rows;
                return std::vector<Workspace>{{"o_partial", parts * kLatentValues * 4},
                                              {"lse_partial", parts * 4},
                                              {"arrived", row_blocks(p, kMmaRows) * 4, true}};
              },
          .cost = [rows](const Problem& p) { return latent_cost(p, rows); },
          .launch = launch,
          .prepare = ATTN_LAUNCH(arrived),
          .needs = kAmpere,
          .takes = {"seqused"},
          .plan = [rows](const Problem& p,
                         const HostTensors& in) { return plans::team_tensors(p, in, rows); }};
}

Step latent_wgmma(std::string name, std::string idea, Launch launch) {
  Step step = latent(std::move(name), std::move(idea), launch, kWgmmaRows);
  step.needs = kHopper;
  step.limits.least_scale = kLeastScale;
  return step;
}
// A tile starts at the first visible key, which with a window need not be the start of a box.
Step latent_boxes(std::string name, std::string idea, Launch launch) {
  Step step = latent_wgmma(std::move(name), std::move(idea), launch);
  step.support = "512 of them V; one K/V head; page sizes that are multiples of 8; causal";
  step.plan = [](const Problem& p, const HostTensors& in) {
    return plans::pair_tensors(p, in, kWgmmaRows);
  };
  step.cost = seesaw_cost;
  step.refuses = [](const Problem& p) -> Reason {
    if (Reason reason = refuse_latent(p)) return reason;
    if (Reason reason = refuse_boxes(p)) return reason;
    if (p.window_left >= 0)
      return fmt::format(
          "--window {},{}: accepted are -1 to the left and --causal, since tiles begin at TMA "
          "boxes",
          p.window_left, p.window_right);
    return std::nullopt;
  };
  return step;
}

// 16-byte chunks of new tokens are counted in 32 bits.
Reason refuse_append(const Problem& p) {
  if (Reason reason = refuse_all(p)) return reason;
  const double chunks = double(p.batch * p.seqlen_q * p.kv_heads) * double(p.head_dim / 16);
  if (chunks >= 0x1p31) return fmt::format("{:.0f} chunks of new tokens: at most 2^31 - 1", chunks);
  return std::nullopt;
}

// Everything written is read once.
Step copies(std::string name, std::string idea, const Operation& operation, const char* phase,
            Launch launch, Reason (*refuses)(const Problem&)) {
  return {
      .name = std::move(name),
      .operation = &operation,
      .idea = std::move(idea),
      .support = "any page size",
      .limits = {.dtypes = k16Bits, .head_dims = {64, 128, 256}, .most_keys = (1 << 30) - 1},
      .refuses = refuses,
      .workspaces = [](const Problem&) { return std::vector<Workspace>(); },
      .cost =
          [&operation, phase](const Problem& p) {
            const double bytes = operation.compulsory_bytes(p);
            return Cost{
                {.name = phase, .hbm_read = bytes / 2, .hbm_write = bytes / 2, .l2_bytes = bytes}};
          },
      .launch = launch,
      .needs = kAmpere,
      .takes = {"seqused"}};
}

}  // namespace attn::builders
