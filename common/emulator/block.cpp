// A block's threads and its schedule.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "emulator/simt.h"
#include "emulator/timeline.h"

namespace attn::emulator {
namespace {

// Turns that end before an atomic, or with a time slice used up, since something has changed by
// which a loop could end: a thread has ended, a phase of a barrier, a word has another value. After
// many, more blocks start; more than max_spins(), or so many slices a thread, are a deadlock.
constexpr std::size_t kMaxSpins = 30'000, kManySpins = 2'000, kManySlices = 8, kMaxSlices = 20;
// kMaxSpins is for up to 8 blocks; in a larger grid every block spins until the last has arrived.
std::size_t max_spins() {
  const std::size_t blocks = std::size_t{gridDim.x} * gridDim.y * gridDim.z;
  return kMaxSpins * std::clamp<std::size_t>(blocks / 8, 1, 64);
}
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
      product_numbers_(warps_.size(), AsyncQueue::kNone) {
  cluster_->blocks.push_back(this);
  exited_lanes_.resize(warps_.size());
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
    shadow_.puts_off = grid.kernel.cluster == 1;
  }
  looks_closer_ = !grid.variables.empty() || grid.races;
  const bool some = random_.below(2) == 0;
  const std::size_t warp = random_.below(warps_.size());
  if (some || late_warps != LateWarps::half) late_warp_ = warp;
  if (timeline) {
    timeline->begin_block(slot_, index_.text(), threads_.size());
    looks_closer_ = true;
    late_warp_ = ~std::size_t{0};
  }
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
  if (late_warps == LateWarps::in_turn) [[unlikely]] {
    if (timeline) {
      const auto next = timeline->next();
      if (!next || next->slot != slot_) return false;
      timeline->begin();
      running_ = next->t;
      if (timeline->polling > 0) turns_ = 1;  // what they wait for may be there
      return true;
    }
    if (random_.below(kTurnsOfLateWarp) == 0) change_late_warp();
  }
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
  reading_block = races_ || timeline ? this : nullptr;
  entering_block = nullptr;
  watches_registers_ = races_ && (thread.work.registers_fenced || !thread.work.held.empty());
  spins_ = slice_ = false;
  reads_left = kSlice;
}

// The thread that runs stops, or has ended: who goes on. The host does after the last turn.
Fiber& Block::end_turn() {
  --turns_;
  grid_.spins += spins_;
  grid_.slices += slice_;
  grid_.wants_more = grid_.waiting > 0 && (grid_.spins > kManySpins || grid_.slices > kManySlices);
  if (grid_.spins > max_spins() || grid_.slices > kMaxSlices * (threads_.size() + 1))
    fail_later(spin_text(running_));
  if (grid_.wants_more) return host_;
  if (std::exchange(paused_, false) && !timeline && random_.below(2) == 0)
    return host_;  // other blocks first
  if (slice_ && !timeline) return host_;  // perhaps one of them writes what this thread waits for
  if (!choose()) return host_;
  begin_turn();
  return threads_[running_].fiber;
}

void Block::finish() {
  if (timeline)
    timeline->shared_layout(slot_, grid_.variables, shared_bytes_, members_);
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
  if (timeline)
    timeline->shared_layout(slot_, grid_.variables, shared_bytes_, members_);
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
    if (timeline && !failure_) {
      timeline->account();
      let_others_run("the end of the kernel", {});
    }
  } catch (const Abandoned&) {
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
  self.state = State::kExited;
  ++exited_;
  if (timeline) timeline->exited(slot_, running_);
  lane_exited();
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
  if (timeline) {
    timeline->arrived_at(slot_, running_, place);
    while (timeline->turn(slot_, running_)) suspend(what, place);
    return;
  }
  if (random_.below(2) == 0) return;
  make_ready(running_);
  suspend(what, place);
}

// The same in the middle of ordinary code, through which nothing may be thrown.
void Block::pause() {
  if (timeline) timeline->account();
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
  if (t / kWarpSize == late_warp_) return late_.push_back(t);
  if (timeline) [[unlikely]]
    return timeline->ready(slot_, t);
  ready_.push_back(t);
}

void Block::wait_until(const char* what, Place place, const std::function<bool()>& there) {
  const Uncounted uncounted;
  leave_if_failed();
  const auto is_there = [&] {
    const Internal internal(internal_);
    return there();
  };
  if (timeline) let_others_run(what, place);
  while (!is_there()) {
    Thread& self = threads_[running_];
    self.state = State::kPolling;
    self.there = &there;
    polling_.push_back(running_);
    if (timeline) ++timeline->polling;
    suspend(what, place);
  }
  if (timeline) timeline->end_wait(nullptr, slot_, running_, what);
}

void Block::poll() {
  std::vector<std::size_t> still;
  for (const std::size_t t : polling_) {
    if ((*threads_[t].there)()) {
      if (timeline) timeline->sees(slot_, t), --timeline->polling;
      make_ready(t);
    } else {
      still.push_back(t);
    }
  }
  polling_.swap(still);
}

void Block::atomic(const char* what, Place place, const void* at, std::size_t bytes, bool releases,
                   bool acquires) {
  const Uncounted uncounted;
  note_progress(grid_);
  if (timeline) {
    spins_ = true;
    let_others_run(what, place);
    spins_ = false;
    timeline->atomic(slot_, running_, what, shared_byte(at).has_value());
  } else if (random_.below(4) == 0) {
    atomic_yields_ += kTurnsOfYield;
    spins_ = true;
    let_others_run(what, place);
    spins_ = false;
  }
  // Others may have run in between. What this thread is about to change, as it is now: a later
  // change of it is progress.
  note_progress(grid_);
  last_word = {at, bytes, {}};
  std::memcpy(last_word.value.data(), at, std::min(bytes, last_word.value.size()));
  const bool loads = acquires && !releases;
  access(loads ? Kind::atomic_read : Kind::atomic, what, place, at, bytes);
  if (races_ && shared_byte(at))
    races_->atomic(number(running_), shared_words_[at], Races::Scope::block, releases, acquires);
  else if (grid_.races)
    races_->atomic(number(running_), races_->place(at), Races::Scope::gpu, releases, acquires);
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
         threads_[t].place.text() + ", and in " + std::to_string(max_spins()) +
         " turns no thread has come to anything else; " + std::to_string(grid_.waiting) +
         " blocks have not started";
}

std::string Block::deadlock_text() const {
  std::string text = waits_text();
  if (text.empty()) text = "no thread of block " + index_.text() + " can go on";
  for (const Block* other : cluster_->blocks)
    if (other != this && !other->over())
      if (const std::string more = other->waits_text(); !more.empty()) text += "; " + more;
  return "deadlock: " + text;
}

// One thread of each line that waits for a barrier, and the barriers.
std::string Block::waits_text() const {
  std::string text;
  std::vector<const Thread*> told;
  const auto barrier_of = [&](const Thread& t) {
    if (t.barrier) return "; " + barrier_text(t.barrier);
    const auto n = static_cast<std::size_t>(&t - threads_.data());
    for (std::size_t id = 0; id < named_.size(); ++id)
      if (std::ranges::find(named_[id].waiting, n) != named_[id].waiting.end())
        return "; named barrier " + std::to_string(id) + ": " +
               std::to_string(named_[id].arrived) + " of " + std::to_string(named_[id].count) +
               " threads have arrived";
    return std::string();
  };
  for (const Thread& t : threads_) {
    if (t.state != State::kWaiting && t.state != State::kPolling) continue;
    if (std::ranges::any_of(
            told, [&](auto* o) { return o->place == t.place && o->barrier == t.barrier; }))
      continue;
    const bool first = told.empty();
    text += (first ? "thread " : ", thread ") + t.index.text();
    if (first) text += " of block " + index_.text();
    text += std::string(" waits in ") + t.what + " at " + t.place.text();
    if (first)
      text += "; " + std::to_string(exited_) + " of " + std::to_string(threads_.size()) +
              " threads have exited";
    if (!t.barrier || std::ranges::none_of(told, [&](auto* o) { return o->barrier == t.barrier; }))
      text += barrier_of(t);
    told.push_back(&t);
  }
  return text;
}

}  // namespace attn::emulator
