// The model's clocks: whose turn it is, and what ordinary code, units and barriers cost.
#include "emulator/timeline.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>

#include "emulator/simt.h"

namespace attn::emulator {
namespace {

// What a warp runs on a unit before another warp has its turn.
constexpr Cycles kQuantum = 32;
// Ordinary code that is shorter is not worth an event.
constexpr Cycles kShort = 16;
// Shorter waits are not drawn: a nanosecond is the resolution of the file.
constexpr Cycles kLeastWait = 4;

std::string warpgroup_name(std::size_t warp) {
  return "warpgroup " + std::to_string(warp / (kWarpgroupSize / kWarpSize));
}

}  // namespace

// ---- launches and blocks ------------------------------------------------------------------------

void Timeline::begin_launch(std::size_t blocks, std::size_t per_sm, std::size_t resident) {
  ++launch_;
  launch_begin_ = end_;
  blocks_.clear();
  sms_.clear();
  syncs_.clear();
  ready_ = {}, events_ = {};
  polling = 0;
  now_ = launch_begin_;
  slot_free_.assign(resident, launch_begin_);
  per_sm = std::max<std::size_t>(per_sm, 1);
  // A GPU places one block on each SM before it places a second one.
  const std::size_t sms =
      blocks <= costs::kSms ? resident : std::max<std::size_t>(resident / per_sm, 1);
  for (std::size_t i = 0; i < sms; ++i) {
    sms_.push_back(std::make_unique<Sm>());
    for (Unit& unit : sms_.back()->special) unit.special = true;
    sms_.back()->special[0].recorded = true;
  }
  const auto used = static_cast<double>(std::min(blocks, costs::kSms));
  bytes_per_cycle_ = std::min(costs::kSmBytes, costs::kL2Bytes / used);
}

void Timeline::end_launch() { end_ = std::max(end_, trace_.end()); }

void Timeline::begin_block(std::size_t slot, const std::string& index, std::size_t threads) {
  if (slot >= blocks_.size()) blocks_.resize(slot + 1);
  if (slot >= slot_free_.size()) slot_free_.resize(slot + 1, now_);
  auto b = std::make_unique<Running>();
  b->sm = slot % sms_.size();
  b->lanes.resize(threads);
  b->warps.resize((threads + kWarpSize - 1) / kWarpSize);
  b->lanes_left = threads;
  for (Lane& l : b->lanes) l.clock = slot_free_[slot];
  b->number = trace_.add_block(
      (launch_ > 1 ? "launch " + std::to_string(launch_) + ", " : std::string()) + "block " +
          index + " on SM " + std::to_string(b->sm),
      b->warps.size());
  blocks_[slot] = std::move(b);
}

void Timeline::exited(std::size_t slot, std::size_t t) {
  Running& b = block(slot);
  const Cycles clock = b.lanes[t].clock;
  end_ = std::max(end_, clock);
  slot_free_[slot] = std::max(slot_free_[slot], clock + costs::kNextBlock);
  --b.lanes_left;
}

// ---- schedule -----------------------------------------------------------------------------------

void Timeline::ready(std::size_t slot, std::size_t t) {
  ready_.push({lane(slot, t).clock, slot, t});
}

std::optional<Timeline::Next> Timeline::next() {
  while (!events_.empty() &&
         (ready_.empty() || events_.top().clock <= ready_.top().clock)) {
    const Event event = events_.top();
    events_.pop();
    now_ = event.clock;
    event.happens();
  }
  if (ready_.empty()) return std::nullopt;
  return Next{ready_.top().slot, ready_.top().t};
}

void Timeline::begin() {
  now_ = ready_.top().clock;
  running_ = {ready_.top().slot, ready_.top().t};
  ready_.pop();
  special_ = read_ = written_ = 0;
}

bool Timeline::others_first(Cycles clock) {
  const auto first = next();
  return first && ready_.top().clock < clock;
}

void Timeline::account() {
  Lane& l = lane(running_.slot, running_.t);
  l.ordinary += static_cast<Cycles>(kSlice - reads_left);
  reads_left = kSlice;
  l.special += std::exchange(special_, 0);
  l.read += std::exchange(read_, 0);
  l.written += std::exchange(written_, 0);
}

void Timeline::drop() {
  reads_left = kSlice;
  special_ = read_ = written_ = 0;
}

bool Timeline::turn(std::size_t slot, std::size_t t) {
  Lane& l = lane(slot, t);
  if (l.products > 0) l.ordinary = 0;  // addresses between the products of a group
  if (l.running) {
    if (!l.running->done) return true;  // woken by something else: not this emulator's
    l.clock = std::max(l.clock, l.running->end);
    l.running = nullptr;
  }
  const auto let_others = [&] {
    if (!others_first(l.clock)) return false;
    ready(slot, t);
    return true;
  };
  if (let_others()) return true;
  if (l.ordinary + l.special + l.read + l.written == 0) return false;
  if (l.special + l.read + l.written == 0 && l.ordinary < kShort) {
    l.clock += std::exchange(l.ordinary, 0);
    return let_others();
  }
  return start_batch(slot, t) || let_others();
}

// The first lane of a warp that comes by says how long it takes, the others wait for its end.
bool Timeline::start_batch(std::size_t slot, std::size_t t) {
  Lane& l = lane(slot, t);
  Warp& w = warp(slot, t);
  if (l.batch == w.batches.size()) {
    auto batch = std::make_shared<Batch>();
    batch->ordinary = l.ordinary;
    batch->special = l.special * costs::kExponential;
    batch->warp = t / kWarpSize;
    const std::size_t lanes = lanes_of(slot, t);
    Cycles begin = l.clock;
    if (l.written) transfer(slot, l.written * lanes, begin);
    if (l.read) {
      const auto [first, last] = transfer(slot, l.read * lanes, begin);
      begin = last + costs::kLoad;
      trace_.span(block(slot).number, 1 + batch->warp, "wait", "global loads", l.clock, begin);
      w.last_wait = begin;
    }
    w.batches.push_back(batch);
    if (begin == l.clock)
      go_on(slot, batch, begin);
    else
      after(begin, [this, slot, batch] { go_on(slot, batch, now_); });
  }
  const std::shared_ptr<Batch>& batch = w.batches[l.batch++];
  l.ordinary = l.special = 0;
  l.read = l.written = 0;
  if (batch->done) {
    l.clock = std::max(l.clock, batch->end);
    return false;
  }
  batch->waiting.push_back({slot, t});
  l.running = batch;
  return true;
}

// Ordinary instructions, then exponentials, then the warp.
void Timeline::go_on(std::size_t slot, const std::shared_ptr<Batch>& batch, Cycles now) {
  Sm& sm = *sms_[block(slot).sm];
  const std::size_t quarter = batch->warp % 4;
  if (const Cycles n = std::exchange(batch->ordinary, 0); n > 0)
    return submit(sm.ordinary[quarter], {slot, batch->warp, batch, n}, now);
  if (const Cycles n = std::exchange(batch->special, 0); n > 0)
    return submit(sm.special[quarter], {slot, batch->warp, batch, n}, now);
  batch->done = true;
  batch->end = now;
  for (const Next& waits : batch->waiting) {
    Lane& l = lane(waits.slot, waits.t);
    l.clock = std::max(l.clock, now);
    ready(waits.slot, waits.t);
  }
  batch->waiting.clear();
}

void Timeline::submit(Unit& unit, Unit::Work work, Cycles now) {
  unit.ring.push_back(std::move(work));
  if (!unit.busy) serve(unit, now);
}

void Timeline::serve(Unit& unit, Cycles now) {
  unit.busy = !unit.ring.empty();
  if (!unit.busy) return;
  Unit::Work& work = unit.ring.front();
  const Cycles n = std::min(work.left, kQuantum);
  if (unit.recorded)
    trace_.busy(block(work.slot).number, kSpecialTrack, warpgroup_name(work.warp), now, now + n);
  work.left -= n;
  after(now + n, [this, &unit] {
    Unit::Work last = std::move(unit.ring.front());
    unit.ring.pop_front();
    if (last.left > 0)
      unit.ring.push_back(std::move(last));
    else
      go_on(last.slot, last.batch, now_);
    serve(unit, now_);
  });
}

std::size_t Timeline::lanes_of(std::size_t slot, std::size_t t) {
  return std::min(kWarpSize, block(slot).lanes.size() - t / kWarpSize * kWarpSize);
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
      trace_.span(block(slot).number, track, "arrive", name, l.clock, w.last_arrival);
    }
    l.clock += costs::kArrive;
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
  s.last = 0;
}

