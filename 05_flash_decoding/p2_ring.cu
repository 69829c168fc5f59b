// p2_ring: K and V travel around a ring; a rank attends to those of a hop while the next arrive.
//
// parent    p1_all_gather
// change    In each hop a rank sends the K and V that it multiplies to the next rank, and receives
//           those of the previous rank into a second buffer. The kernel merges O and lse of each
//           hop with fp32 accumulators in its epilogue.
// why       The transfer overlaps with computation. A rank stores its own shard of K and V and two
//           receive buffers, instead of all K and V. A separate merge would read and write O once
//           more per hop.
// expect    time: compute alone, where a hop computes longer than it transfers
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, causal, windows, GQA
// source    Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (arXiv 2310.01889)
#include "kernels/shard_attention.h"

ATTN_ATTENTION_OF(p1_all_gather, const attn::ranks::Accumulation&, int);

namespace ATTN_BACKEND::p2_ring {
using namespace attn;
using namespace ranks;
using namespace attn::ranks;

void prepare(const ForwardShard& s) {
  const int64_t bytes = s.sharding.kv_bytes_of_largest();
  for (const char* name : {"kv_0", "kv_1"}) s.rank.allocate(name, bytes);
  allocate_accumulators(s);
}

//! [ring]
void run(const ForwardShard& s) {
  Rank& rank = s.rank;
  const std::vector<int> owners = ring_order(rank.index(), rank.world());
  const ShardAttention attention(s, owners, p1_all_gather::attend);
  attention.begin();
  const std::byte* kv = bytes_at(rank, "kv");
  for (std::size_t hop = 0; hop < owners.size(); ++hop) {
    // The previous hop has read the buffer that is received into: the exchange begins when the
    // launches of that hop are complete.
    const bool more = hop + 1 < owners.size();
    std::byte* const other = bytes_at(rank, hop % 2 == 0 ? "kv_0" : "kv_1");
    Ticket ticket = 0;
    if (more)
      ticket = rank.exchange(
          "hop " + std::to_string(hop),
          {send_to(rank.next(), kv, s.sharding.kv_bytes(owners[hop])),
           receive_from(rank.previous(), other, s.sharding.kv_bytes(owners[hop + 1]))});
    attention.multiply(hop, kv, more);
    if (more) rank.wait(ticket);
    kv = other;
  }
  attention.end();
}
//! [ring]

Status launch(const Arguments& args) {
  return run_forward(args, TokenOrder::contiguous, {prepare, run});
}

}  // namespace ATTN_BACKEND::p2_ring
