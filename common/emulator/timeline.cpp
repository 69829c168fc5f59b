// The model's clocks: whose turn it is, and what ordinary code costs.
#include "emulator/timeline.h"

#include <algorithm>

#include "emulator/simt.h"

namespace attn::emulator {
namespace {

// What a warp runs on a unit before another warp has its turn.
constexpr Cycles kQuantum = 32;
// Ordinary code that is shorter is not worth an event.
constexpr Cycles kShort = 16;
}  // namespace

std::string Timeline::warpgroup_name(std::size_t warp) {
  return "warpgroup " + std::to_string(warp / (kWarpgroupSize / kWarpSize));
}

// ---- launches and blocks ------------------------------------------------------------------------

void Timeline::begin_launch(std::size_t blocks, std::size_t per_sm, std::size_t resident) {
  end_blocks();
  ++launch_;
  launch_begin_ = end_;
  blocks_.clear();
  sms_.clear();
  syncs_.clear();
  ready_ = {}, events_ = {};
  polling = 0;
  now_ = launch_begin_;
  slot_free_.assign(resident, launch_begin_);
  // A GPU places one block on each SM before it places a second one.
  per_sm = std::clamp<std::size_t>((blocks + costs::kSms - 1) / costs::kSms, 1,
                                   std::max<std::size_t>(per_sm, 1));
  const std::size_t sms = std::max<std::size_t>(resident / per_sm, 1);
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
  if (blocks_[slot]) end_block(*blocks_[slot]);
  if (shared_) shared_->add_block(b->number, threads);
  blocks_[slot] = std::move(b);
}

void Timeline::exited(std::size_t slot, std::size_t t) {
  Running& b = block(slot);
  const Cycles clock = b.lanes[t].clock;
  end_ = std::max(end_, clock);
  slot_free_[slot] = std::max(slot_free_[slot], clock + costs::kNextBlock);
  if (--b.lanes_left > 0) return;
  // So that the code after the last event of a warp counts.
  for (std::size_t w = 0; w < b.warps.size(); ++w) {
    Cycles last = 0;
    for (std::size_t n = 32 * w; n < std::min(32 * (w + 1), b.lanes.size()); ++n)
      last = std::max(last, b.lanes[n].clock);
    trace_.span(b.number, 1 + w, "exit", "exit", last, last);
  }
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
    l.wait_begin = l.clock;
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
    batch->from = l.clock;
    batch->code = l.ordinary;
    const std::size_t lanes = lanes_of(slot, t);
    Cycles begin = l.clock;
    if (l.written) transfer(slot, l.written * lanes, begin);
    if (l.read) {
      const auto [first, last] = transfer(slot, l.read * lanes, begin);
      begin = last + costs::kLoad;
      trace_.span(block(slot).number, 1 + batch->warp, "wait", "global loads", l.clock, begin);
      w.last_wait = begin;
    }
    batch->begin = begin;
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

}  // namespace attn::emulator
