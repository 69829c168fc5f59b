/// \file
/// What happens later: copies and products in flight, and the barriers in shared memory that count
/// them.
///
/// The emulator does such work as late as the waits allow, so that a kernel which forgets one sees
/// the old bytes; or, if `early_copies` says so, at once. Who waits for whom is up to simt.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "emulator/order.h"
#include "emulator/place.h"

namespace attn::emulator {

/// Whether asynchronous work happens at once, on this thread of the host: then a copy overtakes
/// those who still read what it writes over. `mixed_copies`: each piece of work at once or late, by
/// chance.
inline thread_local constinit bool early_copies = false, mixed_copies = false;
/// SplitMix64: small, seedable and good enough to shuffle a schedule.
struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t n) {  // a division takes as long as a change of stacks
    return static_cast<std::size_t>((n & (n - 1)) == 0 ? next() & (n - 1) : next() % n);
  }
};
/// Draws what is early, if that is up to chance.
inline thread_local constinit Random chance{0};
inline bool happens_early() { return mixed_copies ? chance.below(2) == 0 : early_copies; }

/// Asynchronous work of one thread: it happens as late as a wait allows, so that a kernel which
/// forgets the wait sees the old bytes. Group n is that of the n-th commit, from 1 on.
class AsyncQueue {
 public:
  static constexpr std::size_t kNone = ~std::size_t{0};
  std::size_t who = kNone;  ///< its number among those who do things (order.h)

  /// The group that work added now will be in.
  std::uint32_t open_group() const { return committed_ + 1; }
  /// Whether work added now happens at once: work of one queue stays in order.
  bool early() const { return happens_early() && in_flight_ == 0; }
  void add(bool early, std::function<void()> work) {
    if (early)
      work(), work = nullptr;
    else
      ++in_flight_;
    open_.push_back(std::move(work));
  }
  void commit() {
    groups_.push_back(std::exchange(open_, {}));
    ++committed_;
  }
  /// Does the work of all groups but the newest `pending`. The last group that is done.
  std::uint32_t wait(std::size_t pending) {
    while (groups_.size() > pending) {
      for (auto& work : groups_.front())
        if (work) work(), --in_flight_;
      groups_.erase(groups_.begin());
    }
    return committed_ - static_cast<std::uint32_t>(groups_.size());
  }
  /// Whether there is work of no group yet.
  bool uncommitted() const { return !open_.empty(); }
  /// Whether there is work that the thread has not waited for.
  bool pending() const {
    return !open_.empty() ||
           std::any_of(groups_.begin(), groups_.end(), [](const auto& g) { return !g.empty(); });
  }

 private:
  std::vector<std::function<void()>> open_;                 // not yet committed
  std::vector<std::vector<std::function<void()>>> groups_;  // committed, oldest first
  std::uint32_t committed_ = 0;
  std::size_t in_flight_ = 0;  // pieces of work
};

/// What one thread has in flight.
struct AsyncWork {
  AsyncQueue copies;              // cp.async
  AsyncQueue stores;              // bulk stores and reductions
  AsyncQueue products;            // wgmma
  bool registers_fenced = false;  // wgmma.fence since the last wait
  std::size_t issued = 0;         // wgmma so far: as many as every other thread of the warpgroup
  struct Write {                  // registers since the last wgmma.fence
    const std::byte* at;
    std::size_t bytes;
    Where where;
  };
  std::vector<Write> writes;
  static constexpr std::size_t kMaxWrites = 256;  // more are not remembered
  // What the stores have read of shared memory and not yet written to global memory, by group, and
  // its number (order.h). A wait with `.read` does not say that it is written.
  std::vector<std::pair<std::uint32_t, std::function<void()>>> results;
  std::size_t written = AsyncQueue::kNone;
  std::size_t fences = 0;  // of the block, when its last group of TMA stores was committed
  struct Held {            // registers that a product in flight reads or writes
    const std::byte* at;
    std::size_t bytes;
    bool written;
    std::uint32_t group;
    Place place;
  };
  std::vector<Held> held;
  const std::byte *held_first = nullptr, *held_end = nullptr;  // all of them lie between
};

