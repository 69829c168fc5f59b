// sweep_06_flash_v3_hopper: times v14_tuned's kernel with other tile sizes; v14's come from it.
//
//     sweep_06_flash_v3_hopper [--head-dim D] [--causal] [--repeat R]
//
// Columns: consumer warpgroups, B_c, stages of K and V, buffers for Q, ping-pong, lazy rescale; the
// rest is described in attn/sweep.h.
#define ATTN_SWEEP
#include "v14_tuned.cu"

#include "attn/sweep.h"

namespace gpu::v14_tuned {

template <int kHeadDim, Tuning kTuning>
attn::sweep::Row row() {
  using T = Tuned<kHeadDim, kTuning>;
  char tile[64];
  std::snprintf(tile, sizeof tile, "%3d %3d %6d %2d %8d %4d", T::kNumConsumers, T::kBlockN,
                T::kStages, T::kQStages, T::kUsesPingPong, T::kLazyRescale);
  return {kHeadDim, tile, launch<__nv_bfloat16, T, false>,
          reinterpret_cast<const void*>(&attention_kernel<__nv_bfloat16, T, false>)};
}
// Defaults as in Tuning: 2 consumers, 2 stages, 2 Q buffers, ping-pong, lazy rescale.
const std::vector<attn::sweep::Row> kRows{
    row<64, Tuning{.num_consumers = 3, .block_n = 128, .lazy_rescale = false}>(),
    row<64, Tuning{.num_consumers = 3, .block_n = 128, .pingpong = false, .lazy_rescale = false}>(),
    row<64, Tuning{.num_consumers = 3, .block_n = 128}>(),
    row<64, Tuning{.num_consumers = 3, .block_n = 128, .q_stages = 1}>(),
    row<64, Tuning{.block_n = 128, .stages = 3, .pingpong = false, .lazy_rescale = false}>(),
    row<64, Tuning{.block_n = 128, .stages = 4, .pingpong = false}>(),
    row<64, Tuning{.block_n = 192, .pingpong = false}>(),
    row<128, Tuning{.block_n = 128}>(),
    row<128, Tuning{.block_n = 128, .pingpong = false}>(),
    row<128, Tuning{.block_n = 128, .lazy_rescale = false}>(),
    row<128, Tuning{.block_n = 128, .q_stages = 1}>(),
    row<128, Tuning{.block_n = 144}>(),
    row<128, Tuning{.block_n = 160}>(),
    row<128, Tuning{.block_n = 176, .q_stages = 1}>(),
    row<256, Tuning{.block_n = 64, .q_stages = 1, .pingpong = false}>(),
    row<256, Tuning{.block_n = 64, .q_stages = 1}>(),
    row<256, Tuning{.block_n = 64, .q_stages = 1, .pingpong = false, .lazy_rescale = false}>(),
    row<256, Tuning{.block_n = 80, .q_stages = 1, .pingpong = false}>()};

}  // namespace gpu::v14_tuned

int main(int argc, char** argv) {
  return attn::sweep::main("sweep_06_flash_v3_hopper", gpu::v14_tuned::kRows,
                           "WGs B_c stages Qs pingpong lazy", argc, argv);
}
