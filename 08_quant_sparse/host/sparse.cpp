// The block-sparse steps: their cost models and what they refuse.
#include "host/sparse_steps.h"

#include <fmt/format.h>

#include "attn/tiling.h"
#include "check/field.h"
#include "check/operation.h"
#include "host/predict.h"
#include "host/quantised.h"
#include "host/token_order.h"

ATTN_DECLARE_STEP(s1_block_mask);
ATTN_DECLARE_STEP(s2_flashmask);
ATTN_DECLARE_STEP(s3_sliding_tile);
ATTN_DECLARE_STEP(s4_predict);
ATTN_DECLARE_STEP(s5_skip_pv);
ATTN_DECLARE_STEP(s6_hilbert);
ATTN_DECLARE_STEP(s7_int8);
ATTN_DECLARE_STEP(s8_lpt_order);
ATTN_DECLARE_STEP(s9_tuned);
ATTN_DECLARE_STEP(tile_counter);

namespace attn {
namespace {

int64_t tiles_of(int64_t rows, int64_t tile) { return (rows + tile - 1) / tile; }
// `kept`: the share of the tiles that causal, window and mask leave.
Cost sparse_cost(const Problem& p, double kept = 1) {
  const double d = double(p.head_dim), heads = double(p.batch * p.heads);
  const double tiles = kept * visited_tiles(p), q_rows = heads * double(p.seqlen_q);
  const double tile_keys = double(sparse_block_n(p.head_dim));
  Phase phase{.name = "attention"};
  phase.exp = tiles * kSparseBlockM * tile_keys;
  phase.tensor_flop = 4 * d * phase.exp;
  phase.hbm_read = 2 * d * (q_rows + 2 * double(p.batch * p.kv_heads * p.seqlen_k));
  phase.hbm_write = q_rows * (2 * d + 4);
  phase.l2_bytes = q_rows * (4 * d + 4) + tiles * 2 * tile_keys * d * 2;
  return {phase};
}

using Reason = std::optional<std::string>;

Reason refuse_all(const Problem& p) {
  const int64_t block_n = sparse_block_n(p.head_dim);
  const int64_t tiles = tiles_of_queries(p), most = (int64_t{1} << 31) - 1;
  if (p.batch * p.heads > most / tiles)
    return fmt::format("{} heads of {} tiles of queries: at most 2^31 - 1 blocks fit in a grid",
                       p.batch * p.heads, tiles);
  if (lists_of(p) > most / tiles / tiles_of(p.seqlen_k, block_n))
    return fmt::format("lists of {} x {} blocks for {} heads: at most 2^31 - 1 entries", tiles,
                       tiles_of(p.seqlen_k, block_n), lists_of(p));
  return std::nullopt;
}
Reason refuse_blocks(const Problem& p) {
  const int64_t block_n = sparse_block_n(p.head_dim);
  const BlockMask* const mask = blocks_of(p);
  if (p.mask && mask == nullptr) return "this step takes no masks other than block masks";
  if (mask != nullptr && (mask->block_m() % kSparseBlockM != 0 || mask->block_n() % block_n != 0))
    return fmt::format("blocks of {} x {}: must be multiples of {} queries and {} keys",
                       mask->block_m(), mask->block_n(), kSparseBlockM, block_n);
  return refuse_all(p);
}
Reason refuse_columns(const Problem& p) {
  if (columns_of(p) == nullptr) return "this step needs a mask of column intervals";
  return refuse_all(p);
}

Reason refuse_windows(const Problem& p) {
  if (tiles_of_canvas(p) == nullptr)
    return "this step needs sliding tile windows (--mask sta:)";
  if (p.masked()) return "this step has no causal mask and no window but sliding tile windows";
  return refuse_blocks(p);
}

Step sparse_step(std::string name, std::string idea, Reason (*refuses)(const Problem&),
                 Launch launch) {
  return {
      .name = std::move(name),
      .operation = &forward(),
      .idea = std::move(idea),
      .support = "any lengths, masks, GQA; masks of ",
      .limits = {.dtypes = k16Bits, .head_dims = {64, 128, 256}, .least_scale = kLeastScale},
      .refuses = refuses,
      .workspaces =
          [](const Problem&) {
            return std::vector<Workspace>{{"tile_counter", 4, true}};
          },
      .cost = [](const Problem& p) { return sparse_cost(p); },
      .launch = launch,
      .prepare = ATTN_LAUNCH(tile_counter),
      .needs = kHopper,
      .takes = {"mask"},
  };
}

// The lists are made on the device, by kernels of their own.
Step with_columns(std::string name, std::string idea, Launch launch) {
  Step step = sparse_step(std::move(name), std::move(idea), refuse_columns, launch);
  step.support += "columns";
  step.workspaces = [](const Problem& p) {
    const int64_t blocks = tiles_of(p.seqlen_k, sparse_block_n(p.head_dim));
    const int64_t tiles = lists_of(p) * tiles_of_queries(p);
    return std::vector<Workspace>{{"tile_counter", 4, true},
                                  {"bounds", lists_of(p) * blocks * intervals_of(p) * 16},
                                  {"visits", tiles * 12},
                                  {"visited", tiles * blocks * 4}};
  };
  step.cost = [](const Problem& p) {
    const double blocks = double(tiles_of(p.seqlen_k, sparse_block_n(p.head_dim)));
    const double intervals = double(lists_of(p) * intervals_of(p));
    const double tiles = double(lists_of(p) * tiles_of_queries(p));
    Cost cost{{.name = "bounds",
               .hbm_read = 8 * intervals * double(p.seqlen_k),
               .hbm_write = 16 * intervals * blocks},
              {.name = "lists",
               .hbm_read = 16 * intervals * blocks,
               .hbm_write = 12 * tiles,
               .l2_bytes = 32 * tiles * blocks * double(intervals_of(p))}};
    cost.push_back(sparse_cost(p).front());
    return cost;
  };
  return step;
}

Reason refuse_predicted(const Problem& p) {
  const int64_t n_blocks = tiles_of(p.seqlen_k, sparse_block_n(p.head_dim));
  if (n_blocks > 65535)
    return fmt::format("--seqlen-k {}: at most 65535 blocks of {} keys, whose weights are added up",
                       p.seqlen_k, sparse_block_n(p.head_dim));
  if (const Reason reason = refuse_all(p)) return reason;
  const int64_t heads = p.batch * p.heads, most = (int64_t{1} << 31) - 1;
  if (heads * (tiles_of_queries(p) + n_blocks) > most ||
      heads * tiles_of_queries(p) > most / n_blocks)
    return fmt::format("lists of {} x {} blocks for {} heads: at most 2^31 - 1 entries",
                       tiles_of_queries(p), n_blocks, heads);
  return std::nullopt;
}

// For a field the cost model takes the share of blocks that --keep gives, plus the blocks of text,
// which are always visited. For other inputs block means are not representative, and no model
// predicts --keep-mass: then it counts all blocks.
double kept_share(const Problem& p) {
  const PredictRule rule = rule_of(p);
  return rule.by_mass || !has_field(p) ? 1 : double(rule.amount);
}

// The lists that a launch chose, in the form of `--mask block:`: block_mask [B, Hq, query tiles,
// key blocks].
HostTensors chosen_by_launch(const Problem& p, const ReadWorkspace& read) {
  const std::vector<int32_t> visits = read("visits"), visited = read("visited");
  const int64_t tiles = tiles_of_queries(p),
                n_blocks = tiles_of(p.seqlen_k, sparse_block_n(p.head_dim));
  HostTensor mask = zeros({"block_mask", {p.batch, p.heads, tiles, n_blocks}, DType::int8});
  for (int64_t tile = 0; tile < p.batch * p.heads * tiles; ++tile) {
    const int32_t* const list = visits.data() + 3 * tile;  // struct BlockList: first, masked, end
    for (int32_t at = list[0]; at < list[2]; ++at)
      mask.data[static_cast<std::size_t>(tile * n_blocks + visited[static_cast<std::size_t>(at)])] =
          1;
  }
  HostTensors choices;
  choices.emplace(mask.spec.name, std::move(mask));
  return choices;
}

// Predicted lists.
Step predict_step(std::string name, std::string idea, Launch launch) {
  Step step = sparse_step(std::move(name), std::move(idea), refuse_predicted, launch);
  step.operation = &predict();
  step.support = "any lengths, causal, windows, GQA";
  step.limits.least_scale = kLeastQuantisedScale;
  step.takes = {"keep", "keep_mass", "similarity", "keep_sink", "keep_diagonal"};
  step.workspaces = [](const Problem& p) {
    const int64_t n_blocks = tiles_of(p.seqlen_k, sparse_block_n(p.head_dim));
    const int64_t tiles = p.batch * p.heads * tiles_of_queries(p);
    const int64_t k_blocks = p.batch * p.kv_heads * n_blocks;
    std::vector<Workspace> all{
        {"tile_counter", 4, true},        {"q_mean", tiles * p.head_dim * 4},
        {"q_similar", tiles * 4},         {"k_mean", k_blocks * p.head_dim * 4},
        {"k_similar", k_blocks * 4},      {"visits", tiles * 12},
        {"visited", tiles * n_blocks * 4}};
    if (n_blocks > kScoresInShared) all.push_back({"scores", tiles * n_blocks * 4});
    return all;
  };
  step.cost = [](const Problem& p) {
    const double rows = double(p.batch) * (double(p.heads) * double(p.seqlen_q) +
                                           double(p.kv_heads) * double(p.seqlen_k));
    const double pairs = visited_tiles(p), d = double(p.head_dim);
    Cost cost{{.name = "pool",
               .fp32_flop = 6 * rows * d,
               .hbm_read = 2 * rows * d,
               .hbm_write = 4 * rows * d / kSparseBlockM},
              // A score, and its comparisons: 33 at most.
              {.name = "choose",
               .fp32_flop = pairs * (2 * d + 66),
               .l2_bytes = pairs * 4 * d / kTilesTogether}};
    cost.push_back(sparse_cost(p, kept_share(p)).front());
    return cost;
  };
  step.choices = chosen_by_launch;
  // The step multiplies the original inputs. Returned so that the distance from attention over all
  // keys is printed.
  step.logical = [](const Problem&, const HostTensors& inputs) { return inputs; };
  return step;
}

HostTensors order_tensor(const Problem& p) {
  HostTensor order{{"token_order", {1, 1, 1, p.seqlen_k}, DType::int32, {}, nullptr, false, 1},
                   {},
                   token_order(p, order_of(p))};
  HostTensors tensors;
  tensors.emplace("token_order", std::move(order));
  return tensors;
}

// Predicted lists, of tokens in an order that the host makes: copies of Q, K and V.
Step ordered_step(std::string name, std::string idea, Launch launch) {
  Step step = predict_step(std::move(name), std::move(idea), launch);
  step.support = "the canvas of --inputs field:, and text; GQA; no causal mask, no window";
  step.takes.push_back("order");
  step.refuses = [](const Problem& p) -> Reason {
    if (!has_field(p))
      return "this step reorders the tokens of a canvas, and needs --inputs field:TxHxW";
    if (p.masked())
      return "this step has no causal mask and no window: they refer to the original token order";
    if (p.seqlen_q != p.seqlen_k)
      return fmt::format("{} queries and {} keys: this step has one order for both", p.seqlen_q,
                         p.seqlen_k);
    return refuse_predicted(p);
  };
  step.plan = [](const Problem& p, const HostTensors&) { return order_tensor(p); };
  step.choices = [](const Problem& p, const ReadWorkspace& read) {
    HostTensors choices = chosen_by_launch(p, read);  // blocks of tokens in that order
    choices.merge(order_tensor(p));
    return choices;
  };
  step.workspaces = [of_lists = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = of_lists(p);
    for (const char* copy : {"q_ordered", "k_ordered", "v_ordered"})
      all.push_back(
          {copy, p.batch * (copy[0] == 'q' ? p.heads : p.kv_heads) * p.seqlen_k * p.head_dim * 2});
    return all;
  };
  step.cost = [of_lists = step.cost](const Problem& p) {
    Cost cost = of_lists(p);
    const double bytes =
        2 * double(p.batch * (p.heads + 2 * p.kv_heads)) * double(p.seqlen_k * p.head_dim);
    cost.insert(cost.begin(), {.name = "order", .hbm_read = bytes, .hbm_write = bytes});
    return cost;
  };
  // What the step chooses from and multiplies; and the original rows of O (predict().reference).
  step.logical = [](const Problem& p, const HostTensors& inputs) {
    HostTensors ordered = in_order(p, inputs, order_of(p));
    ordered.merge(order_tensor(p));
    return ordered;
  };
  return step;
}

// Predicted lists, and the passes, operands and scales of an INT8 / FP8 step.
Step predict_8_bits_step(std::string name, std::string idea, Launch launch) {
  const Step eight = fp8_pv_step(name, idea, launch);
  Step step = predict_step(std::move(name), std::move(idea), launch);
  step.limits = eight.limits;
  step.takes.push_back("e4m3");
  step.refuses = [of_eight = eight.refuses](const Problem& p) -> Reason {
    const Reason reason = refuse_predicted(p);
    return reason ? reason : of_eight(p);
  };
  step.workspaces = [of_eight = eight.workspaces, of_lists = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = of_eight(p);
    for (Workspace& w : of_lists(p)) {
      if (w.name == "tile_counter") continue;
      if (w.name == "k_mean") w.name = "k_means";  // block means; k_mean is that of all keys
      all.push_back(std::move(w));
    }
    return all;
  };
  step.cost = [of_eight = eight.cost, of_lists = step.cost](const Problem& p) {
    Cost cost = of_eight(p);
    const Cost lists = of_lists(p);
    Phase& attention = cost.back();
    const double q_bytes =
        double(p.batch * p.heads * p.seqlen_q) * (3 * double(p.head_dim) + 4);  // Q, O and lse
    for (double* x : {&attention.exp, &attention.tensor_flop}) *x *= kept_share(p);
    attention.l2_bytes = q_bytes + kept_share(p) * (attention.l2_bytes - q_bytes);
    cost.insert(cost.end() - 1, lists.begin(), lists.end() - 1);
    return cost;
  };
  // What it multiplies, and the originals from which it chooses.
  step.logical = [](const Problem& p, const HostTensors& inputs) {
    HostTensors stored = fp8_pv(p, inputs);
    stored.emplace("q_given", inputs.at("q")), stored.emplace("k_given", inputs.at("k"));
    return stored;
  };
  return step;
}

// And tiles in LPT order.
Step longest_first_step(std::string name, std::string idea, Launch launch) {
  Step step = predict_8_bits_step(std::move(name), std::move(idea), launch);
  step.workspaces = [before = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = before(p);
    all.push_back({"tile_order", p.batch * p.heads * tiles_of_queries(p) * 4});
    return all;
  };
  step.choices = [](const Problem& p, const ReadWorkspace& read) {
    HostTensors choices = chosen_by_launch(p, read);
    const std::vector<int32_t> order = read("tile_order");
    HostTensor tiles{
        {"tile_order", {1, 1, 1, std::ssize(order)}, DType::int32, {}, nullptr, false, 1},
        {},
        {order.begin(), order.end()}};
    choices.emplace(tiles.spec.name, std::move(tiles));
    return choices;
  };
  step.cost = [before = step.cost](const Problem& p) {
    const double tiles = double(p.batch * p.heads * tiles_of_queries(p));
    Cost cost = before(p);
    cost.insert(cost.end() - 1, {.name = "order", .hbm_write = 4 * tiles, .l2_bytes = 28 * tiles});
    return cost;
  };
  return step;
}

// The same with passes that read Q, K and V twice, and the workspace for O between chunks. In L2,
// every chunk of a tile but its first costs a write and a read of O.
Step read_twice_step(std::string name, std::string idea, Launch launch) {
  Step step = longest_first_step(std::move(name), std::move(idea), launch);
  step.workspaces = [before = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = before(p);
    std::erase_if(all, [](const Workspace& w) {
      return w.name == "k_parts" || w.name == "v_parts" || w.name == "v_descale";
    });
    const int64_t heads = p.batch * p.kv_heads, d = p.head_dim;
    all.push_back({"v_parts", heads * tiles_of(p.seqlen_k, sparse_block_n(d)) * 3 * d * 4});
    all.push_back({"v_channel", heads * d * 8});
    all.push_back(chunk_sums(p, kSparseBlockM));
    return all;
  };
  step.cost = [before = step.cost](const Problem& p) {
    const double d = double(p.head_dim), q = double(p.batch * p.heads * p.seqlen_q) * d;
    const double kv = double(p.batch * p.kv_heads * p.seqlen_k) * d;  // of K, and of V
    const double tiles = double(p.batch * p.heads * tiles_of_queries(p));
    const double blocks =
        double(p.batch * p.kv_heads * tiles_of(p.seqlen_k, sparse_block_n(p.head_dim)));
    const double parts = 16 * blocks * d;  // one mean of K, three values of V
    Cost all = before(p);
    Phase attention = all.back();
    // All chunks but the first.
    const double windows =
        std::max(1.0, std::ceil(kept_share(p) * double(p.seqlen_k) / kChunkKeys)) - 1;
    attention.l2_bytes += double(p.batch * p.heads * p.seqlen_q) * windows * (8 * d + 32);
    return Cost{{.name = "measure",
                 .fp32_flop = 6 * (q + kv) + 3 * kv,
                 .hbm_read = 2 * (q + 2 * kv),
                 .hbm_write = 4 * tiles * d + parts},
                {.name = "reduce", .hbm_read = parts},
                {.name = "codes", .hbm_read = 2 * (q + 2 * kv), .hbm_write = q + 2 * kv},
                all[all.size() - 3],  // choose
                all[all.size() - 2],  // order
                attention};
  };
  step.logical = [](const Problem& p, const HostTensors& inputs) {
    HostTensors stored = fp8_heads(p, inputs);
    stored.emplace("q_given", inputs.at("q")), stored.emplace("k_given", inputs.at("k"));
    return stored;
  };
  return step;
}

}  // namespace

std::vector<Step> predict_steps() {
  Step skips = predict_step("s5_skip_pv", "skip P V of a tile if all of P is small",
                            ATTN_LAUNCH(s5_skip_pv));
  skips.takes.push_back("skip_below");
  skips.refuses = [](const Problem& p) -> Reason {
    if (!p.own.contains("skip_below")) return "this step skips P V, and needs --skip-below";
    return refuse_predicted(p);
  };
  return {predict_step("s4_predict", "query tiles choose their key blocks by block means",
                       ATTN_LAUNCH(s4_predict)),
          std::move(skips),
          ordered_step("s6_hilbert", "tokens along a Hilbert curve before blocks are chosen",
                       ATTN_LAUNCH(s6_hilbert)),
          predict_8_bits_step("s7_int8", "predicted block lists on the INT8 / FP8 kernel",
                              ATTN_LAUNCH(s7_int8)),
          longest_first_step("s8_lpt_order", "tiles with the longest lists first (LPT order)",
                             ATTN_LAUNCH(s8_lpt_order)),
          read_twice_step("s9_tuned", "the loop of q8, passes that read Q, K and V twice",
                          ATTN_LAUNCH(s9_tuned))};
}

std::vector<Step> sparse_steps() {
  Step blocks = sparse_step("s1_block_mask", "fully masked blocks are skipped",
                            refuse_blocks, ATTN_LAUNCH(s1_block_mask));
  blocks.support += "blocks";
  blocks.plan = visit_lists;
  Step windows = sparse_step("s3_sliding_tile", "sliding tile windows over a canvas",
                             refuse_windows, ATTN_LAUNCH(s3_sliding_tile));
  windows.support += "tiles of a canvas";
  return {std::move(blocks),
          with_columns("s2_flashmask", "column intervals; the device makes the lists",
                       ATTN_LAUNCH(s2_flashmask)),
          std::move(windows)};
}

}  // namespace attn
