// p4_ulysses: shards of tokens become shards of heads, and back.
//
// parent    p1_all_gather
// change    All-to-all: a rank sends, of its tokens, the heads of each other rank, and receives its
//           own heads of all tokens. It computes whole heads as one GPU does. A second all-to-all
//           returns O and lse.
// why       A rank sends (ranks - 1) / ranks of its Q, K, V and O once, however many ranks there
//           are; in a ring K and V pass all ranks. Heads have equal work under any mask. But every
//           rank needs a K/V head, and no transfer overlaps with computation.
// expect    time: transfers of 2 (Hq + Hkv) d elements per token, and compute / ranks
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, causal, windows, GQA; K/V heads must
//           be a multiple of the ranks
// source    Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509)
#include "kernels/shard_attention.h"

ATTN_ATTENTION_OF(p1_all_gather, const attn::ranks::Accumulation&, int);

namespace ATTN_BACKEND::p4_ulysses {
using namespace attn;
using namespace ranks;
using namespace attn::ranks;

// Between [rows, groups, chunks] and [groups, rows, chunks], in chunks of 16 bytes. A group is the
// heads of one rank: in the second order they are one message.
//! [pack]
__global__ void pack_kernel(uint4* gTo, const uint4* gFrom, int64_t rows, int groups,
                            int64_t chunks, bool unpack) {
  for (int64_t n = blockIdx.x; n < rows * groups; n += gridDim.x) {
    const int64_t packed = (n % groups * rows + n / groups) * chunks, whole = n * chunks;
    for (int64_t c = threadIdx.x; c < chunks; c += blockDim.x)
      gTo[(unpack ? whole : packed) + c] = gFrom[(unpack ? packed : whole) + c];
  }
}
//! [pack]
void pack(Rank& rank, std::byte* to, const std::byte* from, int64_t rows, int64_t row_bytes,
          bool unpack) {
  if (rows == 0) return;
  rank.compute("pack", [=, groups = rank.world()](Stream stream) {
    const int64_t blocks = rows * groups < 2048 ? rows * groups : 2048;
    return launch_kernel(pack_kernel, dim3(static_cast<unsigned>(blocks)), dim3(128), 0, stream,
                         reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), rows,
                         groups, row_bytes / groups / 16, unpack);
  });
}

// All tokens, and the heads of one rank.
Sharding by_heads(const Sharding& s) {
  Problem p = s.whole;
  p.heads /= s.world(), p.kv_heads /= s.world();
  Sharding all(p, TokenOrder::contiguous, 1);
  const std::vector<Part> q = all.q[0], k = all.k[0];
  all.q.assign(s.q.size(), q), all.k.assign(s.k.size(), k);
  return all;
}

void prepare(const ForwardShard& s) {
  const int rank = s.rank.index();
  const Sharding heads = by_heads(s.sharding);
  for (const char* name : {"q_packed", "o_packed"}) s.rank.allocate(name, s.sharding.q_bytes(rank));
  s.rank.allocate("kv_packed", s.sharding.kv_bytes(rank));
  for (const char* name : {"heads_q", "heads_o"}) s.rank.allocate(name, heads.q_bytes(rank));
  s.rank.allocate("heads_kv", heads.kv_bytes(rank));
  s.rank.allocate("heads_lse", heads.whole.batch * heads.whole.heads * heads.whole.seqlen_q * 4);
  allocate_accumulators({heads, s.rank}, "heads_");
}

//! [ulysses]
void run(const ForwardShard& s) {
  Rank& rank = s.rank;
  const Sharding &tokens = s.sharding, heads = by_heads(tokens);
  const Problem& p = heads.whole;
  const int64_t q_rows = tokens.rows_q(rank.index()), k_rows = tokens.rows_k(rank.index());
  const int64_t q_row = heads.q_row_bytes(), k_row = heads.k_row_bytes();  // of one rank's heads
  const int world = rank.world();
  const auto first = [](const std::vector<std::vector<Part>>& parts, int of) {
    return parts[static_cast<std::size_t>(of)].front().first;
  };

  // (1) Each rank's heads of Q, K and V, from tokens to heads.
  std::vector<Message> messages;
  for (int64_t b = 0; b < p.batch; ++b) {
    pack(rank, bytes_at(rank, "q_packed") + b * q_rows * q_row * world,
         bytes_at(rank, "q") + b * q_rows * q_row * world, q_rows, q_row * world, false);
    for (int n = 0; n < world; ++n) {
      messages.push_back(send_to(n, bytes_at(rank, "q_packed") + (b * world + n) * q_rows * q_row,
                                 q_rows * q_row));
      messages.push_back(
          receive_from(n, bytes_at(rank, "heads_q") + (b * p.seqlen_q + first(tokens.q, n)) * q_row,
                       tokens.rows_q(n) * q_row));
    }
  }
  for (int64_t b = 0; b < 2 * p.batch; ++b) {  // sequences of K, then of V
    pack(rank, bytes_at(rank, "kv_packed") + b * k_rows * k_row * world,
         bytes_at(rank, "kv") + b * k_rows * k_row * world, k_rows, k_row * world, false);
    for (int n = 0; n < world; ++n) {
      messages.push_back(send_to(n, bytes_at(rank, "kv_packed") + (b * world + n) * k_rows * k_row,
                                 k_rows * k_row));
      messages.push_back(receive_from(
          n, bytes_at(rank, "heads_kv") + (b * p.seqlen_k + first(tokens.k, n)) * k_row,
          tokens.rows_k(n) * k_row));
    }
  }
  rank.wait(rank.exchange("all-to-all of Q, K and V", messages));

  // (2) Attention of whole heads.
  const ShardAttention attention({heads, rank}, {rank.index()}, p1_all_gather::attend, "heads_");
  attention.begin();
  attention.multiply(0, bytes_at(rank, "heads_kv"));
  attention.end();

  // (3) Each rank's tokens of O and lse, from heads to tokens.
  messages.clear();
  for (int64_t b = 0; b < p.batch; ++b)
    for (int n = 0; n < world; ++n) {
      messages.push_back(
          send_to(n, bytes_at(rank, "heads_o") + (b * p.seqlen_q + first(tokens.q, n)) * q_row,
                  tokens.rows_q(n) * q_row));
      messages.push_back(receive_from(
          n, bytes_at(rank, "o_packed") + (b * world + n) * q_rows * q_row, q_rows * q_row));
      for (int64_t h = 0; h < p.heads; ++h) {
        const int64_t from = (b * p.heads + h) * p.seqlen_q + first(tokens.q, n);
        const int64_t to = ((b * world + n) * p.heads + h) * q_rows;
        messages.push_back(
            send_to(n, bytes_at(rank, "heads_lse") + 4 * from, 4 * tokens.rows_q(n)));
        messages.push_back(receive_from(n, bytes_at(rank, "lse") + 4 * to, 4 * q_rows));
      }
    }
  rank.wait(rank.exchange("all-to-all of O and lse", messages));
  for (int64_t b = 0; b < p.batch; ++b)
    pack(rank, bytes_at(rank, "o") + b * q_rows * q_row * world,
         bytes_at(rank, "o_packed") + b * q_rows * q_row * world, q_rows, q_row * world, true);
}
//! [ulysses]

Status launch(const Arguments& args) {
  return run_forward(args, TokenOrder::contiguous, {prepare, run});
}

}  // namespace ATTN_BACKEND::p4_ulysses
