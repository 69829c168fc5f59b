// sweep_fp8_06_flash_v3_hopper: the attention kernels of f1 and f5 with other tiles, timed without what
// runs before them.
//
//     sweep_fp8_06_flash_v3_hopper [f1|f5] [--head-dim D] [--causal] [--repeat R]
//
// A row: B_c, stages of K and V, of Q; the rest is in attn/sweep.h.
#include "f1_fp8.cu"
#include "f5_incoherent.cu"

#include "attn/sweep.h"

namespace gpu::fp8_sweep {

template <class Base, int kKeys, int kKvStages, int kQs>
struct Swept : Base {
  static constexpr int kBlockN = kKeys, kStages = kKvStages, kQStages = kQs;
};
template <class Config>
std::string tile_of() {
  char tile[64];
  std::snprintf(tile, sizeof tile, "%3d %6d %2d", Config::kBlockN, Config::kStages, Config::kQStages);
  return tile;
}

template <int kHeadDim, int kBlockN, int kStages = 2, int kQStages = 2>
attn::sweep::Row f1() {
  using C = Swept<f1_fp8::Config<kHeadDim>, kBlockN, kStages, kQStages>;
  return {kHeadDim, tile_of<C>(), f1_fp8::launch_attention<C>,
          reinterpret_cast<const void*>(&f1_fp8::attention_kernel<C>)};
}
const std::vector<attn::sweep::Row> kF1{
    f1<64, 128>(),  f1<64, 128, 3>(), f1<64, 128, 4>(),    f1<64, 192>(),  f1<64, 192, 3>(),
    f1<64, 256>(),  f1<128, 128>(),   f1<128, 128, 3>(),   f1<128, 192>(), f1<128, 192, 3>(),
    f1<128, 192, 2, 1>(), f1<256, 64>(), f1<256, 64, 3, 1>(), f1<256, 128>(), f1<256, 128, 2, 1>()};

template <int kHeadDim, int kBlockN, int kStages = 2, int kQStages = 2>
attn::sweep::Row f5() {
  using C = Swept<f5_incoherent::Config<kHeadDim>, kBlockN, kStages, kQStages>;
  return {kHeadDim, tile_of<C>(), f5_incoherent::launch_attention<C>,
          reinterpret_cast<const void*>(&f5_incoherent::attention_kernel<C>)};
}
const std::vector<attn::sweep::Row> kF5{f5<64, 128>(),     f5<64, 128, 3>(),  f5<64, 128, 4>(),
                                  f5<128, 128>(),    f5<128, 128, 3>(), f5<128, 64, 4>(),
                                  f5<128, 128, 3, 1>(), f5<256, 64>(),  f5<256, 64, 3, 1>()};

attn::Status quantise_f1(const attn::Arguments& args) { return gpu::hopper::quantise_tensors(args); }
attn::Status quantise_f5(const attn::Arguments& args) {
  switch (args.problem.head_dim) {
    case 64: return gpu::hopper::quantise_tiles<true, 64>(args);
    case 128: return gpu::hopper::quantise_tiles<true, 128>(args);
    default: return gpu::hopper::quantise_tiles<true, 256>(args);
  }
}
// What is quantised has a byte for each number; scales are a few for each head.
attn::sweep::Pass pass_of(attn::Status (*quantise)(const attn::Arguments&)) {
  constexpr int64_t kBytes = attn::sweep::kTokens * attn::sweep::kWidth, kScales = 4 * kBytes / 64 / 128;
  return {{"q", "k", "v"},
          {"o"},
          {{"lse", attn::sweep::kMostRows * 4}, {"tile_counter", 4}, {"q8", kBytes}, {"k8", kBytes}, {"v8", kBytes},
           {"partial", 3 * 256 * 4}, {"descale", 12}, {"q_descale", kScales}, {"k_descale", kScales},
           {"v_descale", kScales}},
          4,
          quantise};
}

}  // namespace gpu::fp8_sweep

int main(int argc, char** argv) {
  using namespace gpu::fp8_sweep;
  const bool last = argc > 1 && std::strcmp(argv[1], "f5") == 0;
  const bool named = last || (argc > 1 && std::strcmp(argv[1], "f1") == 0);
  return attn::sweep::main("sweep_fp8_06_flash_v3_hopper [f1|f5]", last ? kF5 : kF1, "B_c stages Qs",
                           argc - named, argv + named, pass_of(last ? quantise_f5 : quantise_f1));
}
