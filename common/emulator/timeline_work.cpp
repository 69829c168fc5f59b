// What the model's barriers, copies and products cost, and the marks of steps.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <exception>

#include "emulator/simt.h"
#include "emulator/timeline.h"

namespace attn::emulator {

// Shorter waits are not drawn: a nanosecond is the resolution of the file.
constexpr Cycles kLeastWait = 4;

std::string tile_name(const Members* members, std::size_t byte) {
  if (!members) return {};
  for (const Member& m : *members)
    if (byte - m.offset < m.bytes) {
      const std::string text = m.element(byte - m.offset);
      const std::size_t first = text.find(']');
      return m.extents[1] == 0 || first == text.npos ? m.name : text.substr(0, first + 1);
    }
  return {};
}

void add_name(std::string& list, const std::string& name) {
  if (name.empty() || (", " + list + ",").find(", " + name + ",") != list.npos) return;
  list += (list.empty() ? "" : ", ") + name;
}

// ---- barriers -----------------------------------------------------------------------------------

void Timeline::sees(std::size_t slot, std::size_t t) {
  Lane& l = lane(slot, t);
  l.clock = std::max(l.clock, now_ + costs::kFlag);
}

void Timeline::atomic(std::size_t slot, std::size_t t, const char* what, bool shared) {
  Lane& l = lane(slot, t);
  const Cycles begin = l.clock;
  l.clock += shared ? costs::kSharedAtomic : costs::kAtomic;
  l.wait_begin = begin;
  record_wait(slot, t, what, {});
}

void Timeline::arrive(const void* barrier, std::size_t slot, std::size_t t,
                      const std::string& name) {
  Lane& l = lane(slot, t);
  Sync& s = syncs_[barrier];
  const std::size_t track = 1 + t / kWarpSize;
  if (!name.empty()) {
    Warp& w = warp(slot, t);
    if (w.arrived_at != barrier || l.clock >= w.last_arrival) {  // one span for a warp's lanes
      w.arrived_at = barrier;
      w.last_arrival = l.clock + costs::kArrive;
      trace_.span(block(slot).number, track, "arrive", name, l.clock, w.last_arrival, {l.place});
    }
    l.clock += costs::kArrive;
    l.wait_begin = l.clock;
  }
  if (l.clock >= s.last || !s.source.known)
    s.source = {block(slot).number, track, l.clock - (name.empty() ? 0 : costs::kArrive),
                !name.empty()};
  s.last = std::max(s.last, l.clock);
}

void Timeline::complete(const void* barrier) {
  Sync& s = syncs_[barrier];
  s.ended = s.last + costs::kBarrier;
  s.ended_by = std::exchange(s.source, {});
  s.number = ++completions_;
  s.last = 0;
}

void Timeline::resume(const void* barrier, std::size_t slot, std::size_t t) {
  Lane& l = lane(slot, t);
  l.clock = std::max(l.clock, syncs_[barrier].ended);
  passed(slot, t, syncs_[barrier]);
}

void Timeline::end_wait(const void* barrier, std::size_t slot, std::size_t t,
                        const std::string& name) {
  Lane& l = lane(slot, t);
  const Sync& s = syncs_[barrier];
  l.clock = std::max(l.clock, s.ended);
  passed(slot, t, s);
  record_wait(slot, t, name, s.ended_by);
}

void Timeline::wait_for(std::size_t slot, std::size_t t, Cycles until, const char* what,
                        const Source& source) {
  Lane& l = lane(slot, t);
  l.wait_begin = l.clock;
  l.clock = std::max(l.clock, until);
  record_wait(slot, t, what, source);
}

// One span for the lanes of a warp, which wait together.
void Timeline::record_wait(std::size_t slot, std::size_t t, const std::string& name,
                           const Source& source) {
  const Lane& l = lane(slot, t);
  Warp& w = warp(slot, t);
  if (l.clock < l.wait_begin + kLeastWait || l.wait_begin < w.last_wait) return;
  w.last_wait = l.clock;
  const std::size_t track = 1 + t / kWarpSize, number = block(slot).number;
  trace_.span(number, track, "wait", name, l.wait_begin, l.clock, {l.place});
  if (source.known) trace_.flow(source, number, track, l.clock);
}

void Timeline::meet(std::size_t slot, std::size_t warp_number, unsigned mask, const char* what) {
  Running& b = block(slot);
  Warp& w = b.warps[warp_number];
  const std::size_t first = warp_number * kWarpSize;
  const bool multiplies = std::strncmp(what, "mma_", 4) == 0;
  const Cycles cost = multiplies || std::strncmp(what, "wgmma", 5) == 0 ? 0
                      : std::strncmp(what, "__shfl", 6) == 0            ? costs::kShuffle
                      : std::strncmp(what, "__syncwarp", 10) == 0       ? costs::kSyncwarp
                      : what[0] == '_'                                  ? costs::kVote
                                                                        : costs::kLdmatrix;
  Cycles last = 0;
  for (std::size_t l = 0; l < kWarpSize; ++l)
    if (mask >> l & 1) last = std::max(last, b.lanes[first + l].clock);
  last += cost;
  if (multiplies) last = multiply(slot, first, costs::kMma, last).first;
  ++meetings_;
  for (std::size_t l = 0; l < kWarpSize; ++l)
    if (mask >> l & 1) {
      b.lanes[first + l].clock = last;
      b.lanes[first + l].batch = w.batches.size();
      if (shared_) shared_->passed(b.number, first + l, 2 * meetings_ + 1);
    }
}

// ---- work in flight -----------------------------------------------------------------------------

// Bytes between L2 and the SM: the first and the last cycle.
std::pair<Cycles, Cycles> Timeline::transfer(std::size_t slot, std::size_t bytes, Cycles from) {
  Cycles& free = sms_[block(slot).sm]->memory_free;
  const Cycles begin = std::max(from, free);
  free = begin + static_cast<Cycles>(std::ceil(static_cast<double>(bytes) / bytes_per_cycle_));
  return {begin, free};
}

std::pair<Cycles, Cycles> Timeline::multiply(std::size_t slot, std::size_t t, Cycles cycles,
                                             Cycles from) {
  const std::size_t warp = t / kWarpSize, quarter = warp % 4;
  Cycles& free = sms_[block(slot).sm]->tensor_free[quarter];
  const Cycles begin = std::max(from, free);
  free = begin + cycles;
  if (quarter == 0)
    trace_.busy(block(slot).number, kTensorTrack, warpgroup_name(warp), begin, free);
  return {begin, free};
}

void Timeline::copy(const void* barrier, std::size_t slot, std::size_t t, std::size_t owner,
                    std::size_t bytes, const std::string& name, const std::string& tile,
                    std::optional<std::size_t> to) {
  Lane& l = lane(slot, t);
  const auto [begin, end] = transfer(slot, bytes, l.clock + costs::kIssue);
  const std::size_t number = block(slot).number;
  Details details{l.place, bytes};
  trace_.busy(number, kTmaTrack, name, begin, end, details);
  details.writes = tile;
  trace_.flight(block(owner).number, 1 + t / kWarpSize, "tma", "TMA " + name, l.clock,
                end + costs::kTma, details);
  if (shared_ && to)
    shared_->flight(block(owner).number, t / kWarpSize, true, "TMA load", l.place, l.clock,
                    end + costs::kTma, {{*to, bytes}});
  Sync& s = syncs_[barrier];
  // complete() adds the latency of a barrier, which is part of the copy's.
  if (const Cycles there = end + costs::kTma - costs::kBarrier; there >= s.last) {
    s.last = there;
    s.source = {number, kTmaTrack, end - std::min<Cycles>(2, end - begin), true};
  }
  l.clock += costs::kIssue;
}

void Timeline::copy_async(std::size_t slot, std::size_t t, std::size_t bytes, Place place,
                          const std::string& tile, std::optional<std::size_t> to) {
  Lane& l = lane(slot, t);
  if (l.copied == 0) {
    l.copies_began = l.clock;
    l.copies_place = place;
    l.copies_tiles.clear();
  }
  add_name(l.copies_tiles, tile);
  if (shared_ && to) {
    constexpr std::size_t kWhole = 16;  // the rest is zeros
    shared_->access(block(slot).number, t, {Kind::write, "cp.async", place, kWhole}, *to,
                    {l.clock, 0, l.batch}, static_cast<std::int64_t>(l.copy_groups));
  }
  l.copied += bytes;
  l.clock += 1;
}

void Timeline::copy_commit(std::size_t slot, std::size_t t) {
  Lane& l = lane(slot, t);
  Warp& w = warp(slot, t);
  if (l.copy_groups++ == w.copies.size()) {
    const auto [begin, end] = transfer(slot, l.copied * lanes_of(slot, t), l.clock);
    const Cycles there = l.copied ? end + costs::kLoad : l.clock;
    const std::size_t number = block(slot).number;
    Source source;
    if (l.copied) {
      Details details{l.copies_place, l.copied * lanes_of(slot, t)};
      trace_.busy(number, kLoadsTrack, "cp.async", begin, end, details);
      details.writes = l.copies_tiles;
      trace_.flight(number, 1 + t / kWarpSize, "cp.async",
                    "cp.async of warp " + std::to_string(t / kWarpSize), l.copies_began, there,
                    details);
      source = {number, kLoadsTrack, end - std::min<Cycles>(2, end - begin), true};
    }
    w.copies.push_back({there, there, source});
  }
  l.copied = 0;
}

void Timeline::copy_wait(std::size_t slot, std::size_t t, std::size_t pending) {
  const std::size_t groups = lane(slot, t).copy_groups;
  if (groups <= pending) return;
  const Group& group = warp(slot, t).copies[groups - pending - 1];
  wait_for(slot, t, group.end, "cp_async_wait", group.source);
}

void Timeline::store(std::size_t slot, std::size_t t, std::size_t bytes,
                     const std::string& tiles, std::vector<SharedTrace::Range> ranges) {
  Lane& l = lane(slot, t);
  const auto [begin, end] = transfer(slot, bytes, l.clock + costs::kIssue);
  Details details{l.place, bytes};
  trace_.busy(block(slot).number, kTmaTrack, "store", begin, end, details);
  details.reads = tiles;
  trace_.flight(block(slot).number, 1 + t / kWarpSize, "tma", "TMA store", l.clock,
                end + costs::kTma, details);
  if (shared_)
    shared_->flight(block(slot).number, t / kWarpSize, false, "TMA store", l.place, l.clock, end,
                    std::move(ranges));
  l.open_stores.read = end;
  l.open_stores.end = end + costs::kTma;
  l.open_stores.source = {block(slot).number, kTmaTrack, end - std::min<Cycles>(2, end - begin),
                          true};
  l.clock += costs::kIssue;
}

void Timeline::store_commit(std::size_t slot, std::size_t t) {
  Lane& l = lane(slot, t);
  l.stores.push_back(std::exchange(l.open_stores, {}));
}

void Timeline::store_wait(std::size_t slot, std::size_t t, std::size_t pending, bool written) {
  const Lane& l = lane(slot, t);
  if (l.stores.size() <= pending) return;
  const Group group = l.stores[l.stores.size() - pending - 1];
  wait_for(slot, t, written ? group.end : group.read, "tma_store_wait", group.source);
}

void Timeline::product(std::size_t slot, std::size_t t, std::size_t columns,
                       Place place) {
  Lane& l = lane(slot, t);
  if (l.products == 0) l.products_began = l.clock, l.products_details = {place, 0, 0, columns};
  ++l.products_details.wgmma;
  l.products += columns / 2;
  l.clock += costs::kIssue;
}

// A product is one instruction of four warps, each with the tensor core of its quarter: the first
// of them that commits a group says when it runs.
void Timeline::product_commit(std::size_t slot, std::size_t t) {
  Lane& l = lane(slot, t);
  std::vector<Group>& groups = products_of(slot, t);
  if (l.product_groups++ == groups.size()) {
    std::array<Cycles, 4>& free = sms_[block(slot).sm]->tensor_free;
    // The first product begins when it is issued, if the tensor cores are free.
    const Cycles begin = std::max(l.products_began, *std::ranges::max_element(free));
    const Cycles end = begin + l.products;
    free.fill(end);
    const std::size_t number = block(slot).number, warp = t / kWarpSize;
    if (l.products > 0) {
      Details details = l.products_details;
      details.reads.clear();
      trace_.busy(number, kTensorTrack, warpgroup_name(warp), begin, end, details);
      Lane& first = lane(slot, warp * kWarpSize);
      details.reads = first.products_details.reads;
      if (shared_)
        shared_->flight(number, warp, false, "wgmma", details.source, l.products_began, end,
                        std::exchange(first.products_ranges, {}));
      trace_.flight(number, 1 + t / kWarpSize, "wgmma", "wgmma of " + warpgroup_name(warp),
                    l.products_began, end + costs::kWgmmaLatency, details);
    }
    groups.push_back({end, end + costs::kWgmmaLatency,
                      {number, kTensorTrack, end - std::min<Cycles>(2, l.products),
                       l.products > 0}});
  }
  // A warp issues into a short queue, and is held while it is full: the last products of the group
  // were issued when those before them had run.
  const Group& group = groups[l.product_groups - 1];
  const Cycles queued = costs::kWgmmaQueue * l.products_details.columns / 2;
  if (std::exchange(l.products, 0) > 0 && group.read > l.clock + queued) {
    const Cycles room = group.read - queued;
    wait_for(slot, t, room, "wgmma_issue",
             {block(slot).number, kTensorTrack, room - 2, true, group.read});
  }
}

void Timeline::product_wait(std::size_t slot, std::size_t t, std::size_t pending) {
  const std::size_t groups = lane(slot, t).product_groups;
  if (groups <= pending) return;
  const Group& group = products_of(slot, t)[groups - pending - 1];
  wait_for(slot, t, group.end, "wgmma_wait", group.source);
}

// ---- marks --------------------------------------------------------------------------------------

void Timeline::begin_mark(const char* name) {
  Lane& l = lane(running_.slot, running_.t);
  l.marks.emplace_back(name, l.clock);
}

// Those of a warp's first lane are drawn.
void Timeline::end_marks(std::size_t open) {
  Lane& l = lane(running_.slot, running_.t);
  for (; l.marks.size() > open; l.marks.pop_back())
    if (running_.t % kWarpSize == 0)
      trace_.span(block(running_.slot).number, 1 + running_.t / kWarpSize, "mark",
                  l.marks.back().first, l.marks.back().second, l.clock);
}

void Timeline::end_mark(const char* name) {
  const auto& marks = lane(running_.slot, running_.t).marks;
  for (std::size_t n = marks.size(); n-- > 0;)
    if (std::strcmp(marks[n].first, name) == 0) return end_marks(n);
}

namespace {
// Spends the time of the ordinary code before a mark. A thread that leaves a kernel that has failed
// has no time.
bool at_mark() {
  if (!timeline || !running_block || std::uncaught_exceptions() > 0) return false;
  running_block->wait_until("a mark", {}, [] { return true; });
  return true;
}
}  // namespace

std::size_t open_marks() { return timeline && running_block ? timeline->open_marks() : 0; }
void begin_mark(const char* name) {
  if (at_mark()) timeline->begin_mark(name);
}
void end_marks(std::size_t open) {
  if (timeline && timeline->open_marks() > open && at_mark()) timeline->end_marks(open);
}
void end_mark(const char* name) {
  if (at_mark()) timeline->end_mark(name);
}

}  // namespace attn::emulator

// Chapter programs are linked with --wrap for these functions (AttnChapter.cmake), so that the
// model sees the instructions of the special-function unit.
#define ATTN_SPECIAL(name)                                     \
  float __real_##name(float) __attribute__((weak));            \
  float __wrap_##name(float x) {                               \
    if (attn::emulator::timeline) [[unlikely]]                 \
      attn::emulator::timeline->count_special();               \
    return __real_##name(x);                                   \
  }
extern "C" {
ATTN_SPECIAL(exp2f)
ATTN_SPECIAL(expf)
ATTN_SPECIAL(logf)
ATTN_SPECIAL(log2f)
ATTN_SPECIAL(tanhf)
}
