// The table of chapter 07: its steps, what each costs and what each refuses.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "paged.h"
#include "plan.h"
#include "splits.h"
#include "trace.h"

ATTN_DECLARE_STEP(v1_block_table);
ATTN_DECLARE_STEP(v2_page_table);
ATTN_DECLARE_STEP(v3_prefetched_pages);
ATTN_DECLARE_STEP(v4_ragged_plan);
ATTN_DECLARE_STEP(v5_balanced_plan);
ATTN_DECLARE_STEP(v6_device_plan);
ATTN_DECLARE_STEP(a1_append);
ATTN_DECLARE_STEP(c1_copy);
ATTN_DECLARE_STEP(arrived);

namespace attn {
namespace {

using namespace splits;
using Reason = std::optional<std::string>;

// What no step of this chapter takes.
Reason refuse_all(const Problem& p) {
  if (p.dtype == DType::fp32) return "the elements must be fp16 or bf16";
  if (p.head_dim != 64 && p.head_dim != 128 && p.head_dim != 256)
    return fmt::format("--head-dim {}: only 64, 128 and 256", p.head_dim);
  if (p.seqlen_k >= 1 << 30) return fmt::format("--seqlen-k {}: at most 2^30 - 1", p.seqlen_k);
  if (num_pages_of(p) * page_size_of(p) >= int64_t{1} << 31)
    return fmt::format("--num-pages {}: of {} tokens each, a pool holds at most 2^31 - 1 tokens",
                       num_pages_of(p), page_size_of(p));
  return std::nullopt;
}
Reason refuse(const Problem& p) {
  if (Reason reason = refuse_all(p)) return reason;
  if (p.seqlen_q > 16) return fmt::format("--seqlen-q {}: at most 16 queries", p.seqlen_q);
  if (row_blocks(p, 1) >= int64_t{1} << 31)
    return fmt::format("{} blocks: at most 2^31 - 1 fit in a grid", row_blocks(p, 1));
  return std::nullopt;
}
// Tiles of all row blocks are counted in 32 bits, in plans with one more for each.
Reason refuse_runs(const Problem& p) {
  if (Reason reason = refuse(p)) return reason;
  const double tiles = double(row_blocks(p, kMmaRows)) * double(p.seqlen_k / 64 + 2);
  if (tiles >= 0x1p30) return fmt::format("{:.0f} tiles of keys: at most 2^30 - 1", tiles);
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
// time may find them in L1, or share an answer of L2. So do the entries of the page table. Steps on
// CUDA cores have two multiply-adds for each number and row, those on tensor cores for each number
// and 16 rows, there or not.
Phase attention(const Problem& p, int64_t block_rows) {
  const double element = double(size_of(p.dtype)), d = double(p.head_dim);
  const double kv = 2 * keys_of(p) * double(p.kv_heads) * d * element;
  const double table = 4 * keys_of(p, page_size_of(p)) / double(page_size_of(p));
  const double q = double(rows_of(p)) * d * element;
  const bool mma = block_rows % kMmaRows == 0;
  const double pairs = p.total_pairs();
  const double mma_pairs =
      keys_of(p, 16) * double(row_blocks(p, block_rows) / p.batch * block_rows);
  return {.name = "attention",
          .tensor_flop = mma ? 4 * d * mma_pairs : 0,
          .fp32_flop = mma ? 0 : 4 * d * pairs,
          .exp = mma ? mma_pairs : pairs,
          .hbm_read = kv + table + q,
          .hbm_write = q + 4 * double(rows_of(p)),
          .l2_bytes = kv + table + 2 * q};
}

const char* const kSupport =
    "fp16, bf16; head dims 64, 128, 256; any page size; up to 16 queries, causal, windows, GQA";

// Two parts a resident block, whatever the lengths, and counters that the merge needs.
Step runs(std::string name, std::string idea, Launch launch) {
  return {.name = std::move(name),
          .operation = &paged_decode(),
          .idea = std::move(idea),
          .support = kSupport,
          .refuses = refuse_runs,
          .workspaces =
              [](const Problem& p) {
                const int64_t rows = int64_t{kMostRuns} * 2 * kMmaRows;
                return std::vector<Workspace>{{"o_partial", rows * p.head_dim * 4},
                                              {"lse_partial", rows * 4},
                                              {"arrived", row_blocks(p, kMmaRows) * 4, true}};
              },
          .cost =
              [](const Problem& p) {
                const int64_t heads = row_blocks(p, kMmaRows);
                Phase all = attention(p, kMmaRows);
                // Where a run ends a head is cut, if runs do not end where heads do.
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

// What blocks work on is planned; parts of row blocks that several share, and counters.
using MakePlan = plans::Plan (*)(const Problem&, const std::vector<int64_t>&, int64_t);
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
    Phase all = attention(p, kMmaRows);
    const double rows = double(std::min(kMmaRows, p.group() * p.seqlen_q));
    all.l2_bytes += 2 * plan.parts * rows * double(p.head_dim + 1) * 4;
    return Cost{all};
  };
  step.plan = tensors;
  return step;
}

constexpr int64_t kMostPlanned = 1 << 14;  // sequences whose beginnings fit into shared memory
// The plan is the first phase of the launch, and lies in a workspace.
Step device_planned(std::string name, std::string idea, Launch launch) {
  Step step = planned(std::move(name), std::move(idea), launch, plans::line_plan, nullptr);
  step.refuses = [](const Problem& p) -> Reason {
    if (p.batch > kMostPlanned)
      return fmt::format("--batch {}: this step plans for at most {} sequences", p.batch,
                         kMostPlanned);
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

// New tokens, in chunks of 16 bytes, are counted in 32 bits.
Reason refuse_append(const Problem& p) {
  if (Reason reason = refuse_all(p)) return reason;
  const double chunks = double(p.batch * p.seqlen_q * p.kv_heads) * double(p.head_dim / 16);
  if (chunks >= 0x1p31) return fmt::format("{:.0f} chunks of new tokens: at most 2^31 - 1", chunks);
  return std::nullopt;
}

// What is written is read once before.
Step copies(std::string name, std::string idea, const Operation& operation, const char* phase,
            Launch launch, Reason (*refuses)(const Problem&)) {
  return {
      .name = std::move(name),
      .operation = &operation,
      .idea = std::move(idea),
      .support = "fp16, bf16; head dims 64, 128, 256; any page size",
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

Chapter make_chapter() {
  Chapter c{"07_paged", "K and V in pages: batches of any shape, shared prefixes", {}};
  c.commands.push_back(
      {"--trace", "[FILE] [--svg FILE] [--save FILE]: requests replayed with pages and without",
       paged::trace_command});
  c.commands.push_back(
      {"--plans", "[--svg FILE]: what plans make of batches of many kinds", plans::plans_command});
  c.steps.push_back({
      .name = "v1_block_table",
      .operation = &paged_decode(),
      .idea = "a block for each query head, whose keys lie in pages",
      .support = kSupport,
      .refuses = refuse,
      .workspaces = [](const Problem&) { return std::vector<Workspace>(); },
      .cost = [](const Problem& p) { return Cost{attention(p, 1)}; },
      .launch = ATTN_LAUNCH(v1_block_table),
      .needs = kAmpere,
      .takes = {"seqused"},
  });
  c.steps.push_back(runs("v2_page_table", "chapter 05's loop, with a look-up for each key",
                         ATTN_LAUNCH(v2_page_table)));
  c.steps.push_back(runs("v3_prefetched_pages", "a key is looked up once, a tile ahead",
                         ATTN_LAUNCH(v3_prefetched_pages)));
  c.steps.push_back(
      planned("v4_ragged_plan", "who works on which keys is planned before the launch",
              ATTN_LAUNCH(v4_ragged_plan), plans::uniform_plan, plans::uniform_tensors));
  c.steps.push_back(planned(
      "v5_balanced_plan", "a block gets as much work as the others, in as many pieces as it takes",
      ATTN_LAUNCH(v5_balanced_plan), plans::balanced_plan, plans::balanced_tensors));
  c.steps.push_back(device_planned("v6_device_plan", "a kernel makes the plan, in closed form",
                                   ATTN_LAUNCH(v6_device_plan)));
  c.steps.push_back(copies("a1_append", "new tokens go to their pages, keys turned on the way",
                           paged_append(), "append", ATTN_LAUNCH(a1_append), refuse_append));
  c.steps.push_back(copies("c1_copy", "pages copied to others, all of a batch in one launch",
                           page_copy(), "copy", ATTN_LAUNCH(c1_copy), refuse_all));
  return c;
}

}  // namespace

const Chapter& chapter() {
  static const Chapter c = make_chapter();
  return c;
}

}  // namespace attn
