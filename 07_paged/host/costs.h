// What the attention steps of chapter 07 cost.
#pragma once

#include "attn/cost.h"
#include "attn/problem.h"
#include "attn/step.h"

namespace attn {

// Decoding in blocks of `block_rows` rows; without what parts cost. K and V come from HBM once, and
// from L2 at least once: blocks that read the same keys at the same time may find them in L1, or
// share an answer of L2. So do the entries of the page table. Steps on CUDA cores have two
// multiply-adds for each number and row, those on tensor cores for each number and 16 rows, there
// or not.
Phase decode_cost(const Problem&, int64_t block_rows);
// Of queries in tiles, as in chapter 04, or others: a tile of K and one of V pass from L2 at each
// visit.
Cost prefill_cost(const Problem&);
Cost tiled_prefill_cost(const Problem&, const Tiling&);
// Latent attention in blocks of `rows` rows.
Cost latent_cost(const Problem&, int64_t rows);

}  // namespace attn
