// p3_zigzag: a ring with equal work per rank under a causal mask.
//
// parent    p2_ring
// change    A sequence is cut into 2 world parts. Rank r holds parts r and 2 world - 1 - r: one
//           early and one late part.
// why       With contiguous shards rank 0 has one block to compute and the last rank all of them:
//           a causal ring takes almost as long as a full one. With an early and a late part each
//           rank computes half as much per hop, in every hop.
// expect    time: near half that of p2_ring, causal; the same without a mask
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, causal, windows, GQA
// source    zhuzilin/ring-flash-attention (zigzag); Brandon et al., "Striped Attention" (arXiv
//           2311.09431), which distributes single tokens instead
#include "kernels/shard_attention.h"

ATTN_ATTENTION_OF(p1_all_gather, const attn::ranks::Accumulation&, int);  // launched by p2_ring

namespace ATTN_BACKEND::p2_ring {
void prepare(const attn::ranks::ForwardShard&);
void run(const attn::ranks::ForwardShard&);
}  // namespace ATTN_BACKEND::p2_ring

namespace ATTN_BACKEND::p3_zigzag {
using namespace attn;
using namespace attn::ranks;

//! [zigzag]
Status launch(const Arguments& args) {
  return run_forward(args, TokenOrder::zigzag, {p2_ring::prepare, p2_ring::run});
}
//! [zigzag]

}  // namespace ATTN_BACKEND::p3_zigzag
