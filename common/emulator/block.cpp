// A block's threads, its schedule and its barriers.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "emulator/simt.h"

namespace attn::emulator {
namespace {

// Turns that end before an atomic, or with a time slice used up, since something has changed by
// which a loop could end: a thread has ended, a phase of a barrier, a word has another value. After
// many, more blocks start; more than kMaxSpins, or so many slices a thread, are a deadlock.
constexpr std::size_t kMaxSpins = 30'000, kManySpins = 2'000, kManySlices = 8, kMaxSlices = 5;
// The late warp runs after so many turns of others at the latest; one before an atomic counts more.
constexpr unsigned kTurnsUntilLate = 8192, kTurnsOfYield = 32;

// What the last atomic was to, and what was there before it: whether it has changed it.
struct Word {
  const void* at = nullptr;
  std::size_t bytes = 0;
  std::array<std::byte, 8> value{};
};
thread_local constinit Word last_word;

void note_progress(Grid& grid) {
  const Word& w = last_word;
  if (w.at && std::memcmp(w.at, w.value.data(), std::min(w.bytes, w.value.size())) != 0)
    grid.spins = grid.slices = 0;
}
// Where warps are late in turn: about so many turns of threads each.
constexpr std::size_t kTurnsOfLateWarp = 256;

// Fills the stack below its caller, where a kernel's variables will lie: an uninitialised one is
// NaN, or -1, as a register holds anything. More bytes would take longer than a small kernel.
[[gnu::noinline]] void poison_stack() {
  std::byte bytes[4096];
  std::memset(bytes, 0xFF, sizeof bytes);
  asm volatile("" ::"r"(bytes) : "memory");
}

}  // namespace

std::string Index3::text() const {
  std::string s = "(";  // "(" + std::string makes GCC 12 warn of memory it does not touch
  return s.append(std::to_string(x)) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
}

Block::Block(Index3 index, Index3 extent, std::size_t shared_bytes, std::uint64_t seed, Grid& grid,
             std::size_t slot, std::size_t first_number, std::shared_ptr<Cluster> cluster)
    : index_(index),
      extent_(extent),
      random_{seed},
      grid_(grid),
      slot_(slot),
      first_number_(first_number),
      cluster_(std::move(cluster)),
      rank_(static_cast<unsigned>(cluster_->blocks.size())),
      shared_bytes_(shared_bytes),
      threads_(extent.count()),
      warps_((extent.count() + kWarpSize - 1) / kWarpSize),
      registers_((extent.count() + kWarpgroupSize - 1) / kWarpgroupSize),
      products_(registers_.size()),
      product_numbers_(warps_.size(), AsyncQueue::kNobody) {
  cluster_->blocks.push_back(this);
  // Fresh shared memory holds whatever the last block left: NaN bytes stand for "anything".
  const std::size_t bytes = shared_bytes + kGuardBytes;
  shared_.reset(new (std::align_val_t{kSharedAlignment}) std::byte[bytes]);
  std::memset(shared_.get(), 0xFF, bytes);
  for (const StaticShared& v : grid.variables)
    variables_.resize(variables_.size() + v.bytes, std::byte{0xFF});
  if (find_races && grid.kernel.instrumented) {
    if (!grid.races) {
      own_races_ = std::make_unique<Races>();
      own_races_->name_threads([this](std::size_t t, std::uint32_t) { return name(t); });
      own_races_->add_threads(threads_.size());
    }
    races_ = grid.races ? grid.races.get() : own_races_.get();
    shared_name_ = [this](std::size_t byte) { return shared_name(byte); };
  }
  looks_closer_ = !grid.variables.empty() || grid.races;
  const bool some = random_.below(2) == 0;
  const std::size_t warp = random_.below(warps_.size());
  if (some || late_warps != LateWarps::half) late_warp_ = warp;
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
  // Before they go: the same value of several lanes?
  if (grid_.inside && grid_.inside->races_)
    if (const std::string* race = grid_.inside->races_->different_values())
      grid_.inside->fail_later(*race);
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
  if (late_warps == LateWarps::in_turn && random_.below(kTurnsOfLateWarp) == 0) change_late_warp();
  // A thread that spins may wait for the late warp.
  const bool late = !late_.empty() && (ready_.empty() || ++atomic_yields_ >= kTurnsUntilLate);
  if (late) atomic_yields_ = 0;
  std::vector<std::size_t>& ready = late ? late_ : ready_;
  if (ready.empty()) {
    // A barrier may open from another block of the cluster.
    if (polling_.empty() && cluster_->blocks.size() == 1)
      failure_ = std::make_exception_ptr(KernelError(deadlock_text()));
    return false;
  }
  std::swap(ready[random_.below(ready.size())], ready.back());
  running_ = ready.back();
  ready.pop_back();
  return true;
}

// Another warp is late from here on, or none.
void Block::change_late_warp() {
  ready_.insert(ready_.end(), late_.begin(), late_.end());
  late_.clear();
  late_warp_ = random_.below(warps_.size() + 1);
  std::erase_if(ready_, [&](std::size_t t) {
    if (t / kWarpSize == late_warp_) late_.push_back(t);
    return t / kWarpSize == late_warp_;
  });
}

void Block::begin_turn() {
  const Thread& thread = threads_[running_];
  stack_ = thread.stack;
  threadIdx = thread.index;
  reading_block = races_ ? this : nullptr;
  entering_block = nullptr;
  spins_ = slice_ = false;
  reads_left = kSlice;
}

// The thread that runs stops, or has ended: who goes on. The host does after the last turn.
Fiber& Block::end_turn() {
  --turns_;
  grid_.spins += spins_;
  grid_.slices += slice_;
  grid_.wants_more =
      grid_.waiting > 0 && (grid_.spins > kManySpins || grid_.slices > kManySlices);
  if (grid_.spins > kMaxSpins || grid_.slices > kMaxSlices * (threads_.size() + 1))
    fail_later(spin_text(running_));
  if (grid_.wants_more) return host_;
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
  ended_ = true;
  last_word = {};  // perhaps in this block's shared memory
  check_shared_guard();
  check_whole_warpgroups();
  check_barriers();
  check_unawaited();
  check_registers_given();
  if (races_)
    if (const std::string* race = races_->different_values()) throw KernelError(*race);
  if (own_races_)
    if (const auto line = own_races_->never_written()) throw KernelError(*line);
  for (Thread& t : threads_)
    for (auto& result : t.work.results) grid_.results.push_back(std::move(result.second));
}

void Block::abandon() {
  if (!failure_) failure_ = std::make_exception_ptr(Abandoned{});
  bring_variables();
  for (std::size_t t = 0; t < threads_.size(); ++t)
    while (threads_[t].state != State::kExited) {
      // In ordinary code nothing can be thrown: it would go on for ever.
      if (threads_[t].state == State::kLost) {
        threads_[t].fiber.forget();
        break;
      }
      resume(t);
    }
}

void Block::thread_main(Thread& self) {
  try {
    poison_stack();
    entries_ = 0;
    entering_block = std::exchange(reading_block, nullptr) ? this : nullptr;
    if (!failure_) grid_.kernel.run();
    reading_block = races_ ? this : nullptr;
  } catch (const Abandoned&) {
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
  self.state = State::kExited;
  ++exited_;
  grid_.spins = grid_.slices = 0;
  leave_cluster();
  // From sm_70 on threads that have left do not count at a barrier of the block.
  if (!failure_ && !barrier_.empty() && barrier_.size() + exited_ == threads_.size())
    open_block_barrier();
}

// The kernel's own code, or else the second function: the first one calls it.
void Block::entered(const void* code) noexcept {
  constexpr std::size_t kNear = 256;
  const auto* const kernel = static_cast<const std::byte*>(grid_.kernel.function);
  if (static_cast<std::size_t>(static_cast<const std::byte*>(code) - kernel) >= kNear &&
      ++entries_ < 2)
    return;
  entering_block = nullptr;
  reading_block = this;
}

// Called by the host, who goes on after the step's last turn.
void Block::resume(std::size_t t) {
  running_ = t;
  blockIdx = index_;
  blockDim = extent_;
  running_block = this;
  begin_turn();
  host_.go_on_with(threads_[t].fiber);
  running_block = reading_block = entering_block = nullptr;
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

// A loop around a plain word, which another thread is to change, does not end by itself.
void Block::end_slice(const void* caller, bool waits) noexcept {
  if (internal_) return;
  Thread& self = threads_[running_];
  if (!failure_) {
    self.what = "ordinary reads", self.place = {}, self.slice = Where(caller);
    slice_ = waits;
    if (waits) atomic_yields_ = kTurnsUntilLate;  // perhaps for the late warp
    pause();
  }
  if (failure_ && waits) lose("");
}

// Through ordinary code nothing can be thrown: what this thread has on its stack is lost.
void Block::lose(const std::string& line) noexcept {
  if (!line.empty()) fail_later(line);
  Thread& self = threads_[running_];
  self.state = State::kLost;
  self.fiber.go_on_with(host_);
  std::abort();  // not reached: the thread is never resumed
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
  barrier_.push_back(running_);
  if (barrier_.size() + exited_ < threads_.size()) return suspend(what, place);
  barrier_.pop_back();
  go_on(open_block_barrier(), running_);
}

std::shared_ptr<const Epochs> Block::open_block_barrier() {
  auto known = std::make_shared<const Epochs>(std::exchange(meeting_, {}).known);
  for (std::size_t t : barrier_) {
    go_on(known, t);
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
  if (barrier.arrivals.empty()) barrier.arrivals.resize(threads_.size());
  ++barrier.arrivals[running_];
  arrive(barrier.meeting, running_);
  if (++barrier.arrived == count) require_whole_warps(what, place, barrier);
  if (barrier.arrived < count) {
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

// A GPU counts 32 for a warp, however many of its lanes arrive. PTX ISA, "barrier{.cta}".
void Block::require_whole_warps(const char* what, Place place, const Named& barrier) const {
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
                 " lanes have arrived: the barrier takes whole warps, and counts 32 for each");
  }
}

void Block::mbarrier_init(const char* what, Place place, const void* at, std::size_t count) {
  if (reinterpret_cast<std::uintptr_t>(at) % 8 != 0 || count == 0)
    fail(what, place,
         "for " + std::to_string(count) + " threads: at least one, at a multiple of 8 bytes");
  access(Kind::write, what, place, at, sizeof(std::uint64_t));
  mbarriers_.insert_or_assign(at, MBarrier(count, running_));
}

void Block::atomic(const char* what, Place place, const void* at, std::size_t bytes, bool releases,
                   bool acquires) {
  note_progress(grid_);
  last_word = {at, bytes, {}};
  std::memcpy(last_word.value.data(), at, std::min(bytes, last_word.value.size()));
  if (random_.below(4) == 0) {
    atomic_yields_ += kTurnsOfYield;
    spins_ = true;
    let_others_run(what, place);
    spins_ = false;
  }
  const bool loads = acquires && !releases;
  access(loads ? Kind::atomic_read : Kind::atomic, what, place, at, bytes);
  if (races_ && shared_byte(at))
    races_->atomic(number(running_), shared_words_[at], Races::Scope::block, releases, acquires);
  else if (grid_.races)
    races_->atomic(number(running_), races_->place(at), Races::Scope::gpu, releases, acquires);
}

void Block::mbarrier_init_fence() {
  for (auto& [at, barrier] : mbarriers_) barrier.make_known(running_);
}

void Block::mbarrier_arrive(const char* what, Place place, const void* at, std::size_t bytes) {
  leave_if_failed();
  MBarrier& barrier = mbarrier_of(what, place, at);
  access(Kind::atomic, what, place, at, sizeof(std::uint64_t));
  if (barrier.all_arrived()) end_phase(*this, barrier);
  if (barrier.all_arrived())
    fail(what, place, "once more than the barrier counts in a phase: " + barrier_text(at));
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
  Block& owner = *cluster_->blocks[rank];
  leave_if_failed();
  if (&owner != this && owner.over()) fail(what, place, "to a block of the cluster that has ended");
  owner.require_shared(what, place, "a destination", to, bytes);
  MBarrier& barrier = owner.mbarrier_of(what, place, at);
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
  leave_if_failed();
  MBarrier& barrier = mbarrier_of(what, place, at);
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
  go_on(barrier.ended, running_);
}

MBarrier& Block::mbarrier_of(const char* what, Place place, const void* at) {
  const auto it = mbarriers_.find(at);
  if (it == mbarriers_.end()) fail(what, place, "on a barrier that nobody has initialised");
  return it->second;
}

// The barrier may be of another block of the cluster.
void Block::end_phase(Block& owner, MBarrier& barrier) {
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
  grid_.spins = grid_.slices = 0;
  for (std::size_t t : barrier.take_waiting()) owner.make_ready(t);
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
  if (slice_)
    return "deadlock: " + thread_name(t) + " reads at " + threads_[t].slice.text() +
           " for ever, and no other thread can come to anything else; " +
           std::to_string(grid_.waiting) + " blocks have not started";
  return "deadlock: " + thread_name(t) + " spins on " + threads_[t].what + " at " +
         threads_[t].place.text() + ", and in " + std::to_string(kMaxSpins) +
         " turns no thread has come to anything else; " + std::to_string(grid_.waiting) +
         " blocks have not started";
}

std::string Block::deadlock_text() const {
  const auto waits = [](const Thread& t) {
    return t.state == State::kWaiting || t.state == State::kPolling;
  };
  const auto one = std::find_if(threads_.begin(), threads_.end(), waits);
  if (one == threads_.end()) return "deadlock: no thread of block " + index_.text() + " can go on";
  const Thread& first = *one;
  const auto elsewhere = std::find_if(threads_.begin(), threads_.end(), [&](const Thread& t) {
    return waits(t) && !(t.place == first.place);
  });
  std::string text = "deadlock: thread " + first.index.text() + " of block " + index_.text() +
                     " waits in " + first.what + " at " + first.place.text() + "; " +
                     std::to_string(exited_) + " of " + std::to_string(threads_.size()) +
                     " threads have exited";
  if (first.barrier) text += "; " + barrier_text(first.barrier);
  if (elsewhere != threads_.end())
    text += ", thread " + elsewhere->index.text() + " waits in " + elsewhere->what + " at " +
            elsewhere->place.text();
  if (elsewhere != threads_.end() && elsewhere->barrier && elsewhere->barrier != first.barrier)
    text += "; " + barrier_text(elsewhere->barrier);
  return text;
}

// ---- clusters ---------------------------------------------------------------------------------

Block& Block::owner_of(const char* what, Place place, const void* at) const {
  for (Block* block : cluster_->blocks)
    if (const auto offset =
            static_cast<std::size_t>(static_cast<const std::byte*>(at) - block->shared_.get());
        offset < block->shared_bytes_) {
      if (block != this && block->over())
        fail(what, place,
             "on shared memory of a block of the cluster that has ended: cluster_sync keeps it");
      return *block;
    }
  fail(what, place, "on an address outside of the cluster's dynamic shared memory");
}

void* Block::map_shared(const char* what, Place place, const void* at, unsigned rank) const {
  if (rank >= cluster_->blocks.size())
    fail(what, place,
         "of rank " + std::to_string(rank) + " in a cluster of " +
             std::to_string(cluster_->blocks.size()));
  const Block& owner = owner_of(what, place, at);
  return cluster_->blocks[rank]->shared_.get() +
         (static_cast<const std::byte*>(at) - owner.shared_.get());
}

void Block::access_cluster(Kind kind, const char* what, Place place, const void* at,
                           std::size_t bytes) {
  leave_if_failed();
  Block& owner = owner_of(what, place, at);
  owner.require_shared(what, place, "an address", at, bytes);
  if (&owner == this) return access(kind, what, place, at, bytes);
  if (!races_ || internal_) return;
  const std::size_t byte = *owner.shared_byte(at);
  Races::Access now = races_->by_thread(number(running_), kind, what, place, at);
  if (const std::string* race =
          races_->touch(now, {owner.shadow_, owner.shared_name_}, byte, bytes))
    throw KernelError(*race);
}

void Block::cluster_arrive(const char* what, Place place) {
  leave_if_failed();
  Thread& self = threads_[running_];
  if (self.cluster_phase > cluster_->phase) fail(what, place, "twice without cluster_wait between");
  self.cluster_phase = cluster_->phase + 1;
  arrive(cluster_->meeting, running_);
  ++cluster_->arrived;
  const std::size_t all = cluster_->blocks.size() * threads_.size();
  if (cluster_->arrived + cluster_->left == all) end_cluster_phase();
  let_others_run(what, place);
}

void Block::end_cluster_phase() {
  cluster_->known = std::make_shared<const Epochs>(std::exchange(cluster_->meeting, {}).known);
  cluster_->arrived = 0;
  ++cluster_->phase;
  for (auto& [block, t] : std::exchange(cluster_->waiting, {})) block->make_ready(t);
}

void Block::cluster_wait(const char* what, Place place) {
  leave_if_failed();
  const std::size_t phase = threads_[running_].cluster_phase;
  if (phase == 0) fail(what, place, "without cluster_arrive before it");
  while (cluster_->phase < phase) {
    cluster_->waiting.emplace_back(this, running_);
    suspend(what, place);
  }
  threads_[running_].cluster_phase = 0;
  go_on(cluster_->known, running_);
}

// Threads that have left do not count, as at the barrier of a block.
void Block::leave_cluster() {
  ++cluster_->left;
  if (threads_[running_].cluster_phase > cluster_->phase) --cluster_->arrived;  // counts once
  const std::size_t all = cluster_->blocks.size() * threads_.size();
  if (!failure_ && cluster_->left < all && cluster_->arrived + cluster_->left == all)
    end_cluster_phase();
}

void Block::mbarrier_arrive_cluster(const char* what, Place place, const void* at) {
  leave_if_failed();
  Block& owner = owner_of(what, place, at);
  MBarrier& barrier = owner.mbarrier_of(what, place, at);
  access_cluster(Kind::atomic, what, place, at, sizeof(std::uint64_t));
  if (barrier.all_arrived()) end_phase(owner, barrier);
  if (barrier.all_arrived())
    fail(what, place, "once more than the barrier counts in a phase: " + owner.barrier_text(at));
  arrive(barrier.meeting, running_);
  if (barrier.arrive(0)) end_phase(owner, barrier);
  let_others_run(what, place);
}

void Block::grid_dependency_wait() {
  if (grid_.races && grid_.before) races_->order().take(number(running_), grid_.before);
}

// "full[1] is in phase 3: 31 of 32 threads have arrived, 128 bytes announced, 112 of them in
// flight".
std::string Block::barrier_text(const void* at) const {
  const auto it = mbarriers_.find(at);
  if (it == mbarriers_.end()) return "an mbarrier that nobody has initialised";
  const MBarrier& barrier = it->second;
  const auto byte = shared_byte(at);
  std::string text = "mbarrier " + (byte ? word_name(*byte) : std::string("?")) + " is in phase " +
                     std::to_string(barrier.phase()) + ": " + std::to_string(barrier.arrived()) +
                     " of " + std::to_string(barrier.count()) + " threads have arrived";
  const std::ptrdiff_t in_flight = barrier.in_flight(), missing = barrier.missing_bytes();
  if (in_flight == 0 && missing == 0) return text;
  return text + ", " + std::to_string(in_flight + missing) + " bytes are announced, " +
         std::to_string(in_flight) + " in flight";
}

// A barrier that is left in the middle of a phase has got an arrival too many or too few, a phase
// or more before; a copy that was not waited for may write to the next block's shared memory.
void Block::check_barriers() const {
  for (const auto& [at, barrier] : mbarriers_) {
    const std::string where = "block " + index_.text() + " ends ";
    if (barrier.copies_unawaited())
      throw KernelError(
          where + "before anybody has waited for copies to shared memory: " + barrier_text(at));
    if (barrier.arrived() != 0 && !barrier.all_arrived())
      throw KernelError(where + "in the middle of a phase: " + barrier_text(at) +
                        ": probably an arrival too many or too few");
  }
}

// What a thread leaves in flight when it ends.
void Block::check_unawaited() const {
  for (std::size_t t = 0; t < threads_.size(); ++t) {
    const AsyncWork& work = threads_[t].work;
    const char* what = work.copies.pending()     ? "cp_async copies without cp_async_wait"
                       : work.stores.pending()   ? "a TMA store without tma_store_wait"
                       : work.products.pending() ? "wgmma without wgmma_wait"
                                                 : nullptr;
    if (what) throw KernelError(thread_name(t) + " ends with " + what);
  }
}

}  // namespace attn::emulator
