// The steps of chapter 03: cost models and limits.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "check/operation.h"
#include "kernels/row_ranges.h"
#include "kernels/scalar_tiles.h"

ATTN_DECLARE_STEP(v1_scalar);
ATTN_DECLARE_STEP(v2_constant_tiles);
ATTN_DECLARE_STEP(v3_register_scores);
ATTN_DECLARE_STEP(v4_split_keys);
ATTN_DECLARE_STEP(v5_tensor_core);
ATTN_DECLARE_STEP(v6_async);
ATTN_DECLARE_STEP(v7_grid);
ATTN_DECLARE_STEP(v8_warp_pair_barriers);
ATTN_DECLARE_STEP(v9_rows_per_warp);
ATTN_DECLARE_STEP(v10_exp2);
ATTN_DECLARE_STEP(b1_scalar);
ATTN_DECLARE_STEP(b2_saved_dot);
ATTN_DECLARE_STEP(b3_constant_tiles);
ATTN_DECLARE_STEP(b4_score_mma);
ATTN_DECLARE_STEP(b5_tensor_core);
ATTN_DECLARE_STEP(b6_async);
ATTN_DECLARE_STEP(b7_grid);
ATTN_DECLARE_LAUNCH(v1_scalar, launch_half);
ATTN_DECLARE_LAUNCH(v1_scalar, launch_double);

