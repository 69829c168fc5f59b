#include "attn/tiling.h"

#include <algorithm>
#include <functional>
#include <list>
#include <queue>
#include <unordered_map>
#include <utility>
#include <vector>

namespace attn {
namespace {

// What L2 holds, most recently used first.
class LeastRecentlyUsed {
 public:
  explicit LeastRecentlyUsed(double bytes) : free_(bytes) {}
  // Whether it was there. It is now, instead of what was not used for longest.
  bool use(int64_t what, double bytes) {
    const auto found = where_.find(what);
    if (found != where_.end()) {
      order_.splice(order_.begin(), order_, found->second);
      return true;
    }
    order_.emplace_front(what, bytes);
    where_[what] = order_.begin();
    for (free_ -= bytes; free_ < 0; order_.pop_back()) {
      free_ += order_.back().second;
      where_.erase(order_.back().first);
    }
    return false;
  }

 private:
  using Order = std::list<std::pair<int64_t, double>>;
  double free_;
  Order order_;
  std::unordered_map<int64_t, Order::iterator> where_;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of keys [begin, end) that a tile of queries sees something of.
KeyRange kv_block_range(const Problem& p, const Tiling& t, int64_t m_block) {
  const int64_t row = m_block * t.block_m, last = std::min(row + t.block_m, p.seqlen_q) - 1;
  const int64_t begin = p.visible(row).begin, end = p.visible(last).end;
  return end > begin ? KeyRange{begin / t.block_n, ceil_div(end, t.block_n)} : KeyRange{0, 0};
}

}  // namespace

std::optional<Tiling> tiling_of(const Launch& launch, const Problem& p) {
  std::optional<Tiling> tiling;
  Arguments arguments(p, Backend::emulated);
  arguments.on_tiling = [&](const Tiling& t) { tiling = t; };
  if (!launch.emulated(arguments).ok()) return std::nullopt;
  return tiling;
}

std::optional<Tiling> tiling_of(const Step& step, const Problem& p) {
  if (!step.tiled) return std::nullopt;
  Problem padded = p;
  padded.varlen_q.clear(), padded.varlen_k.clear();
  return tiling_of(step.launch, padded);
}

double visits(const Problem& p, const Tiling& t, bool skips) {
  const int64_t num_m_blocks = ceil_div(p.seqlen_q, t.block_m);
  if (!skips) return double(num_m_blocks) * double(ceil_div(p.seqlen_k, t.block_n));
  double count = 0;
  for (int64_t m = 0; m < num_m_blocks; ++m) count += double(kv_block_range(p, t, m).size());
  return count;
}

double kv_bytes_from_hbm(const Problem& p, const Tiling& t, const Machine& machine) {
  const int64_t heads = p.batch * p.heads, num_m_blocks = ceil_div(p.seqlen_q, t.block_m);
  const int64_t section = std::clamp<int64_t>(t.section, 1, heads), count = heads * num_m_blocks;
  const double row_bytes = double(p.head_dim * size_of(p.dtype)),
               tile_bytes = double(t.block_m) * row_bytes;

  // Several blocks of keys as one, where there are very many: the model has to answer at once.
  constexpr double kMaxEvents = 3e5;
  int64_t blocks_together = 1;
  while (visits(p, t) * double(heads) / double(blocks_together) > kMaxEvents) blocks_together *= 2;
  const double kv_bytes = 2 * double(blocks_together * t.block_n) * row_bytes;
  const int64_t groups = ceil_div(ceil_div(p.seqlen_k, t.block_n), blocks_together);

  const auto order = t.order ? t.order : [&](int64_t index) -> QueryTile {
    const int64_t first_head = index / (section * num_m_blocks) * section;
    const int64_t together = std::min(section, heads - first_head),
                  in_section = index - first_head * num_m_blocks;
    return {first_head + in_section % together, num_m_blocks - 1 - in_section / together};
  };

  LeastRecentlyUsed l2(kL2Share * machine.l2_bytes);
  struct Block {
    int64_t tile = -1, head = 0, next = 0, end = 0;  // of the tile of queries: its groups of blocks
  };
  std::vector<Block> blocks(
      static_cast<std::size_t>(std::max(1, machine.num_sms * t.blocks_per_sm)));
  using Event = std::pair<double, std::size_t>;  // when, which block
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
  for (std::size_t b = 0; b < blocks.size(); ++b) events.emplace(1e-6 * double(b), b);
  // their names begin after those of K and V
  const int64_t q_and_o = p.batch * p.kv_heads * groups;
  double bytes = 0;
  for (int64_t taken = 0; !events.empty();) {
    auto [now, which] = events.top();
    events.pop();
    Block& block = blocks[which];
    if (block.next == block.end) {
      if (block.tile >= 0) l2.use(q_and_o + 2 * block.tile + 1, tile_bytes);  // O is written
      if (taken == count) continue;
      const int64_t index = taken++;
      const QueryTile tile = order(index);
      const KeyRange range = kv_block_range(p, t, tile.m_block);
      block = {index, tile.head / p.group(), range.begin / blocks_together,
               ceil_div(range.end, blocks_together)};
      l2.use(q_and_o + 2 * index, tile_bytes);
      // an epilogue and a prologue take as long as half a block of keys
      now += 0.5 / double(blocks_together);
    } else {
      if (!l2.use(block.head * groups + block.next++, kv_bytes)) bytes += kv_bytes;
      now += 1;
    }
    events.emplace(now, which);
  }
  return std::max(bytes, 2 * double(p.batch * p.kv_heads * p.seqlen_k) * row_bytes);
}

}  // namespace attn
