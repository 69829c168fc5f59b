// Block lists of the query tiles. The tiles come from the function that the kernels use:
// kv_block_range.
#define ATTN_EMULATED
#include "host/sparse_steps.h"

#include <algorithm>

#include "attn/tensor.h"
#include "kernels/visits.h"

namespace attn {
namespace {

using ::emulated::hopper::BlockClass;
using ::emulated::hopper::KvBlockRange;
using ::emulated::hopper::Bounds;

// The bounds of the intervals of each key block, for each list: [lists, blocks, intervals].
std::vector<Bounds> bounds_of(const Problem& p) {
  const std::vector<HostTensor> tensors = p.mask->tensors();
  const std::vector<int64_t>&begin = tensors[0].numbers, &end = tensors[1].numbers;
  const int64_t block_n = sparse_block_n(p.head_dim), count = intervals_of(p);
  std::vector<Bounds> bounds;
  for (int64_t list = 0; list < lists_of(p); ++list)
    for (int64_t key0 = 0; key0 < p.seqlen_k; key0 += block_n)
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = (list * count + i) * p.seqlen_k;
        const auto from = row + key0, to = row + std::min(key0 + block_n, p.seqlen_k);
        const auto [begin_min, begin_max] =
            std::minmax_element(begin.begin() + from, begin.begin() + to);
        const auto [end_min, end_max] = std::minmax_element(end.begin() + from, end.begin() + to);
        bounds.push_back({static_cast<int>(*begin_min), static_cast<int>(*begin_max),
                          static_cast<int>(*end_min), static_cast<int>(*end_max)});
      }
  return bounds;
}

// Calls visit(n_block, masked) for the key blocks that a query tile of a list visits, in ascending
// order. `bounds`: of bounds_of, for a mask of column intervals.
template <class Visit>
void each_block(const Problem& p, const std::vector<Bounds>& bounds, int64_t list, int64_t m_block,
                Visit visit) {
  const int block_n = sparse_block_n(p.head_dim);
  const auto row0 = static_cast<int>(m_block * kSparseBlockM);
  const auto last_row = static_cast<int>(std::min(p.seqlen_q, int64_t{row0} + kSparseBlockM)) - 1;
  const KvBlockRange seen =
      ::emulated::hopper::kv_block_range(shape_of(p), static_cast<int>(p.seqlen_q),
                                      static_cast<int>(p.seqlen_k), row0, kSparseBlockM, block_n);
  const int64_t n_blocks = (p.seqlen_k + block_n - 1) / block_n;
  for (int n = seen.begin; n < seen.end; ++n) {
    bool masked = n < seen.unmasked_begin || n >= seen.unmasked_end;
    if (const BlockMask* const mask = blocks_of(p)) {
      const int64_t heads = mask->shape()[1];
      if (!mask->open(list / heads, list % heads, row0 / mask->block_m(),
                      int64_t{n} * block_n / mask->block_n()))
        continue;
    }
    if (columns_of(p) != nullptr) {
      const int count = intervals_of(p);
      const BlockClass is = ::emulated::hopper::classify(
          bounds.data() + (list * n_blocks + n) * count, count, row0, last_row);
      if (is == BlockClass::kHidden) continue;
      masked = masked || is == BlockClass::kMasked;
    }
    visit(n, masked);
  }
}

// Number of sequences or heads with lists of their own: the sizes of the mask.
int64_t side_of(const Problem& p, std::size_t side) {
  if (blocks_of(p) != nullptr) return blocks_of(p)->shape()[side];
  return columns_of(p) != nullptr ? columns_of(p)->shape()[side] : 1;
}

}  // namespace

int64_t lists_of(const Problem& p) { return side_of(p, 0) * side_of(p, 1); }

ListStrides list_strides(const Problem& p) {
  const auto tiles = static_cast<int>(tiles_of_queries(p));
  const auto heads = static_cast<int>(side_of(p, 1));
  return {side_of(p, 0) > 1 ? tiles * heads : 0, heads > 1 ? tiles : 0};
}

// visits [lists, 3]: the BlockList of each query tile; visited: the blocks.
//! [lists]
HostTensors visit_lists(const Problem& p, const HostTensors&) {
  std::vector<int64_t> visits, visited;
  for (int64_t list = 0; list < lists_of(p); ++list)
    for (int64_t m = 0; m < tiles_of_queries(p); ++m) {
      std::vector<int64_t> masked;
      visits.push_back(static_cast<int64_t>(visited.size()));
      each_block(p, {}, list, m,
                 [&](int n, bool is_masked) { (is_masked ? masked : visited).push_back(n); });
      visits.push_back(static_cast<int64_t>(visited.size()));
      visited.insert(visited.end(), masked.begin(), masked.end());
      visits.push_back(static_cast<int64_t>(visited.size()));
    }
  if (visited.empty()) visited.push_back(0);  // never read
  const auto tensor = [](const char* name, std::vector<int64_t> numbers) {
    const TensorSpec spec{name, {1, 1, 1, static_cast<int64_t>(numbers.size())}, DType::int32};
    return HostTensor{spec, {}, std::move(numbers)};
  };
  HostTensors tensors;
  tensors.emplace("visits", tensor("visits", std::move(visits)));
  tensors.emplace("visited", tensor("visited", std::move(visited)));
  return tensors;
}
//! [lists]

// Tiles of S that are computed, over all heads.
double visited_tiles(const Problem& p) {
  const std::vector<Bounds> bounds =
      columns_of(p) != nullptr ? bounds_of(p) : std::vector<Bounds>();
  double tiles = 0;
  for (int64_t list = 0; list < lists_of(p); ++list)
    for (int64_t m = 0; m < tiles_of_queries(p); ++m)
      each_block(p, bounds, list, m, [&](int, bool) { ++tiles; });
  return tiles * double(p.batch * p.heads / lists_of(p));
}

}  // namespace attn
