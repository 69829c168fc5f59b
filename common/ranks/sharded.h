/// \file
/// Attention with the tokens of a sequence on several ranks: shards, and the order in which a rank
/// merges the blocks of its attention.
#pragma once

#include <functional>
#include <vector>

#include "ranks/gpus.h"
#include "ranks/parts.h"
#include "ranks/rank.h"

namespace attn::ranks {

/// The devices of `--devices`, one rank each.
std::vector<int> devices_of(const Problem&);
/// Why a step on several ranks cannot do a problem, or nothing.
std::optional<std::string> refuse_ranks(const Problem&);

/// The shards of a problem. A shard is packed: Q and O `[B, rows, Hq, d]`, K and V `[B, rows, Hkv,
/// d]`, lse `[B, Hq, rows]`. K and V of a rank follow one another and are one message.
struct Sharding {
  Problem whole;
  TokenOrder order;
  std::vector<std::vector<Part>> q, k;  ///< by rank

  Sharding(const Problem&, TokenOrder, int world);
  int world() const { return static_cast<int>(q.size()); }
  int64_t rows_q(int rank) const { return count_of(q[static_cast<std::size_t>(rank)]); }
  int64_t rows_k(int rank) const { return count_of(k[static_cast<std::size_t>(rank)]); }
  int64_t kv_bytes_of_largest() const;
  int64_t q_row_bytes() const { return bytes_of(whole.dtype, whole.heads * whole.head_dim); }
  int64_t k_row_bytes() const { return bytes_of(whole.dtype, whole.kv_heads * whole.head_dim); }
  int64_t q_bytes(int rank) const { return whole.batch * rows_q(rank) * q_row_bytes(); }
  int64_t kv_bytes(int rank) const { return 2 * whole.batch * rows_k(rank) * k_row_bytes(); }
};

/// A block of a rank's attention, with what happens to its rows' accumulators. Bit n is of the
/// rows of the rank's n-th part of queries.
struct PlannedBlock {
  ShardBlock block;
  unsigned first = 0;  ///< nothing was accumulated before: the accumulators are not read
  unsigned last = 0;   ///< nothing follows: O is written in its type, instead of the accumulators
};
/// The blocks of a rank by the rank that owns their keys: in the order of `owners`.
struct RankBlocks {
  std::vector<std::vector<PlannedBlock>> of_owner;
  /// Parts of queries whose accumulators must be set to zero before, and converted to O after:
  /// those of which the first, or last, block does not have all rows.
  unsigned clear = 0, convert = 0;
  int64_t split = 0;  ///< rows of the first part
};
RankBlocks blocks_of_rank(const Sharding&, int rank, const std::vector<int>& owners);
/// The ranks whose keys a rank of a ring multiplies, in order: its own, its predecessor's ...
std::vector<int> ring_order(int rank, int world);
/// A block as a problem of its own: one packed sequence.
Problem problem_of(const Problem& whole, const ShardBlock&);

/// One rank's share of a forward pass.
struct ForwardShard {
  const Sharding& sharding;
  Rank& rank;
};
/// What the ranks of a step do.
struct ForwardProgram {
  std::function<void(const ForwardShard&)> prepare, run;
};
/// Distributes Q, K and V to buffers "q", "kv", "o" and "lse" of the ranks, runs the program, and
/// collects O and lse.
Status run_forward(const Arguments&, TokenOrder, const ForwardProgram&);

/// One rank's share of decoding: all queries, and one part of the cache in "k" and "v", `[B, Hkv,
/// keys, d]`; the numbers of its keys in use in "seqused_k".
struct DecodeShard {
  Problem local;  ///< with the keys of this rank, and no mask
  /// Visible keys left and right of the local diagonal, which ends at the rank's last key in use.
  /// The left one is negative where the window begins later.
  int window_left, window_right;
  Rank& rank;
  int64_t rows() const { return local.batch * local.heads * local.seqlen_q; }
};
/// Of all ranks of one process, which rank `of` launches together with its own.
std::vector<DecodeShard> decode_shards(const Problem& whole, const Rank& of);
struct DecodeProgram {
  std::function<void(const DecodeShard&)> prepare, run;
};
std::optional<std::string> refuse_decode(const Problem&);
/// Distributes the cache, runs the program, and collects O and lse. All ranks have them: the rows
/// are taken from the ranks in turn, so that a rank that is wrong everywhere shows.
Status run_decode(const Arguments&, const DecodeProgram&);

/// The same with the cache in pages, distributed round-robin: page i of a sequence is on rank i
/// modulo world. "k" and "v" are `[num_pages, page_size, Hkv, d]`, "page_table" `[B, max_pages]`
/// with max_pages pages in `local.seqlen_k`; the pages of a rank do not lie in order.
Status run_decode_pages(const Arguments&, int64_t page_size, const DecodeProgram&);
std::optional<std::string> refuse_decode_pages(const Problem&);

/// Distributes what the backward pass needs, and collects dQ, dK and dV. The n-th part of a rank is
/// dense: "q0", "o0", "do0" and "dq0" are `[B, Hq, rows, d]`, "lse0" `[B, Hq, rows]`. "kv" has K
/// and V of all its parts, each `[B, Hkv, rows, d]`: K0, V0, K1, V1; "dkv" dK and dV.
Status run_backward(const Arguments&, TokenOrder, const ForwardProgram&);
/// The workspaces of chapter 06's b7, which works on pairs of parts.
std::vector<Workspace> workspaces_of_backward(const Problem&);

/// Copies rows between buffers of any devices: `width` bytes each, so many bytes apart.
void copy_rows(Backend, void* to, int64_t to_pitch, const void* from, int64_t from_pitch,
               int64_t width, int64_t rows);
/// Seconds after which a wait for another rank ends the run (--timeout).
double timeout_of(const Problem&);
/// Runs a program on the ranks of a problem, on GPUs or emulated. With --rank this process is one
/// of them; all have the whole `outputs` afterwards.
Status run_ranks(const Arguments&, const Program&, const std::function<void(Rank&)>& finish,
                 const std::vector<Output>& outputs);

}  // namespace attn::ranks
