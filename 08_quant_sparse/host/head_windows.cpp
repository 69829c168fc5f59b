#include "host/head_windows.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>

#include "attn/error.h"
#include "attn/parallel_for.h"
#include "check/field.h"
#include "check/inputs.h"
#include "check/operation.h"
#include "run/mask_option.h"
#include "run/parse.h"
#include "kernels/sparse.h"

namespace attn {
namespace {

int64_t product(const Sides& s) { return s[0] * s[1] * s[2]; }
std::string text_of(const Sides& s) { return fmt::format("{}", fmt::join(s, "x")); }

// Attention of one query, split into key blocks: sums of exponentials, and of exponentials times
// values.
struct Parts {
  std::vector<double> sums;    // [blocks]
  std::vector<double> values;  // [blocks, d]
};
Parts parts_of(const Problem& p, const HostTensors& in, int64_t b, int64_t h, int64_t i,
               int64_t block) {
  const auto d = static_cast<std::size_t>(p.head_dim);
  const float* const q = in.at("q").row(b, h, i);
  std::vector<double> scores;
  for (int64_t j = 0; j < p.seqlen_k; ++j) {
    const float* const k = in.at("k").row(b, h / p.group(), j);
    float dot = 0;
    for (std::size_t c = 0; c < d; ++c) dot += q[c] * k[c];
    scores.push_back(dot * p.softmax_scale);
  }
  const double most = *std::ranges::max_element(scores);
  Parts parts;
  for (int64_t j = 0; j < p.seqlen_k; ++j) {
    if (j % block == 0) parts.sums.push_back(0), parts.values.resize(parts.values.size() + d);
    const double weight = std::exp(scores[static_cast<std::size_t>(j)] - most);
    parts.sums.back() += weight;
    const float* const v = in.at("v").row(b, h / p.group(), j);
    double* const value = &parts.values[parts.values.size() - d];
    for (std::size_t c = 0; c < d; ++c) value[c] += weight * v[c];
  }
  return parts;
}

// O over the visible blocks.
template <class Open>
std::vector<double> sum_of(const Parts& parts, std::size_t d, Open open) {
  double sum = 0;
  std::vector<double> o(d);
  for (std::size_t n = 0; n < parts.sums.size(); ++n) {
    if (!open(static_cast<int64_t>(n))) continue;
    sum += parts.sums[n];
    for (std::size_t c = 0; c < d; ++c) o[c] += parts.values[n * d + c];
  }
  for (double& x : o) x /= sum;
  return o;
}

double density_of(const BlockMask& mask) {
  double open = 0;
  const int64_t m_blocks = mask.shape()[2], n_blocks = mask.shape()[3];
  for (int64_t m = 0; m < m_blocks; ++m)
    for (int64_t n = 0; n < n_blocks; ++n) open += mask.open(0, 0, m, n);
  return open / double(m_blocks * n_blocks);
}

}  // namespace

std::vector<Sides> windows_of(const WindowSearch& s) {
  const auto sides = [&](std::size_t i) {
    std::vector<int64_t> all;
    const int64_t tiles = s.canvas[i] / s.tile[i];
    for (int64_t n = 1; n < tiles; n += 2) all.push_back(n * s.tile[i]);
    all.push_back(s.canvas[i]);
    return all;
  };
  std::vector<Sides> windows;
  for (const int64_t t : sides(0))
    for (const int64_t y : sides(1))
      for (const int64_t x : sides(2)) windows.push_back({t, y, x});
  std::ranges::stable_sort(windows, {}, product);
  return windows;
}

std::vector<HeadWindow> search_windows(const Problem& p, const HostTensors& in,
                                       const WindowSearch& s) {
  const auto d = static_cast<std::size_t>(p.head_dim);
  const std::vector<Sides> windows = windows_of(s);
  std::vector<SlidingTiles> masks;
  for (const Sides& w : windows)
    masks.emplace_back(s.canvas, s.tile, std::vector{w}, p.seqlen_k - product(s.canvas));
  const int64_t block = product(s.tile), rows = (p.seqlen_q + s.every - 1) / s.every;
  std::vector<HeadWindow> found;
  for (int64_t h = 0; h < p.heads; ++h) {
    // Per row and window: the distance from full attention, and the magnitude of O.
    std::vector<double> off(static_cast<std::size_t>(rows) * windows.size());
    std::vector<double> size(static_cast<std::size_t>(rows));
    parallel_for(rows, [&](int64_t r) {
      const int64_t i = r * s.every;
      const Parts parts = parts_of(p, in, 0, h, i, block);
      const std::vector<double> all = sum_of(parts, d, [](int64_t) { return true; });
      for (const double x : all) size[static_cast<std::size_t>(r)] += std::abs(x);
      for (std::size_t w = 0; w < windows.size(); ++w) {
        const std::vector<double> o =
            sum_of(parts, d, [&](int64_t n) { return masks[w].open(0, 0, i / block, n); });
        double& sum = off[static_cast<std::size_t>(r) * windows.size() + w];
        for (std::size_t c = 0; c < d; ++c) sum += std::abs(o[c] - all[c]);
      }
    });
    for (std::size_t w = 0; w < windows.size(); ++w) {
      double error = 0, of_all = 0;
      for (std::size_t r = 0; r < size.size(); ++r)
        error += off[r * windows.size() + w], of_all += size[r];
      if (error > s.bound * of_all && w + 1 < windows.size()) continue;
      found.push_back({windows[w], density_of(masks[w]), error / of_all});
      break;
    }
  }
  return found;
}

std::string mask_option(const WindowSearch& s, const std::vector<HeadWindow>& found) {
  std::string text = fmt::format("--mask sta:{},{}", text_of(s.canvas), text_of(s.tile));
  for (const HeadWindow& w : found) text += fmt::format(",{}", text_of(w.window));
  return text;
}

int windows_command(const std::vector<std::string>& arguments) {
  WindowSearch s{{10, 16, 40}, {2, 8, 8}, 0.05, 16};
  Problem p;
  p.heads = p.kv_heads = 4;
  const auto sides_of = [](const std::string& option, const std::string& text) {
    const std::vector<std::string> parts = split(text, 'x');
    if (parts.size() != 3)
      throw InputError(fmt::format("{} {}: must be TxHxW, as 30x48x80", option, text));
    Sides sides;
    for (std::size_t i = 0; i < 3; ++i)
      sides[i] = parse_number<int64_t>(option, parts[i], 1, 1 << 20);
    return sides;
  };
  CLI::App app("for each head of a field, the smallest sliding tile window within an error bound",
               "08_quant_sparse --windows");
  app.set_help_flag("-h,--help", "this text");
  const auto value = [&](const std::string& name, const std::string& meaning, auto store) {
    app.add_option_function<std::string>(
        name, [=](const std::string& text) { store(name, text); }, meaning);
  };
  using Text = const std::string&;
  value("--canvas", "TxHxW, tokens (10x16x40)", [&](Text o, Text t) { s.canvas = sides_of(o, t); });
  value("--tile", "TxHxW, tokens (2x8x8)", [&](Text o, Text t) { s.tile = sides_of(o, t); });
  value("--bound", "relative L1 error bound of a window (0.05)",
        [&](Text o, Text t) { s.bound = parse_number<double>(o, t, 0, 1); });
  value("--every", "N: evaluate every N-th query (16)",
        [&](Text o, Text t) { s.every = parse_number<int64_t>(o, t, 1, 1 << 20); });
  value("--heads", "(4)", [&](Text o, Text t) {
    p.heads = p.kv_heads = parse_number<int64_t>(o, t, 1, 1024);
  });
  value("--head-dim", "d (64)",
        [&](Text o, Text t) { p.head_dim = parse_number<int64_t>(o, t, 1, 1024); });
  value("--seed", "of the field (1)",
        [&](Text o, Text t) { p.seed = parse_number<uint64_t>(o, t, 0, ~uint64_t{0}); });
  try {  // CLI11 takes them in reverse
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return 0;
  } catch (const CLI::ParseError& e) {
    throw InputError(fmt::format("--windows: {} (--windows --help lists its options)", e.what()));
  }
  p.own["field"] = read_field(text_of(s.canvas) + "," + text_of(s.tile));
  p.seqlen_q = p.seqlen_k = product(s.canvas);
  p.finish();
  const std::vector<HeadWindow> found = search_windows(p, draw_inputs(p, attention_inputs(p)), s);
  fmt::print(
      "heads of a field on a canvas of {}, tiles of {}: the smallest windows with a relative L1 of "
      "at most {}, of one query in {}\n",
      text_of(s.canvas), text_of(s.tile), s.bound, s.every);
  fmt::print("{:>4}  {:<12} {:>8} {:>12}\n", "head", "window", "density", "relative L1");
  for (std::size_t h = 0; h < found.size(); ++h)
    fmt::print("{:>4}  {:<12} {:>7.1f}% {:>12.4f}\n", h, text_of(found[h].window),
               100 * found[h].density, found[h].error);
  const std::string option = mask_option(s, found);
  read_mask(option.substr(std::string("--mask ").size()), p);  // in the form in which it is parsed
  fmt::print("--heads {} --seqlen {} {}\n", p.heads, p.seqlen_k, option);
  if (product(s.tile) % kSparseBlockM != 0)
    fmt::print("which no step takes: a tile has {} tokens, and must have a multiple of {}\n",
               product(s.tile), kSparseBlockM);
  return 0;
}

}  // namespace attn
