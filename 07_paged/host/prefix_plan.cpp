#include "host/prefix_plan.h"

#include <algorithm>
#include <map>

#include "host/plan.h"
#include "kernels/splits.h"

namespace attn::plans {
namespace {

using namespace splits;

constexpr int64_t kLeastShared = 128;  // keys: shorter prefixes are not shared
constexpr int64_t kNoPage = (int64_t{1} << 31) - 1;

int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

TensorSpec ints(const char* name, int64_t rows, int64_t columns) {
  return {name, {1, 1, rows, columns}, DType::int32, {}, nullptr, false, columns == 1 ? 1 : 2};
}

}  // namespace

int64_t most_prefix_work(const Problem& p) {
  const int64_t rows = p.batch * p.group() * p.seqlen_q;
  return 2 * planned_blocks(p) +
         p.kv_heads * (blocks_of(rows, prefix_rows(p.head_dim)) + p.batch / 2);
}

int64_t most_prefix_places(const Problem& p) {
  return most_prefix_work(p) * prefix_rows(p.head_dim);
}

//! [prefixes]
PrefixPlan prefix_plan(const Problem& p, const std::vector<int64_t>& table,
                       const std::vector<int64_t>& lengths, int64_t blocks, PrefixTiles tiles) {
  const int64_t size = page_size_of(p), room = max_pages_of(p);
  const int64_t least = blocks_of(kLeastShared, size);
  const auto page = [&](int64_t b, int64_t n) {
    return table[static_cast<std::size_t>(b * room + n)];
  };
  // Full pages visible to all queries of a sequence.
  const auto seen_by_all = [&](int64_t b) {
    const int64_t keys = lengths[static_cast<std::size_t>(b)] - p.seqlen_q;
    return p.window_left >= 0 ? 0 : std::max<int64_t>(0, keys) / size;
  };
  // by the page that ends the shortest shared prefix
  std::map<int64_t, std::vector<int64_t>> alike;
  for (int64_t b = 0; b < p.batch; ++b)
    if (seen_by_all(b) >= least) alike[page(b, least - 1)].push_back(b);

  PrefixPlan plan;
  plan.of_sequence.resize(static_cast<std::size_t>(p.batch));
  plan.keys.resize(static_cast<std::size_t>(p.batch));
  struct Group {
    int64_t first_member, members, keys;
  };
  std::vector<Group> groups;
  for (const auto& [ends, sequences] : alike) {
    const int64_t first = sequences.front();
    int64_t shared = seen_by_all(first);
    for (const int64_t b : sequences) {
      int64_t same = 0;
      for (const int64_t most = std::min(shared, seen_by_all(b));
           same < most && page(b, same) == page(first, same);)
        ++same;
      shared = same;
    }
    if (sequences.size() < 2 || shared < least) continue;
    groups.push_back({static_cast<int64_t>(plan.members.size()),
                      static_cast<int64_t>(sequences.size()), shared * size});
    for (const int64_t b : sequences) {
      plan.members.push_back(static_cast<int>(b));
      plan.keys[static_cast<std::size_t>(b)] = shared * size;
    }
  }
  //! [prefixes]
  // Chunks of one length: the smallest that gives no more work tiles than resident blocks.
  const int64_t each = p.group() * p.seqlen_q, tile = tiles.rows;
  const auto parts_of = [&](const Group& g, int64_t chunk) {
    return blocks_of(blocks_of(g.keys, tiles.keys), chunk);
  };
  int64_t chunk = kLeastShared / tiles.keys, longest = chunk;
  for (const Group& g : groups) longest = std::max(longest, blocks_of(g.keys, tiles.keys));
  const auto pieces = [&](int64_t of) {
    int64_t all = 0;
    for (const Group& g : groups)
      all += p.kv_heads * blocks_of(g.members * each, tile) * parts_of(g, of);
    return all;
  };
  while (chunk < longest) {
    const int64_t middle = (chunk + longest) / 2;
    if (pieces(middle) <= tiles.blocks_per_sm * blocks)
      longest = middle;
    else
      chunk = middle + 1;
  }
  for (const Group& g : groups) {
    const int64_t parts = parts_of(g, chunk), rows = g.members * each;
    for (int64_t m = 0; m < g.members; ++m)
      plan.of_sequence[static_cast<std::size_t>(
          plan.members[static_cast<std::size_t>(g.first_member + m)])] = {
          static_cast<int>(parts), static_cast<int>(plan.places), static_cast<int>(m * each),
          static_cast<int>(rows)};
    for (int64_t head = 0; head < p.kv_heads; ++head)
      for (int64_t part = 0; part < parts; ++part, plan.places += rows)
        // adjacent, because they read the same keys
        for (int64_t row0 = 0; row0 < rows; row0 += tile)
          plan.work.push_back(
              {plan.members[static_cast<std::size_t>(g.first_member)], static_cast<int>(head),
               static_cast<int>(g.first_member), static_cast<int>(rows), static_cast<int>(row0),
               static_cast<int>(g.keys), static_cast<int>(part * chunk),
               static_cast<int>(std::min((part + 1) * chunk, blocks_of(g.keys, tiles.keys))),
               static_cast<int>(plan.places)});
  }
  return plan;
}

HostTensors prefix_tensors(const Problem& p, const HostTensors& in, PrefixTiles tiles) {
  const std::vector<int64_t>& table = in.at("page_table").numbers;
  const std::vector<int64_t>& lengths = in.at("seqused_k").numbers;
  const PrefixPlan plan = prefix_plan(p, table, lengths, planned_blocks(p), tiles);
  HostTensor work = zeros(ints("prefix_work", most_prefix_work(p), kPrefixNumbers));
  int64_t* at = work.numbers.data();
  for (const PrefixWork& w : plan.work)
    for (const int n :
         {w.sequence, w.kv_head, w.first_member, w.rows, w.row0, w.keys, w.begin, w.end, w.place})
      *at++ = n;
  HostTensor members = zeros(ints("members", p.batch, 1)),
             of = zeros(ints("prefix_of", p.batch, 4));
  std::ranges::copy(plan.members, members.numbers.begin());
  HostTensor suffix_table = zeros(ints("suffix_table", p.batch, max_pages_of(p)));
  HostTensor used = in.at("seqused_k");
  at = of.numbers.data();
  int64_t* page = suffix_table.numbers.data();
  const int64_t size = page_size_of(p), room = max_pages_of(p);
  for (int64_t b = 0; b < p.batch; ++b) {
    const PrefixPlan::Share& s = plan.of_sequence[static_cast<std::size_t>(b)];
    for (const int n : {s.parts, s.place, s.first_row, s.rows}) *at++ = n;
    const int64_t keys = plan.keys[static_cast<std::size_t>(b)], first = keys / size;
    used.numbers[static_cast<std::size_t>(b)] -= keys;
    const int64_t* row = table.data() + b * room;
    page = std::fill_n(std::copy(row + first, row + room, page), first, kNoPage);
  }
  HostTensors suffix;
  suffix.emplace("seqused_k", used);
  HostTensors all = balanced_tensors(p, suffix);
  used.spec = ints("suffix_used", p.batch, 1);
  for (HostTensor* t : {&work, &members, &of, &suffix_table, &used})
    all.emplace(t->spec.name, std::move(*t));
  return all;
}

}  // namespace attn::plans
