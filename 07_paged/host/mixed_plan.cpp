// Tiles are counted with tiles_of, the function that the kernels use.
#define ATTN_EMULATED
#include "host/mixed_plan.h"

#include <algorithm>
#include <numeric>
#include <queue>

#include "kernels/decode/keys.h"
#include "host/plan.h"

namespace attn::plans {
namespace {

using namespace splits;

std::vector<int64_t> queries_of(const Problem& p) {
  return p.varlen() ? p.varlen_q : std::vector(static_cast<std::size_t>(p.batch), p.seqlen_q);
}
int64_t row_tiles(const Problem& p, int64_t queries) {
  return (p.group() * queries + kMmaRows - 1) / kMmaRows;
}

// Longest first; a stable sort.
void longest_first(std::vector<MixedWork>& work) {
  std::ranges::stable_sort(work, std::greater(), &MixedWork::count);
}

// List scheduling: each block takes the next work tile as soon as it is free. Returns when the last
// block ends and the average end, in keys of a prefill tile. `free`: when each block starts.
struct Ends {
  double last, mean;
};
Ends ends_of(const std::vector<MixedWork>& work, std::vector<double> free) {
  std::priority_queue<double, std::vector<double>, std::greater<>> blocks(std::greater<>(),
                                                                          std::move(free));
  double sum = 0, last = 0;
  const auto count = static_cast<double>(blocks.size());
  for (const MixedWork& w : work) {
    const double end = blocks.top() + w.count;
    blocks.pop();
    blocks.push(end);
    last = std::max(last, end);
  }
  for (; !blocks.empty(); blocks.pop()) sum += blocks.top();
  return {last, sum / count};
}

}  // namespace

//! [first]
bool prefill_first(const std::vector<MixedWork>& prefill, const std::vector<MixedWork>& decode,
                   int64_t sms) {
  double decoding = 0;  // time of decoding, limited by memory
  for (const MixedWork& w : decode) decoding += w.count * kKeysPerDecodeTile;
  decoding /= static_cast<double>(sms);
  const auto blocks = static_cast<std::size_t>(sms);
  std::vector<double> half(blocks);  // one half starts at once, the other after decoding
  half.resize(2 * blocks, kHalfDecodes * decoding);
  // If all prefer prefill, blocks start to decode as they run out of it, at all.mean on average,
  // and decoding takes `decoding` from then on.
  const Ends all = ends_of(prefill, std::vector<double>(2 * blocks));
  return !prefill.empty() && std::max(all.last, all.mean + decoding) < ends_of(prefill, half).last;
}
//! [first]

//! [plan]
MixedPlan mixed_plan(const Problem& p, const std::vector<int64_t>& lengths_q,
                     const std::vector<int64_t>& lengths_k, int64_t sms) {
  MixedPlan plan;
  const auto decodes = [&](std::size_t b) {
    return lengths_q[b] > 0 && lengths_q[b] <= kMaxDecoding;
  };
  const auto shape = [&](std::size_t b) {
    Shape own = shape_of(p);
    own.seqlen_q = static_cast<int>(lengths_q[b]);
    return own;
  };
  std::vector<int> tiles(lengths_q.size());
  int64_t total = 0;
  for (std::size_t b = 0; b < tiles.size(); ++b) {
    if (!decodes(b)) continue;
    tiles[b] = ::emulated::flash_decoding::tiles_of(shape(b), static_cast<int>(lengths_k[b]),
                                                    kMixedTileKeys);
    total += tiles[b] * p.kv_heads * row_tiles(p, lengths_q[b]);
  }
  const int64_t pieces = kPiecesPerSm * sms,
                chunk = std::max<int64_t>(1, (total + pieces - 1) / pieces);
  for (std::size_t b = 0; b < tiles.size(); ++b) {
    const int sequence = static_cast<int>(b);
    if (!decodes(b)) {  // query tiles and their cost: keys up to the last query's
      const int64_t rows = prefill_rows(p.head_dim), queries = lengths_q[b];
      for (int64_t row0 = 0; row0 < queries; row0 += rows) {
        const int64_t last = std::min(row0 + rows, queries) - 1;
        const auto seen = ::emulated::flash_decoding::keys_of_query(
            shape(b), static_cast<int>(lengths_k[b]), static_cast<int>(last));
        for (int head = 0; head < p.heads; ++head)
          plan.prefill.push_back({sequence, head, static_cast<int>(row0), 0, 0,
                                  std::max(0, seen.end - seen.begin), 0, 1, 0});
      }
      continue;
    }
    // As many parts as chunks of the common length, all of equal length. Heads with the same keys
    // are adjacent in the list, because a token's heads are contiguous in memory.
    const auto parts = static_cast<int>((tiles[b] + chunk - 1) / chunk);
    const auto rows = static_cast<int>(row_tiles(p, lengths_q[b]));
    const int row_blocks = static_cast<int>(p.kv_heads) * rows;
    for (int part = 0; part < parts; ++part)
      for (int at = 0; at < row_blocks; ++at) {
        const int begin = part * tiles[b] / parts, end = (part + 1) * tiles[b] / parts;
        plan.decode.push_back({sequence, at / rows, at % rows * static_cast<int>(kMmaRows),
                               plan.row_blocks + at, begin, end - begin, part, parts,
                               parts > 1 ? plan.parts + at * parts : 0});
      }
    plan.row_blocks += row_blocks;
    if (parts > 1) plan.parts += row_blocks * parts;
  }
  longest_first(plan.prefill);
  longest_first(plan.decode);
  plan.prefill_first = prefill_first(plan.prefill, plan.decode, sms);
  return plan;
}
//! [plan]

// A row block of n tiles has at most n / chunk + 1 work tiles, and more than one only if n > chunk;
// those are fewer than 2 n / chunk.
MixedBounds mixed_bounds(const Problem& p) {
  MixedBounds most{};
  for (const int64_t queries : queries_of(p))
    if (queries > kMaxDecoding)
      most.work += p.heads * ((queries + prefill_rows(p.head_dim) - 1) / prefill_rows(p.head_dim));
    else if (queries > 0)
      most.row_blocks += p.kv_heads * row_tiles(p, queries);
  const int64_t pieces = kPiecesPerSm * planned_blocks(p);
  most.work += most.row_blocks + pieces;
  most.parts = 2 * pieces;
  return most;
}

HostTensors mixed_tensors(const Problem& p, const HostTensors& in) {
  const MixedPlan plan =
      mixed_plan(p, queries_of(p), in.at("seqused_k").numbers, planned_blocks(p));
  HostTensors tensors;
  HostTensor work = zeros(
      {"work", {1, 1, mixed_bounds(p).work, kMixedNumbers}, DType::int32, {}, nullptr, false, 2});
  auto at = work.numbers.begin();
  for (const auto* kind : {&plan.prefill, &plan.decode})
    for (const MixedWork& w : *kind)
      for (const int n : {w.sequence, w.head, w.row0, w.row_block, w.tile, w.count, w.part,
                          w.num_parts, w.first_part})
        *at++ = n;
  HostTensor counts = zeros({"work_counts", {1, 1, 1, 3}, DType::int32, {}, nullptr, false, 1});
  counts.numbers = {static_cast<int64_t>(plan.prefill.size()),
                    static_cast<int64_t>(plan.decode.size()), plan.prefill_first ? 1 : 0};
  tensors.emplace("work", std::move(work));
  tensors.emplace("work_counts", std::move(counts));
  return tensors;
}

}  // namespace attn::plans
