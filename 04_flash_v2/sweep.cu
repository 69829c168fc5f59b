// sweep_04_flash_v2: the kernel of v7_tuned with other tiles, timed; v7's own are chosen from what this prints.
//
//     sweep_04_flash_v2 [--head-dim D] [--causal] [--repeat R]
//
// A row: B_r, B_c, warps, of how many times 16 columns of Q the fragments stay in registers, stages, blocks an SM; the
// rest is in attn/sweep.h.
#define ATTN_SWEEP
#include "v7_tuned.cu"

#include "attn/sweep.h"

namespace gpu::v7_tuned {

template <int... kTile>
attn::sweep::Row row() {
  using T = Tile<kTile...>;
  char tile[64];
  std::snprintf(tile, sizeof tile, "%4d %3d %5d %4d %6d %3d", T::kBlockM, T::kBlockN, T::kNumWarps, T::kKept,
                T::kStages, T::kBlocksPerSm);
  return {T::kHeadDim, tile, launch<__nv_bfloat16, T, false>,
          reinterpret_cast<const void*>(&attention_kernel<__nv_bfloat16, T, false>)};
}
//                                             d    M    N  warps kept, stages, blocks an SM
const std::vector<attn::sweep::Row> kRows{row<64, 128, 128, 4, 0, 1, 2>(),  // FlashAttention-2's
                                          row<64, 128, 128, 4, 0, 2, 2>(),
                                          row<64, 128, 64, 4, 0, 2, 2>(),
                                          row<64, 128, 64, 4, 4, 2, 2>(),
                                          row<64, 128, 64, 4, 0, 2, 3>(),
                                          row<64, 128, 64, 4, 0, 1, 3>(),
                                          row<64, 128, 32, 4, 4, 2, 3>(),
                                          row<64, 64, 64, 4, 4, 2, 4>(),
                                          row<64, 128, 64, 8, 4, 2, 2>(),
                                          row<64, 64, 64, 2, 4, 2, 4>(),
                                          row<128, 128, 64, 4, 0, 1, 2>(),  // FlashAttention-2's
                                          row<128, 128, 64, 4, 0, 2, 2>(),
                                          row<128, 128, 32, 4, 0, 1, 2>(),
                                          row<128, 128, 32, 4, 0, 2, 2>(),
                                          row<128, 64, 64, 4, 8, 2, 2>(),
                                          row<128, 64, 64, 4, 0, 1, 3>(),
                                          row<128, 64, 32, 4, 8, 2, 3>(),
                                          row<128, 128, 64, 8, 8, 2, 1>(),
                                          row<128, 64, 64, 2, 0, 1, 4>(),
                                          row<256, 64, 64, 4, 0, 1, 2>(),  // FlashAttention-2's
                                          row<256, 64, 64, 4, 4, 1, 2>(),
                                          row<256, 64, 64, 4, 8, 1, 2>(),
                                          row<256, 64, 64, 4, 10, 1, 2>(),
                                          row<256, 64, 32, 4, 8, 2, 2>(),
                                          row<256, 64, 48, 4, 8, 1, 2>(),
                                          row<256, 128, 64, 8, 0, 2, 1>(),
                                          row<256, 128, 64, 8, 4, 2, 1>(),
                                          row<256, 128, 64, 8, 8, 2, 1>(),
                                          row<256, 128, 64, 8, 8, 1, 1>(),
                                          row<32, 128, 128, 4, 2, 2, 2>(),
                                          row<32, 128, 64, 4, 2, 2, 2>(),
                                          row<32, 128, 64, 4, 2, 2, 3>(),
                                          row<96, 128, 64, 4, 0, 1, 2>(),
                                          row<96, 128, 64, 4, 0, 2, 2>(),
                                          row<96, 128, 64, 4, 2, 1, 2>(),
                                          row<192, 64, 64, 4, 0, 1, 2>(),
                                          row<192, 64, 64, 4, 6, 1, 2>(),
                                          row<192, 64, 64, 4, 12, 1, 2>(),
                                          row<192, 64, 32, 4, 12, 2, 2>(),
                                          row<192, 128, 64, 8, 6, 2, 1>()};

}  // namespace gpu::v7_tuned

int main(int argc, char** argv) {
  return attn::sweep::main("sweep_04_flash_v2", gpu::v7_tuned::kRows, "   M   N warps kept stages /SM", argc, argv);
}
