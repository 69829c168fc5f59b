/// \file
/// Sequence (context) parallelism: which tokens a rank holds, and which keys of another rank's
/// shard its queries see.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "attn/problem.h"

namespace attn::ranks {

/// The order in which the tokens of a sequence are distributed to the ranks.
enum class TokenOrder {
  contiguous,  ///< rank r holds the r-th of `world` equal parts
  zigzag,      ///< rank r holds parts r and 2 world - 1 - r of 2 world: equal work if causal
  striped,     ///< rank r holds tokens r, r + world, r + 2 world ...
};

/// Tokens first, first + stride ... of the sequence, `count` of them.
struct Part {
  int64_t first = 0, count = 0, stride = 1;
  int64_t token(int64_t i) const { return first + i * stride; }
};

/// The parts of a rank, in the order in which it stores them. Lengths need not be divisible; parts
/// may be empty.
std::vector<Part> parts_of(TokenOrder, int64_t tokens, int world, int rank);
int64_t count_of(const std::vector<Part>&);

/// token[n]: the token that is stored at place n if the shards of all ranks follow one another.
std::vector<int64_t> permutation(TokenOrder, int64_t tokens, int world);
/// place[token]: the inverse.
std::vector<int64_t> inverse(const std::vector<int64_t>& permutation);

/// The queries [q0, q0 + nq) and keys [k0, k0 + nk) of two parts, between which there are visible
/// pairs, as a problem of its own: its diagonal is aligned at the bottom right of this block, and
/// -1 is no limit. Rows and keys at the edges that take part in no visible pair are cut off.
struct Block {
  int64_t q0, nq, k0, nk;
  int64_t window_left, window_right;
};
/// Nothing if no query of `q` sees a key of `k`. `whole`: the problem of all ranks, whose lengths,
/// causal mask and window define what is visible. Both parts have the same stride.
std::optional<Block> visible_block(const Problem& whole, const Part& q, const Part& k);

/// A block of a rank's attention, in rows of its shard of Q and of a rank's shard of K and V.
struct ShardBlock {
  int64_t q_row, nq, k_row, nk;
  int64_t window_left, window_right;  ///< as in Block
};
/// The blocks of all queries of a rank and all keys of another. Neighbours in the shards are one
/// block if no mask separates them, for fewer and larger launches: with zig-zag the late queries
/// see the early keys and, below the diagonal, the late ones.
std::vector<ShardBlock> blocks_of(const Problem& whole, const std::vector<Part>& q,
                                  const std::vector<Part>& k);

}  // namespace attn::ranks
