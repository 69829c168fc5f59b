// `--plans`: modelled utilisation of plans, as a table and as bars.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <numeric>

#include "attn/error.h"
#include "host/paged.h"
#include "host/plan.h"
#include "kernels/splits.h"

namespace attn::plans {
namespace {

struct Batch {
  std::string name;
  std::vector<int64_t> lengths;
};
std::vector<Batch> batches() {
  const auto one_long = [](std::size_t others) {
    std::vector<int64_t> lengths(others + 1, 1024);
    lengths[0] = 131072;
    return lengths;
  };
  return {{"16 of 8192 tokens", drawn_lengths("const:8192", 16, 7)},
          {"33 of 4096 to 16384", drawn_lengths("uniform:4096,16384", 33, 7)},
          {"16 of 4096 to 16384", drawn_lengths("uniform:4096,16384", 16, 7)},
          {"one of 131072, 63 of 1024", one_long(63)},
          {"one of 131072, 15 of 1024", one_long(15)},
          {"64 of 512 to 2048", drawn_lengths("uniform:512,2048", 64, 7)},
          {"256 of 16 to 512", drawn_lengths("uniform:16,512", 256, 7)}};
}

Plan planned(decltype(&runs_plan) make, const Batch& batch) {
  Problem p;
  p.batch = static_cast<int64_t>(batch.lengths.size());
  p.heads = 32, p.kv_heads = 8, p.head_dim = 128, p.seqlen_q = 1;
  p.seqlen_k = *std::ranges::max_element(batch.lengths);
  p.finish();
  return make(p, batch.lengths, splits::kSms);
}

int sum(const std::vector<int>& of) { return std::accumulate(of.begin(), of.end(), 0); }
int busiest(const std::vector<std::vector<int>>& busy) {
  int most = 0;
  for (const std::vector<int>& sm : busy) most = std::max(most, sum(sm));
  return most;
}
// Share of the time of all SMs that is spent on KV tiles.
double share(const Plan& plan) {
  double tiles = 0;
  for (const WorkTile& w : plan.work) tiles += w.count;
  return tiles / (double(splits::kSms) * busiest(busy_tiles(plan, splits::kSms)));
}

}  // namespace

std::vector<std::vector<int>> busy_tiles(const Plan& plan, int64_t sms) {
  std::vector<std::vector<int>> busy(static_cast<std::size_t>(sms));
  for (std::size_t n = 0; n + 1 < plan.begin.size(); ++n) {
    std::vector<int>& sm = *std::ranges::min_element(busy, {}, sum);
    for (int w = plan.begin[n]; w < plan.begin[n + 1]; ++w)
      sm.push_back(plan.work[static_cast<std::size_t>(w)].count + kPieceTiles);
  }
  return busy;
}

std::string plan_table() {
  std::string text =
      "| sequences | runs (v2, v3) | one chunk length (v4) | balanced (v5) | pieces of v5 | "
      "on a line (v6) |\n"
      "|---|---:|---:|---:|---:|---:|\n";
  for (const Batch& batch : batches()) {
    const Plan balanced = planned(balanced_plan, batch);
    text += fmt::format("| {} | {:.0f} % | {:.0f} % | {:.0f} % | {} | {:.0f} % |\n", batch.name,
                        100 * share(planned(runs_plan, batch)),
                        100 * share(planned(uniform_plan, batch)), 100 * share(balanced),
                        balanced.work.size(), 100 * share(planned(line_plan, batch)));
  }
  return text;
}

std::string plan_picture() {
  std::string svg =
      R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 400" width="800" height="400"
  role="img" aria-labelledby="t d">
  <title id="t">What each SM works on, by two plans</title>
  <desc id="d">Bars over 132 SMs for two batches: chunks of one length leave most SMs without work
    for most of the time; the balanced plan gives all of them the same.</desc>
  <style>
    .bg { fill: #ffffff; stroke: #d9dfe5; }
    text { font: 14px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1d2530; }
    .b { font-weight: 600; } .s { font-size: 13px; fill: #56616f; } .c { text-anchor: middle; }
    .bar { stroke: #6f9fc8; stroke-width: 2; } .line { stroke: #8496a9; }
    @media (prefers-color-scheme: dark) {
      .bg { fill: #1b2027; stroke: #323a44; } text { fill: #dfe5ec; } .s { fill: #a9b4c0; }
      .bar { stroke: #5f93c0; } .line { stroke: #6d7f92; }
    }
  </style>
  <rect class="bg" x="0.5" y="0.5" width="799" height="399" rx="6"/>
  <text x="220" y="30" class="b c">chunks of one length (v4)</text>
  <text x="600" y="30" class="b c">balanced (v5)</text>
)";
  const std::vector<Batch> all = batches();
  for (const std::size_t row : {0u, 1u}) {
    const Batch& batch = all[row == 0 ? 1 : 3];
    const auto uniform = busy_tiles(planned(uniform_plan, batch), splits::kSms);
    const auto balanced = busy_tiles(planned(balanced_plan, batch), splits::kSms);
    constexpr double kHigh = 125, kLeast = 3;
    const double scale = kHigh / busiest(uniform), base = 180 + 190 * double(row);
    int column = 0;
    for (const auto* busy : {&uniform, &balanced}) {
      const double left = 50 + 380.0 * column++;
      // One bar segment per work tile, with gaps where segments are wide enough.
      svg += "  <path class=\"bar\" d=\"";
      double x = left;
      for (const std::vector<int>& sm : *busy) {
        double y = base, high = 0;
        for (const int& cost : sm) {
          high += cost * scale;
          if (high < kLeast && &cost != &sm.back()) continue;
          svg += fmt::format("M{:.1f} {:.1f}v{:.1f}", x, y, -std::max(0.3, high - 0.6));
          y -= high, high = 0;
        }
        x += 2.6;
      }
      svg += "\"/>\n";
      svg += fmt::format("  <path class=\"line\" d=\"M{0:.0f} {1:.0f} H{2:.0f}\"/>\n", left, base,
                         left + 343);
      svg += fmt::format(
          "  <text x=\"{:.0f}\" y=\"{:.0f}\" class=\"s c\">{} tokens: {} tiles</text>\n",
          left + 170, base + 18, batch.name, busiest(*busy));
    }
  }
  return svg + "</svg>\n";
}

int plans_command(const std::vector<std::string>& arguments) {
  const bool draws = arguments.size() == 2 && arguments[0] == "--svg";
  if (!draws && !arguments.empty())
    throw InputError(fmt::format("--plans: {}: must be [--svg FILE]", arguments[0]));
  fmt::print(
      "of the time of 132 SMs, the share that goes into tiles, by the plans' own costs; 32/8 "
      "heads, d=128\n\n{}",
      plan_table());
  if (!draws) return 0;
  std::ofstream file(arguments[1]);
  file << plan_picture();
  file.close();
  if (!file) throw InputError(fmt::format("--svg {}: could not be written", arguments[1]));
  return 0;
}

}  // namespace attn::plans
