// sweep_backward_04_flash_v2: times the kernel of b7_tuned with other tiles. b7's tiles come from
// it.
//
//     sweep_backward_04_flash_v2 [--head-dim D] [--causal] [--repeat R]
//
// The first row of a head dim is b1_kv_parallel, if it supports that head dim. Columns of the other
// rows: B_r, B_c, keys per pair of warps, stages of Q and dO, buffers of dS, blocks per SM, rotated
// rows, staggered dQ, MiB per section of heads (0: no sections); warps. Times include all three
// kernels; the rest is in attn/sweep.h.
#include <cstdint>
namespace {
int64_t kSectionBytes = 32 << 20;
}
#define ATTN_SWEEP
#define b7_tuned b7_sweep  // the chapter's b7_tuned is another instantiation
#include "b7_tuned.cu"
#undef b7_tuned

#include "attn/sweep.h"

ATTN_DECLARE_STEP(v13_tuned);
ATTN_DECLARE_STEP(b1_kv_parallel);

namespace gpu::b7_sweep {
using sweep::Row;

template <class T, int kSectionMb>
Status launch_in_sections(const Arguments& args) {
  kSectionBytes = kSectionMb == 0 ? INT64_MAX : int64_t{kSectionMb} << 20;
  return launch<__nv_bfloat16, T, false>(args);
}
template <int d, int M, int N, int keys, Tuning t = Tuning{}>
Row row(int section_mb = 32) {  // MiB: 32, or 0 for no sections
  using T = Tuned<d, M, N, keys, t>;
  static_assert(t.blocks_per_sm * (sizeof(SharedStorage<__nv_bfloat16, T>) + 1024) <= 228 * 1024);
  char text[80];
  std::snprintf(text, sizeof text, "%4d %3d %4d %6d %7d %3d %6d %7d %7d %5d", M, N, keys, t.stages,
                t.buffers, t.blocks_per_sm, t.rotate, t.stagger, section_mb, T::kNumWarps);
  return {d, text, section_mb == 0 ? launch_in_sections<T, 0> : launch_in_sections<T, 32>,
          reinterpret_cast<const void*>(&attention_backward_kernel<__nv_bfloat16, T, false>)};
}
Row parent(int d) {
  char text[80];
  std::snprintf(text, sizeof text, "%-61s", "b1_kv_parallel");
  return {d, text, ::gpu::b1_kv_parallel::launch, nullptr};
}

//      d, M, N, keys per pair of warps; differences from Tuning{}
const std::vector<Row> kRows{
    parent(128),
    row<128, 64, 128, 32, Tuning{.stagger = false}>(),
    row<128, 64, 128, 32>(),
    row<128, 64, 128, 32, Tuning{.rotate = false, .stagger = false}>(),
    row<128, 64, 128, 32, Tuning{.stagger = false}>(0),
    row<128, 64, 128, 32, Tuning{.rotate = false, .stagger = false}>(0),
    row<128, 64, 128, 32, Tuning{.buffers = 1, .stagger = false}>(),
    row<128, 64, 128, 32, Tuning{.stages = 1, .buffers = 1, .stagger = false}>(),
    row<128, 32, 128, 32, Tuning{.stagger = false}>(),
    row<128, 32, 64, 32, Tuning{.blocks_per_sm = 2, .stagger = false}>(),
    row<128, 64, 128, 16, Tuning{.stagger = false}>(),
    parent(64),
    row<64, 128, 128, 32, Tuning{.stagger = false}>(),
    row<64, 128, 128, 32>(),
    row<64, 64, 128, 32>(),
    row<64, 64, 64, 32, Tuning{.blocks_per_sm = 2}>(),
    row<64, 64, 64, 32, Tuning{.blocks_per_sm = 3, .stagger = false}>(),
    row<64, 64, 64, 32, Tuning{.blocks_per_sm = 3}>(),
    row<64, 32, 128, 32, Tuning{.blocks_per_sm = 2, .stagger = false}>(),
    row<64, 32, 64, 32, Tuning{.blocks_per_sm = 3}>(),
    row<64, 32, 64, 32, Tuning{.blocks_per_sm = 4}>(),
    row<64, 64, 64, 16, Tuning{.blocks_per_sm = 2}>(),
    row<64, 128, 128, 16>(),
    row<256, 64, 64, 16, Tuning{.buffers = 1, .stagger = false}>(),
    row<256, 64, 64, 16, Tuning{.buffers = 1, .stagger = false}>(0),
    row<256, 64, 64, 16, Tuning{.stages = 1, .buffers = 1, .stagger = false}>(),
    row<256, 32, 64, 16, Tuning{.stagger = false}>(),
    row<256, 32, 64, 16>(),
    row<32, 128, 128, 32, Tuning{.stagger = false}>(),
    row<32, 64, 128, 32, Tuning{.blocks_per_sm = 2, .stagger = false}>(),
    row<32, 64, 64, 32, Tuning{.blocks_per_sm = 3, .stagger = false}>(),
    row<32, 128, 128, 16, Tuning{.buffers = 1, .stagger = false}>(),
    row<96, 64, 128, 32, Tuning{.stagger = false}>(),
    row<96, 64, 64, 32, Tuning{.blocks_per_sm = 2, .stagger = false}>(),
    row<192, 64, 64, 16, Tuning{.stagger = false}>(),
    row<192, 64, 64, 16>(),
    row<192, 64, 96, 16, Tuning{.stagger = false}>()};
const sweep::Pass kBackward{{"q", "k", "v", "o", "do"},
                            {"dq", "dk", "dv"},
                            {{"lse", sweep::kMaxRows * 4},
                             {"rows", sweep::kMaxRows * 8},
                             {"accum", sweep::kTokens * sweep::kWidth * 4}},
                            10,
                            ::gpu::v13_tuned::launch};

}  // namespace gpu::b7_sweep

int main(int argc, char** argv) {
  return attn::sweep::main("sweep_backward_04_flash_v2", gpu::b7_sweep::kRows,
                           "   M   N keys stages buffers /SM rotate stagger section warps", argc,
                           argv, gpu::b7_sweep::kBackward);
}
