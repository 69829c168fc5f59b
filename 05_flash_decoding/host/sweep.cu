// sweep_05_flash_decoding: times of all steps, with several numbers of splits.
//
//     sweep_05_flash_decoding [STEP ...]
//     sweep_05_flash_decoding --regret [N [SEED]]
//
// Each row is a problem of the README: the median launch in microseconds with the step's own number
// of splits, that number, and the times with others. bf16, d=128, one query; L2 flushed.
// --regret: v7 on N random problems (default 200). Prints how much longer the model's number of
// splits takes than the best of the search, and a second measurement of the model's number, which
// shows the noise. The model was fitted to the problems of seed 7.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "device/device.h"
#include "kernels/splits.h"
#include "attn/kernel.h"

ATTN_DECLARE_STEP(v1_one_block);
ATTN_DECLARE_STEP(v2_split_kv);
ATTN_DECLARE_STEP(v3_bytes_in_flight);
ATTN_DECLARE_STEP(v4_gqa);
ATTN_DECLARE_STEP(v5_packed_rows);
ATTN_DECLARE_STEP(v6_heuristic);
ATTN_DECLARE_STEP(v7_fused_combine);
ATTN_DECLARE_STEP(v8_stream_k);
ATTN_DECLARE_STEP(v9_eight_warps);
ATTN_DECLARE_STEP(v10_vectorised_combine);
ATTN_DECLARE_STEP(v11_shared_p);
ATTN_DECLARE_STEP(v12_more_rows);
ATTN_DECLARE_STEP(v13_even_splits);
ATTN_DECLARE_STEP(v14_unified_max);
ATTN_DECLARE_STEP(v15_wgmma);
ATTN_DECLARE_STEP(v16_features);
ATTN_DECLARE_STEP(arrived);

namespace {
using namespace attn;
struct Point {
  int64_t batch, keys, heads, kv_heads, queries = 1;
};
constexpr Point kPoints[] = {{1, 1024, 32, 8},   {1, 8192, 32, 8},   {1, 65536, 32, 8},
                             {1, 262144, 32, 8}, {16, 1024, 32, 8},  {16, 8192, 32, 8},
                             {64, 4096, 32, 8},  {1, 1024, 32, 32},  {1, 8192, 32, 32},
                             {1, 65536, 32, 32}, {16, 1024, 32, 32}, {16, 8192, 32, 32},
                             {1, 8192, 64, 8},   {16, 1024, 64, 8},  {64, 4096, 64, 8},
                             {1, 1024, 32, 4},   {1, 8192, 32, 4},   {16, 8192, 32, 4}};
struct Named {
  const char* name;
  LaunchFunction launch;
  bool takes_splits;
};
const Named kSteps[] = {{"v1", ::gpu::v1_one_block::launch, false},
                        {"v2", ::gpu::v2_split_kv::launch, false},
                        {"v3", ::gpu::v3_bytes_in_flight::launch, false},
                        {"v4", ::gpu::v4_gqa::launch, false},
                        {"v5", ::gpu::v5_packed_rows::launch, false},
                        {"v6", ::gpu::v6_heuristic::launch, true},
                        {"v7", ::gpu::v7_fused_combine::launch, true},
                        {"v8", ::gpu::v8_stream_k::launch, false},
                        {"v9", ::gpu::v9_eight_warps::launch, false},
                        {"v10", ::gpu::v10_vectorised_combine::launch, false},
                        {"v11", ::gpu::v11_shared_p::launch, false},
                        {"v12", ::gpu::v12_more_rows::launch, false},
                        {"v13", ::gpu::v13_even_splits::launch, false},
                        {"v14", ::gpu::v14_unified_max::launch, false},
                        {"v15", ::gpu::v15_wgmma::launch, false},
                        {"v16", ::gpu::v16_features::launch, false}};
constexpr int64_t kSplits[] = {1, 2, 3, 4, 6, 8, 11, 16, 22, 33, 44, 66, 88, 128};

double microseconds(GpuTimer& timer, Arguments& args, LaunchFunction launch, int repeat) {
  std::vector<double> seconds;
  for (int i = -2; i < repeat; ++i) {
    Sample sample;
    if (const Status s = timer.time(args, launch, sample); !s.ok()) {
      std::printf("%s\n", s.message.c_str());
      std::exit(4);
    }
    if (i >= 0) seconds.push_back(sample.seconds);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2] * 1e6;
}
}  // namespace

