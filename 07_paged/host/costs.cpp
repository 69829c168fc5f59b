#include "host/costs.h"

#include <algorithm>

#include "attn/tiling.h"
#include "host/paged.h"
#include "host/plan.h"
#include "kernels/splits.h"

namespace attn {
namespace {

using namespace splits;

int64_t rows_of(const Problem& p) { return p.batch * p.heads * p.seqlen_q; }
// Keys visible to some query, over all sequences, in whole tiles of `tile`.
double keys_of(const Problem& p, int64_t tile = 1) {
  double keys = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Problem one = p.sequence(b);
    const int64_t seen = one.visible(one.seqlen_q - 1).end - one.visible(0).begin;
    keys += double((std::max<int64_t>(0, seen) + tile - 1) / tile * tile);
  }
  return keys;
}

std::vector<int64_t> known_lengths(const Problem& p) {
  std::vector<int64_t> lengths = p.seqused_k;
  lengths.resize(static_cast<std::size_t>(p.batch), p.seqlen_k);
  return lengths;
}

}  // namespace

Phase decode_cost(const Problem& p, int64_t block_rows) {
  const double element = double(size_of(p.dtype)), d = double(p.head_dim);
  const double kv = 2 * keys_of(p) * double(p.kv_heads) * d * element;
  // Part of a cost for sequence(b), which shares no prefix with others.
  const double shared = 2 * double(saved_tokens(p) * p.kv_heads) * d * element;
  const double table = 4 * keys_of(p, page_size_of(p)) / double(page_size_of(p));
  const double q = double(rows_of(p)) * d * element;
  const bool mma = block_rows % kMmaRows == 0;
  const double pairs = p.total_pairs();
  const double mma_pairs =
      keys_of(p, 16) * double(row_blocks(p, block_rows) / p.batch * block_rows);
  return {.name = "attention",
          .tensor_flop = mma ? 4 * d * mma_pairs : 0,
          .fp32_flop = mma ? 0 : 4 * d * pairs,
          .exp = mma ? mma_pairs : pairs,
          .hbm_read = kv - shared + table + q,
          .hbm_write = q + 4 * double(rows_of(p)),
          .l2_bytes = kv + table + 2 * q};
}

Cost prefill_cost(const Problem& p) {
  const int64_t rows = prefill_rows(p.head_dim);
  return tiled_prefill_cost(
      p, {.block_m = rows, .block_n = kPrefillKeys, .rows_together = rows / kPrefillWarps});
}

Cost tiled_prefill_cost(const Problem& p, const Tiling& tiles) {
  Tiling computed = tiles;
  if (tiles.rows_together > 0) computed.block_m = tiles.rows_together;
  const double element = double(size_of(p.dtype)), d = double(p.head_dim);
  Phase all{.name = "attention"};
  for (int64_t b = 0; b < p.batch; ++b) {
    const Problem one = p.sequence(b);
    if (one.seqlen_k == 0) continue;
    const double heads = double(p.heads), keys = heads * visits(one, tiles) * double(tiles.block_n);
    all.exp += heads * visits(one, computed) * double(computed.block_m * computed.block_n);
    all.l2_bytes += 2 * keys * d * element;
    all.hbm_read += 2 * double(p.kv_heads * one.seqlen_k) * d * element;
  }
  const double q = double(rows_of(p)) * d * element, lse = double(rows_of(p)) * 4;
  all.tensor_flop = 4 * d * all.exp;
  all.hbm_read += q;
  all.hbm_write += q + lse;
  all.l2_bytes += 2 * q + lse;
  return {all};
}

static Cost latent_cost(const Problem& p, int64_t rows, const plans::Plan& plan) {
  const double element = double(size_of(p.dtype));
  const int64_t row_tiles = (p.heads * p.seqlen_q + rows - 1) / rows;
  // v12 skips warps without keys, 16 keys each.
  const double keys = keys_of(p, rows == kWgmmaRows ? 64 : 16) * double(row_tiles);
  const double kv = keys_of(p) * kLatentDim * element,
               table = 4 * keys_of(p) / double(page_size_of(p));
  const double q = double(rows_of(p)) * kLatentDim * element,
               o = double(rows_of(p)) * kLatentValues * element;
  const double parts = plan.parts * double(row_tiles);
  return {{.name = "attention",
           .tensor_flop = 2 * (kLatentDim + kLatentValues) * keys * double(rows),
           .exp = keys * double(rows),
           .hbm_read = kv + table + q,
           .hbm_write = o + 4 * double(rows_of(p)),
           .l2_bytes = kv * double(row_tiles) + table + q + o +
                       2 * parts * double(rows) * (kLatentValues + 1) * 4}};
}

Cost latent_cost(const Problem& p, int64_t rows) {
  return latent_cost(p, rows, plans::team_plan(p, known_lengths(p), plans::teams(p, rows)));
}

Cost seesaw_cost(const Problem& p) {
  const plans::Plan plan = plans::pair_plan(p, known_lengths(p), plans::teams(p, kWgmmaRows));
  const int64_t row_tiles = (p.heads * p.seqlen_q + kWgmmaRows - 1) / kWgmmaRows;
  Cost cost = latent_cost(p, kWgmmaRows, plan);
  if (!plans::combines(p, kWgmmaRows)) return cost;
  double parts = 0;
  for (const plans::WorkTile& w : plan.work)
    if (w.num_parts > plans::few_parts(p, kWgmmaRows)) ++parts;
  const double bytes = parts * double(row_tiles * kWgmmaRows) * (kLatentValues + 1) * 4;
  cost.front().l2_bytes -= bytes;
  cost.push_back({.name = "combine", .l2_bytes = bytes});
  return cost;
}

}  // namespace attn
