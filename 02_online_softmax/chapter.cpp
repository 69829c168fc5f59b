// The step table of chapter 02: what each step costs, and which problems it refuses.
#include <fmt/format.h>

#include <string>

#include "host/operations.h"

ATTN_DECLARE_STEP(v1_three_pass);
ATTN_DECLARE_STEP(v2_online);
ATTN_DECLARE_STEP(v3_warp);
ATTN_DECLARE_STEP(v4_one_read);
ATTN_DECLARE_STEP(v5_split_row);
ATTN_DECLARE_STEP(v6_softmax_topk);
ATTN_DECLARE_STEP(v7_attention_row);

namespace attn {
namespace {

using Reason = std::optional<std::string>;

int64_t rows_of(const Problem& p) { return p.batch * p.heads * p.seqlen_q; }
int64_t vector_size(const Problem& p) { return 16 / size_of(p.dtype); }

// A row is read `reads` times and written once; `exp` exponentials per element.
Cost softmax_cost(const Problem& p, double reads, double exp) {
  const double elements = double(rows_of(p)) * double(p.seqlen_k);
  const double bytes = elements * double(size_of(p.dtype));
  return {
      {.name = "softmax", .exp = exp * elements, .hbm_read = reads * bytes, .hbm_write = bytes}};
}

// All blocks are in gridDim.x, which is at most 2^31 - 1.
Reason refuse_blocks(int64_t blocks) {
  if (blocks < int64_t{1} << 31) return std::nullopt;
  return fmt::format("{} blocks: at most 2^31 - 1 fit in a grid", blocks);
}
Reason refuse_rows(const Problem& p) { return refuse_blocks(rows_of(p)); }

// v4: one block holds at most 128 KiB of a row in registers and 224 KiB in shared memory.
Reason refuse_long_rows(const Problem& p) {
  const int64_t most = 352 * 1024 / size_of(p.dtype);
  if (p.seqlen_k / vector_size(p) > most / vector_size(p))
    return fmt::format(
        "{} columns: a row of more than 352 KiB ({} columns) does not fit on one SM; "
        "v5_split_row takes any",
        p.seqlen_k, most);
  return refuse_rows(p);
}

int64_t chunks_of(const Problem& p) {
  const int64_t chunk = 4096 * vector_size(p);  // v5's Config::kChunk, in elements
  return (p.seqlen_k + chunk - 1) / chunk;
}

std::vector<Workspace> no_workspace(const Problem&) { return {}; }

const char* const kAnyRows = "fp32, fp16, bf16; any number of rows and columns";

Chapter make_chapter() {
  Chapter c{"02_online_softmax", "softmax in fewer passes over memory", {}};
  c.steps.push_back({
      .name = "v1_three_pass",
      .operation = &softmax(),
      .idea = "safe softmax: max, sum and normalisation in three passes",
      .support = kAnyRows,
      .refuses = refuse_rows,
      .workspaces = no_workspace,
      .cost = [](const Problem& p) { return softmax_cost(p, 3, 2); },
      .launch = ATTN_LAUNCH(v1_three_pass),
  });
  c.steps.push_back({
      .name = "v2_online",
      .operation = &softmax(),
      .idea = "online softmax: max and sum in one pass",
      .support = kAnyRows,
      .refuses = refuse_rows,
      .workspaces = no_workspace,
      .cost = [](const Problem& p) { return softmax_cost(p, 2, 2); },
      .launch = ATTN_LAUNCH(v2_online),
  });
  c.steps.push_back({
      .name = "v3_warp",
      .operation = &softmax(),
      .idea = "warp-shuffle merge; 16-byte loads with one rescale each",
      .support = kAnyRows,
      .refuses = refuse_rows,
      .workspaces = no_workspace,
      .cost = [](const Problem& p) { return softmax_cost(p, 2, 2 + 1 / double(vector_size(p))); },
      .launch = ATTN_LAUNCH(v3_warp),
  });
  c.steps.push_back({
      .name = "v4_one_read",
      .operation = &softmax(),
      .idea = "the row stays in registers and shared memory: one read",
      .support = "fp32, fp16, bf16; any number of rows, of up to 352 KiB",
      .refuses = refuse_long_rows,
      .workspaces = no_workspace,
      .cost = [](const Problem& p) { return softmax_cost(p, 1, 2 + 1 / double(vector_size(p))); },
      .launch = ATTN_LAUNCH(v4_one_read),
  });
  c.steps.push_back({
      .name = "v5_split_row",
      .operation = &softmax(),
      .idea = "several blocks per row, states merged: for few, very long rows",
      .support = kAnyRows,
      .refuses = [](const Problem& p) { return refuse_blocks(rows_of(p) * chunks_of(p)); },
      .workspaces = [](const Problem& p) {
        return std::vector<Workspace>{{"partial", rows_of(p) * chunks_of(p) * 8}};
      },
      .cost = [](const Problem& p) {
        const double elements = double(rows_of(p)) * double(p.seqlen_k);
        const double bytes = elements * double(size_of(p.dtype));
        return Cost{{.name = "partial",
                     .exp = elements * (1 + 1 / double(vector_size(p))),
                     .hbm_read = bytes},
                    {.name = "quotients", .exp = elements, .hbm_read = bytes, .hbm_write = bytes}};
      },
      .launch = ATTN_LAUNCH(v5_split_row),
  });
  c.steps.push_back({
      .name = "v6_softmax_topk",
      .operation = &softmax_topk(),
      .idea = "fused top-k: one read, k probabilities written",
      .support = "fp32, fp16, bf16; any number of rows and columns; --top-k up to 32",
      .refuses = [](const Problem& p) -> Reason {
        if (p.top_k > 32)
          return fmt::format("--top-k {}: at most 32, one per lane of a warp", p.top_k);
        return refuse_rows(p);
      },
      .workspaces = no_workspace,
      .cost = [](const Problem& p) {
        const double elements = double(rows_of(p)) * double(p.seqlen_k);
        return Cost{{.name = "softmax",
                     .exp = elements * (1 + 1 / double(vector_size(p))),
                     .hbm_read = elements * double(size_of(p.dtype)),
                     .hbm_write = double(rows_of(p) * p.top_k * (size_of(p.dtype) + 4))}};
      },
      .launch = ATTN_LAUNCH(v6_softmax_topk),
  });
  c.steps.push_back({
      .name = "v7_attention_row",
      .operation = &forward(),
      .idea = "online softmax with a row of O: attention in one pass over K and V",
      .support = "fp32, fp16, bf16; head dims up to 256; any lengths, masks, GQA",
      .refuses = [](const Problem& p) -> Reason {
        if (p.head_dim > 256)
          return fmt::format("--head-dim {}: at most 256, 8 columns per lane", p.head_dim);
        return refuse_rows(p);
      },
      .workspaces = no_workspace,
      .cost = [](const Problem& p) {
        const double pairs = double(p.batch * p.heads) * p.visible_pairs();
        const double element = double(size_of(p.dtype));
        const double q = double(rows_of(p) * p.head_dim) * element;
        const double kv = double(p.batch * p.kv_heads * p.seqlen_k) * double(p.head_dim) * element;
        // Each query reads K and V from L2. HBM delivers them once if L2 holds them.
        // Two exponentials per pair, `rescale` and `weight`: the compiler merges the two of `merge`
        // with them.
        return Cost{{.name = "attention",
                     .fp32_flop = 4 * double(p.head_dim) * pairs,
                     .exp = 2 * pairs,
                     .hbm_read = q + 2 * kv,
                     .hbm_write = q + double(rows_of(p)) * 4,
                     .l2_bytes = 2 * q + 2 * double(p.head_dim) * pairs * element}};
      },
      .launch = ATTN_LAUNCH(v7_attention_row),
  });
  return c;
}

}  // namespace

const Chapter& chapter() {
  static const Chapter c = make_chapter();
  return c;
}

}  // namespace attn
