// A block's threads, its schedule and its barriers.
#include <algorithm>
#include <cstring>

#include "emulator/simt.h"

namespace attn::emulator {
namespace {

// Turns of threads in a row that end before an atomic: more than that is a deadlock.
constexpr std::size_t kMaxSpins = 1'000'000;

}  // namespace

std::string Index3::text() const {
  std::string s = "(";  // "(" + std::string makes GCC 12 warn of memory it does not touch
  return s.append(std::to_string(x)) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
}

Block::Block(Index3 index, Index3 extent, std::size_t shared_bytes, std::uint64_t seed, Grid& grid,
             std::size_t slot)
    : index_(index),
      extent_(extent),
      random_{seed},
      grid_(grid),
      slot_(slot),
      shared_bytes_(shared_bytes),
      threads_(extent.count()),
      warps_((extent.count() + kWarpSize - 1) / kWarpSize),
      registers_((extent.count() + kWarpgroupSize - 1) / kWarpgroupSize),
      product_numbers_(warps_.size(), AsyncQueue::kNobody) {
  // Fresh shared memory holds whatever the last block left: NaN bytes stand for "anything".
  const std::size_t bytes = shared_bytes + kGuardBytes;
  shared_.reset(new (std::align_val_t{kSharedAlignment}) std::byte[bytes]);
  std::memset(shared_.get(), 0xFF, bytes);
  for (const StaticShared& v : grid.variables)
    variables_.resize(variables_.size() + v.bytes, std::byte{0xFF});
  if (find_races && grid.kernel.instrumented) {
    if (!grid.races)
      own_races_ = std::make_unique<Races>(
          threads_.size(), [this](std::size_t t, std::uint32_t) { return name(t); });
    races_ = grid.races ? &grid.races->races : own_races_.get();
    shared_name_ = [this](std::size_t byte) { return shared_name(byte); };
  }
  looks_closer_ = !grid.variables.empty() || grid.races;
  if (random_.below(2) == 0) late_warp_ = random_.below(warps_.size());
  for (std::size_t t = 0; t < threads_.size(); ++t) {
    threads_[t].index = index_in(extent, static_cast<std::uint32_t>(t));
    std::byte* const stack = grid.stacks[global_number(t)];
    threads_[t].stack = stack;
    threads_[t].fiber.start(stack, [this, t]() -> Fiber& {
      thread_main(threads_[t]);
      return end_turn();
    });
    make_ready(t);
  }
}

Block::~Block() {
  if (grid_.inside == this) grid_.inside = nullptr;
}

// The host compiler has one of each __shared__ variable: they hold the bytes of the block that
// runs.
void Block::bring_variables() {
  if (grid_.inside == this) return;
  std::size_t at = 0;
  for (const StaticShared& v : grid_.variables) {
    if (grid_.inside) std::memcpy(grid_.inside->variables_.data() + at, v.data, v.bytes);
    std::memcpy(v.data, variables_.data() + at, v.bytes);
    at += v.bytes;
  }
  grid_.inside = this;
}

bool Block::step(std::size_t turns) {
  bring_variables();
  poll();
  turns_ = turns;
  if (!choose()) return false;
  resume(running_);
  return true;
}

// Whose turn is next: running_. None is if this step, or the block, has come to its end.
bool Block::choose() {
  if (turns_ == 0 || over()) return false;
  // Whoever spins on an atomic may spin for the late warp.
  const bool late = !late_.empty() && (ready_.empty() || atomic_yields_ >= kMaxAtomicYields);
  if (late) atomic_yields_ = 0;
  std::vector<std::size_t>& ready = late ? late_ : ready_;
  if (ready.empty()) {
    if (polling_.empty()) failure_ = std::make_exception_ptr(KernelError(deadlock_text()));
    return false;
  }
  std::swap(ready[random_.below(ready.size())], ready.back());
  running_ = ready.back();
  ready.pop_back();
  return true;
}

void Block::begin_turn() {
  const Thread& thread = threads_[running_];
  stack_ = thread.stack;
  threadIdx = thread.index;
  spins_ = false;
}

// The thread that runs stops, or has ended: who goes on. The host does after the last turn.
Fiber& Block::end_turn() {
  --turns_;
  grid_.spins = spins_ ? grid_.spins + 1 : 0;
  if (grid_.spins > kMaxSpins) fail_later(spin_text(running_));
  if (std::exchange(paused_, false) && random_.below(2) == 0) return host_;  // other blocks first
  if (!choose()) return host_;
  begin_turn();
  return threads_[running_].fiber;
}

void Block::finish() {
  if (failure_) {
    const std::exception_ptr failure = failure_;
    abandon();
    std::rethrow_exception(failure);
  }
  check_shared_guard();
  check_whole_warpgroups();
  if (own_races_)
    if (const auto line = own_races_->never_written()) throw KernelError(*line);
}

void Block::abandon() {
  if (!failure_) failure_ = std::make_exception_ptr(Abandoned{});
  bring_variables();
  for (std::size_t t = 0; t < threads_.size(); ++t)
    while (threads_[t].state != State::kExited) resume(t);
}

void Block::thread_main(Thread& self) {
  try {
    if (!failure_) grid_.kernel.run();
  } catch (const Abandoned&) {
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
  self.state = State::kExited;
  ++exited_;
}

// Called by the host, who goes on after the step's last turn.
void Block::resume(std::size_t t) {
  running_ = t;
  blockIdx = index_;
  blockDim = extent_;
  running_block = this;
  reading_block = races_ ? this : nullptr;
  begin_turn();
  host_.go_on_with(threads_[t].fiber);
  running_block = reading_block = nullptr;
}

void Block::stop() {
  Fiber& self = threads_[running_].fiber;
  Fiber& next = end_turn();
  if (&next != &self) self.go_on_with(next);
}

void Block::suspend(const char* what, Place place) {
  if (failure_) throw Abandoned{};
  Thread& self = threads_[running_];
  self.what = what;
  self.place = place;
  if (self.state == State::kReady) self.state = State::kWaiting;
  stop();
  if (failure_) throw Abandoned{};
}

// Who arrives somewhere and goes on may be overtaken by those who waited for that, or not.
void Block::let_others_run(const char* what, Place place) {
  if (random_.below(2) == 0) return;
  make_ready(running_);
  suspend(what, place);
}

// The same in the middle of ordinary code, through which nothing may be thrown.
void Block::pause() {
  make_ready(running_);
  paused_ = true;
  stop();
}

void Block::make_ready(std::size_t t) {
  threads_[t].state = State::kReady;
  (t / kWarpSize == late_warp_ ? late_ : ready_).push_back(t);
}

void Block::wait_until(const char* what, Place place, const std::function<bool()>& there) {
  leave_if_failed();
  const auto is_there = [&] {
    const Internal internal(internal_);
    return there();
  };
  while (!is_there()) {
    Thread& self = threads_[running_];
    self.state = State::kPolling;
    self.there = &there;
    polling_.push_back(running_);
    suspend(what, place);
  }
}

void Block::poll() {
  std::vector<std::size_t> still;
  for (const std::size_t t : polling_) {
    if ((*threads_[t].there)())
      make_ready(t);
    else
      still.push_back(t);
  }
  polling_.swap(still);
}

void Block::wait_block(const char* what, Place place) {
  leave_if_failed();
  if (!barrier_.empty() && !(threads_[barrier_.front()].place == place))
    fail(what, place,
         "while " + name(barrier_.front()) + " waits in another one, at " +
             threads_[barrier_.front()].place.text() + ": a divergent barrier");
  arrive(meeting_, running_);
  if (barrier_.size() + 1 < threads_.size()) {
    barrier_.push_back(running_);
    return suspend(what, place);
  }
  const auto known = std::make_shared<const Epochs>(std::exchange(meeting_, {}).known);
  for (std::size_t t : barrier_) {
    go_on(known, t);
    make_ready(t);
  }
  go_on(known, running_);
  if (races_) races_->all_met(shadow_);
  barrier_.clear();
}

void Block::named_barrier(const char* what, Place place, std::size_t id, std::size_t count,
                          bool wait) {
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
  barrier.count = count;
  arrive(barrier.meeting, running_);
  if (++barrier.arrived < count) {
    if (!wait) return let_others_run(what, place);
    barrier.waiting.push_back(running_);
    return suspend(what, place);
  }
  const auto known = std::make_shared<const Epochs>(std::move(barrier.meeting.known));
  for (std::size_t t : barrier.waiting) {
    go_on(known, t);
    make_ready(t);
  }
  if (wait) go_on(known, running_);
  barrier = {};
  if (!wait) let_others_run(what, place);
}

void Block::mbarrier_init(const char* what, Place place, const void* at, std::size_t count) {
  if (reinterpret_cast<std::uintptr_t>(at) % 8 != 0 || count == 0)
    fail(what, place,
         "for " + std::to_string(count) + " threads: at least one, at a multiple of 8 bytes");
  access(Kind::write, what, place, at, sizeof(std::uint64_t));
  mbarriers_.insert_or_assign(at, MBarrier(count, running_));
}

void Block::mbarrier_init_fence() {
  for (auto& [at, barrier] : mbarriers_) barrier.make_known(running_);
}

void Block::mbarrier_arrive(const char* what, Place place, const void* at, std::size_t bytes) {
  leave_if_failed();
  MBarrier& barrier = mbarrier_of(what, place, at);
  access(Kind::atomic, what, place, at, sizeof(std::uint64_t));
  if (barrier.all_arrived()) end_phase(barrier);
  if (barrier.all_arrived()) fail(what, place, "once more than the barrier counts in a phase");
  arrive(barrier.meeting, running_);
  if (barrier.arrive(bytes)) end_phase(barrier);
  let_others_run(what, place);
}

void Block::mbarrier_copy(const char* what, Place place, const void* at, void* to,
                          std::size_t bytes, std::function<void()> work, const BlockList& source) {
  leave_if_failed();
  require_shared(what, place, "a destination", to, bytes);
  MBarrier& barrier = mbarrier_of(what, place, at);
  if (!barrier.known_to_copies())
    fail(what, place, "on a barrier without mbarrier_init_fence since its mbarrier_init");
  access(Kind::atomic, what, place, at, sizeof(std::uint64_t));
  // While it is in flight nobody knows what is there: whoever still reads, or reads too early, gets
  // NaN.
  if (!early_copies) std::memset(to, 0xFF, bytes);
  if (races_) {
    const std::uint32_t epoch = barrier.phase() + 1;
    Races::Access writes = async(barrier.who, epoch, Kind::write, what, place);
    async_access(writes, to, bytes);
    Races::Access reads = async(barrier.who, epoch, Kind::read, what, place);
    if (grid_.races)
      source([&](const void* first, std::size_t n) { async_access(reads, first, n); });
  }
  const bool ends = [&] {
    const Internal internal(internal_);
    return barrier.copy(bytes, std::move(work));
  }();
  if (ends) end_phase(barrier);
}

void Block::mbarrier_wait(const char* what, Place place, const void* at, unsigned parity) {
  leave_if_failed();
  MBarrier& barrier = mbarrier_of(what, place, at);
  access(Kind::atomic_read, what, place, at, sizeof(std::uint64_t));
  while (barrier.phase() % 2 == parity) {
    end_phase(barrier);
    if (barrier.phase() % 2 != parity) break;
    barrier.wait(running_);
    suspend(what, place);
  }
  go_on(barrier.ended, running_);
}

MBarrier& Block::mbarrier_of(const char* what, Place place, const void* at) {
  const auto it = mbarriers_.find(at);
  if (it == mbarriers_.end()) fail(what, place, "on a barrier that nobody has initialised");
  return it->second;
}

void Block::end_phase(MBarrier& barrier) {
  {
    const Internal internal(internal_);
    if (!barrier.end_phase()) return;
  }
  if (races_) {
    if (barrier.who != AsyncQueue::kNobody)
      Order::set(barrier.meeting.known, barrier.who, barrier.phase());
    barrier.ended = std::make_shared<const Epochs>(barrier.meeting.known);
    barrier.meeting.last = nullptr;
  }
  for (std::size_t t : barrier.take_waiting()) make_ready(t);
}

void Block::meet_warp(const char* what, Place place, unsigned mask, void* mine,
                      const Finish& finish, bool orders) {
  leave_if_failed();
  const std::size_t warp = running_ / kWarpSize;
  mask &= full_mask();
  if (!(mask >> lane() & 1)) fail(what, place, "with a mask that does not name its lane");
  std::vector<Collective>& open = warps_[warp];
  // Lanes of a smaller mask may meet while the rest already waits for them further on. What can
  // never end is two lanes that wait for each other in different places. Only __syncwarp may stand
  // in several.
  auto it = std::find_if(open.begin(), open.end(), [&](const Collective& c) {
    return c.mask == mask && (orders || c.place == place) &&
           (c.what == what || std::strcmp(c.what, what) == 0);
  });
  if (it == open.end()) {
    for (const Collective& c : open)
      if ((c.mask >> lane() & 1) && (c.arrived & mask))
        fail(what, place,
             std::string("while a lane of its warp waits in ") + c.what + " at " + c.place.text() +
                 ": a divergent warp");
    it = open.insert(open.end(), Collective{what, place, mask, 0, {}});
  }
  it->operands[lane()] = mine;
  it->arrived |= 1u << lane();
  if (it->arrived != mask) return suspend(what, place);
  std::array<void*, kWarpSize> all{};
  Meeting meeting;
  for (std::size_t l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) continue;
    all[l] = it->operands[l];
    if (l != lane()) make_ready(warp * kWarpSize + l);
    if (orders) arrive(meeting, warp * kWarpSize + l);
  }
  if (orders && races_) {
    const auto known = std::make_shared<const Epochs>(std::move(meeting.known));
    for (std::size_t l = 0; l < kWarpSize; ++l)
      if (mask >> l & 1) go_on(known, warp * kWarpSize + l);
  }
  open.erase(it);
  const Internal internal(internal_);
  finish(all);
}

void Block::wait_syncwarp(Place place, unsigned mask) {
  meet_warp(
      "__syncwarp", place, mask, this, [](const auto&) {}, true);
}

unsigned Block::full_mask() const {
  const std::size_t first = running_ - lane();
  const std::size_t lanes = std::min(kWarpSize, threads_.size() - first);
  return lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
}

void Block::fail(const char* what, Place place, const std::string& why) const {
  throw KernelError(name(running_) + " of block " + index_.text() + " calls " + what + " at " +
                    place.text() + " " + why);
}

void Block::fail_later(const std::string& line) noexcept {
  if (!failure_) failure_ = std::make_exception_ptr(KernelError(line));
}

std::string Block::spin_text(std::size_t t) const {
  return "deadlock: " + thread_name(t) + " spins on " + threads_[t].what + " at " +
         threads_[t].place.text() + ", and in " + std::to_string(kMaxSpins) +
         " turns no thread has come to anything else; " + std::to_string(grid_.waiting) +
         " blocks have not started";
}

std::string Block::deadlock_text() const {
  const auto waits = [](const Thread& t) {
    return t.state == State::kWaiting || t.state == State::kPolling;
  };
  const Thread& first = *std::find_if(threads_.begin(), threads_.end(), waits);
  const auto elsewhere = std::find_if(threads_.begin(), threads_.end(), [&](const Thread& t) {
    return waits(t) && !(t.place == first.place);
  });
  std::string text = "deadlock: thread " + first.index.text() + " of block " + index_.text() +
                     " waits in " + first.what + " at " + first.place.text() + "; " +
                     std::to_string(exited_) + " of " + std::to_string(threads_.size()) +
                     " threads have exited";
  if (elsewhere != threads_.end())
    text += ", thread " + elsewhere->index.text() + " waits in " + elsewhere->what + " at " +
            elsewhere->place.text();
  return text;
}

}  // namespace attn::emulator
