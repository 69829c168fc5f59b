#include "ranks/parts.h"

#include <algorithm>

namespace attn::ranks {
namespace {

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }
int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }

// The n-th of `of` parts of nearly equal length.
Part equal_part(int64_t tokens, int64_t n, int64_t of) {
  const int64_t first = tokens * n / of;
  return {first, tokens * (n + 1) / of - first};
}

}  // namespace

std::vector<Part> parts_of(TokenOrder order, int64_t tokens, int world, int rank) {
  switch (order) {
    case TokenOrder::contiguous: return {equal_part(tokens, rank, world)};
    case TokenOrder::zigzag:
      return {equal_part(tokens, rank, 2 * world),
              equal_part(tokens, 2 * world - 1 - rank, 2 * world)};
    case TokenOrder::striped: return {{rank, (tokens - rank + world - 1) / world, world}};
  }
  return {};
}

int64_t count_of(const std::vector<Part>& parts) {
  int64_t count = 0;
  for (const Part& part : parts) count += part.count;
  return count;
}

std::vector<int64_t> permutation(TokenOrder order, int64_t tokens, int world) {
  std::vector<int64_t> all;
  all.reserve(static_cast<std::size_t>(tokens));
  for (int rank = 0; rank < world; ++rank)
    for (const Part& part : parts_of(order, tokens, world, rank))
      for (int64_t i = 0; i < part.count; ++i) all.push_back(part.token(i));
  return all;
}

std::vector<int64_t> inverse(const std::vector<int64_t>& permutation) {
  std::vector<int64_t> place(permutation.size());
  for (std::size_t n = 0; n < permutation.size(); ++n)
    place[static_cast<std::size_t>(permutation[n])] = static_cast<int64_t>(n);
  return place;
}

// Query i of `q` sees key j of `k` if first + i - left <= j <= last + i: the masks of the whole
// sequence, counted in strides. Without causal mask and window all keys are visible.
std::optional<Block> visible_block(const Problem& whole, const Part& q, const Part& k) {
  if (q.count <= 0 || k.count <= 0) return std::nullopt;
  const int64_t diagonal = q.first + whole.seqlen_k - whole.seqlen_q - k.first;
  const int64_t right = whole.causal ? 0 : whole.window_right, left = whole.window_left;
  const bool has_last = right >= 0, has_first = left >= 0;
  const int64_t last = has_last ? floor_div(diagonal + right, q.stride) : 0;
  const int64_t first = has_first ? ceil_div(diagonal - left, q.stride) : 0;

  if (has_last && has_first && first > last) return std::nullopt;  // a window between two strides
  int64_t q0 = 0, q1 = q.count, k0 = 0, k1 = k.count;
  if (has_last) q0 = std::max(q0, -last);  // earlier queries see no key: all are later than they
  if (has_first) q1 = std::min(q1, k.count - first);  // later queries: all keys are too old
  if (q0 >= q1) return std::nullopt;
  if (has_last) k1 = std::min(k1, q1 - 1 + last + 1);
  if (has_first) k0 = std::max(k0, q0 + first);
  if (k0 >= k1) return std::nullopt;

  Block block{q0, q1 - q0, k0, k1 - k0, -1, -1};
  // The same limits, counted from a diagonal that ends at the last query and key of the block.
  const int64_t corner = k1 - q1;
  if (has_last && q0 + last + 1 < k1) block.window_right = last - corner;
  if (has_first && q1 - 1 + first > k0) block.window_left = corner - first;
  return block;
}

namespace {
bool full(const ShardBlock& b) { return b.window_left < 0 && b.window_right < 0; }
// Appends the keys of `next` to a block of the same queries. Its diagonal stays that of `next`,
// since it is aligned at the last key.
bool join_keys(ShardBlock& block, const ShardBlock& next) {
  if (!full(block) || next.window_left >= 0 || block.q_row != next.q_row || block.nq != next.nq ||
      block.k_row + block.nk != next.k_row)
    return false;
  block.nk += next.nk, block.window_right = next.window_right;
  return true;
}
bool join_queries(ShardBlock& block, const ShardBlock& next) {
  if (!full(block) || !full(next) || block.k_row != next.k_row || block.nk != next.nk ||
      block.q_row + block.nq != next.q_row)
    return false;
  block.nq += next.nq;
  return true;
}
}  // namespace

std::vector<ShardBlock> blocks_of(const Problem& whole, const std::vector<Part>& q,
                                  const std::vector<Part>& k) {
  std::vector<ShardBlock> blocks;
  int64_t q_row = 0;
  for (const Part& queries : q) {
    std::vector<ShardBlock> of_part;
    int64_t k_row = 0;
    for (const Part& keys : k) {
      if (const auto b = visible_block(whole, queries, keys)) {
        const ShardBlock block{q_row + b->q0, b->nq,          k_row + b->k0,
                               b->nk,         b->window_left, b->window_right};
        if (of_part.empty() || !join_keys(of_part.back(), block)) of_part.push_back(block);
      }
      k_row += keys.count;
    }
    for (const ShardBlock& block : of_part)
      if (blocks.empty() || !join_queries(blocks.back(), block)) blocks.push_back(block);
    q_row += queries.count;
  }
  return blocks;
}

}  // namespace attn::ranks