namespace attn {
namespace {

using Reason = std::optional<std::string>;

struct Tiles {
  int64_t block_m, block_n;  // B_r, B_c
};

// v1: Algorithm 1, line 1, with M = `floats`.
Tiles scalar_tiles(const Problem& p, int floats) {
  const ScalarTiles tiles(floats, static_cast<int>(p.head_dim));
  return {tiles.block_m, tiles.block_n};
}

// Visits of a head: (query tile, KV tile) pairs that are not skipped.
double visits(const Problem& p, Tiles t) {
  double count = 0;
  for (int64_t row = 0; row < p.seqlen_q; row += t.block_m) {
    const int64_t begin = p.visible(row).begin, last = std::min(row + t.block_m, p.seqlen_q) - 1;
    const int64_t end = p.visible(last).end;
    count += end <= begin ? 1 : double((end + t.block_n - 1) / t.block_n - begin / t.block_n);
  }
  return count;
}

// L2 bytes: a visit loads a tile of Q, and loads and stores O, l and m; the first visit of a row
// loads no state, the last stores O in its final type. Each block reads all of K and V.
// HBM bytes: compulsory traffic only, because how much of the rest misses depends on L2's size.
// `warp`: the part of a tile that one warp skips if it is fully masked.
Cost forward_cost(const Problem& p, Tiles t, Tiles warp, double blocks_a_head, bool tensor) {
  const double heads = double(p.batch * p.heads), d = double(p.head_dim),
               element = double(size_of(p.dtype));
  const double q_rows = double(p.seqlen_q), kv = double(p.seqlen_k) * d * element;
  const double pairs = visits(p, t), rows = double(t.block_m);
  const double row_tiles = double((p.seqlen_q + t.block_m - 1) / t.block_m);
  const double accum = 2 * std::max(0.0, pairs - row_tiles) * rows * (4 * d + 8);
  const double exp = visits(p, warp) * double(warp.block_m * warp.block_n) * heads,
               flop = 4 * d * exp;
  const double compulsory = heads * q_rows * d * element;
  Phase phase{.name = "attention", .exp = exp};
  (tensor ? phase.tensor_flop : phase.fp32_flop) = flop;
  phase.hbm_read = compulsory + 2 * double(p.batch * p.kv_heads) * kv;
  phase.hbm_write = compulsory + heads * q_rows * 4;
  phase.l2_bytes = heads * (pairs * rows * d * element + accum + 2 * blocks_a_head * kv +
                            q_rows * (d * element + 4));
  return {phase};
}

// As in the forward pass: a visit loads tiles of Q and dO, and loads and stores dQ. `mma` of the
// five GEMMs run on tensor cores. Without a saved D, a visit also loads O.
Phase backward_phase(const Problem& p, Tiles t, int mma, bool saved_dot = true) {
  const double heads = double(p.batch * p.heads), d = double(p.head_dim),
               element = double(size_of(p.dtype));
  const double q_rows = heads * double(p.seqlen_q),
               kv = 2 * double(p.batch * p.kv_heads * p.seqlen_k) * d * element;
  const double pairs = visits(p, t), rows = double(t.block_m);
  const double row_tiles = double((p.seqlen_q + t.block_m - 1) / t.block_m);
  Phase phase{.name = "attention_backward", .exp = heads * pairs * rows * double(t.block_n)};
  phase.tensor_flop = mma * 2 * d * phase.exp;
  phase.fp32_flop = (5 - mma) * 2 * d * phase.exp;
  const double row_tensors = saved_dot ? 2 : 3, row_numbers = saved_dot ? 8 : 4;  // lse; D
  phase.hbm_read = q_rows * (row_tensors * d * element + row_numbers) + kv;
  phase.hbm_write = q_rows * d * element + kv;
  const double accum = 2 * std::max(0.0, pairs - row_tiles) * rows * d * 4;
  phase.l2_bytes = heads * (pairs * rows * (row_tensors * d * element + row_numbers) + accum) +
                   q_rows * d * element + 2 * kv;
  return phase;
}
Phase dot_phase(const Problem& p) {
  const double rows = double(p.batch * p.heads * p.seqlen_q), d = double(p.head_dim);
  Phase phase{.name = "dot", .fp32_flop = 2 * rows * d};
  phase.hbm_read = 2 * rows * d * double(size_of(p.dtype));
  phase.hbm_write = 4 * rows;
  return phase;
}

// b7: rounds dQ to its final type.
Phase convert_phase(const Problem& p) {
  const double numbers = double(p.batch * p.heads * p.seqlen_q * p.head_dim);
  Phase phase{.name = "convert"};
  phase.hbm_read = 4 * numbers;
  phase.hbm_write = double(size_of(p.dtype)) * numbers;
  return phase;
}

Reason refuse_heads(const Problem& p) {
  if (p.batch * p.heads >= int64_t{1} << 31)
    return fmt::format("--batch times --heads is {}: at most 2^31 - 1 blocks fit in a grid",
                       p.batch * p.heads);
  return std::nullopt;
}
Reason refuse_scalar(const Problem& p) {
  if (p.head_dim > 128)
    return fmt::format("--head-dim {}: at most 128 (shared memory)", p.head_dim);
  return refuse_heads(p);
}
// O in fp32 and (m, l) between visits: linear in the length.
std::vector<Workspace> state_of_rows(const Problem& p) {
  const int64_t rows = p.batch * p.heads * p.seqlen_q;
  return {{"accum", rows * p.head_dim * 4}, {"state", rows * 8}};
}

const char* const kScalarSupport =
    "fp32, fp16, bf16; head dims up to 128; any lengths, masks, GQA, dropout";
const char* const kTensorSupport = "any lengths, masks, GQA, dropout";

Step scalar_step(std::string name, std::string idea, int floats, Launch launch) {
  return {
      .name = std::move(name),
      .operation = &forward(),
      .idea = std::move(idea),
      .support = kScalarSupport,
      .refuses = refuse_scalar,
      .workspaces = state_of_rows,
      .cost =
          [floats](const Problem& p) {
            const Tiles t = scalar_tiles(p, floats);
            return forward_cost(p, t, t, 1, false);
          },
      .launch = launch,
      .takes = {"dropout"},
  };
}

// v2 to v7: tiles of 16 rows; from v4 on a warp owns a quarter of the keys, at d = 32 half. Then
// v8; then v9 and v10.
Tiles small_tiles(const Problem&) { return {16, 128}; }
Tiles small_warp(const Problem& p) { return {16, p.head_dim == 32 ? 64 : 32}; }
Tiles group_tiles(const Problem&) { return {64, 256}; }
Tiles group_warp(const Problem&) { return {16, 128}; }
Tiles large_tiles(const Problem&) { return {128, 256}; }
Tiles large_warp(const Problem&) { return {32, 128}; }

// `warp`: see forward_cost. `split_rows`: blocks take ranges of queries.
struct Work {
  Tiles (*tiles)(const Problem&);
  Tiles (*warp)(const Problem&);
  bool split_rows, tensor;
};
Step tile_step(std::string name, std::string idea, Work work, Launch launch) {
  return {
      .name = std::move(name),
      .operation = &forward(),
      .idea = std::move(idea),
      .support = kTensorSupport,
      .limits = {.dtypes = k16Bits, .head_dims = {32, 64, 128}},
      .refuses = refuse_heads,
      .workspaces = state_of_rows,
      .cost =
          [work](const Problem& p) {
            const Tiles tiles = work.tiles(p);
            const int64_t rows = rows_a_block(p, tiles.block_m);
            return forward_cost(p, tiles, work.warp(p),
                                work.split_rows ? double((p.seqlen_q + rows - 1) / rows) : 1,
                                work.tensor);
          },
      .launch = launch,
      .needs = kAmpere,
      .takes = {"dropout"},
  };
}

// From b3 on: rows and keys of a tile.
Tiles backward_tiles(const Problem& p) { return {p.head_dim == 128 ? 64 : 128, 128}; }

// From b3 on. `mma`: how many of the five GEMMs run on tensor cores.
Step backward_step(std::string name, std::string idea, int mma, Launch launch) {
  return {
      .name = std::move(name),
      .operation = &backward(),
      .idea = std::move(idea),
      .support = kTensorSupport,
      .limits = {.dtypes = k16Bits, .head_dims = {32, 64, 128}, .least_scale = kLeastScale},
      .refuses = refuse_heads,
      .workspaces =
          [](const Problem& p) {  // also those of the forward pass that prepares the inputs
            const int64_t heads = p.batch * p.heads, block = backward_tiles(p).block_m;
            const int64_t padded = (p.seqlen_q + block - 1) / block * block;
            return std::vector<Workspace>{{"accum", heads * padded * p.head_dim * 4},
                                          {"state", heads * p.seqlen_q * 8},
                                          {"dot", heads * p.seqlen_q * 4}};
          },
      .cost =
          [mma](const Problem& p) {
            return Cost{dot_phase(p), backward_phase(p, backward_tiles(p), mma)};
          },
      .launch = launch,
      .prepare = ATTN_LAUNCH(v10_exp2),
      .needs = kAmpere,
      .takes = {"dropout"},
  };
}

Chapter make_chapter() {
  Chapter c{"03_flash_v1", "FlashAttention-1: tiled and fused, no tensor of size N^2", {}};
  c.steps.push_back(scalar_step(
      "v1_scalar", "Algorithm 1 line by line: K/V outer, Q inner loop, O in HBM; M = 64 KiB",
      16 * 1024, ATTN_LAUNCH(v1_scalar)));
  const Work whole{small_tiles, small_tiles, false, false},
      split{small_tiles, small_warp, false, false};
  const Work mma{small_tiles, small_warp, false, true}, grid{small_tiles, small_warp, true, true};
  const Work groups{group_tiles, group_warp, true, true}, two{large_tiles, large_warp, true, true};
  c.steps.push_back(tile_step(
      "v2_constant_tiles", "16-bit swizzled tiles of compile-time size; four lanes per softmax row",
      whole, ATTN_LAUNCH(v2_constant_tiles)));
  c.steps.push_back(
      tile_step("v3_register_scores",
                "S in registers, in the accumulator layout: 2 x 2 of each 16 x 8 per lane", whole,
                ATTN_LAUNCH(v3_register_scores)));
  c.steps.push_back(tile_step("v4_split_keys",
                              "P in registers; warps split the keys and exchange partial O", split,
                              ATTN_LAUNCH(v4_split_keys)));
  c.steps.push_back(tile_step("v5_tensor_core", "mma.sync and ldmatrix for both GEMMs", mma,
                              ATTN_LAUNCH(v5_tensor_core)));
  c.steps.push_back(tile_step("v6_async",
                              "cp.async for Q, K and V: loads in flight during the MMAs", mma,
                              ATTN_LAUNCH(v6_async)));
  c.steps.push_back(tile_step("v7_grid", "blocks take ranges of queries: more blocks than heads",
                              grid, ATTN_LAUNCH(v7_grid)));
  c.steps.push_back(tile_step("v8_warp_pair_barriers",
                              "256 keys per tile; two warps share 16 rows and a named barrier",
                              groups, ATTN_LAUNCH(v8_warp_pair_barriers)));
  c.steps.push_back(tile_step("v9_rows_per_warp",
                              "32 rows per warp: each fragment of K or V feeds two MMAs", two,
                              ATTN_LAUNCH(v9_rows_per_warp)));
  c.steps.push_back(tile_step("v10_exp2", "softmax scale and base change folded into one FFMA", two,
                              ATTN_LAUNCH(v10_exp2)));
  c.steps.back().limits.least_scale = kLeastScale;
  c.steps.push_back(scalar_step("v1_half_m",
                                "v1_scalar with M = 32 KiB: smaller tiles, more traffic", 8 * 1024,
                                ATTN_LAUNCH_OF(v1_scalar, launch_half)));
  c.steps.push_back(scalar_step("v1_double_m",
                                "v1_scalar with M = 128 KiB: larger tiles, less traffic", 32 * 1024,
                                ATTN_LAUNCH_OF(v1_scalar, launch_double)));
  Step b1 =
      scalar_step("b1_scalar", "Algorithm 4 line by line: P recomputed, dQ accumulated in HBM",
                  16 * 1024, ATTN_LAUNCH(b1_scalar));
  b1.operation = &backward();
  b1.cost = [](const Problem& p) {
    return Cost{backward_phase(p, scalar_tiles(p, 16 * 1024), 0, false)};
  };
  b1.prepare = ATTN_LAUNCH(v1_scalar);
  c.steps.push_back(std::move(b1));
  Step b2 = scalar_step("b2_saved_dot", "D = rowsum(dO . O) once per row, in a preprocess kernel",
                        16 * 1024, ATTN_LAUNCH(b2_saved_dot));
  b2.operation = &backward();
  b2.cost = [](const Problem& p) {
    return Cost{dot_phase(p), backward_phase(p, scalar_tiles(p, 16 * 1024), 0)};
  };
  b2.workspaces = [](const Problem& p) {
    std::vector<Workspace> all = state_of_rows(p);
    all.push_back({"dot", p.batch * p.heads * p.seqlen_q * 4});
    return all;
  };
  b2.prepare = ATTN_LAUNCH(v1_scalar);
  c.steps.push_back(std::move(b2));
  c.steps.push_back(backward_step("b3_constant_tiles",
                                  "16-bit swizzled tiles of compile-time size; dK, dV in registers",
                                  0, ATTN_LAUNCH(b3_constant_tiles)));
  c.steps.push_back(backward_step("b4_score_mma", "mma.sync for S and dP, two of five GEMMs", 2,
                                  ATTN_LAUNCH(b4_score_mma)));
  c.steps.push_back(backward_step("b5_tensor_core", "mma.sync for all five GEMMs", 5,
                                  ATTN_LAUNCH(b5_tensor_core)));
  c.steps.push_back(
      backward_step("b6_async", "cp.async with two stages of Q and dO", 5, ATTN_LAUNCH(b6_async)));
  c.steps.push_back(backward_step("b7_grid", "one block per key tile; dQ by fp32 atomics", 5,
                                  ATTN_LAUNCH(b7_grid)));
  c.steps.back().cost = [](const Problem& p) {
    return Cost{dot_phase(p), backward_phase(p, backward_tiles(p), 5), convert_phase(p)};
  };
  c.steps.back().deterministic = false;
  c.steps.back().refuses = [](const Problem& p) -> Reason {
    if ((p.seqlen_k + 127) / 128 > 65535)
      return fmt::format("--seqlen-k {}: at most {} (65535 blocks of 128 keys in a grid)",
                         p.seqlen_k, 65535 * 128);
    return refuse_heads(p);
  };
  return c;
}

}  // namespace

const Chapter& chapter() {
  static const Chapter c = make_chapter();
  return c;
}

}  // namespace attn
