// sweep_backward_04_flash_v2: the kernel of b2_tuned with other tiles, timed; b2's own are chosen from this.
//
//     sweep_backward_04_flash_v2 [--head-dim D] [--causal] [--repeat R]
//
// 16384 tokens, 2048 / d heads, bf16. The first row of a head dim is b1_kv_parallel where it has that head dim. The
// others are tiles: B_r, B_c, keys a warp, stages of Q and dO, buffers of dS, blocks an SM, whether blocks begin at
// different rows, whether the warps that own P add dQ later, MiB of a section of heads (0: no sections); warps;
// registers and spilled bytes of a thread. Then the median of R launches (all three kernels) at each length, and how
// far dQ, dK and dV are from those of the first row (NaN: not all was written).
#include <cstdint>
namespace {
int64_t kSectionBytes = 24 << 20;
}
#define ATTN_SWEEP
#define b2_tuned b2_sweep  // beside the b2_tuned of the chapter
#include "b2_tuned.cu"
#undef b2_tuned

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "attn/device.h"

ATTN_DECLARE_STEP(v7_tuned);
ATTN_DECLARE_STEP(b1_kv_parallel);

namespace gpu::b2_sweep {
namespace {

struct Row {
  int head_dim;
  char text[80];
  int64_t section_mb;
  Status (*launch)(const Arguments&);
  const void* kernel;
};
template <int d, int M, int N, int keys, int stages, int buffers, int blocks, bool rotate, bool stagger = false>
Row row(int section_mb) {
  using T = Tile<d, M, N, keys, stages, buffers, blocks, rotate, stagger>;
  static_assert(blocks * (sizeof(SharedStorage<__nv_bfloat16, T>) + 1024) <= 228 * 1024);
  Row r{d, {}, section_mb, launch<__nv_bfloat16, T, false>,
        reinterpret_cast<const void*>(&attention_backward_kernel<__nv_bfloat16, T, false>)};
  std::snprintf(r.text, sizeof r.text, "%4d %3d %4d %6d %7d %3d %6d %7d %7d %5d", M, N, keys, stages, buffers, blocks,
                rotate, stagger, section_mb, T::kNumWarps);
  return r;
}
Row parent(int d) { return {d, "b1_kv_parallel", 0, ::gpu::b1_kv_parallel::launch, nullptr}; }

//                        d    M    N  keys a warp, stages, buffers, blocks an SM, rotate, stagger
const Row kRows[] = {parent(128),
                     row<128, 64, 128, 32, 2, 2, 1, true>(24),
                     row<128, 64, 128, 32, 2, 2, 1, true, true>(24),
                     row<128, 64, 128, 32, 2, 2, 1, false>(24),
                     row<128, 64, 128, 32, 2, 2, 1, true>(0),
                     row<128, 64, 128, 32, 2, 2, 1, false>(0),
                     row<128, 64, 128, 32, 2, 1, 1, true>(24),
                     row<128, 64, 128, 32, 1, 1, 1, true>(24),
                     row<128, 32, 128, 32, 2, 2, 1, true>(24),
                     row<128, 64, 64, 32, 2, 1, 2, true>(24),
                     row<128, 32, 64, 32, 2, 2, 2, true>(24),
                     row<128, 64, 128, 16, 2, 2, 1, true>(24),
                     row<128, 64, 64, 16, 2, 1, 2, true>(24),
                     parent(64),
                     row<64, 128, 128, 32, 2, 2, 1, true>(24),
                     row<64, 128, 128, 32, 2, 2, 1, true, true>(24),
                     row<64, 128, 128, 32, 2, 2, 1, false>(24),
                     row<64, 128, 128, 32, 2, 2, 1, true>(0),
                     row<64, 128, 128, 32, 2, 2, 1, false>(0),
                     row<64, 128, 128, 32, 2, 1, 1, true>(24),
                     row<64, 64, 128, 32, 2, 2, 1, true>(24),
                     row<64, 64, 128, 32, 2, 2, 1, true, true>(24),
                     row<64, 64, 64, 32, 2, 2, 2, true>(24),
                     row<64, 64, 64, 32, 2, 2, 2, true, true>(24),
                     row<64, 64, 64, 32, 2, 2, 3, true>(24),
                     row<64, 128, 64, 32, 1, 1, 2, true>(24),
                     row<64, 64, 128, 16, 2, 2, 1, true>(24),
                     row<64, 128, 128, 16, 2, 2, 1, true>(24),
                     row<64, 64, 64, 16, 2, 2, 2, true>(24),
                     row<64, 32, 128, 32, 2, 2, 2, true>(24),
                     row<256, 64, 64, 16, 2, 1, 1, true>(24),
                     row<256, 64, 64, 16, 2, 1, 1, true>(0),
                     row<256, 64, 64, 16, 1, 1, 1, true>(24),
                     row<256, 32, 64, 16, 2, 2, 1, true>(24),
                     row<256, 32, 64, 16, 2, 2, 1, true, true>(24),
                     row<32, 128, 128, 32, 2, 2, 1, true>(24),
                     row<32, 64, 128, 32, 2, 2, 2, true>(24),
                     row<32, 64, 64, 32, 2, 2, 3, true>(24),
                     row<32, 128, 128, 16, 2, 1, 1, true>(24),
                     row<96, 64, 128, 32, 2, 2, 1, true>(24),
                     row<96, 64, 64, 32, 2, 2, 2, true>(24),
                     row<192, 64, 64, 16, 2, 2, 1, true>(24),
                     row<192, 64, 64, 16, 2, 2, 1, true, true>(24),
                     row<192, 64, 96, 16, 2, 2, 1, true>(24)};

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
  Tensor q(1), k(2), v(3), o(4), d_o(5);
  Tensor gradients[3] = {Tensor(6), Tensor(7), Tensor(8)};
  const char* const names[3] = {"dq", "dk", "dv"};
  DeviceBuffer lse(Backend::gpu, "lse", kTokens * kWidth / 32 * 4);
  DeviceBuffer rows(Backend::gpu, "rows", kTokens * kWidth / 32 * 8);
  DeviceBuffer accum(Backend::gpu, "accum", kTokens * kWidth * 4);
  GpuTimer timer;
  const int lengths[] = {512, 2048, 8192, 16384};
  std::printf("  d mask      M   N keys stages buffers /SM rotate stagger section warps regs spill");
  for (const int n : lengths) std::printf(" | N=%-5d ms TFLOP/s", n);
  std::printf(" | differs\n");
  std::vector<std::vector<__nv_bfloat16>> first(3 * std::size(lengths));
  int last_dim = 0;
  for (const Row& r : kRows) {
    if (head_dim != 0 && r.head_dim != head_dim) continue;
    cudaFuncAttributes attributes{};
    if (r.kernel) cudaFuncGetAttributes(&attributes, r.kernel);
    std::printf("%3d %-6s %-61s %4d %5zu", r.head_dim, causal ? "causal" : "full", r.text, attributes.numRegs,
                attributes.localSizeBytes);
    kSectionBytes = r.section_mb == 0 ? INT64_MAX : r.section_mb << 20;
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
      args.bind("do", d_o.buffer.data());
      args.bind("lse", lse.data());
      args.bind("rows", rows.data());
      args.bind("dot", rows.data());  // b1's
      args.bind("accum", accum.data());
      for (int g = 0; g < 3; ++g) {
        gradients[g].buffer.poison();
        args.bind(names[g], gradients[g].buffer.data());
      }
      std::vector<double> seconds;
      for (int i = -4; i < repeat; ++i) {
        Sample sample;
        if (const Status s = timer.time(args, i == -4 ? ::gpu::v7_tuned::launch : r.launch, sample); !s.ok()) {
          std::printf("\n%s\n", s.message.c_str());
          return 4;
        }
        if (i >= 0) seconds.push_back(sample.seconds);
      }
      std::sort(seconds.begin(), seconds.end());
      const double median = seconds[seconds.size() / 2];
      const double flop = 10.0 * kTokens * lengths[l] * kWidth / (causal ? 2 : 1);
      std::printf(" | %10.4f %7.1f", median * 1e3, flop / median * 1e-12);
      for (std::size_t g = 0; g < 3; ++g) {
        Tensor& t = gradients[g];
        t.buffer.download(t.host.data());
        if (r.head_dim != last_dim) first[3 * l + g] = t.host;
        const double d = differs(t.host, first[3 * l + g]);
        if (!(d <= most)) most = d;
      }
    }
    last_dim = r.head_dim;
    std::printf(" | %.2g\n", most);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace gpu::b2_sweep

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
      std::fprintf(stderr, "sweep_backward_04_flash_v2 [--head-dim D] [--causal] [--repeat R]\n");
      return 2;
    }
  }
  if (!attn::gpu_info().available) {
    std::printf("no GPU (%s): a sweep needs one\n", attn::gpu_info().error.c_str());
    return 77;
  }
  try {
    return gpu::b2_sweep::sweep(head_dim, causal, repeat);
  } catch (const attn::DeviceError& e) {
    std::fprintf(stderr, "sweep_backward_04_flash_v2: %s\n", e.what());
    return 4;
  }
}
