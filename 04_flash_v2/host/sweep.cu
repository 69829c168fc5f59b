// sweep_04_flash_v2: times the kernel of v13_tuned with other tiles. v13's tiles come from it.
//
//     sweep_04_flash_v2 [--head-dim D] [--causal] [--repeat R]
//
// Columns of a row: B_r, B_c, warps, 16-column fragments of Q in registers, stages, blocks per SM;
// the rest is in attn/sweep.h.
#define ATTN_SWEEP
#include "v13_tuned.cu"

#include "attn/sweep.h"

namespace gpu::v13_tuned {

template <int kHeadDim, Tuning kTuning>
attn::sweep::Row row() {
  using T = Tuned<kHeadDim, kTuning>;
  char tile[64];
  std::snprintf(tile, sizeof tile, "%4d %3d %5d %7d %6d %3d", T::kBlockM, T::kBlockN, T::kNumWarps,
                T::kQSteps, T::kStages, T::kBlocksPerSm);
  return {kHeadDim, tile, launch<__nv_bfloat16, T, Contiguous<kHeadDim>, false>,
          reinterpret_cast<const void*>(
              &attention_kernel<__nv_bfloat16, T, Contiguous<kHeadDim>, false>)};
}
// Defaults of Tuning: 128 x 64, 4 warps, no Q in registers, 1 stage, 2 blocks per SM.
const std::vector<attn::sweep::Row> kRows{
    row<64, Tuning{.block_n = 128}>(),  // FlashAttention-2's
    row<64, Tuning{.block_n = 128, .stages = 2}>(),
    row<64, Tuning{.stages = 2}>(),
    row<64, Tuning{.q_steps = 4, .stages = 2}>(),
    row<64, Tuning{.stages = 2, .blocks_per_sm = 3}>(),
    row<64, Tuning{.blocks_per_sm = 3}>(),
    row<64, Tuning{.block_n = 32, .q_steps = 4, .stages = 2, .blocks_per_sm = 3}>(),
    row<64, Tuning{.block_m = 64, .q_steps = 4, .stages = 2, .blocks_per_sm = 4}>(),
    row<64, Tuning{.num_warps = 8, .q_steps = 4, .stages = 2}>(),
    row<64, Tuning{.block_m = 64, .num_warps = 2, .q_steps = 4, .stages = 2, .blocks_per_sm = 4}>(),
    row<128, Tuning{}>(),  // FlashAttention-2's
    row<128, Tuning{.stages = 2}>(),
    row<128, Tuning{.block_n = 32}>(),
    row<128, Tuning{.block_n = 32, .stages = 2}>(),
    row<128, Tuning{.block_m = 64, .q_steps = 8, .stages = 2}>(),
    row<128, Tuning{.block_m = 64, .blocks_per_sm = 3}>(),
    row<128, Tuning{.block_m = 64, .block_n = 32, .q_steps = 8, .stages = 2, .blocks_per_sm = 3}>(),
    row<128, Tuning{.num_warps = 8, .q_steps = 8, .stages = 2, .blocks_per_sm = 1}>(),
    row<128, Tuning{.block_m = 64, .num_warps = 2, .blocks_per_sm = 4}>(),
    row<256, Tuning{.block_m = 64}>(),  // FlashAttention-2's
    row<256, Tuning{.block_m = 64, .q_steps = 4}>(),
    row<256, Tuning{.block_m = 64, .q_steps = 8}>(),
    row<256, Tuning{.block_m = 64, .q_steps = 10}>(),
    row<256, Tuning{.block_m = 64, .block_n = 32, .q_steps = 8, .stages = 2}>(),
    row<256, Tuning{.block_m = 64, .block_n = 48, .q_steps = 8}>(),
    row<256, Tuning{.num_warps = 8, .stages = 2, .blocks_per_sm = 1}>(),
    row<256, Tuning{.num_warps = 8, .q_steps = 4, .stages = 2, .blocks_per_sm = 1}>(),
    row<256, Tuning{.num_warps = 8, .q_steps = 8, .stages = 2, .blocks_per_sm = 1}>(),
    row<256, Tuning{.num_warps = 8, .q_steps = 8, .blocks_per_sm = 1}>(),
    row<32, Tuning{.block_n = 128, .q_steps = 2, .stages = 2}>(),
    row<32, Tuning{.q_steps = 2, .stages = 2}>(),
    row<32, Tuning{.q_steps = 2, .stages = 2, .blocks_per_sm = 3}>(),
    row<96, Tuning{}>(),
    row<96, Tuning{.stages = 2}>(),
    row<96, Tuning{.q_steps = 2}>(),
    row<192, Tuning{.block_m = 64}>(),
    row<192, Tuning{.block_m = 64, .q_steps = 6}>(),
    row<192, Tuning{.block_m = 64, .q_steps = 12}>(),
    row<192, Tuning{.block_m = 64, .block_n = 32, .q_steps = 12, .stages = 2}>(),
    row<192, Tuning{.num_warps = 8, .q_steps = 6, .stages = 2, .blocks_per_sm = 1}>(),
};

}  // namespace gpu::v13_tuned

int main(int argc, char** argv) {
  return attn::sweep::main("sweep_04_flash_v2", gpu::v13_tuned::kRows,
                           "   M   N warps q_steps stages /SM", argc, argv);
}
