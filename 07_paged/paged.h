// What the steps of chapter 07 compute: attention to a cache whose tokens lie in pages.
#pragma once

#include "check/operation.h"

namespace attn {

// A few queries of each sequence against its pages: q [B, Hq, seqlen_q, d]; k, v [num_pages,
// page_size, Hkv, d]; page_table [B, max_pages]; seqused_k [B].
const Operation& paged_decode();

// The pages of the pool.
int64_t num_pages_of(const Problem&);

// The lengths of a batch, as --lengths has them: uniform:A,B, zipf:MEAN, const:N.
std::vector<int64_t> drawn_lengths(const std::string& text, int64_t batch, uint64_t seed);

}  // namespace attn
