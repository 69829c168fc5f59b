// sweep_backward_06_flash_v3_hopper: times b7_dependent_launches with other pipelines and register
// counts. Tiles are fixed: a warpgroup has 64 keys, and 64 x 64 elements of dQ.
//
//     sweep_backward_06_flash_v3_hopper [--head-dim D] [--causal] [--repeat R]
//
// Columns: stages of Q and of dO; buffers of K and V; early: dS is handed over by an mbarrier;
// body: one loop body for masked and unmasked tiles; registers of a consumer thread. Times include
// all three kernels; the rest is in attn/sweep.h.
#define b7_dependent_launches b7_sweep  // the chapter's own instantiation keeps this name
#include "b7_dependent_launches.cu"
#undef b7_dependent_launches

#include "attn/sweep.h"

ATTN_DECLARE_STEP(v14_tuned);

namespace gpu::b7_sweep {

template <int kHeadDim, Tuning kTuning, int kRegisters>
struct Swept : Tuned<kHeadDim, kTuning> {
  static constexpr int kConsumerRegisters = kRegisters, kProducerRegisters = 504 - 2 * kRegisters;
};
template <int kHeadDim, Tuning kTuning, int kRegisters = 232>
attn::sweep::Row row() {
  using T = Swept<kHeadDim, kTuning, kRegisters>;
  static_assert(sizeof(SharedStorage<__nv_bfloat16, T>) <= 227 * 1024, "does not fit");
  char text[64];
  std::snprintf(text, sizeof text, "%6d %2d %5d %4d %9d", T::kStages, T::kKvBuffers,
                T::kEarlyArrival, T::kOneBody, kRegisters);
  return {kHeadDim, text, launch<__nv_bfloat16, T>,
          reinterpret_cast<const void*>(&attention_backward_kernel<__nv_bfloat16, T>)};
}
// The first row of each head dim is b7's. Tuning: B_r, stages, buffers, early arrival, one body.
const std::vector<attn::sweep::Row> kRows{
    row<64, Tuning{128, 2, 2, true, true}>(),
    row<64, Tuning{128, 2, 2, true, true}, 240>(),
    row<64, Tuning{128, 2, 2, true, false}>(),
    row<64, Tuning{128, 2, 2, false, true}>(),
    row<64, Tuning{128, 2, 2, false, false}>(),
    row<64, Tuning{128, 2, 1, true, true}>(),
    row<64, Tuning{128, 3, 1, true, true}>(),
    row<64, Tuning{128, 3, 1, false, true}>(),
    row<128, Tuning{64, 2, 1, false, false}>(),
    row<128, Tuning{64, 2, 1, false, false}, 240>(),
    row<128, Tuning{64, 2, 1, false, true}>(),
    row<128, Tuning{64, 2, 1, true, false}>(),
    row<128, Tuning{64, 2, 1, true, true}>(),
    row<128, Tuning{64, 2, 2, false, false}>(),
    row<128, Tuning{64, 3, 1, false, false}>(),
    row<128, Tuning{64, 3, 1, true, false}>(),
};
// O and lse. b7 leaves a count where v14 expects 0.
attn::Status forward(const attn::Arguments& args) {
  cudaMemsetAsync(args.out<unsigned>("tile_counter"), 0, 4,
                  static_cast<cudaStream_t>(args.stream));
  return ::gpu::v14_tuned::launch(args);
}
const attn::sweep::Pass kBackward{{"q", "k", "v", "o", "do"},
                                  {"dq", "dk", "dv"},
                                  {{"lse", attn::sweep::kMaxRows * 4},
                                   {"rows", attn::sweep::kMaxRows * 8},
                                   {"tile_counter", 4},
                                   {"accum", attn::sweep::kTokens * attn::sweep::kWidth * 4}},
                                  10,
                                  forward};

}  // namespace gpu::b7_sweep

int main(int argc, char** argv) {
  return attn::sweep::main("sweep_backward_06_flash_v3_hopper", gpu::b7_sweep::kRows,
                           "stages KV early body registers", argc, argv, gpu::b7_sweep::kBackward);
}
