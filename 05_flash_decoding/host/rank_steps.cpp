#include "host/rank_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "check/operation.h"
#include "host/measure.h"
#include "host/rank_model.h"
#include "ranks/sharded.h"

ATTN_DECLARE_STEP(p1_all_gather);
ATTN_DECLARE_STEP(p2_ring);
ATTN_DECLARE_STEP(p3_zigzag);
ATTN_DECLARE_STEP(p4_ulysses);
ATTN_DECLARE_STEP(p5_ring_backward);
ATTN_DECLARE_LAUNCH(p5_ring_backward, one_gpu);
ATTN_DECLARE_STEP(p6_tree_decode);
ATTN_DECLARE_STEP(p7_peer_decode);
ATTN_DECLARE_STEP(p8_paged_shards);

namespace attn::rank_steps {
namespace {

using namespace ranks;
using Reason = std::optional<std::string>;

// Query and key pairs that a rank computes, of one head.
double pairs_of(const Sharding& s, int rank) {
  double pairs = 0;
  for (const auto& keys : s.k)
    for (const ShardBlock& b : blocks_of(s.whole, s.q[static_cast<std::size_t>(rank)], keys))
      pairs += problem_of(s.whole, b).sequence(0).visible_pairs();
  return pairs;
}

// What the rank with the most work does. Messages are not in it: host/rank_model.h has them.
Cost forward_cost(const Problem& p, TokenOrder order) {
  const Sharding s(p, order, std::max<int>(1, static_cast<int>(devices_of(p).size())));
  double pairs = 0;
  for (int r = 0; r < s.world(); ++r) pairs = std::max(pairs, pairs_of(s, r));
  const double d = double(p.head_dim), heads = double(p.batch * p.heads);
  Phase phase{.name = "attention"};
  phase.exp = heads * pairs;
  phase.tensor_flop = 4 * d * phase.exp;
  phase.hbm_read = double(s.q_bytes(0));
  for (int r = 0; r < s.world(); ++r) phase.hbm_read += double(s.kv_bytes(r));
  phase.hbm_write = double(s.q_bytes(0)) + heads * double(s.rows_q(0)) * 4;
  phase.l2_bytes = phase.hbm_read + phase.hbm_write;
  return {phase};
}

Step forward_step(std::string name, std::string idea, TokenOrder order, Launch launch) {
  return {.name = std::move(name),
          .operation = &forward(),
          .idea = std::move(idea),
          .support = "--devices 0,1,...; any lengths, causal, windows, GQA",
          .limits = {.dtypes = k16Bits, .head_dims = {64, 128, 256}, .least_scale = kLeastScale},
          .refuses = refuse_ranks,
          .workspaces = [](const Problem&) { return std::vector<Workspace>{}; },
          .cost = [order](const Problem& p) { return forward_cost(p, order); },
          .launch = launch,
          .needs = kHopper,
          .takes = {"devices", "timeout", "transport", "rank", "world", "nccl_id"}};
}

// Of one rank's keys. Partial results are small next to them.
Cost decode_cost(const Problem& p) {
  const double world = std::max<double>(1, double(devices_of(p).size()));
  const double rows = double(p.batch * p.heads * p.seqlen_q), d = double(p.head_dim);
  Phase phase{.name = "attention"};
  phase.exp = p.total_pairs() / world;
  phase.tensor_flop = 4 * d * phase.exp;
  phase.hbm_read = decode().useful_bytes(p) / world;
  phase.hbm_write = rows * (2 * d + 4);
  phase.l2_bytes = phase.hbm_read + 2 * world * rows * (d + 1) * 4;
  return {phase};
}

Step decode_step(std::string name, std::string idea, Launch launch) {
  return {.name = std::move(name),
          .operation = &decode(),
          .idea = std::move(idea),
          .support = "--devices 0,1,...; causal, windows, GQA",
          .limits = {.dtypes = k16Bits,
                     .head_dims = {64, 128, 256},
                     .most_queries = 16,
                     .most_keys = (1 << 30) - 1},
          .refuses = refuse_decode,
          .workspaces = [](const Problem&) { return std::vector<Workspace>{}; },
          .cost = decode_cost,
          .launch = launch,
          .needs = kAmpere,
          .takes = {"seqused", "devices", "timeout", "transport", "rank", "world", "nccl_id"}};
}

}  // namespace

Launch one_gpu_backward() { return ATTN_LAUNCH_OF(p5_ring_backward, one_gpu); }

Chapter with_ranks(Chapter chapter) {
  chapter.steps.push_back(forward_step("p1_all_gather",
                                       "context parallelism: every rank gathers all K and V",
                                       TokenOrder::contiguous, ATTN_LAUNCH(p1_all_gather)));
  chapter.steps.push_back(forward_step("p2_ring", "K and V travel around a ring during attention",
                                       TokenOrder::contiguous, ATTN_LAUNCH(p2_ring)));
  chapter.steps.push_back(forward_step("p3_zigzag",
                                       "an early and a late part per rank: equal causal work",
                                       TokenOrder::zigzag, ATTN_LAUNCH(p3_zigzag)));
  Step ulysses = forward_step("p4_ulysses", "all-to-all: from shards of tokens to shards of heads",
                              TokenOrder::contiguous, ATTN_LAUNCH(p4_ulysses));
  ulysses.refuses = [](const Problem& p) -> Reason {
    if (auto reason = refuse_ranks(p)) return reason;
    const auto world = static_cast<int64_t>(devices_of(p).size());
    if (p.kv_heads % world != 0)
      return fmt::format("--kv-heads {}: must be a multiple of the {} ranks", p.kv_heads, world);
    return std::nullopt;
  };
  ulysses.cost = [](const Problem& p) {
    Problem heads = p;
    const int64_t world = std::max<int64_t>(1, std::ssize(devices_of(p)));
    heads.heads = std::max<int64_t>(1, p.heads / world);
    heads.kv_heads = std::max<int64_t>(1, p.kv_heads / world);
    heads.own.erase("devices");
    return forward_cost(heads, TokenOrder::contiguous);
  };
  chapter.steps.push_back(ulysses);
  Step gradients =
      forward_step("p5_ring_backward", "backward pass: dK and dV follow K and V, one hop behind",
                   TokenOrder::zigzag, ATTN_LAUNCH(p5_ring_backward));
  gradients.operation = &backward();
  gradients.support = "--devices 0,1,...; equal lengths, causal, GQA";
  gradients.limits.head_dims = {64, 128};
  gradients.refuses = [](const Problem& p) -> Reason {
    if (auto reason = refuse_ranks(p)) return reason;
    if (p.seqlen_q != p.seqlen_k)
      return fmt::format("--seqlen-k {}: must be that of Q, {}", p.seqlen_k, p.seqlen_q);
    if (p.window_left >= 0 || p.window_right >= 0) return "--window: this step has none";
    return std::nullopt;
  };
  gradients.cost = [](const Problem& p) {
    Cost cost = forward_cost(p, TokenOrder::zigzag);
    cost[0].tensor_flop *= 2.5;
    return cost;
  };
  gradients.prepare = ATTN_LAUNCH(p3_zigzag);
  gradients.deterministic = false;  // chapter 06 accumulates dQ with atomics
  chapter.steps.push_back(gradients);
  Step tree =
      decode_step("p6_tree_decode", "the cache on several ranks: all-gather of O and lse, merge",
                  ATTN_LAUNCH(p6_tree_decode));
  tree.takes.push_back("collective");
  tree.refuses = [](const Problem& p) -> Reason {
    const auto is = [&](const char* name) {
      return p.own.contains(name) && p.own.at(name)[0] == 1;
    };
    if (is("collective") && is("transport")) return "--transport copies: has no all-reduce";
    return refuse_decode(p);
  };
  chapter.steps.push_back(tree);
  Step peers = decode_step("p7_peer_decode",
                           "attention, exchange and merge in one launch: writes to peers' memory",
                           ATTN_LAUNCH(p7_peer_decode));
  peers.refuses = [](const Problem& p) -> Reason {
    if (auto reason = refuse_decode(p)) return reason;
    if (p.own.contains("rank")) return "--rank: this step writes to peers of its own process";
    if (devices_of(p).size() > 16)
      return fmt::format("--devices: {} ranks: at most 16", devices_of(p).size());
    if (p.own.contains("transport") && p.own.at("transport")[0] == 0)
      return "--transport nccl: kernels of this step write to peers";
    // Kernels of two ranks may not fit on one GPU together, and would wait for each other.
    const std::vector<int> devices = devices_of(p);
    if (std::set(devices.begin(), devices.end()).size() < devices.size())
      return "--devices: ranks that write to peers need a GPU each";
    return std::nullopt;
  };
  chapter.steps.push_back(peers);
  Step pages = decode_step("p8_paged_shards", "pages of the cache, round-robin over the ranks",
                           ATTN_LAUNCH(p8_paged_shards));
  pages.support = "--devices 0,1,...; one query or no mask, no windows, GQA";
  pages.refuses = refuse_decode_pages;
  chapter.steps.push_back(pages);
  chapter.commands.push_back(
      {"--measure-ranks", "times steps on several GPUs, next to one GPU", measure::ranks});
  chapter.commands.push_back(
      {"--measure-links", "bandwidth of messages between GPUs, by size", measure::links});
  chapter.commands.push_back(
      {"--predict-ranks", "predicted times for 2 to 512 ranks", rank_model::table});
  chapter.commands.push_back({"--compare-ranks",
                              "FILE of several_gpus.sh: its times and their predictions",
                              rank_model::compare});
  return chapter;
}

}  // namespace attn::rank_steps
