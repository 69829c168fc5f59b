// sweep_04_flash_v2: the kernel of v7_tuned with other tiles, timed; v7's own are chosen from what this prints.
//
//     sweep_04_flash_v2 [--head-dim D] [--causal] [--repeat R]
//
// 16384 tokens, 2048 / d heads, bf16. A row is a tile: B_r, B_c, warps, of how many times 16 columns of Q the
// fragments stay in registers, stages, blocks an SM; registers and spilled bytes of a thread; then the median of R
// launches at each length, and how far O is from that of the first tile (NaN: not all of it was written).
#define ATTN_SWEEP
#include "v7_tuned.cu"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "attn/device.h"

namespace gpu::v7_tuned {
namespace {

struct Row {
  int head_dim, block_m, block_n, warps, kept, stages, blocks_per_sm;
  Status (*launch)(const Arguments&);
  const void* kernel;
};
template <int... kTile>
Row row() {
  using T = Tile<kTile...>;
  return {T::kHeadDim, T::kBlockM, T::kBlockN, T::kNumWarps, T::kKept, T::kStages, T::kBlocksPerSm,
          launch<__nv_bfloat16, T, false>,
          reinterpret_cast<const void*>(&attention_kernel<__nv_bfloat16, T, false>)};
}

//                        d    M    N  warps kept, stages, blocks an SM
const Row kRows[] = {row<64, 128, 128, 4, 0, 1, 2>(),  // FlashAttention-2's
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

constexpr int64_t kTokens = 16384, kWidth = 2048;

struct Tensor {
  DeviceBuffer buffer{Backend::gpu, "tensor", kTokens * kWidth * 2};
  std::vector<__nv_bfloat16> host = std::vector<__nv_bfloat16>(kTokens * kWidth);
  explicit Tensor(unsigned seed) {  // normal, as most speeds are given for: power depends on what is multiplied
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<__nv_bfloat16> some(1'000'003);
    for (auto& x : some) x = __float2bfloat16_rn(normal(random));
    for (std::size_t i = 0; i < host.size(); ++i) host[i] = some[i % some.size()];
    buffer.upload(host.data());
  }
};

double differs(const std::vector<__nv_bfloat16>& a, const std::vector<__nv_bfloat16>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); i += 7) {
    const double d = std::abs(double(__bfloat162float(a[i])) - double(__bfloat162float(b[i])));
    if (!(d <= most)) most = d;
    if (std::isnan(d)) break;
  }
  return most;
}

int sweep(int head_dim, bool causal, int repeat) {
  Tensor q(1), k(2), v(3), o(4);
  DeviceBuffer lse(Backend::gpu, "lse", kTokens * kWidth / 32 * 4);
  GpuTimer timer;
  const int lengths[] = {512, 2048, 8192, 16384};
  std::printf("  d mask      M   N warps kept stages /SM regs spill");
  for (const int n : lengths) std::printf(" | N=%-5d ms TFLOP/s", n);
  std::printf(" | differs\n");
  std::vector<std::vector<__nv_bfloat16>> first(std::size(lengths));
  int last_dim = 0;
  for (const Row& r : kRows) {
    if (head_dim != 0 && r.head_dim != head_dim) continue;
    cudaFuncAttributes attributes{};
    cudaFuncGetAttributes(&attributes, r.kernel);
    std::printf("%3d %-6s %4d %3d %5d %4d %6d %3d %4d %5zu", r.head_dim, causal ? "causal" : "full", r.block_m,
                r.block_n, r.warps, r.kept, r.stages, r.blocks_per_sm, attributes.numRegs,
                attributes.localSizeBytes);
    double most = 0;
    for (std::size_t l = 0; l < std::size(lengths); ++l) {
      Problem p;
      p.seqlen_q = p.seqlen_k = lengths[l];
      p.batch = kTokens / lengths[l];
      p.heads = p.kv_heads = kWidth / r.head_dim;
      p.head_dim = r.head_dim;
      p.dtype = DType::bf16;
      p.causal = causal;
      p.finish();
      Arguments args(p, Backend::gpu);
      args.bind("q", q.buffer.data());
      args.bind("k", k.buffer.data());
      args.bind("v", v.buffer.data());
      args.bind("o", o.buffer.data());
      args.bind("lse", lse.data());
      o.buffer.poison();
      std::vector<double> seconds;
      for (int i = -3; i < repeat; ++i) {
        Sample sample;
        if (const Status s = timer.time(args, r.launch, sample); !s.ok()) {
          std::printf("\n%s\n", s.message.c_str());
          return 4;
        }
        if (i >= 0) seconds.push_back(sample.seconds);
      }
      std::sort(seconds.begin(), seconds.end());
      const double median = seconds[seconds.size() / 2];
      const double flop = 4.0 * kTokens * lengths[l] * kWidth / (causal ? 2 : 1);
      std::printf(" | %10.4f %7.1f", median * 1e3, flop / median * 1e-12);
      o.buffer.download(o.host.data());
      if (r.head_dim != last_dim) first[l] = o.host;
      const double d = differs(o.host, first[l]);
      if (!(d <= most)) most = d;
    }
    last_dim = r.head_dim;
    std::printf(" | %.2g\n", most);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace gpu::v7_tuned

int main(int argc, char** argv) {
  int head_dim = 0, repeat = 20;
  bool causal = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--causal") == 0) {
      causal = true;
    } else if (std::strcmp(argv[i], "--head-dim") == 0 && i + 1 < argc) {
      head_dim = std::atoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--repeat") == 0 && i + 1 < argc) {
      repeat = std::max(1, std::atoi(argv[++i]));
    } else {
      std::fprintf(stderr, "sweep_04_flash_v2 [--head-dim D] [--causal] [--repeat R]\n");
      return 2;
    }
  }
  if (!attn::gpu_info().available) {
    std::printf("no GPU (%s): a sweep needs one\n", attn::gpu_info().error.c_str());
    return 77;
  }
  try {
    return gpu::v7_tuned::sweep(head_dim, causal, repeat);
  } catch (const attn::DeviceError& e) {
    std::fprintf(stderr, "sweep_04_flash_v2: %s\n", e.what());
    return 4;
  }
}
