// Operations of chapter 07: attention to a paged KV cache.
#pragma once

#include "check/operation.h"

namespace attn {

// A few queries per sequence: q [B, Hq, seqlen_q, d]; k, v [num_pages, page_size, Hkv, d];
// page_table [B, max_pages]; seqused_k [B].
const Operation& paged_decode();

// Any number of queries per sequence: ragged, q [tokens, Hq, d] and cu_seqlens_q [B + 1]; or
// equally many, in the layout of paged_decode.
const Operation& paged_prefill();

// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1, in its decoding form):
// all query heads share one K/V head. q [B, Hq, seqlen_q, 576]; kv [num_pages, page_size, 1, 576],
// as input "k" and file kv_pages.npy, whose first 512 elements are V; page_table [B, max_pages];
// seqused_k [B]. o [B, Hq, seqlen_q, 512], lse [B, Hq, seqlen_q].
const Operation& paged_mla();

// Stores the last seqlen_q of the seqused_k tokens of each sequence, from k_new, v_new
// [B * seqlen_q, Hkv, d], to their pages; --rotary rotates the keys by their positions.
const Operation& paged_append();
// Copies `--batch` pages, or their first tokens: page_copies [batch, 3] holds from, to, tokens.
const Operation& page_copy();

// Page table of a problem, and K or V gathered by it.
TensorSpec table_of(const Problem&);
TensorSpec in_pages(const Problem&, const std::string& name, const HostTensor& table);
// Tensors common to both operations: q, k, v, page table, lengths, and those of features.
std::vector<TensorSpec> paged_inputs(const Problem&);
// A page table for this problem: pages in random order, 2^31 - 1 past the end of each sequence.
HostTensor drawn_table(const Problem&);
// Reads sizes of k_pages.npy, page_table.npy and seqused_k.npy into a problem; shape of a file.
void sizes_of_pages(const std::string& folder, Problem&, const char* file = "k_pages.npy");
std::vector<int64_t> shape_of_file(const std::string& folder, const char* file, std::size_t rank,
                                   const char* sides);
// Options of pages.
std::vector<Feature> page_options();
// Applies --lengths and similar options before Problem::finish, unless a page table is loaded.
void complete_lengths(Problem&, const std::set<std::string>& given);
void place_pages(const Problem&, HostTensors&);

// Tokens that --shared-prefix saves in the pool: shared tokens are stored once.
int64_t saved_tokens(const Problem&);

// Number of pages in the pool.
int64_t num_pages_of(const Problem&);

// Lengths of a batch as --lengths draws them: uniform:A,B, zipf:MEAN, const:N.
std::vector<int64_t> drawn_lengths(const std::string& text, int64_t batch, uint64_t seed);

}  // namespace attn
