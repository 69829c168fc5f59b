// The step table of chapter 01: what each step costs, and which problems it refuses.
#include <fmt/format.h>

#include <string>

#include "attn/blas.h"
#include "check/operation.h"

ATTN_DECLARE_STEP(v1_global);
ATTN_DECLARE_STEP(v2_coalesced);
ATTN_DECLARE_STEP(v3_warp_softmax);
ATTN_DECLARE_STEP(v4_tiled);
ATTN_DECLARE_STEP(v5_register_tiles);
ATTN_DECLARE_STEP(v6_p_16bit);
ATTN_DECLARE_STEP(v7_vector_loads);
ATTN_DECLARE_STEP(v8_mma);
ATTN_DECLARE_STEP(v9_warp_tiles);
ATTN_DECLARE_STEP(v10_ldmatrix);
ATTN_DECLARE_STEP(v11_vectorised);
ATTN_DECLARE_STEP(v12_cp_async);
ATTN_DECLARE_STEP(v13_cublas);
ATTN_DECLARE_STEP(b1_global);
ATTN_DECLARE_STEP(b2_cublas);

namespace attn {
namespace {

using Reason = std::optional<std::string>;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Tensor sizes for the cost formulas below: elements, summed over all heads.
struct Sizes {
  double q, kv, scores, visible;  // Q or O, K or V, S or P, visible part of S
  double element;  // bytes per element
  Sizes(const Problem& p, int64_t row_multiple)
      : q(double(p.batch * p.heads) * double(p.seqlen_q * p.head_dim)),
        kv(double(p.batch * p.kv_heads) * double(p.seqlen_k * p.head_dim)),
        scores(double(p.batch * p.heads) * double(p.seqlen_q) *
               double(round_up(p.seqlen_k, row_multiple))),
        visible(double(p.batch * p.heads) * p.visible_pairs()),
        element(double(size_of(p.dtype))) {}
};

// Forward cost. S is fp32; P has `p_bytes` per element; the softmax reads S `softmax_reads` times.
// The products ignore the mask and compute all N^2 scores, in whole tiles of `column_multiple`
// columns. The softmax reads the visible scores and writes all of P.
Cost forward_cost(const Problem& p, int64_t row_multiple, double p_bytes, double softmax_reads,
                  bool tensor, int64_t column_multiple = 1) {
  const Sizes n(p, row_multiple);
  const double flop = 2 * double(round_up(p.head_dim, column_multiple)) * n.scores;
  Phase scores{.name = "scores", .hbm_read = (n.q + n.kv) * n.element, .hbm_write = 4 * n.scores};
  Phase softmax{.name = "softmax",
                .exp = 2 * n.visible,
                .hbm_read = 4 * softmax_reads * n.visible,
                .hbm_write = p_bytes * n.scores};
  Phase output{.name = "output",
               .hbm_read = p_bytes * n.scores + n.kv * n.element,
               .hbm_write = n.q * n.element};
  for (Phase* product : {&scores, &output})
    (tensor ? product->tensor_flop : product->fp32_flop) = flop;
  return {scores, softmax, output};
}

// Backward cost: four products. P has `p_bytes` per element, dS `ds_bytes`, dP is fp32; the dS
// kernel reads P and dP `ds_reads` times.
Cost backward_cost(const Problem& p, int64_t row_multiple, double p_bytes, double ds_bytes,
                   double ds_reads, bool tensor) {
  const Sizes n(p, row_multiple);
  const double flop = 2 * double(p.head_dim) * n.scores;
  Phase dv{.name = "dv",
           .hbm_read = p_bytes * n.scores + n.q * n.element,
           .hbm_write = n.kv * n.element};
  Phase dp{.name = "dp", .hbm_read = (n.q + n.kv) * n.element, .hbm_write = 4 * n.scores};
  Phase ds{.name = "ds",
           .hbm_read = ds_reads * (p_bytes + 4) * n.scores,
           .hbm_write = ds_bytes * n.scores};
  Phase dq{.name = "dq",
           .hbm_read = ds_bytes * n.scores + n.kv * n.element,
           .hbm_write = n.q * n.element};
  Phase dk{.name = "dk",
           .hbm_read = ds_bytes * n.scores + n.q * n.element,
           .hbm_write = n.kv * n.element};
  for (Phase* product : {&dv, &dp, &dq, &dk})
    (tensor ? product->tensor_flop : product->fp32_flop) = flop;
  return {dv, dp, ds, dq, dk};
}

int64_t score_bytes(const Problem& p, int64_t row_multiple, int64_t bytes) {
  return p.batch * p.heads * p.seqlen_q * round_up(p.seqlen_k, row_multiple) * bytes;
}

// gridDim.y and gridDim.z are at most 65535.
Reason refuse_grid(int64_t heads, int64_t rows, int64_t rows_a_block, const char* option) {
  constexpr int64_t kMost = 65535;
  if (heads > kMost)
    return fmt::format("--batch times --heads is {}: this step puts heads in grid.z, at most {}",
                       heads, kMost);
  if (rows > kMost * rows_a_block)
    return fmt::format("{} {}: this step takes at most {} ({} per block in grid.y)", option, rows,
                       kMost * rows_a_block, rows_a_block);
  return std::nullopt;
}

// All query heads of a group are one matrix in the cuBLAS call.
Reason refuse_cublas(const Problem& p) {
  if (p.group() * p.seqlen_q >= int64_t{1} << 31)
    return fmt::format("{} query rows per key/value head: cuBLAS takes fewer than 2^31",
                       p.group() * p.seqlen_q);
  return refuse_grid(p.batch * p.heads, 0, 1, "");
}

bool on_tensor_cores(const Problem& p) { return p.dtype != DType::fp32; }

const char* const kAnything = "fp32, fp16, bf16; any lengths, head dims, masks, GQA";

std::vector<Workspace> s_and_p_in_fp32(const Problem& p) {
  return {{"S", score_bytes(p, 1, 4)}, {"P", score_bytes(p, 1, 4)}};
}
std::vector<Workspace> p_in_16_bits(const Problem& p) {
  return {{"S", score_bytes(p, 8, 4)}, {"P", score_bytes(p, 8, size_of(p.dtype))}};
}
// v1 and v2 read S three times. Later steps read it once if a row fits in shared memory.
Cost read_three_times(const Problem& p) { return forward_cost(p, 1, 4, 3, false); }
int reads_of_s(const Problem& p) { return p.seqlen_k * 4 <= 224 * 1024 ? 1 : 3; }

// FP32 products, `block_rows` result rows per block; P in fp32.
Step fma_step(std::string name, std::string idea, int64_t block_rows, Launch launch) {
  return {.name = std::move(name),
          .operation = &forward(),
          .idea = std::move(idea),
          .support = kAnything,
          .refuses =
              [block_rows](const Problem& p) {
                return refuse_grid(p.batch * p.heads, p.seqlen_q, block_rows, "--seqlen-q");
              },
          .workspaces = s_and_p_in_fp32,
          .cost = [](const Problem& p) { return forward_cost(p, 1, 4, reads_of_s(p), false); },
          .launch = launch};
}

// Products from 16-bit tiles of `tile_rows` rows, copied in 16-byte vectors; on FP32 units or on
// tensor cores.
Step half_precision_step(std::string name, std::string idea, int64_t tile_rows, bool tensor,
                         Launch launch) {
  return {.name = std::move(name),
          .operation = &forward(),
          .idea = std::move(idea),
          .support = "head dims that are a multiple of 8; any lengths, masks, GQA",
          .limits = {.dtypes = k16Bits},
          .refuses = [=](const Problem& p) -> Reason {
            if (p.head_dim % 8 != 0)
              return fmt::format("--head-dim {}: must be a multiple of 8 (16-byte rows)",
                                 p.head_dim);
            return refuse_grid(p.batch * p.heads, p.seqlen_q, tile_rows, "--seqlen-q");
          },
          .workspaces = p_in_16_bits,
          .cost =
              [tensor](const Problem& p) {
                return forward_cost(p, 8, 2, reads_of_s(p), tensor, tensor ? 64 : 1);
              },
          .launch = launch,
          .needs = tensor ? kAmpere : GpuNeeds{}};
}

Chapter make_chapter() {
  Chapter c{"01_naive", "attention with S and P in HBM, the baseline of fused kernels", {}};
  c.steps.push_back({
      .name = "v1_global",
      .operation = &forward(),
      .idea = "three kernels, one thread per element; adjacent threads on adjacent rows",
      .support = kAnything,
      .refuses =
          [](const Problem& p) {
            Reason r = refuse_grid(p.batch * p.heads, p.seqlen_k, 8, "--seqlen-k");
            return r ? r : refuse_grid(1, p.head_dim, 8, "--head-dim");
          },
      .workspaces = s_and_p_in_fp32,
      .cost = read_three_times,
      .launch = ATTN_LAUNCH(v1_global),
  });
  c.steps.push_back({
      .name = "v2_coalesced",
      .operation = &forward(),
      .idea = "adjacent threads on adjacent addresses",
      .support = kAnything,
      .refuses =
          [](const Problem& p) {
            return refuse_grid(p.batch * p.heads, p.seqlen_q, 8, "--seqlen-q");
          },
      .workspaces = s_and_p_in_fp32,
      .cost = read_three_times,
      .launch = ATTN_LAUNCH(v2_coalesced),
  });
  c.steps.push_back(fma_step("v3_warp_softmax", "one warp per softmax row; the row is read once", 8,
                             ATTN_LAUNCH(v3_warp_softmax)));
  c.steps.push_back(fma_step("v4_tiled", "shared-memory tiles, one result per thread", 32,
                             ATTN_LAUNCH(v4_tiled)));
  c.steps.push_back(fma_step("v5_register_tiles", "register tiles: 4 x 4 results per thread", 64,
                             ATTN_LAUNCH(v5_register_tiles)));
  Step p_16bit = fma_step("v6_p_16bit", "P in the type of Q, K and V: 16 bits", 64,
                          ATTN_LAUNCH(v6_p_16bit));
  p_16bit.workspaces = p_in_16_bits;
  p_16bit.cost = [](const Problem& p) {
    return forward_cost(p, 8, double(size_of(p.dtype)), reads_of_s(p), false);
  };
  c.steps.push_back(std::move(p_16bit));
  c.steps.push_back(half_precision_step("v7_vector_loads",
                                        "tiles of 16-bit elements, copied by 16-byte loads", 64,
                                        false, ATTN_LAUNCH(v7_vector_loads)));
  c.steps.push_back(half_precision_step(
      "v8_mma", "mma.sync for both products, fragments by 32-bit loads", 64, true,
      ATTN_LAUNCH(v8_mma)));
  c.steps.push_back(half_precision_step(
      "v9_warp_tiles", "32 x 64 results per warp: each fragment used in several MMAs", 128, true,
      ATTN_LAUNCH(v9_warp_tiles)));
  c.steps.push_back(half_precision_step("v10_ldmatrix", "fragments of mma.sync by ldmatrix", 128,
                                        true, ATTN_LAUNCH(v10_ldmatrix)));
  c.steps.push_back(half_precision_step("v11_vectorised",
                                        "16-byte accesses to S, P and O",
                                        128, true, ATTN_LAUNCH(v11_vectorised)));
  c.steps.push_back(half_precision_step("v12_cp_async", "three-stage cp.async pipeline", 128,
                                        true, ATTN_LAUNCH(v12_cp_async)));
  c.steps.push_back({
      .name = "v13_cublas",
      .operation = &forward(),
      .idea = "cuBLAS for both GEMMs, without fusion",
      .support = kAnything,
      .refuses = refuse_cublas,
      .workspaces = p_in_16_bits,
      .cost =
          [](const Problem& p) {
            return forward_cost(p, 8, double(size_of(p.dtype)), reads_of_s(p), on_tensor_cores(p));
          },
      .launch = ATTN_LAUNCH(v13_cublas),
  });
  c.steps.push_back({
      .name = "b1_global",
      .operation = &backward(),
      .idea = "five kernels, one thread per element; P kept from the forward pass",
      .support = kAnything,
      .refuses =
          [](const Problem& p) {
            Reason r = refuse_grid(p.batch * p.heads, p.seqlen_q, 8, "--seqlen-q");
            return r ? r : refuse_grid(1, p.seqlen_k, 8, "--seqlen-k");
          },
      .workspaces =
          [](const Problem& p) {
            return std::vector<Workspace>{{"P", score_bytes(p, 1, 4), true},
                                          {"S", score_bytes(p, 1, 4)},
                                          {"dP", score_bytes(p, 1, 4)}};
          },
      .cost = [](const Problem& p) { return backward_cost(p, 1, 4, 4, 2, false); },
      .launch = ATTN_LAUNCH(b1_global),
      .prepare = ATTN_LAUNCH(v2_coalesced),
  });
  c.steps.push_back({
      .name = "b2_cublas",
      .operation = &backward(),
      .idea = "cuBLAS for the four GEMMs, one warp per row for dS",
      .support = kAnything,
      .refuses = refuse_cublas,
      .workspaces =
          [](const Problem& p) {
            return std::vector<Workspace>{{"P", score_bytes(p, 8, size_of(p.dtype)), true},
                                          {"S", score_bytes(p, 8, 4)},
                                          {"dS", score_bytes(p, 8, size_of(p.dtype))}};
          },
      .cost =
          [](const Problem& p) {
            const auto e = double(size_of(p.dtype));
            return backward_cost(p, 8, e, e, 2, on_tensor_cores(p));
          },
      .launch = ATTN_LAUNCH(b2_cublas),
      .prepare = ATTN_LAUNCH(v13_cublas),
  });
  return c;
}

}  // namespace

const Chapter& chapter() {
  static const Chapter c = make_chapter();
  return c;
}

}  // namespace attn
