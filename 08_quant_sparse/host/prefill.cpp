// The prefill steps that quantise: their cost models, what they refuse, what they allocate.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "attn/tiling.h"
#include "check/operation.h"
#include "device/device.h"
#include "kernels/mean_parts.h"
#include "host/quantised.h"

ATTN_DECLARE_STEP(q1_int8_qk);
ATTN_DECLARE_STEP(q2_smooth_k);
ATTN_DECLARE_STEP(q3_per_thread);
ATTN_DECLARE_STEP(q4_fp8_pv);
ATTN_DECLARE_STEP(q5_fewer_instructions);
ATTN_DECLARE_STEP(q6_smooth_q);
ATTN_DECLARE_STEP(q7_int4_qk);
ATTN_DECLARE_STEP(q8_tuned);
ATTN_DECLARE_STEP(q9_mma_sync);
ATTN_DECLARE_STEP(tile_counter);

namespace attn {
namespace {

int64_t heads_q(const Problem& p) { return p.batch * p.heads; }
int64_t heads_k(const Problem& p) { return p.batch * p.kv_heads; }
int64_t tiles_of(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }
double elements_q(const Problem& p) { return double(heads_q(p) * p.seqlen_q * p.head_dim); }
double elements_k(const Problem& p) { return double(heads_k(p) * p.seqlen_k * p.head_dim); }

// 1-byte Q and K, 2-byte V: HBM traffic, and traffic between L2 and the SMs.
Phase attention_phase(const Problem& p, const Tiling& t) {
  const double heads = double(heads_q(p)), d = double(p.head_dim);
  const double q_rows = heads * double(p.seqlen_q), pairs = heads * visits(p, t);
  Phase phase{.name = "attention"};
  // A warp may skip a key block for its own rows, but the block comes from L2 all the same.
  Tiling computed = t;
  if (t.rows_together > 0) computed.block_m = t.rows_together;
  phase.exp = heads * visits(p, computed) * double(computed.block_m * t.block_n);
  phase.tensor_flop = 4 * d * phase.exp;
  phase.hbm_read = elements_q(p) + 3 * elements_k(p);
  phase.hbm_write = q_rows * (2 * d + 4);
  phase.l2_bytes = q_rows * (3 * d + 4) + pairs * 3 * double(t.block_n) * d;
  return phase;
}

Cost int8_cost(const Problem& p, Launch launch) {
  const double read = 2 * (elements_q(p) + elements_k(p));
  return {{.name = "quantise", .hbm_read = read, .hbm_write = read / 2},
          attention_phase(p, *tiling_of(launch, p))};
}

std::optional<std::string> refuse(const Problem& p, Launch launch) {
  const int64_t block_m = tiling_of(launch, p)->block_m;
  const int64_t row_tiles = (p.seqlen_q + block_m - 1) / block_m;
  if (heads_q(p) > ((int64_t{1} << 31) - 1) / row_tiles)
    return fmt::format("{} heads of {} tiles of queries: at most 2^31 - 1 blocks fit in a grid",
                       heads_q(p), row_tiles);
  return std::nullopt;
}

// Codes, and `q_groups` and `k_groups` scales per tile.
std::vector<Workspace> int8_workspaces(const Problem& p, int64_t q_groups, int64_t k_groups) {
  return {{"tile_counter", 4, true},
          {"q8", heads_q(p) * p.seqlen_q * p.head_dim},
          {"k8", heads_k(p) * p.seqlen_k * p.head_dim},
          {"q_descale", heads_q(p) * tiles_of(p.seqlen_q) * q_groups * 4},
          {"k_descale", heads_k(p) * tiles_of(p.seqlen_k) * k_groups * 4}};
}

Step int8_step(std::string name, std::string idea, Launch launch) {
  return {
      .name = std::move(name),
      .operation = &forward(),
      .idea = std::move(idea),
      .support = "any lengths, masks, GQA",
      .limits = {.head_dims = {64, 128, 256}, .least_scale = kLeastQuantisedScale},
      .refuses = [launch](const Problem& p) { return refuse(p, launch); },
      .workspaces = [](const Problem& p) { return int8_workspaces(p, 1, 1); },
      .cost = [launch](const Problem& p) { return int8_cost(p, launch); },
      .launch = launch,
      .prepare = ATTN_LAUNCH(tile_counter),
      .needs = kHopper,
      .tiled = true,
      .takes = {"int8"},
      .logical = int8_blocks,
  };
}

// With smooth K: one more phase, and the correction of lse.
Step smooth_step(std::string name, std::string idea, Launch launch, int64_t q_groups,
                 int64_t k_groups) {
  Step step = int8_step(std::move(name), std::move(idea), launch);
  step.logical = q_groups == 1 ? smoothed_blocks : smoothed_threads;
  step.workspaces = [=](const Problem& p) {
    std::vector<Workspace> all = int8_workspaces(p, q_groups, k_groups);
    all.push_back({"k_parts", heads_k(p) * mean_parts(p.seqlen_k) * p.head_dim * 4});
    all.push_back({"k_mean", heads_k(p) * p.head_dim * 4});
    all.push_back({"lse_shift", heads_q(p) * p.seqlen_q * 4});
    return all;
  };
  step.cost = [launch](const Problem& p) {
    Cost cost = int8_cost(p, launch);
    cost.insert(cost.begin(), {.name = "mean", .hbm_read = 2 * elements_k(p)});
    return cost;
  };
  return step;
}

// For GPUs without wgmma: one block per query tile, without a tile counter.
Step mma_step(std::string name, std::string idea, Launch launch) {
  Step step = smooth_step(std::move(name), std::move(idea), launch, 64, 4);
  step.needs = kAmpere;
  step.prepare = {};
  step.workspaces = [before = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = before(p);
    std::erase_if(all, [](const Workspace& w) { return w.name == "tile_counter"; });
    return all;
  };
  return step;
}

}  // namespace

// Per computing thread (two per row): d / 8 float4 of O, one float4 of the max and, in q8, of l.
Workspace chunk_sums(const Problem& p, int64_t rows) {
  const int64_t tiles = heads_q(p) * ((p.seqlen_q + rows - 1) / rows);
  const int64_t sms = gpu_info().available ? gpu_info().num_sms : 132;
  return {"sums", std::min(tiles, sms) * (p.head_dim / 8 + 1) * 2 * rows * 16};
}

// And with FP8 P V: scales and transposition of V, which read V twice at most.
Step fp8_pv_step(std::string name, std::string idea, Launch launch) {
  Step step = smooth_step(std::move(name), std::move(idea), launch, 64, 4);
  step.logical = fp8_pv;
  step.takes = {"e4m3"};
  step.refuses = [of_int8 = step.refuses](const Problem& p) -> std::optional<std::string> {
    if (heads_k(p) > std::numeric_limits<int32_t>::max() / p.head_dim)
      return fmt::format("{} heads of K and V with d={}: V's scales must be below 2^31", heads_k(p),
                         p.head_dim);
    if (p.seqlen_k > 65535 * kTileRows)
      return fmt::format("--seqlen-k {}: V is transposed in a grid of up to 65535 x 128 keys",
                         p.seqlen_k);
    return of_int8(p);
  };
  step.workspaces = [of_int8 = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = of_int8(p);
    all.push_back({"v_parts", heads_k(p) * mean_parts(p.seqlen_k) * p.head_dim * 4});
    all.push_back({"v_descale", heads_k(p) * p.head_dim * 4});
    all.push_back({"v8", heads_k(p) * p.head_dim * ((p.seqlen_k + 15) / 16 * 16)});
    return all;
  };
  step.cost = [launch, of_int8 = step.cost](const Problem& p) {
    Cost cost = of_int8(p);
    Phase& attention = cost.back();
    attention.hbm_read -= elements_k(p);
    const Tiling t = *tiling_of(launch, p);
    attention.l2_bytes -= double(heads_q(p)) * visits(p, t) * double(t.block_n * p.head_dim);
    const double v = elements_k(p);
    cost.insert(cost.end() - 1, {{.name = "scales", .hbm_read = 2 * v},
                                 {.name = "transpose", .hbm_read = 2 * v, .hbm_write = v}});
    return cost;
  };
  return step;
}

namespace {

// And with smooth Q, one vector over the keys per tile of Q: the sums of Q, a phase that reads K
// for up to 16 tiles at a time, and the vectors, written and read once.
Step smooth_q_step(std::string name, std::string idea, Launch launch, int largest_code) {
  Step step = fp8_pv_step(std::move(name), std::move(idea), launch);
  const auto vector_bytes = [](const Problem& p) {
    return heads_q(p) * tiles_of(p.seqlen_q) * ((p.seqlen_k + 3) / 4 * 4) * 4;
  };
  step.workspaces = [=, before = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = before(p);
    all.push_back({"q_sums", heads_q(p) * tiles_of(p.seqlen_q) * p.head_dim * 4});
    all.push_back({"vectors", vector_bytes(p)});
    return all;
  };
  step.cost = [=, before = step.cost](const Problem& p) {
    Cost cost = before(p);
    const double vectors = double(vector_bytes(p)), d = double(p.head_dim);
    cost[0].hbm_read += 2 * elements_q(p);
    cost.back().hbm_read += vectors, cost.back().l2_bytes += vectors;
    cost.insert(cost.begin() + 2, {.name = "vectors",
                                   .fp32_flop = 2 * d * vectors / 4,
                                   .hbm_read = 2 * elements_k(p),
                                   .hbm_write = vectors});
    return cost;
  };
  step.logical = largest_code == 7 ? smoothed_q_int4 : smoothed_q;
  return step;
}

// And with smooth V, per chunk: means and scales, and the workspace in which each running block
// keeps O, l and the max between chunks. In L2, every chunk of a tile but its first costs a write
// and a read of O.
int64_t chunks_of(const Problem& p) { return (p.seqlen_k + kChunkKeys - 1) / kChunkKeys; }
Step chunks_step(std::string name, std::string idea, Launch launch) {
  Step step = fp8_pv_step(std::move(name), std::move(idea), launch);
  step.workspaces = [before = step.workspaces](const Problem& p) {
    std::vector<Workspace> all = before(p);
    std::erase_if(
        all, [](const Workspace& w) { return w.name == "v_parts" || w.name == "v_descale"; });
    all.push_back({"v_chunk", heads_k(p) * chunks_of(p) * p.head_dim * 8});
    all.push_back(chunk_sums(p, p.head_dim == 64 ? 192 : 128));
    return all;
  };
  step.cost = [before = step.cost](const Problem& p) {
    Cost cost = before(p);
    cost.erase(cost.end() - 3);  // V is read once
    Phase& chunks = cost[cost.size() - 2];
    chunks.name = "chunks";
    chunks.hbm_write += double(heads_k(p) * chunks_of(p) * p.head_dim) * 8;
    cost.back().l2_bytes +=
        double(heads_q(p) * p.seqlen_q * (chunks_of(p) - 1)) * (8 * double(p.head_dim) + 32);
    return cost;
  };
  step.logical = fp8_chunks;
  return step;
}

}  // namespace

std::vector<Step> prefill_steps() {
  return {
      int8_step("q1_int8_qk", "INT8 Q K^T, one scale per tile of 128 rows",
                ATTN_LAUNCH(q1_int8_qk)),
      smooth_step("q2_smooth_k", "smooth K: subtract the mean over the tokens",
                  ATTN_LAUNCH(q2_smooth_k), 1, 1),
      smooth_step("q3_per_thread", "per-thread scales: 2 rows of Q, 32 keys",
                  ATTN_LAUNCH(q3_per_thread), 64, 4),
      fp8_pv_step("q4_fp8_pv", "FP8 P V, one scale per channel of V", ATTN_LAUNCH(q4_fp8_pv)),
      fp8_pv_step("q5_fewer_instructions",
                  "accumulators reinterpreted as floats; O rescaled as P V is added",
                  ATTN_LAUNCH(q5_fewer_instructions)),
      smooth_q_step("q6_smooth_q", "smooth Q: subtract the mean per query tile",
                    ATTN_LAUNCH(q6_smooth_q), 127),
      smooth_q_step("q7_int4_qk", "4-bit Q and K: accuracy only, no speedup",
                    ATTN_LAUNCH(q7_int4_qk), 7),
      chunks_step("q8_tuned", "smooth V: accumulate 4096 keys in the tensor core",
                  ATTN_LAUNCH(q8_tuned)),
      mma_step("q9_mma_sync", "q3's scores with mma.sync, P V in bf16: 04's loop",
               ATTN_LAUNCH(q9_mma_sync))};
}

}  // namespace attn