/// A barrier in shared memory (`mbarrier`). A phase ends when `count` threads have arrived and all
/// announced bytes are there. A copy in flight is done when the phase could end and a thread waits
/// for that: as late as possible.
class MBarrier {
 public:
  /// By thread `initialiser`; copies may be told of the barrier when that thread has made it known
  /// to them.
  MBarrier(std::size_t count, std::size_t initialiser)
      : count_(count), missing_(count), initialiser_(initialiser) {}
  /// Its copies' number among those who do things (order.h).
  std::size_t who = AsyncQueue::kNone;
  Meeting meeting;  ///< of those who have arrived
  std::shared_ptr<const Epochs> ended =
      std::make_shared<const Epochs>();  ///< what is known when the last phase ended

  void make_known(std::size_t t) { known_to_copies_ |= t == initialiser_; }
  bool known_to_copies() const { return known_to_copies_; }
  unsigned phase() const { return phase_; }
  bool all_arrived() const { return missing_ == 0; }
  std::size_t count() const { return count_; }
  std::size_t arrived() const { return count_ - missing_; }
  /// Bytes that copies in flight will bring, and bytes announced beyond those.
  std::ptrdiff_t in_flight() const {
    std::ptrdiff_t sum = 0;
    for (const auto& [size, work] : copies_) sum += size;
    return sum;
  }
  std::ptrdiff_t missing_bytes() const { return bytes_ - in_flight(); }
  std::ptrdiff_t announced() const { return announced_; }  ///< in this phase
  /// A thread has waited for the end of the last phase.
  void note_wait() { awaited_ = phase_; }
  /// Whether the last copies came in a phase for whose end no thread has waited.
  bool copies_unawaited() const { return copied_ && copied_in_ >= awaited_; }

  /// A thread arrives and announces `bytes`. Whether the phase is to end if it can.
  bool arrive(std::size_t bytes) {
    bytes_ += static_cast<std::ptrdiff_t>(bytes);
    announced_ += static_cast<std::ptrdiff_t>(bytes);
    --missing_;
    return bytes_ == 0 || !waiting_.empty();
  }
  /// A copy of `bytes` bytes. Whether the phase is to end if it can.
  bool copy(std::size_t bytes, bool early, std::function<void()> work) {
    const auto size = static_cast<std::ptrdiff_t>(bytes);
    copied_ = true, copied_in_ = phase_;
    if (early) {
      work();
      bytes_ -= size;
    } else {
      copies_.emplace_back(size, std::move(work));
    }
    return !waiting_.empty();
  }
  /// Thread `t` waits for the end of this phase.
  void wait(std::size_t t) { waiting_.push_back(t); }

  /// Ends the phase if all threads have arrived and the copies in flight are all that were
  /// announced: does them.
  bool end_phase() {
    if (missing_ > 0 || in_flight() != bytes_) return false;
    for (const auto& [size, work] : copies_) work();
    copies_.clear();
    bytes_ = announced_ = 0;
    missing_ = count_;
    ++phase_;
    return true;
  }
  /// Those who waited for it.
  std::vector<std::size_t> take_waiting() { return std::exchange(waiting_, {}); }

 private:
  std::size_t count_, missing_;  // threads of a phase, and those of this one that have not arrived
  std::size_t initialiser_;
  bool known_to_copies_ = false;
  std::ptrdiff_t bytes_ = 0, announced_ = 0;  // announced and not yet copied; announced
  unsigned phase_ = 0, awaited_ = 0, copied_in_ = 0;
  bool copied_ = false;
  std::vector<std::pair<std::ptrdiff_t, std::function<void()>>> copies_;  // in flight
  std::vector<std::size_t> waiting_;
};

}  // namespace attn::emulator
