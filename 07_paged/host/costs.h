// Costs of the attention steps of chapter 07.
#pragma once

#include "attn/cost.h"
#include "attn/problem.h"
#include "attn/step.h"

namespace attn {

// Decoding in blocks of `block_rows` rows, without the cost of partial results. K and V come from
// HBM once, and from L2 at least once: blocks that read the same keys at the same time may hit in
// L1 or share an L2 response. The same holds for page-table entries. Steps on CUDA cores execute
// two multiply-adds per element and row, those on tensor cores per element and 16 rows, padding
// included.
Phase decode_cost(const Problem&, int64_t block_rows);
// Prefill in query tiles, of chapter 04's sizes or others: each visit of a key block reads one tile
// of K and one of V from L2.
Cost prefill_cost(const Problem&);
Cost tiled_prefill_cost(const Problem&, const Tiling&);
// Latent attention in blocks of `rows` rows.
Cost latent_cost(const Problem&, int64_t rows);
// Of v16_mla_seesaw: pairs of tiles, and a launch that reduces sequences of many parts.
Cost seesaw_cost(const Problem&);

}  // namespace attn
