// wgmma: the products of a block's warpgroups that are in flight, and the registers they hold.
#include <algorithm>
#include <string>
#include <vector>

#include "emulator/simt.h"
#include "emulator/timeline.h"

namespace attn::emulator {

void Block::product_fence() {
  const Uncounted uncounted;
  AsyncWork& mine = threads_[running_].work;
  mine.registers_fenced = true;
  mine.writes.clear();
  watches_registers_ = races_;
}

namespace {
void note_held(AsyncWork& work) {
  work.held_first = work.held_end = nullptr;
  for (const AsyncWork::Held& h : work.held) {
    if (!work.held_first || h.at < work.held_first) work.held_first = h.at;
    work.held_end = std::max(work.held_end, h.at + h.bytes);
  }
}
// Bits of Product::operands.
constexpr std::size_t kScaleD = 1, kDescriptors = 2;
}  // namespace

// wgmma is one instruction of four warps: all of their lanes run the same ones in the same order,
// with the same scale-d, and the warps with the same descriptors. `operands`: scale-d, and of lane
// 0 also kDescriptors and a number for the descriptors.
void Block::check_same_product(Place place, std::size_t operands) {
  std::vector<Product>& all = products_[running_ / kWarpgroupSize];
  const std::size_t n = threads_[running_].work.issued;
  if (n == all.size()) all.push_back({place, operands});
  if (!(all[n].place == place))
    fail("wgmma", place,
         "as its number " + std::to_string(n + 1) +
             ", where another warp of its warpgroup runs "
             "the one at " +
             all[n].place.text() + ": all four run the same ones in the same order");
  if ((operands ^ all[n].operands) & kScaleD)
    fail("wgmma", place,
         "that adds to D where another lane of its warpgroup overwrites it, or the reverse: all "
         "have the same scale-d");
  if (!(operands & kDescriptors)) return;
  if (!(all[n].operands & kDescriptors)) all[n].operands = operands;
  if (all[n].operands != operands)
    fail("wgmma", place,
         "with other operands in shared memory than another warp of its warpgroup: all four have "
         "the same descriptors");
}

void Block::product_async(Place place, Registers d, bool accumulate, Registers a,
                          std::function<void()> work, const BlockList& operands) {
  const Uncounted uncounted;
  leave_if_failed();
  AsyncWork& mine = threads_[running_].work;
  if (!mine.registers_fenced) fail("wgmma", place, "without wgmma_fence since the last wait");
  const bool early = mine.products.early();
  if (!accumulate && !early) std::memset(d.at, 0xFF, d.bytes);  // undefined until the wait
  const auto written_since_fence = [&](Registers r) {
    const auto* const first = static_cast<const std::byte*>(r.at);
    for (const AsyncWork::Write& w : mine.writes)
      if (w.at < first + r.bytes && first < w.at + w.bytes)
        fail("wgmma", place,
             "on a register that was written at " + w.where.text() +
                 ", after wgmma_fence: the fence is for what was written before it");
  };
  if (accumulate) written_since_fence(d);
  if (a.at) written_since_fence(a);
  const std::uint32_t group = mine.products.open_group();
  // One entry for the accumulators of all k steps, and one for operands that lie side by side: each
  // access to a variable goes through them.
  const auto hold = [&](Registers r, bool written) {
    const auto* const at = static_cast<const std::byte*>(r.at);
    for (AsyncWork::Held& h : mine.held) {
      const bool same = written && h.at == at && h.bytes == r.bytes;
      const bool behind = !written && h.group == group && h.at + h.bytes == at;
      if (h.written != written || !(same || behind)) continue;
      if (behind) h.bytes += r.bytes;
      h.group = group, h.place = place;
      return;
    }
    mine.held.push_back({at, r.bytes, written, group, place});
  };
  if (races_) hold(d, true);
  if (races_ && a.at) hold(a, false);
  note_held(mine);
  // N columns of D are N / 2 floats of a thread.
  if (timeline) timeline->product(slot_, running_, d.bytes / sizeof(float) * 2, place);
  if (lane() == 0) {  // one instruction of all four warps: each has to know what was written
    std::optional<Races::Access> reads;
    if (races_) {
      // The warps of a warpgroup read the same: their numbers follow each other (races.h).
      std::size_t& who = product_numbers_[running_ / kWarpSize];
      if (who == AsyncQueue::kNone) {
        const std::size_t first = running_ / kWarpgroupSize * (kWarpgroupSize / kWarpSize);
        const std::size_t end =
            std::min(first + kWarpgroupSize / kWarpSize, product_numbers_.size());
        for (std::size_t warp = first; warp < end; ++warp)
          product_numbers_[warp] = races_->order().add();
      }
      reads = async(who, group, Kind::read, "wgmma", place);
      reads->proxy = Space::shared;
    }
    Timeline* const timed = timeline;
    std::size_t seen = 0;
    operands([&](const void* first, std::size_t bytes) {
      seen = 31 * (31 * seen + reinterpret_cast<std::uintptr_t>(first)) + bytes;
      if (reads) async_access(*reads, first, bytes);
      if (timed)
        timed->product_reads(
            slot_, running_,
            tile_name(members_, shared_byte(first).value_or(0) - variables_.size()),
            shared_byte(first), bytes);
    });
    check_same_product(place, 4 * seen + kDescriptors + accumulate * kScaleD);
  } else {
    check_same_product(place, accumulate * kScaleD);
  }
  ++mine.issued;
  const Internal internal(internal_);
  mine.products.add(early, std::move(work));
}

void Block::product_commit() {
  const Uncounted uncounted;
  if (timeline) {
    let_others_run("wgmma_commit", {});
    timeline->product_commit(slot_, running_);
  }
  threads_[running_].work.products.commit();
}

void Block::product_wait(std::size_t pending, Place place) {
  const Uncounted uncounted;
  if (timeline) {
    let_others_run("wgmma_wait", place);
    timeline->product_wait(slot_, running_, pending);
  }
  AsyncWork& mine = threads_[running_].work;
  const std::uint32_t done = [&] {
    const Internal internal(internal_);
    return mine.products.wait(pending);
  }();
  if (timeline) timeline->drop();
  std::erase_if(mine.held, [&](const AsyncWork::Held& h) { return h.group <= done; });
  const std::size_t who = product_numbers_[running_ / kWarpSize];
  if (races_ && who != AsyncQueue::kNone) races_->order().learn(number(running_), who, done);
  mine.registers_fenced = false;  // from here on ordinary code may write them
  note_held(mine);
  watches_registers_ = !mine.held.empty();
  meet_warp("wgmma_wait", place, ~0u, this, [](const auto&) {});
}

// wgmma is one instruction of 128 threads: what some of them leave out, the others wait for.
void Block::check_whole_warpgroups() const {
  for (std::size_t first = 0; first < threads_.size(); first += kWarpgroupSize) {
    const std::size_t end = std::min(first + kWarpgroupSize, threads_.size());
    for (std::size_t t = first; t < end; ++t) {
      const std::size_t mine = threads_[t].work.issued, other = threads_[first].work.issued;
      if (mine != other || (mine > 0 && end - first < kWarpgroupSize))
        throw KernelError("wgmma: " + thread_name(first) + " ran " + std::to_string(other) + ", " +
                          name(t) + " " + std::to_string(mine) +
                          ": all four warps of a warpgroup multiply together");
    }
  }
}

}  // namespace attn::emulator
