// sweep_fp8_06_flash_v3_hopper: times the attention kernels of f1 and f4 with other tile sizes,
// without the quantisation. f5 launches f4's kernel, on inputs that its own pass has rotated.
//
//     sweep_fp8_06_flash_v3_hopper [f1|f5] [--head-dim D] [--causal] [--repeat R]
//
// Columns: B_r, B_c, stages of K and V, buffers for Q, ping-pong; the rest is described in
// attn/sweep.h.
#include "f1_fp8.cu"
#include "f4_block_scales.cu"

#include "attn/sweep.h"

namespace gpu::fp8_sweep {

struct Tile {
  int keys, stages = 2, q_stages = 2;
  bool pingpong = true;
  int consumers = 2;
};
template <class Base, Tile kTile>
struct Swept : Base {
  static constexpr int kBlockN = kTile.keys, kStages = kTile.stages, kQStages = kTile.q_stages;
  static constexpr bool kUsesPingPong = kTile.pingpong;
  static constexpr int kNumConsumers = kTile.consumers, kBlockM = 64 * kNumConsumers;
  static constexpr int kThreads = 128 * (kNumConsumers + 1);
  static constexpr int kProducerRegisters = kNumConsumers == 3 ? 32 : Base::kProducerRegisters;
  static constexpr int kConsumerRegisters = kNumConsumers == 3 ? 160 : Base::kConsumerRegisters;
};
template <class Config>
std::string tile_of() {
  char tile[64];
  std::snprintf(tile, sizeof tile, "%3d %3d %6d %2d %s", Config::kBlockM, Config::kBlockN,
                Config::kStages, Config::kQStages, Config::kUsesPingPong ? "pp" : "- ");
  return tile;
}

template <int kHeadDim, Tile kTile>
attn::sweep::Row f1() {
  using C = Swept<f1_fp8::Config<kHeadDim>, kTile>;
  return {kHeadDim, tile_of<C>(), f1_fp8::launch_attention<C>,
          reinterpret_cast<const void*>(&f1_fp8::attention_kernel<C>)};
}
const std::vector<attn::sweep::Row> kF1{
    f1<64, Tile{128}>(),
    f1<64, Tile{128, 3, 2, false}>(),
    f1<64, Tile{192}>(),
    f1<64, Tile{192, 2, 2, false}>(),
    f1<64, Tile{256}>(),
    f1<64, Tile{128, 3, 2, true, 3}>(),
    f1<64, Tile{128, 3, 2, false, 3}>(),
    f1<64, Tile{192, 3, 2, true, 3}>(),
    f1<128, Tile{128, 3}>(),
    f1<128, Tile{128, 3, 2, false}>(),
    f1<128, Tile{192}>(),
    f1<128, Tile{192, 2, 2, false}>(),
    f1<256, Tile{64, 3, 1}>(),
    f1<256, Tile{128}>(),
    f1<256, Tile{128, 2, 2, false}>(),
    f1<256, Tile{128, 2, 1, false}>(),
};

template <int kHeadDim, Tile kTile>
attn::sweep::Row f5() {
  using C = Swept<f4_block_scales::Config<kHeadDim>, kTile>;
  return {kHeadDim, tile_of<C>(), f4_block_scales::launch_attention<C>,
          reinterpret_cast<const void*>(&f4_block_scales::attention_kernel<C>)};
}
const std::vector<attn::sweep::Row> kF5{
    f5<64, Tile{128}>(),
    f5<64, Tile{128, 3}>(),
    f5<64, Tile{128, 3, 2, false}>(),
    f5<64, Tile{64, 4, 2, false}>(),
    f5<128, Tile{128}>(),
    f5<128, Tile{128, 3, 1}>(),
    f5<128, Tile{128, 2, 2, false}>(),
    f5<128, Tile{64, 4, 2, false}>(),
    f5<256, Tile{64}>(),
    f5<256, Tile{64, 2, 2, false}>(),
    f5<256, Tile{64, 3, 1, false}>(),
};

attn::Status quantise_f1(const attn::Arguments& args) {
  return gpu::hopper::quantise_tensors(args);
}
attn::Status quantise_f5(const attn::Arguments& args) {
  switch (args.problem.head_dim) {
    case 64: return gpu::hopper::quantise_tiles<true, 64>(args);
    case 128: return gpu::hopper::quantise_tiles<true, 128>(args);
    default: return gpu::hopper::quantise_tiles<true, 256>(args);
  }
}
// Quantised tensors have one byte per element; there are a few scales per head.
attn::sweep::Pass pass_of(attn::Status (*quantise)(const attn::Arguments&)) {
  constexpr int64_t kBytes = attn::sweep::kTokens * attn::sweep::kWidth,
                    kScales = 4 * kBytes / 64 / 128;
  return {{"q", "k", "v"},
          {"o"},
          {{"lse", attn::sweep::kMaxRows * 4},
           {"tile_counter", 4},
           {"q8", kBytes},
           {"k8", kBytes},
           {"v8", kBytes},
           {"partial", 3 * 256 * 4},
           {"descale", 12},
           {"q_descale", kScales},
           {"k_descale", kScales},
           {"v_descale", kScales}},
          4,
          quantise};
}

}  // namespace gpu::fp8_sweep

int main(int argc, char** argv) {
  using namespace gpu::fp8_sweep;
  const bool last = argc > 1 && std::strcmp(argv[1], "f5") == 0;
  const bool named = last || (argc > 1 && std::strcmp(argv[1], "f1") == 0);
  return attn::sweep::main("sweep_fp8_06_flash_v3_hopper [f1|f5]", last ? kF5 : kF1,
                           "B_r B_c stages Qs ping-pong", argc - named, argv + named,
                           pass_of(last ? quantise_f5 : quantise_f1));
}