void Timeline::begin_wait(std::size_t slot, std::size_t t) {
  Lane& l = lane(slot, t);
  l.wait_begin = l.clock;
}

void Timeline::resume(const void* barrier, std::size_t slot, std::size_t t) {
  Lane& l = lane(slot, t);
  l.clock = std::max(l.clock, syncs_[barrier].ended);
}

void Timeline::end_wait(const void* barrier, std::size_t slot, std::size_t t,
                        const std::string& name) {
  Lane& l = lane(slot, t);
  const Sync& s = syncs_[barrier];
  l.clock = std::max(l.clock, s.ended);
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
  trace_.span(number, track, "wait", name, l.wait_begin, l.clock);
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
  for (std::size_t l = 0; l < kWarpSize; ++l)
    if (mask >> l & 1) {
      b.lanes[first + l].clock = last;
      b.lanes[first + l].batch = w.batches.size();
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
                    std::size_t bytes, const std::string& name) {
  Lane& l = lane(slot, t);
  const auto [begin, end] = transfer(slot, bytes, l.clock + costs::kIssue);
  const std::size_t number = block(slot).number;
  trace_.busy(number, kTmaTrack, name, begin, end);
  trace_.flight(block(owner).number, 1 + t / kWarpSize, "tma", "TMA " + name, l.clock,
                end + costs::kTma);
  Sync& s = syncs_[barrier];
  // complete() adds the latency of a barrier, which is part of the copy's.
  if (const Cycles there = end + costs::kTma - costs::kBarrier; there >= s.last) {
    s.last = there;
    s.source = {number, kTmaTrack, end - std::min<Cycles>(2, end - begin), true};
  }
  l.clock += costs::kIssue;
}

void Timeline::copy_async(std::size_t slot, std::size_t t, std::size_t bytes) {
  Lane& l = lane(slot, t);
  if (l.copied == 0) l.copies_began = l.clock;
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
      trace_.busy(number, kLoadsTrack, "cp.async", begin, end);
      trace_.flight(number, 1 + t / kWarpSize, "cp.async",
                    "cp.async of warp " + std::to_string(t / kWarpSize), l.copies_began, there);
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

void Timeline::store(std::size_t slot, std::size_t t, std::size_t bytes) {
  Lane& l = lane(slot, t);
  const auto [begin, end] = transfer(slot, bytes, l.clock + costs::kIssue);
  trace_.busy(block(slot).number, kTmaTrack, "store", begin, end);
  trace_.flight(block(slot).number, 1 + t / kWarpSize, "tma", "TMA store", l.clock,
                end + costs::kTma);
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

void Timeline::product(std::size_t slot, std::size_t t, std::size_t columns) {
  Lane& l = lane(slot, t);
  if (l.products == 0) l.products_began = l.clock;
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
      trace_.busy(number, kTensorTrack, warpgroup_name(warp), begin, end);
      trace_.flight(number, 1 + t / kWarpSize, "wgmma", "wgmma of " + warpgroup_name(warp),
                    l.products_began, end + costs::kWgmmaLatency);
    }
    groups.push_back({end, end + costs::kWgmmaLatency,
                      {number, kTensorTrack, end - std::min<Cycles>(2, l.products),
                       l.products > 0}});
  }
  l.products = 0;
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
