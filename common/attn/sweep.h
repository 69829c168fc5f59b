/// \file
/// Sweep over tile configurations: the common part of the chapters' host/sweep.cu. Needs a GPU.
///
/// 16384 tokens and 2048 / d heads, bf16. One row per configuration, as its chapter names it:
/// registers and spilled bytes per thread; the speed of the median launch at each length; and the
/// difference of the outputs from those of the first row of its head dim (NaN: not all was
/// written).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device/device.h"
#include "attn/kernel.h"

namespace attn::sweep {

constexpr int64_t kTokens = 16384, kWidth = 2048, kLengths[] = {512, 1024, 2048, 4096, 8192, 16384};
constexpr int64_t kMaxRows = kTokens * kWidth / 32;  ///< over all heads, for the smallest head dim

struct Row {
  int head_dim;
  std::string tile;  ///< printed below the chapter's heading
  Status (*launch)(const Arguments&);
  const void* kernel;  ///< kernel whose registers are printed; null: none
};

/// Inputs and outputs of the kernels.
struct Pass {
  std::vector<std::string> inputs, outputs;              ///< [tokens, kWidth] in bf16
  std::vector<std::pair<std::string, int64_t>> scratch;  ///< bytes of each, initially 0
  /// per score and column of a head
  double flop;
  Status (*prepare)(const Arguments&) = nullptr;  ///< called once before, untimed
};
/// `tile_counter`: for kernels with a dynamic tile scheduler.
inline const Pass kForward{{"q", "k", "v"}, {"o"}, {{"lse", kMaxRows * 4}, {"tile_counter", 4}}, 4};

struct Tensor {
  DeviceBuffer buffer{Backend::gpu, "tensor", kTokens* kWidth * 2};
  std::vector<__nv_bfloat16> host = std::vector<__nv_bfloat16>(kTokens * kWidth);
  // normally distributed, as in most published speeds: power depends on the data
  explicit Tensor(unsigned seed) {
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

inline int run(const Pass& pass, const std::vector<Row>& rows, const char* heading, int head_dim,
               bool causal, int repeat) {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, DeviceBuffer> scratch;
  for (const auto* names : {&pass.inputs, &pass.outputs})
    for (const std::string& name : *names)
      tensors.try_emplace(name, static_cast<unsigned>(tensors.size() + 1));
  for (const auto& [name, bytes] : pass.scratch)
    scratch.try_emplace(name, Backend::gpu, name, bytes)
        .first->second.upload(std::vector<std::byte>(static_cast<std::size_t>(bytes)).data());
  GpuTimer timer;
  std::printf("  d mask   %s regs spill", heading);
  std::printf(" | TFLOP/s at N =");
  for (const int64_t n : kLengths) std::printf(" %5d", static_cast<int>(n));
  std::printf(" | differs\n");
  // by length and output
  std::map<std::pair<int64_t, std::string>, std::vector<__nv_bfloat16>> first;
  int last_dim = 0;
  for (const Row& r : rows) {
    if (head_dim != 0 && r.head_dim != head_dim) continue;
    cudaFuncAttributes attributes{};
    if (r.kernel != nullptr) cudaFuncGetAttributes(&attributes, r.kernel);
    std::printf("%3d %-6s %s %4d %5zu", r.head_dim, causal ? "causal" : "full", r.tile.c_str(),
                attributes.numRegs, attributes.localSizeBytes);
    double most = 0;
    for (const int64_t n : kLengths) {
      Problem p;
      p.seqlen_q = p.seqlen_k = n;
      p.batch = kTokens / n;
      p.heads = p.kv_heads = kWidth / r.head_dim;
      p.head_dim = r.head_dim;
      p.dtype = DType::bf16;
      p.causal = causal;
      p.finish();
      Arguments args(p, Backend::gpu);
      for (auto& [name, tensor] : tensors) args.bind(name, tensor.buffer.data());
      for (auto& [name, buffer] : scratch) args.bind(name, buffer.data());
      for (const std::string& name : pass.outputs) tensors.at(name).buffer.poison();
      std::vector<double> seconds;
      for (int i = -4; i < repeat; ++i) {
        Sample sample;
        if (i == -4 && pass.prepare == nullptr) continue;
        if (const Status s = timer.time(args, i == -4 ? pass.prepare : r.launch, sample); !s.ok()) {
          std::printf("\n%s\n", s.message.c_str());
          return 4;
        }
        if (i >= 0) seconds.push_back(sample.seconds);
      }
      std::sort(seconds.begin(), seconds.end());
      const double median = seconds[seconds.size() / 2];
      const double flop = pass.flop * double(kTokens * n * kWidth) / (causal ? 2 : 1);
      std::printf(n == kLengths[0] ? " |              %7.1f" : " %5.1f", flop / median * 1e-12);
      for (const std::string& name : pass.outputs) {
        Tensor& t = tensors.at(name);
        t.buffer.download(t.host.data());
        if (r.head_dim != last_dim) first[{n, name}] = t.host;
        const double d = differs(t.host, first.at({n, name}));
        if (!(d <= most)) most = d;
      }
    }
    last_dim = r.head_dim;
    std::printf(" | %.2g\n", most);
    std::fflush(stdout);
  }
  return 0;
}

/// Main program: PROGRAM [--head-dim D] [--causal] [--repeat R]. Exit status 0; 2 for a
/// command-line error, 4 for a GPU error, 77 without a GPU.
inline int main(const char* program, const std::vector<Row>& rows, const char* heading, int argc,
                char** argv, const Pass& pass = kForward) {
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
    return run(pass, rows, heading, head_dim, causal, repeat);
  } catch (const DeviceError& e) {
    std::fprintf(stderr, "%s: %s\n", program, e.what());
    return 4;
  }
}

}  // namespace attn::sweep
