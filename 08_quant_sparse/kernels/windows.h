// Sliding tile windows over a canvas (Sliding Tile Attention, arXiv 2502.04507): the key blocks
// that a query tile visits, computed arithmetically.
#pragma once

#include "kernels/sparse.h"
#include "kernels/visits.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

//! [windows]
struct TileWindows {
  const int* gWindows;       // [Hq, 3]: sides of each head's window, in tiles of the canvas
  int canvas[3];             // its sides in tiles
  int m_of_tile, n_of_tile;  // query tiles, and key blocks, per tile of the canvas
  int n_blocks, tail;  // of all keys; 1 if the last block is partial
  TileWindows(const Arguments& args, int block_n)
      : gWindows(args.in<int>("tile_windows")),
        n_blocks(static_cast<int>(ceil_div(args.problem.seqlen_k, block_n))),
        tail(args.problem.seqlen_k % block_n != 0) {
    const SlidingTiles& mask = *tiles_of_canvas(args.problem);
    for (int i = 0; i < 3; ++i) canvas[i] = static_cast<int>(mask.canvas_tiles()[i]);
    m_of_tile = static_cast<int>(mask.block_m() / kSparseBlockM);
    n_of_tile = static_cast<int>(mask.block_n() / block_n);
  }

  struct Window {
    int begin[3], size[3];
  };
  //! [ex08b]
  // The window centred on a query tile, moved inside the canvas; for text, the whole canvas.
  __device__ Window around(int head, int m_block) const {
    const int tile = m_block / m_of_tile;
    const int idx[3] = {tile / canvas[2] / canvas[1], tile / canvas[2] % canvas[1],
                       tile % canvas[2]};
    Window w;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      w.size[i] = idx[0] < canvas[0] ? gWindows[3 * head + i] : canvas[i];
      w.begin[i] = min(max(idx[i] - w.size[i] / 2, 0), canvas[i] - w.size[i]);
    }
    return w;
  }
  //! [ex08b]
  __device__ int in_canvas(const Window& w) const {
    return w.size[0] * w.size[1] * w.size[2] * n_of_tile;
  }
  // Blocks of the window, then those of text, which are visible to all.
  __device__ int count(const Window& w) const {
    return in_canvas(w) + n_blocks - canvas[0] * canvas[1] * canvas[2] * n_of_tile;
  }
  __device__ int block(const Window& w, int i) const {
    const int behind = i - in_canvas(w);
    if (behind >= 0) return canvas[0] * canvas[1] * canvas[2] * n_of_tile + behind;
    const int tile = i / n_of_tile;
    const int x = w.begin[2] + tile % w.size[2], y = w.begin[1] + tile / w.size[2] % w.size[1];
    const int t = w.begin[0] + tile / w.size[2] / w.size[1];
    return ((t * canvas[1] + y) * canvas[2] + x) * n_of_tile + i % n_of_tile;
  }
};
//! [windows]

template <class Config>
__device__ __forceinline__ WorkTile windowed_work_of(const Shape& shape, TileOrder::Tile tile,
                                                 const TileWindows& windows) {
  WorkTile work = work_of<Config>(shape, tile);
  const int count =
      windows.count(windows.around(tile.bh % shape.heads, tile.row0 / Config::kBlockM));
  work.visits = {0, count - windows.tail, count};
  work.last_key = shape.seqlen_k - 1;
  return work;
}

}  // namespace ATTN_BACKEND::hopper
