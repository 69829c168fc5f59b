#include "attn/sliding_tiles.h"

#include <fmt/format.h>

#include <algorithm>

#include "attn/error.h"
#include "attn/tensor.h"

namespace attn {
namespace {

int64_t product(const Sides& s) { return s[0] * s[1] * s[2]; }
std::string text_of(const Sides& s) { return fmt::format("{}", fmt::join(s, "x")); }

Sides tiles_of(const char* what, const Sides& sides, const Sides& tile) {
  Sides tiles;
  for (std::size_t i = 0; i < 3; ++i) {
    if (sides[i] < 1 || tile[i] < 1 || sides[i] % tile[i] != 0)
      throw InputError(fmt::format("--mask sta: a {} of {}: must be a multiple of tiles of {}",
                                   what, text_of(sides), text_of(tile)));
    tiles[i] = sides[i] / tile[i];
  }
  return tiles;
}

// Whether the query tile at `q` attends to the key tile at `k`, with `tiles` per row and a window
// of `window` tiles.
bool sees(int64_t q, int64_t k, int64_t tiles, int64_t window) {
  if (window == tiles) return true;
  const int64_t centre = std::clamp(q, window / 2, tiles - 1 - window / 2);
  return std::abs(centre - k) <= window / 2;
}

std::vector<bool> open_blocks(const Sides& canvas, const std::vector<Sides>& windows,
                              int64_t text_blocks) {
  const int64_t tiles = product(canvas), blocks = tiles + text_blocks;
  std::vector<bool> open;
  open.reserve(windows.size() * static_cast<std::size_t>(blocks * blocks));
  const auto at = [&](int64_t tile) {
    Sides place;  // the last dimension is contiguous
    for (std::size_t i = 3; i-- > 0; tile /= canvas[i]) place[i] = tile % canvas[i];
    return place;
  };
  for (const Sides& window : windows)
    for (int64_t m = 0; m < blocks; ++m)
      for (int64_t n = 0; n < blocks; ++n) {
        bool seen = true;
        const Sides q = at(m), k = at(n);
        for (std::size_t i = 0; i < 3 && m < tiles && n < tiles; ++i)
          seen = seen && sees(q[i], k[i], canvas[i], window[i]);
        open.push_back(seen);
      }
  return open;
}

int64_t blocks_of(const Sides& canvas, const Sides& tile, int64_t text) {
  return product(tiles_of("canvas", canvas, tile)) + (text + product(tile) - 1) / product(tile);
}
std::vector<Sides> in_tiles(const Sides& canvas, const Sides& tile,
                            const std::vector<Sides>& windows) {
  const Sides all = tiles_of("canvas", canvas, tile);
  std::vector<Sides> tiles;
  for (const Sides& window : windows) {
    tiles.push_back(tiles_of("window", window, tile));
    for (std::size_t i = 0; i < 3; ++i)
      if (tiles.back()[i] > all[i] || (tiles.back()[i] % 2 == 0 && tiles.back()[i] != all[i]))
        throw InputError(fmt::format(
            "--mask sta: a window of {}: must have an odd number of tiles of {} on each "
            "side, or all {}",
            text_of(window), text_of(tile), text_of(all)));
  }
  return tiles;
}

// In the syntax of --mask: one window if all heads share it, otherwise one per head.
std::string name_of(const Sides& canvas, const Sides& tile, const std::vector<Sides>& windows) {
  std::string name = fmt::format("sta:{},{}", text_of(canvas), text_of(tile));
  const bool alike = std::ranges::all_of(windows, [&](const Sides& w) { return w == windows[0]; });
  const std::size_t said = alike ? 1 : windows.size();
  for (std::size_t h = 0; h < said; ++h) name += "," + text_of(windows.at(h));
  return name;
}

}  // namespace

SlidingTiles::SlidingTiles(const Sides& canvas, const Sides& tile,
                           const std::vector<Sides>& windows, int64_t text)
    : BlockMask(product(tile), product(tile),
                {1, static_cast<int64_t>(windows.size()), blocks_of(canvas, tile, text),
                 blocks_of(canvas, tile, text)},
                open_blocks(tiles_of("canvas", canvas, tile), in_tiles(canvas, tile, windows),
                            (text + product(tile) - 1) / product(tile))),
      canvas_tiles_(tiles_of("canvas", canvas, tile)),
      windows_(in_tiles(canvas, tile, windows)),
      tokens_(product(canvas) + text),
      name_(name_of(canvas, tile, windows)) {}

void SlidingTiles::fits(const Problem& p) const {
  if (p.seqlen_q != tokens_ || p.seqlen_k != tokens_)
    throw InputError(fmt::format("--mask {}: {} queries and {} keys: both must be {}", name_,
                                 p.seqlen_q, p.seqlen_k, tokens_));
  BlockMask::fits(p);
}

std::vector<HostTensor> SlidingTiles::tensors() const {
  HostTensor t{{"tile_windows", {1, 1, static_cast<int64_t>(windows_.size()), 3}, DType::int32}};
  for (const Sides& window : windows_)
    t.numbers.insert(t.numbers.end(), window.begin(), window.end());
  return {t};
}

}  // namespace attn
