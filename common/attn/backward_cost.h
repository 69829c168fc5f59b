/// \file
/// The cost model of backward passes that are parallel over key tiles, with an fp32 accumulator of
/// dQ in global memory: three kernels, a preprocess, the gradients, and the conversion of dQ.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "attn/step.h"

namespace attn {

struct BackwardTiles {
  int64_t block_m, block_n;  ///< B_r, B_c
  int64_t row_tiles(const Problem& p) const { return (p.seqlen_q + block_m - 1) / block_m; }
  int64_t key_tiles(const Problem& p) const { return (p.seqlen_k + block_n - 1) / block_n; }
};

/// Visits of a head: tiles of S that are not fully masked.
inline double visits(const Problem& p, BackwardTiles t) {
  double count = 0;
  for (int64_t row = 0; row < p.seqlen_q; row += t.block_m) {
    const int64_t begin = p.visible(row).begin,
                  end = p.visible(std::min(row + t.block_m, p.seqlen_q) - 1).end;
    if (end > begin) count += double((end + t.block_n - 1) / t.block_n - begin / t.block_n);
  }
  return count;
}

/// Preprocess: D = rowsum(dO . O); zeroes the dQ accumulator.
inline Phase dot_phase(const Problem& p, double slices = 1) {
  const double rows = double(p.batch * p.heads * p.seqlen_q), d = double(p.head_dim);
  Phase phase{.name = "dot", .fp32_flop = 2 * rows * d};
  phase.hbm_read = 2 * rows * d * double(size_of(p.dtype));
  phase.hbm_write = rows * (4 + slices * 4 * d);
  return phase;
}

/// Five GEMMs. A visit loads tiles of Q and dO with lse and D, and adds a tile to dQ; K, V, dK and
/// dV move once.
inline Phase gradient_phase(const Problem& p, BackwardTiles t) {
  const double heads = double(p.batch * p.heads), d = double(p.head_dim),
               element = double(size_of(p.dtype));
  const double q_rows = heads * double(p.seqlen_q),
               kv = 2 * double(p.batch * p.kv_heads * p.seqlen_k) * d * element;
  const double pairs = heads * visits(p, t), rows = double(t.block_m);
  Phase phase{.name = "attention_backward", .exp = pairs * rows * double(t.block_n)};
  phase.tensor_flop = 10 * d * phase.exp;
  phase.hbm_read = q_rows * (2 * d * element + 8) + kv;
  phase.hbm_write = q_rows * d * 4 + kv;
  phase.l2_bytes = pairs * rows * (2 * d * element + 8 + 4 * d) + 2 * kv;
  return phase;
}

/// Postprocess: rounds dQ.
inline Phase convert_phase(const Problem& p, double slices = 1) {
  const double numbers = double(p.batch * p.heads * p.seqlen_q * p.head_dim);
  Phase phase{.name = "convert"};
  phase.hbm_read = slices * 4 * numbers;
  phase.hbm_write = double(size_of(p.dtype)) * numbers;
  return phase;
}

/// The reason why the tiles of a problem do not fit in a grid, or nothing.
inline std::optional<std::string> refuse_grid(const Problem& p, BackwardTiles t) {
  const int64_t most = (int64_t{1} << 31) - 1, heads = p.batch * p.heads;
  const int64_t tiles = std::max(t.row_tiles(p), t.key_tiles(p));
  if (heads > most / tiles)
    return fmt::format("{} heads of {} tiles: at most 2^31 - 1 blocks fit in a grid", heads, tiles);
  return std::nullopt;
}

/// dQ accumulator, and lse and D per row, in tiles; each packed sequence starts a new tile.
inline std::vector<Workspace> gradient_workspaces(const Problem& p, BackwardTiles t,
                                                  int64_t slices = 1) {
  const int64_t tiles = p.varlen() ? p.tokens_q() / t.block_m + p.batch : p.batch * t.row_tiles(p);
  const int64_t rows = p.heads * tiles * t.block_m;
  return {{"accum", slices * rows * p.head_dim * 4}, {"rows", rows * 8}};
}

}  // namespace attn
