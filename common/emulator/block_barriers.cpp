// Where threads of a block or a warp wait for each other: barriers and warp collectives.
#include <algorithm>
#include <cstring>

#include "emulator/simt.h"
#include "emulator/timeline.h"

namespace attn::emulator {

void Block::wait_block(const char* what, Place place) {
  const Uncounted uncounted;
  leave_if_failed();
  if (!barrier_.empty() && !(threads_[barrier_.front()].place == place))
    fail(what, place,
         "while " + name(barrier_.front()) + " waits in another one, at " +
             threads_[barrier_.front()].place.text() + ": a divergent barrier");
  if (timeline) {
    let_others_run(what, place);
    timeline->arrive(&barrier_, slot_, running_, "");
  }
  arrive(meeting_, running_);
  barrier_.push_back(running_);
  if (barrier_.size() + exited_ < threads_.size()) return suspend(what, place);
  barrier_.pop_back();
  go_on(open_block_barrier(), running_);
  if (timeline) timeline->end_wait(&barrier_, slot_, running_, what);
}

std::shared_ptr<const Epochs> Block::open_block_barrier() {
  auto known = std::make_shared<const Epochs>(std::exchange(meeting_, {}).known);
  if (timeline) timeline->complete(&barrier_);
  for (std::size_t t : barrier_) {
    go_on(known, t);
    if (timeline) timeline->end_wait(&barrier_, slot_, t, threads_[t].what);
    make_ready(t);
  }
  // Those who have left know of nothing more, and do nothing.
  // Nor do those of one block know of others in the cluster, who use its shared memory as well.
  if (races_ && exited_ == 0 && cluster_->blocks.size() == 1) races_->all_met(shadow_);
  barrier_.clear();
  return known;
}

void Block::named_barrier(const char* what, Place place, std::size_t id, std::size_t count,
                          bool wait) {
  const Uncounted uncounted;
  leave_if_failed();
  if (id == 0) fail(what, place, "with barrier 0, which is __syncthreads's: 1 to 15 are free");
  if (id >= named_.size() || count % kWarpSize != 0 || count == 0 || count > round_up_to_warps())
    fail(what, place,
         "with barrier " + std::to_string(id) + " and " + std::to_string(count) +
             " threads: 16 barriers, a multiple of 32 up to the block's threads");
  Named& barrier = named_[id];
  if (barrier.arrived > 0 && barrier.count != count)
    fail(what, place,
         "for " + std::to_string(count) + " threads, while others wait there for " +
             std::to_string(barrier.count));
  const std::string timed = timeline ? "named barrier " + std::to_string(id) : std::string();
  if (timeline) {
    let_others_run(what, place);
    timeline->arrive(&barrier, slot_, running_, timed);
  }
  barrier.count = count;
  if (barrier.arrivals.empty()) {
    barrier.arrivals.resize(threads_.size());
    barrier.places.resize(warps_.size());
  }
  // PTX ISA, "barrier{.cta}": all threads of a warp execute the same bar instruction.
  Place& first = barrier.places[running_ / kWarpSize];
  if (first == Place{}) first = place;
  if (barrier.arrivals[running_] == 0 && !(first == place))
    fail(what, place,
         "while another lane of its warp is at " + first.text() +
             ": a warp executes one bar instruction");
  ++barrier.arrivals[running_];
  arrive(barrier.meeting, running_);
  // A partial last warp counts as 32: its first lane also counts for the missing ones.
  const std::size_t lanes = std::min(kWarpSize, threads_.size() - running_);
  barrier.arrived += running_ % kWarpSize == 0 ? 1 + kWarpSize - lanes : 1;
  if (barrier.arrived == count) require_whole_warps(what, place, barrier);
  if (barrier.arrived < count) {
    if (!wait) return let_others_run(what, place);
    barrier.waiting.push_back(running_);
    return suspend(what, place);
  }
  const auto known = std::make_shared<const Epochs>(std::move(barrier.meeting.known));
  if (timeline) timeline->complete(&barrier);
  for (std::size_t t : barrier.waiting) {
    go_on(known, t);
    if (timeline) timeline->end_wait(&barrier, slot_, t, timed);
    make_ready(t);
  }
  if (wait) go_on(known, running_);
  if (wait && timeline) timeline->end_wait(&barrier, slot_, running_, timed);
  barrier = {};
  if (!wait) let_others_run(what, place);
}

// A GPU counts 32 for a warp, however many of its lanes arrive. PTX ISA, "barrier{.cta}": bar.sync
// is for all threads of the warp, so that those which have exited are missed here.
void Block::require_whole_warps(const char* what, Place place, const Named& barrier) const {
  std::size_t warps = 0;  // of which at least one lane has arrived
  for (std::size_t first = 0; first < threads_.size(); first += kWarpSize)
    warps += std::any_of(&barrier.arrivals[first],
                         &barrier.arrivals[0] + std::min(first + kWarpSize, threads_.size()),
                         [](auto times) { return times > 0; });
  for (std::size_t first = 0; first < threads_.size(); first += kWarpSize) {
    const std::size_t end = std::min(first + kWarpSize, threads_.size());
    const auto times = [&](std::size_t t) { return barrier.arrivals[t]; };
    std::size_t lanes = 0, most = 0;
    for (std::size_t t = first; t < end; ++t)
      lanes += times(t) > 0, most = std::max<std::size_t>(most, times(t));
    for (std::size_t t = first; t < end; ++t)
      if (lanes > 0 && times(t) != most)
        fail(what, place,
             "while of the warp of " + name(first) + " " + std::to_string(lanes) + " of " +
                 std::to_string(end - first) +
                 " lanes have arrived: the barrier takes whole warps, and counts 32 for each" +
                 (warps * kWarpSize > barrier.count
                      ? "; or more than " + std::to_string(barrier.count / kWarpSize) +
                            " warps use this number"
                      : std::string()));
  }
}

void Block::mbarrier_init(const char* what, Place place, const void* at, std::size_t count) {
  if (reinterpret_cast<std::uintptr_t>(at) % 8 != 0 || count == 0)
    fail(what, place,
         "for " + std::to_string(count) + " threads: at least one, at a multiple of 8 bytes");
  if (mbarriers_.contains(at))
    fail(what, place,
         "again: PTX leaves undefined what happens to a barrier that is in use, and " +
             barrier_text(at));
  access(Kind::write, what, place, at, sizeof(std::uint64_t));
  mbarriers_.insert_or_assign(at, MBarrier(count, running_));
  shadow_.keeps_reads = true;
}

void Block::mbarrier_init_fence() {
  for (auto& [at, barrier] : mbarriers_) barrier.make_known(running_);
}

void Block::mbarrier_arrive(const char* what, Place place, const void* at, std::size_t bytes) {
  const Uncounted uncounted;
  leave_if_failed();
  MBarrier& barrier = mbarrier_of(what, place, at);
  if (timeline) let_others_run(what, place);
  access(Kind::atomic, what, place, at, sizeof(std::uint64_t));
  if (barrier.all_arrived()) end_phase(*this, barrier);
  if (barrier.all_arrived())
    fail(what, place, "once more than the barrier counts in a phase: " + barrier_text(at));
  if (timeline) timeline->arrive(&barrier, slot_, running_, word_name(shared_byte(at).value_or(0)));
  arrive(barrier.meeting, running_);
  if (barrier.arrive(bytes)) end_phase(*this, barrier);
  let_others_run(what, place);
}

void Block::mbarrier_copy(const char* what, Place place, const void* at, void* to,
                          std::size_t bytes, std::function<void()> work, const BlockList& source) {
  mbarrier_copy_to(rank_, what, place, at, to, bytes, std::move(work), source);
}

// Of the block's own, or of another one of the cluster: `this` is the block that issues it.
void Block::mbarrier_copy_to(unsigned rank, const char* what, Place place, const void* at, void* to,
                             std::size_t bytes, std::function<void()> work,
                             const BlockList& source) {
  const Uncounted uncounted;
  Block& owner = *cluster_->blocks[rank];
  leave_if_failed();
  if (&owner != this && owner.over()) fail(what, place, "to a block of the cluster that has ended");
  owner.require_shared(what, place, "a destination", to, bytes);
  MBarrier& barrier = owner.mbarrier_of(what, place, at);
  if (timeline) {
    let_others_run(what, place);
    timeline->copy(&barrier, slot_, running_, owner.slot_, bytes,
                   owner.word_name(owner.shared_byte(at).value_or(0)),
                   tile_name(owner.members_,
                             owner.shared_byte(to).value_or(0) - owner.variables_.size()),
                   owner.shared_byte(to));
  }
  if (!barrier.known_to_copies())
    fail(what, place, "on a barrier without mbarrier_init_fence since its mbarrier_init");
  if (&owner == this)
    access(Kind::atomic, what, place, at, sizeof(std::uint64_t));
  else
    access_cluster(Kind::atomic, what, place, at, sizeof(std::uint64_t));
  // While the copy is in flight the destination is undefined: a thread that reads there gets
  // NaN.
  const bool early = happens_early();
  if (!early) std::memset(to, 0xFF, bytes);
  if (races_) {
    const std::uint32_t epoch = barrier.phase() + 1;
    Races::Access writes = async(barrier.who, epoch, Kind::write, what, place);
    writes.proxy = Space::shared;
    owner.async_access(writes, to, bytes);
    Races::Access reads = async(barrier.who, epoch, Kind::read, what, place);
    source([&](const void* first, std::size_t n) {
      const bool is_shared = shared_byte(first).has_value();
      if (!is_shared && !grid_.races) return;
      reads.proxy = is_shared ? Space::shared : Space::global;
      reads.after = 0;  // to the other proxy
      async_access(reads, first, n);
    });
  }
  const bool ends = [&] {
    const Internal internal(internal_);
    return barrier.copy(bytes, early, std::move(work));
  }();
  if (ends) end_phase(owner, barrier);
}

void Block::mbarrier_wait(const char* what, Place place, const void* at, unsigned parity) {
  const Uncounted uncounted;
  leave_if_failed();
  MBarrier& barrier = mbarrier_of(what, place, at);
  if (timeline) let_others_run(what, place);
  access(Kind::atomic_read, what, place, at, sizeof(std::uint64_t));
  while (barrier.phase() % 2 == parity) {
    end_phase(*this, barrier);
    if (barrier.phase() % 2 != parity) break;
    barrier.wait(running_);
    threads_[running_].barrier = at;
    suspend(what, place);
    threads_[running_].barrier = nullptr;
  }
  barrier.note_wait();
  if (timeline)
    timeline->end_wait(&barrier, slot_, running_, word_name(shared_byte(at).value_or(0)));
  go_on(barrier.ended, running_);
}

MBarrier& Block::mbarrier_of(const char* what, Place place, const void* at) {
  const auto it = mbarriers_.find(at);
  if (it == mbarriers_.end()) fail(what, place, "on a barrier that no thread has initialised");
  return it->second;
}

// The barrier may be of another block of the cluster.
void Block::end_phase(Block& owner, MBarrier& barrier) {
  {
    const Internal internal(internal_);
    if (!barrier.end_phase()) return;
  }
  if (races_) {
    if (barrier.who != AsyncQueue::kNone)
      Order::set(barrier.meeting.known, barrier.who, barrier.phase());
    barrier.ended = std::make_shared<const Epochs>(barrier.meeting.known);
    barrier.meeting.last = nullptr;
  }
  grid_.spins = grid_.slices = 0;
  if (timeline) timeline->complete(&barrier);
  for (std::size_t t : barrier.take_waiting()) {
    if (timeline) timeline->resume(&barrier, owner.slot_, t);
    owner.make_ready(t);
  }
}

// A thread that waits keeps this frame: it is small, and what few need is elsewhere.
void Block::meet_warp(const char* what, Place place, unsigned mask, void* mine,
                      const Finish& finish, Exited exited, bool orders) {
  leave_if_failed();
  if (timeline) [[unlikely]] {  // no Uncounted: this frame is to stay small
    timeline->account();
    let_others_run(what, place);
  }
  const std::size_t warp = running_ / kWarpSize;
  mask &= full_mask();
  if (!(mask >> lane() & 1)) fail(what, place, "with a mask that does not name its lane");
  // Lanes of a smaller mask may meet while the rest already waits for them further on. What can
  // never end is two lanes that wait for each other in different places. Only __syncwarp may stand
  // in several.
  std::vector<Collective>& open = warps_[warp];
  auto it = std::find_if(open.begin(), open.end(), [&](const Collective& c) {
    return c.mask == mask && (orders || c.place == place) &&
           (c.what == what || std::strcmp(c.what, what) == 0);
  });
  const auto begin = [&]() __attribute__((noinline)) {
    for (const Collective& c : open)
      if ((c.mask >> lane() & 1) && (c.arrived & mask))
        fail(what, place,
             std::string("while a lane of its warp waits in ") + c.what + " at " + c.place.text() +
                 ": a divergent warp");
    return open.insert(open.end(), Collective{what, place, mask, 0, {}, exited, orders, nullptr});
  };
  if (it == open.end()) it = begin();
  it->operands[lane()] = mine;
  it->arrived |= 1u << lane();
  it->finish = &finish;
  if (!complete(warp, *it)) return suspend(what, place);
  open_collective(warp, it, running_);
}

bool Block::complete(std::size_t warp, const Collective& c) const {
  const unsigned left = c.exited == Exited::do_not_count ? exited_lanes_[warp] : 0;
  return (c.arrived | (left & c.mask)) == c.mask;
}

// All lanes are there; `last` runs, the others wait. What is behind it.
[[gnu::noinline]] std::vector<Block::Collective>::iterator Block::open_collective(
    std::size_t warp, std::vector<Collective>::iterator which, std::size_t last) {
  const Collective& c = *which;
  if (timeline) timeline->meet(slot_, warp, c.arrived, c.what);
  Meeting meeting;
  for (std::size_t l = 0; l < kWarpSize; ++l) {
    if (!(c.arrived >> l & 1)) continue;
    if (warp * kWarpSize + l != last) make_ready(warp * kWarpSize + l);
    if (c.orders) arrive(meeting, warp * kWarpSize + l);
  }
  if (c.orders && races_) {
    const auto known = std::make_shared<const Epochs>(std::move(meeting.known));
    for (std::size_t l = 0; l < kWarpSize; ++l)
      if (c.arrived >> l & 1) go_on(known, warp * kWarpSize + l);
  }
  const Internal internal(internal_);
  (*c.finish)(c.operands);
  const auto behind = warps_[warp].erase(which);
  if (timeline) [[unlikely]]
    timeline->drop();
  return behind;
}

// The thread that runs has exited: perhaps others of its warp have waited for that.
void Block::lane_exited() {
  const std::size_t warp = running_ / kWarpSize;
  exited_lanes_[warp] |= 1u << lane();
  if (failure_) return;
  std::vector<Collective>& open = warps_[warp];
  for (auto it = open.begin(); it != open.end();)
    it = complete(warp, *it) ? open_collective(warp, it, running_) : it + 1;
}

void Block::wait_syncwarp(Place place, unsigned mask) {
  meet_warp(
      "__syncwarp", place, mask, this, [](const auto&) {}, Exited::do_not_count, true);
}

unsigned Block::full_mask() const {
  const std::size_t first = running_ - lane();
  const std::size_t lanes = std::min(kWarpSize, threads_.size() - first);
  return lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
}

void Block::grid_dependency_wait() {
  if (grid_.races && grid_.before) races_->order().take(number(running_), grid_.before);
}

// "full[1] is in phase 3: 31 of 32 threads have arrived, 128 bytes announced, 112 of them in
// flight".
std::string Block::barrier_text(const void* at) const {
  const auto it = mbarriers_.find(at);
  if (it == mbarriers_.end()) return "an mbarrier that no thread has initialised";
  const MBarrier& barrier = it->second;
  const auto byte = shared_byte(at);
  std::string text = "mbarrier " + (byte ? word_name(*byte) : std::string("?")) + " is in phase " +
                     std::to_string(barrier.phase()) + ": " + std::to_string(barrier.arrived()) +
                     " of " + std::to_string(barrier.count()) + " threads have arrived";
  const std::ptrdiff_t in_flight = barrier.in_flight(), missing = barrier.missing_bytes(),
                       there = barrier.announced() - in_flight - missing;
  if (in_flight == 0 && missing == 0) return text;
  text += ", " + std::to_string(barrier.announced()) + " bytes are announced, " +
          std::to_string(in_flight) + " in flight";
  return there == 0 ? text : text + ", " + std::to_string(there) + " there";
}

// A barrier that is left in the middle of a phase has got an arrival too many or too few, a phase
// or more before; a copy that was not waited for may write to the next block's shared memory.
void Block::check_barriers() const {
  for (const auto& [at, barrier] : mbarriers_) {
    const std::string where = "block " + index_.text() + " ends ";
    if (barrier.copies_unawaited())
      throw KernelError(
          where + "before a thread has waited for copies to shared memory: " + barrier_text(at));
    if (barrier.arrived() != 0 && !barrier.all_arrived())
      throw KernelError(where + "in the middle of a phase: " + barrier_text(at) +
                        ": probably an arrival too many or too few");
    if (barrier.missing_bytes() > 0)
      throw KernelError(where + "before all expected bytes have arrived: " + barrier_text(at));
  }
}

// What a thread leaves in flight when it ends.
void Block::check_unawaited() const {
  for (std::size_t t = 0; t < threads_.size(); ++t) {
    const AsyncWork& work = threads_[t].work;
    const char* what = nullptr;
    if (work.copies.uncommitted()) what = "cp_async copies without cp_async_commit";
    else if (work.copies.pending()) what = "cp_async copies without cp_async_wait";
    else if (work.stores.uncommitted())
      what = "a TMA store or bulk reduction without tma_store_commit";
    else if (work.stores.pending()) what = "a TMA store or bulk reduction without tma_store_wait";
    else if (work.products.uncommitted()) what = "wgmma without wgmma_commit";
    else if (work.products.pending()) what = "wgmma without wgmma_wait";
    if (what) throw KernelError(thread_name(t) + " ends with " + what);
  }
}

}  // namespace attn::emulator
