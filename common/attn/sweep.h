/// \file
/// Times one forward kernel with several tiles: what a chapter's sweep.cu is made of. It runs on a GPU alone.
///
/// 16384 tokens and 2048 / d heads, bf16. A row is a tile, as its chapter names it; registers and spilled bytes of a
/// thread; then the speed of the median launch at each length, and how far O is from that of the first tile of its head
/// dim (NaN: not all of it was written).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "attn/device.h"
#include "attn/kernel.h"

namespace attn::sweep {

struct Row {
  int head_dim;
  std::string tile;  ///< below the chapter's own heading
  Status (*launch)(const Arguments&);
  const void* kernel;
};

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

inline double differs(const std::vector<__nv_bfloat16>& a, const std::vector<__nv_bfloat16>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); i += 7) {
    const double d = std::abs(double(__bfloat162float(a[i])) - double(__bfloat162float(b[i])));
    if (!(d <= most)) most = d;
    if (std::isnan(d)) break;
  }
  return most;
}

inline int run(const std::vector<Row>& rows, const char* heading, int head_dim, bool causal, int repeat) {
  Tensor q(1), k(2), v(3), o(4);
  DeviceBuffer lse(Backend::gpu, "lse", kTokens * kWidth / 32 * 4);
  DeviceBuffer queue(Backend::gpu, "queue", 4);
  const unsigned nothing = 0;
  queue.upload(&nothing);
  GpuTimer timer;
  const int lengths[] = {512, 1024, 2048, 4096, 8192, 16384};
  std::printf("  d mask   %s regs spill", heading);
  std::printf(" | TFLOP/s at N =");
  for (const int n : lengths) std::printf(" %5d", n);
  std::printf(" | differs\n");
  std::vector<std::vector<__nv_bfloat16>> first(std::size(lengths));
  int last_dim = 0;
  for (const Row& r : rows) {
    if (head_dim != 0 && r.head_dim != head_dim) continue;
    cudaFuncAttributes attributes{};
    cudaFuncGetAttributes(&attributes, r.kernel);
    std::printf("%3d %-6s %s %4d %5zu", r.head_dim, causal ? "causal" : "full", r.tile.c_str(), attributes.numRegs,
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
      args.bind("queue", queue.data());
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
      std::printf(l == 0 ? " |              %7.1f" : " %5.1f", flop / median * 1e-12);
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

/// The program: PROGRAM [--head-dim D] [--causal] [--repeat R]. Exit status 0, 2 for a mistake on the command line, 4
/// for an error of the GPU, 77 where there is none.
inline int main(const char* program, const std::vector<Row>& rows, const char* heading, int argc, char** argv) {
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
      std::fprintf(stderr, "%s [--head-dim D] [--causal] [--repeat R]\n", program);
      return 2;
    }
  }
  if (!gpu_info().available) {
    std::printf("no GPU (%s): a sweep needs one\n", gpu_info().error.c_str());
    return 77;
  }
  try {
    return run(rows, heading, head_dim, causal, repeat);
  } catch (const DeviceError& e) {
    std::fprintf(stderr, "%s: %s\n", program, e.what());
    return 4;
  }
}

}  // namespace attn::sweep
