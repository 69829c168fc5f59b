// sweep_06_flash_v3_hopper: v11_tuned's kernel with other tiles, timed; v11's own are chosen from what this prints.
//
//     sweep_06_flash_v3_hopper [--head-dim D] [--causal] [--repeat R]
//
// A row: consumer warpgroups, B_c, stages, tiles of Q in shared memory, whether warpgroups take turns, whether O is
// rescaled seldom; the rest is in attn/sweep.h.
#define ATTN_SWEEP
#include "v11_tuned.cu"

#include "attn/sweep.h"

namespace gpu::v11_tuned {

template <int kHeadDim, int kConsumers, int kBlockN, int kStages, int kQueries, bool kTurns, bool kSeldom>
attn::sweep::Row row() {
  using T = Tile<kHeadDim, kConsumers, kBlockN, kStages, kQueries, kTurns, kSeldom>;
  char tile[64];
  std::snprintf(tile, sizeof tile, "%3d %3d %6d %2d %5d %6d", kConsumers, kBlockN, kStages, kQueries, kTurns, kSeldom);
  return {kHeadDim, tile, launch<__nv_bfloat16, T, false>,
          reinterpret_cast<const void*>(&attention_kernel<__nv_bfloat16, T, false>)};
}
//                                           d  WGs  B_c stages Qs turns seldom
const std::vector<attn::sweep::Row> kRows{row<64, 3, 128, 2, 2, true, false>(),
                                          row<64, 3, 128, 2, 2, false, false>(),
                                          row<64, 3, 128, 2, 2, true, true>(),
                                          row<64, 3, 128, 2, 1, true, true>(),
                                          row<64, 2, 128, 3, 2, false, false>(),
                                          row<64, 2, 128, 4, 2, false, true>(),
                                          row<64, 2, 192, 2, 2, false, true>(),
                                          row<128, 2, 128, 2, 2, true, true>(),
                                          row<128, 2, 128, 2, 2, false, true>(),
                                          row<128, 2, 128, 2, 2, true, false>(),
                                          row<128, 2, 128, 2, 1, true, true>(),
                                          row<128, 2, 144, 2, 2, true, true>(),
                                          row<128, 2, 160, 2, 2, true, true>(),
                                          row<128, 2, 176, 2, 1, true, true>(),
                                          row<256, 2, 64, 2, 1, false, true>(),
                                          row<256, 2, 64, 2, 1, true, true>(),
                                          row<256, 2, 64, 2, 1, false, false>(),
                                          row<256, 2, 80, 2, 1, false, true>()};

}  // namespace gpu::v11_tuned

int main(int argc, char** argv) {
  return attn::sweep::main("sweep_06_flash_v3_hopper", gpu::v11_tuned::kRows, "WGs B_c stages Qs turns seldom", argc,
                           argv);
}
