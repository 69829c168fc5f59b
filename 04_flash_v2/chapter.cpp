// The steps of chapter 04: cost models and limits.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "host/backward_host.h"
#include "check/operation.h"
#include "attn/tiling.h"

ATTN_DECLARE_STEP(v1_loop_swap);
ATTN_DECLARE_STEP(v2_split_q);
ATTN_DECLARE_STEP(v3_prefetch);
ATTN_DECLARE_STEP(v4_unmasked_blocks);
ATTN_DECLARE_STEP(v5_rows_per_warp);
ATTN_DECLARE_STEP(v6_register_double_buffer);
ATTN_DECLARE_STEP(v7_xor_addresses);
ATTN_DECLARE_STEP(v8_q_in_registers);
ATTN_DECLARE_STEP(v9_lazy_rescale);
ATTN_DECLARE_STEP(v10_l2_order);
ATTN_DECLARE_STEP(v11_wide_stores);
ATTN_DECLARE_STEP(v12_features);
ATTN_DECLARE_STEP(v13_tuned);

namespace attn {
namespace {

using Reason = std::optional<std::string>;

// L2 bytes: Q, O and lse once, and a tile of K and one of V per visit. HBM bytes: compulsory
// traffic only; cost_of adds what L2 misses in this order of tiles. Fully masked blocks are not
// counted. `warp_keys`: keys of the part that a warp skips if it is fully masked (0: the block's).
Cost forward_cost(const Problem& p, const Tiling& t, int64_t warp_keys = 0) {
  const double heads = double(p.batch * p.heads), d = double(p.head_dim);
  const double element = double(size_of(p.dtype));
  const double q_rows = heads * double(p.seqlen_q), pairs = heads * visits(p, t);
  Tiling computed = t;
  if (t.rows_together > 0) computed.block_m = t.rows_together;
  if (warp_keys > 0) computed.block_n = warp_keys;
  Phase phase{.name = "attention"};
  phase.exp = heads * visits(p, computed) * double(computed.block_m * computed.block_n);
  phase.tensor_flop = 4 * d * phase.exp;
  phase.hbm_read =
      q_rows * d * element + 2 * double(p.batch * p.kv_heads * p.seqlen_k) * d * element;
  phase.hbm_write = q_rows * (d * element + 4);
  // A partial last KV block counts as a full one.
  phase.l2_bytes = q_rows * (2 * d * element + 4) + pairs * 2 * double(t.block_n) * d * element;
  return {phase};
}

Reason refuse(const Problem& p, const Launch& launch) {
  const int64_t heads = p.batch * p.heads, block_m = tiling_of(launch, p)->block_m;
  const int64_t row_tiles = (p.seqlen_q + block_m - 1) / block_m;
  if (heads > ((int64_t{1} << 31) - 1) / row_tiles)
    return fmt::format("{} heads of {} tiles of queries: at most 2^31 - 1 blocks fit in a grid",
                       heads, row_tiles);
  return std::nullopt;
}

Step first_step(std::string name, std::string idea, Launch launch, int64_t warp_keys = 0) {
  return {
      .name = std::move(name),
      .operation = &forward(),
      .idea = std::move(idea),
      .support = "any lengths, masks, GQA",
      .limits = {.dtypes = k16Bits, .head_dims = {32, 64, 128}, .least_scale = kLeastScale},
      .refuses = [launch](const Problem& p) { return refuse(p, launch); },
      .workspaces = [](const Problem&) { return std::vector<Workspace>{}; },
      .cost = [launch, warp_keys](
                  const Problem& p) { return forward_cost(p, *tiling_of(launch, p), warp_keys); },
      .launch = launch,
      .needs = kAmpere,
      .tiled = true,
  };
}

Step featured_step(std::string name, std::string idea, std::vector<int64_t> head_dims,
                   Launch launch) {
  return {
      .name = std::move(name),
      .operation = &forward(),
      .idea = std::move(idea),
      .support = "any lengths, packed sequences, masks, GQA, softcap, ALiBi, dropout",
      .limits = {.dtypes = k16Bits, .head_dims = std::move(head_dims)},
      .refuses = [launch](const Problem& p) { return refuse(p, launch); },
      .workspaces = [](const Problem&) { return std::vector<Workspace>{}; },
      .cost = [launch](const Problem& p) { return forward_cost(p, *tiling_of(launch, p)); },
      .launch = launch,
      .needs = kAmpere,
      .tiled = true,
      .takes = {"dropout", "softcap", "alibi", "varlen"},
  };
}

Chapter make_chapter() {
  Chapter c{"04_flash_v2",
            "FlashAttention-2: Q in the outer loop, O in registers, split Q across warps",
            {}};
  c.steps.push_back(first_step("v1_loop_swap",
                               "Q in the outer loop, K and V in the inner one: O stays on the chip",
                               ATTN_LAUNCH(v1_loop_swap), 32));
  c.steps.push_back(first_step("v2_split_q",
                               "split Q across warps: no exchange, P stays in registers",
                               ATTN_LAUNCH(v2_split_q)));
  c.steps.push_back(first_step("v3_prefetch", "V loads during Q K^T, the next K during softmax",
                               ATTN_LAUNCH(v3_prefetch)));
  c.steps.push_back(first_step("v4_unmasked_blocks",
                               "separate loop bodies for masked and unmasked KV blocks",
                               ATTN_LAUNCH(v4_unmasked_blocks)));
  c.steps.push_back(first_step("v5_rows_per_warp",
                               "32 rows per warp: each fragment of K or V feeds two MMAs",
                               ATTN_LAUNCH(v5_rows_per_warp)));
  c.steps.push_back(first_step("v6_register_double_buffer",
                               "fragments loaded and P computed one step ahead of the MMAs",
                               ATTN_LAUNCH(v6_register_double_buffer)));
  c.steps.push_back(first_step("v7_xor_addresses",
                               "shared-memory addresses: a base offset XOR constants",
                               ATTN_LAUNCH(v7_xor_addresses)));
  c.steps.push_back(first_step("v8_q_in_registers", "fragments of Q loaded once, up to d=64",
                               ATTN_LAUNCH(v8_q_in_registers)));
  c.steps.push_back(first_step("v9_lazy_rescale",
                               "rescale O only if a max grew by more than 8 in log2 units",
                               ATTN_LAUNCH(v9_lazy_rescale)));
  c.steps.push_back(first_step("v10_l2_order", "sections of heads whose K and V stay in L2",
                               ATTN_LAUNCH(v10_l2_order)));
  c.steps.push_back(first_step("v11_wide_stores", "epilogue through shared memory, 16-byte stores",
                               ATTN_LAUNCH(v11_wide_stores)));
  c.steps.push_back(featured_step("v12_features", "softcap, ALiBi, dropout, packed sequences",
                                  {32, 64, 128}, ATTN_LAUNCH(v12_features)));
  c.steps.push_back(featured_step("v13_tuned",
                                  "tiles, stages and registers per head dim, from a sweep",
                                  {32, 64, 96, 128, 192, 256}, ATTN_LAUNCH(v13_tuned)));
  backward_host::add_steps(c);
  return c;
}

}  // namespace

const Chapter& chapter() {
  static const Chapter c = make_chapter();
  return c;
}

}  // namespace attn