int main(int argc, char** argv) {
  if (!gpu_info().available) {
    std::printf("no GPU (%s): a sweep needs one\n", gpu_info().error.c_str());
    return 77;
  }
  constexpr int64_t kMost = int64_t{16} * 8192 * 32 * 128 * 2;
  std::vector<uint16_t> some(1'000'003);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (auto& x : some) x = __builtin_bit_cast(uint16_t, __float2bfloat16_rn(normal(random)));
  DeviceBuffer k(Backend::gpu, "k", kMost), v(Backend::gpu, "v", kMost),
      q(Backend::gpu, "q", 1 << 22), o(Backend::gpu, "o", 1 << 22),
      lse(Backend::gpu, "lse", 1 << 20), used(Backend::gpu, "used", 4096),
      o_partial(Backend::gpu, "o_partial", int64_t{1} << 29),
      lse_partial(Backend::gpu, "lse_partial", 1 << 24), arrived(Backend::gpu, "arrived", 1 << 20);
  std::vector<uint16_t> all(static_cast<std::size_t>(kMost / 2));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = some[i % some.size()];
  k.upload(all.data());
  v.upload(all.data());
  q.upload(all.data());
  GpuTimer timer;
  const auto problem = [](const Point& at) {
    Problem p;
    p.batch = at.batch, p.heads = at.heads, p.kv_heads = at.kv_heads, p.head_dim = 128;
    p.seqlen_q = at.queries, p.seqlen_k = at.keys;
    p.dtype = DType::bf16;
    p.finish();
    return p;
  };
  const auto arguments = [&](const Problem& p) {
    const std::vector<int> lengths(1024, static_cast<int>(p.seqlen_k));
    used.upload(lengths.data());
    Arguments args(p, Backend::gpu);
    args.bind("q", q.data()), args.bind("k", k.data()), args.bind("v", v.data());
    args.bind("o", o.data()), args.bind("lse", lse.data()), args.bind("seqused_k", used.data());
    args.bind("o_partial", o_partial.data()), args.bind("lse_partial", lse_partial.data());
    args.bind("arrived", arrived.data());
    if (!::gpu::arrived::launch(args).ok()) std::exit(4);
    return args;
  };
  if (argc > 1 && std::string(argv[1]) == "--regret") {
    const int count = argc > 2 ? std::atoi(argv[2]) : 200;
    std::mt19937_64 draw(argc > 3 ? static_cast<unsigned>(std::atoi(argv[3])) : 7);
    const auto log_uniform = [&](double from, double to) {
      return std::exp(std::uniform_real_distribution(std::log(from), std::log(to))(draw));
    };
    double sum = 0, worst = 0, noise = 0;
    std::printf("                    model: us splits   best: us splits   regret  again\n");
    for (int n = 0; n < count;) {
      const int64_t kv_heads = int64_t{1} << draw() % 6, group = int64_t{1} << draw() % 4;
      const Point at{static_cast<int64_t>(log_uniform(1, 65)),
                     static_cast<int64_t>(log_uniform(256, 131073)), kv_heads * group, kv_heads};
      if (at.batch * at.keys * kv_heads * 128 * 2 > kMost) continue;
      ++n;
      Problem p = problem(at);
      Arguments args = arguments(p);
      const int64_t model = splits::best_splits(p, splits::kMmaRows);
      int64_t best_splits = model;
      p.own["num_splits"] = {double(model)};
      const double us = microseconds(timer, args, ::gpu::v7_fused_combine::launch, 15);
      double best = us;
      for (const int64_t splits : kSplits) {
        if (splits == model || splits > (at.keys + 63) / 64 ||
            at.batch * at.heads * splits > 32 * 1024)
          continue;
        p.own["num_splits"] = {double(splits)};
        const double with = microseconds(timer, args, ::gpu::v7_fused_combine::launch, 9);
        if (with < best) best = with, best_splits = splits;
      }
      p.own["num_splits"] = {double(model)};
      const double again = microseconds(timer, args, ::gpu::v7_fused_combine::launch, 15);
      const double regret = us / best - 1;
      sum += regret, worst = std::max(worst, regret), noise += std::abs(again / us - 1);
      std::printf("B%-3d L%-6d %2d/%-2d  %10.1f %6d %10.1f %6d  %6.1f %% %5.1f %%\n", int(at.batch),
                  int(at.keys), int(at.heads), int(at.kv_heads), us, int(model), best,
                  int(best_splits), 100 * regret, 100 * (again / us - 1));
    }
    std::printf("%d problems: mean regret %.2f %%, worst %.1f %%; the same again: %.2f %%\n", count,
                100 * sum / count, 100 * worst, 100 * noise / count);
    return 0;
  }
  for (const auto& [name, launch, takes_splits] : kSteps) {
    if (argc > 1 && std::find(argv + 1, argv + argc, std::string(name)) == argv + argc) continue;
    std::printf("%s                        us splits |", name);
    if (takes_splits)
      for (const int64_t n : kSplits) std::printf(" %6d", static_cast<int>(n));
    std::printf("\n");
    for (const Point& at : kPoints) {
      Problem p = problem(at);
      Arguments args = arguments(p);
      const double us = microseconds(timer, args, launch, 15);
      const double bytes = 2.0 * double(at.batch * at.keys * at.kv_heads) * 128 * 2;
      std::printf("B%-3d L%-6d %2d/%-2d  %8.1f %4.2f TB/s %4d |", int(at.batch), int(at.keys),
                  int(at.heads), int(at.kv_heads), us, bytes / us * 1e-6,
                  takes_splits ? int(splits::best_splits(p, splits::kMmaRows)) : 0);
      if (takes_splits)
        for (const int64_t n : kSplits) {
          if (n > (at.keys + 63) / 64 || at.batch * at.heads * n > 32 * 1024) continue;
          p.own["num_splits"] = {double(n)};
          std::printf(" %6.1f", microseconds(timer, args, launch, 9));
        }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}
