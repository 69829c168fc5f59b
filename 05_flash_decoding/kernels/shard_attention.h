// One rank's attention: the launches of its blocks, and its accumulators.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "attn/kernel.h"
#include "kernels/shard_rows.h"
#include "kernels/shard_tiles.h"
#include "ranks/sharded.h"

namespace ATTN_BACKEND::ranks {
using namespace attn;
using namespace attn::ranks;

inline std::byte* bytes_at(const Rank& rank, const std::string& name) {
  return static_cast<std::byte*>(rank.buffer(name));
}
inline void allocate_accumulators(const ForwardShard& s, const std::string& of = "") {
  const Problem& p = s.sharding.whole;
  const int64_t rows = s.sharding.rows_q(s.rank.index());
  s.rank.allocate(of + "o_acc", p.batch * rows * p.heads * p.head_dim * 4);
  s.rank.allocate(of + "tile_counter", 4, true);
}

// `owners`: the ranks whose keys are multiplied, in order. A block's launch knows from it whether
// it is the first or the last of its rows. `of`: how the names of Q's, O's and other buffers begin.
class ShardAttention {
 public:
  using Attend = Status (*)(const Arguments&, const Accumulation&, int transfer_sms);

  ShardAttention(const ForwardShard& s, std::vector<int> owners, Attend attend, std::string of = "")
      : sharding_(s.sharding),
        rank_(s.rank),
        owners_(std::move(owners)),
        attend_(attend),
        of_(std::move(of)),
        blocks_(blocks_of_rank(sharding_, rank_.index(), owners_)),
        rows_(sharding_.rows_q(rank_.index())) {}

  // Before the first block.
  void begin() const {
    for_each_range(blocks_.clear, [&](const RowRange& rows, int64_t b) {
      rank_.compute("clear", [=, o_acc = o_acc(b, 0), lse = lse(b, 0)](Stream stream) {
        return clear_rows(stream, o_acc, lse, rows);
      });
    });
  }
  // The blocks of the n-th owner's keys. `kv`: where its K and V are now. `next_to_transfers`: an
  // exchange is in flight, and the launches leave SMs to it.
  void multiply(std::size_t n, const std::byte* kv, bool next_to_transfers = false) const {
    const Problem& whole = sharding_.whole;
    const int owner = owners_[n];
    const std::byte* const v = kv + sharding_.kv_bytes(owner) / 2;
    for (const PlannedBlock& planned : blocks_.of_owner[n])
      for (int64_t b = 0; b < whole.batch; ++b) {
        const ShardBlock& block = planned.block;
        const int64_t q = (b * rows_ + block.q_row) * sharding_.q_row_bytes();
        const int64_t k = (b * sharding_.rows_k(owner) + block.k_row) * sharding_.k_row_bytes();
        const std::vector<std::pair<const char*, const void*>> pointers{
            {"q", bytes_at(rank_, of_ + "q") + q},
            {"k", kv + k},
            {"v", v + k},
            {"o", bytes_at(rank_, of_ + "o") + q},
            {"o_acc", o_acc(b, block.q_row)},
            {"lse", lse(b, block.q_row)},
            {"tile_counter", bytes_at(rank_, of_ + "tile_counter")}};
        const int split = static_cast<int>(std::max<int64_t>(0, blocks_.split - block.q_row));
        const Accumulation rows{rows_, split, planned.first, planned.last};
        rank_.compute("block", [=, this, p = problem_of(whole, block), device = rank_.device(),
                                attend = attend_,
                                sms = next_to_transfers ? rank_.transfer_sms() : 0](Stream stream) {
          Arguments args(p, device);
          args.stream = stream;
          for (const auto& [name, pointer] : pointers) args.bind(name, const_cast<void*>(pointer));
          return attend(args, rows, sms);
        });
      }
  }
  // After the last block.
  void end() const {
    for_each_range(blocks_.convert, [&](const RowRange& rows, int64_t b) {
      rank_.compute("convert", [=, dtype = sharding_.whole.dtype, o_acc = o_acc(b, 0),
                                o = bytes_at(rank_, of_ + "o") +
                                    b * rows_ * sharding_.q_row_bytes()](Stream stream) {
        return dispatch_16bit(dtype, [&]<class Element>() {
          return convert_rows(stream, reinterpret_cast<Element*>(o), o_acc, rows);
        });
      });
    });
  }

 private:
  float* o_acc(int64_t b, int64_t row) const {
    const Problem& p = sharding_.whole;
    return static_cast<float*>(rank_.buffer(of_ + "o_acc")) +
           (b * rows_ + row) * p.heads * p.head_dim;
  }
  float* lse(int64_t b, int64_t row) const {
    return static_cast<float*>(rank_.buffer(of_ + "lse")) + b * sharding_.whole.heads * rows_ + row;
  }
  // `parts`: bit n is of the n-th part of the rank's queries.
  template <class Body>
  void for_each_range(unsigned parts, Body body) const {
    const Problem& p = sharding_.whole;
    int64_t first = 0;
    for (const Part& part : sharding_.q[static_cast<std::size_t>(rank_.index())]) {
      if ((parts & 1) != 0)
        for (int64_t b = 0; b < p.batch; ++b)
          body(RowRange{first, part.count, p.heads, p.head_dim, rows_}, b);
      first += part.count, parts >>= 1;
    }
  }

  Sharding sharding_;
  Rank& rank_;
  std::vector<int> owners_;
  Attend attend_;
  std::string of_;
  RankBlocks blocks_;
  int64_t rows_;
};

}  // namespace ATTN_BACKEND::ranks
