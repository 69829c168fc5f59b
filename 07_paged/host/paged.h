// What the steps of chapter 07 compute: attention to a cache whose tokens lie in pages.
#pragma once

#include "check/operation.h"

namespace attn {

// A few queries of each sequence against its pages: q [B, Hq, seqlen_q, d]; k, v [num_pages,
// page_size, Hkv, d]; page_table [B, max_pages]; seqused_k [B].
const Operation& paged_decode();

// Any number of queries of each sequence against its pages: ragged, q [tokens, Hq, d] and
// cu_seqlens_q [B + 1], or as many of each, as paged_decode has them.
const Operation& paged_prefill();

// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1, as it decodes): all
// query heads see one K/V head. q [B, Hq, seqlen_q, 576]; kv [num_pages, page_size, 1, 576], in the
// input "k" and the file kv_pages.npy, whose first 512 numbers are V; page_table [B, max_pages];
// seqused_k [B]. o [B, Hq, seqlen_q, 512], lse [B, Hq, seqlen_q].
const Operation& paged_mla();

// The last seqlen_q tokens of each sequence, of the seqused_k that it has with them, from k_new,
// v_new [B * seqlen_q, Hkv, d] into its pages; with --rotary the keys are turned by their
// positions.
const Operation& paged_append();
// `--batch` pages copied to others, or their first tokens: page_copies [batch, 3] has from, to,
// tokens.
const Operation& page_copy();

// How tokens lie in pages: the table of a problem, and K or V by it.
TensorSpec table_of(const Problem&);
TensorSpec in_pages(const Problem&, const std::string& name, const HostTensor& table);
// What the two have alike: q, k, v, the table, lengths, and what features bring.
std::vector<TensorSpec> paged_inputs(const Problem&);
// A page table of this problem: pages in any order, poison behind the end of a sequence.
HostTensor drawn_table(const Problem&);
// Sizes of k_pages.npy, page_table.npy and seqused_k.npy, into a problem; and the shape of a file.
void sizes_of_pages(const std::string& folder, Problem&, const char* file = "k_pages.npy");
std::vector<int64_t> shape_of_file(const std::string& folder, const char* file, std::size_t rank,
                                   const char* sides);
// The options of pages.
std::vector<Feature> page_options();
// --lengths and the like, before Problem::finish; a loaded table, in its place.
void complete_lengths(Problem&, const std::set<std::string>& given);
void place_pages(const Problem&, HostTensors&);

// Tokens of the pool that --shared-prefix saves: those that several sequences have, but once.
int64_t saved_tokens(const Problem&);

// The pages of the pool.
int64_t num_pages_of(const Problem&);

// The lengths of a batch, as --lengths has them: uniform:A,B, zipf:MEAN, const:N.
std::vector<int64_t> drawn_lengths(const std::string& text, int64_t batch, uint64_t seed);

}  // namespace attn
