// The table of chapter 04: its steps, what each costs and what each refuses.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "backward_steps.h"
#include "check/operation.h"
#include "attn/tiling.h"

ATTN_DECLARE_STEP(v1_loop_swap);
ATTN_DECLARE_STEP(v2_split_q);
ATTN_DECLARE_STEP(v3_swizzle);
ATTN_DECLARE_STEP(v4_cp_async);
ATTN_DECLARE_STEP(v5_exp2);
ATTN_DECLARE_STEP(v6_causal_skip);
ATTN_DECLARE_STEP(v7_tuned);

namespace attn {
namespace {

using Reason = std::optional<std::string>;

// What passes between L2 and the SMs: Q once, a tile of K and one of V at each visit, O and lse once. Of HBM what cannot
// be avoided; cost_of adds what the order of tiles makes L2 fetch again. `skip`: blocks that nobody sees are left out.
Cost forward_cost(const Problem& p, const Tiling& t, bool skip) {
  const double heads = double(p.batch * p.heads), d = double(p.head_dim), element = double(size_of(p.dtype));
  const double q_rows = heads * double(p.seqlen_q), pairs = heads * visits(p, t, skip);
  Tiling computed = t;
  if (t.rows_together > 0) computed.block_m = t.rows_together;
  Phase phase{.name = "attention"};
  phase.exp = heads * visits(p, computed, skip) * double(computed.block_m * computed.block_n);
  phase.tensor_flop = 4 * d * phase.exp;
  phase.hbm_read = q_rows * d * element + 2 * double(p.batch * p.kv_heads * p.seqlen_k) * d * element;
  phase.hbm_write = q_rows * (d * element + 4);
  // The last tile of keys may be cut; the model takes it as whole.
  phase.l2_bytes = q_rows * (2 * d * element + 4) + pairs * 2 * double(t.block_n) * d * element;
  return {phase};
}

Reason refuse(const Problem& p, const Launch& launch) {
  if (p.dtype == DType::fp32) return "--dtype fp32: tensor cores take fp16 or bf16";
  const int64_t heads = p.batch * p.heads, block_m = tiling_of(launch, p)->block_m;
  const int64_t row_tiles = (p.seqlen_q + block_m - 1) / block_m;
  if (heads > ((int64_t{1} << 31) - 1) / row_tiles)
    return fmt::format("{} heads of {} tiles of queries: at most 2^31 - 1 blocks fit in a grid", heads, row_tiles);
  return std::nullopt;
}

Step first_step(std::string name, std::string idea, bool skip, Launch launch) {
  return {
      .name = std::move(name),
      .operation = &forward(),
      .idea = std::move(idea),
      .support = "fp16, bf16; head dims 32, 64, 128; any lengths, masks, GQA, dropout",
      .refuses = [launch](const Problem& p) -> Reason {
        if (p.head_dim != 32 && p.head_dim != 64 && p.head_dim != 128)
          return fmt::format("--head-dim {}: this step has 32, 64 and 128", p.head_dim);
        return refuse(p, launch);
      },
      .workspaces = [](const Problem&) { return std::vector<Workspace>{}; },
      .cost = [skip, launch](const Problem& p) { return forward_cost(p, *tiling_of(launch, p), skip); },
      .launch = launch,
      .needs = kAmpere,
      .tiled = true,
      .takes = {"dropout"},
  };
}

Step tuned_step(std::string name, std::string idea, Launch launch) {
  return {
      .name = std::move(name),
      .operation = &forward(),
      .idea = std::move(idea),
      .support = "fp16, bf16; head dims 32, 64, 96, 128, 192, 256; any lengths, packed sequences, masks, GQA, softcap, "
                 "ALiBi, dropout",
      .refuses = [launch](const Problem& p) -> Reason {
        constexpr int64_t kDims[] = {32, 64, 96, 128, 192, 256};
        if (std::find(std::begin(kDims), std::end(kDims), p.head_dim) == std::end(kDims))
          return fmt::format("--head-dim {}: this step has 32, 64, 96, 128, 192 and 256", p.head_dim);
        return refuse(p, launch);
      },
      .workspaces = [](const Problem&) { return std::vector<Workspace>{}; },
      .cost = [launch](const Problem& p) { return forward_cost(p, *tiling_of(launch, p), true); },
      .launch = launch,
      .needs = kAmpere,
      .tiled = true,
      .takes = {"dropout", "softcap", "alibi", "varlen"},
  };
}

// For steps that take the maximum of scores that are not scaled yet. A scale that is 0 as a float, or denormal and
// taken for 0, would make the product with a masked score, -inf, no number.
void refuse_negative_scale(Step& step) {
  step.support += "; scales from 1e-37";
  step.refuses = [refuses = step.refuses](const Problem& p) -> Reason {
    if (p.softmax_scale < 1e-37)
      return "--scale below 1e-37: this step takes the maximum of scores that are not scaled yet";
    return refuses(p);
  };
}

Chapter make_chapter() {
  Chapter c{"04_flash_v2", "FlashAttention-2: queries outside, O in registers, warps that share nothing", {}};
  c.steps.push_back(first_step("v1_loop_swap", "Q outside, K/V inside: O stays on the chip, one division at the end",
                               false, ATTN_LAUNCH(v1_loop_swap)));
  c.steps.push_back(first_step("v2_split_q", "every warp its own rows: nothing is exchanged, P stays in registers",
                               false, ATTN_LAUNCH(v2_split_q)));
  c.steps.push_back(first_step("v3_swizzle", "16-byte chunks change places: ldmatrix without bank conflicts", false,
                               ATTN_LAUNCH(v3_swizzle)));
  c.steps.push_back(first_step("v4_cp_async", "K and V each on their way during the other product", false,
                               ATTN_LAUNCH(v4_cp_async)));
  c.steps.push_back(first_step("v5_exp2", "scale folded into exp2; sums meet once, at the end", false,
                               ATTN_LAUNCH(v5_exp2)));
  refuse_negative_scale(c.steps.back());
  c.steps.push_back(first_step("v6_causal_skip", "loops for masked and for plain blocks of keys; long rows first", true,
                               ATTN_LAUNCH(v6_causal_skip)));
  refuse_negative_scale(c.steps.back());
  c.steps.push_back(tuned_step("v7_tuned", "tiles for each head dim; O rescaled seldom; addresses are constants",
                               ATTN_LAUNCH(v7_tuned)));
  backward_steps::add_steps(c);
  return c;
}

}  // namespace

const Chapter& chapter() {
  static const Chapter c = make_chapter();
  return c;
}

}  // namespace attn
