/// \file
/// What happens later: copies and products under way, and the barriers in shared memory that count them.
///
/// The emulator does such work as late as the waits allow, so that a kernel which forgets one sees the old bytes; or,
/// if `early_copies` says so, at once. Who waits for whom is up to simt.h.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace attn::emulator {

/// Whether asynchronous work happens at once, on this thread of the host: then a copy overtakes those who
/// still read what it writes over.
inline thread_local constinit bool early_copies = false;

/// Asynchronous work of one thread (`cp.async`): it happens as late as a wait allows, so that a
/// kernel which forgets the wait sees the old bytes.
class AsyncQueue {
 public:
  void add(std::function<void()> work) {
    if (early_copies) return work();
    open_.push_back(std::move(work));
  }
  void commit() { groups_.push_back(std::exchange(open_, {})); }
  /// Does the work of all groups but the newest `pending`.
  void wait(std::size_t pending) {
    while (groups_.size() > pending) {
      for (auto& work : groups_.front()) work();
      groups_.erase(groups_.begin());
    }
  }

 private:
  std::vector<std::function<void()>> open_;                 // not yet committed
  std::vector<std::vector<std::function<void()>>> groups_;  // committed, oldest first
};

/// What one thread has under way of Hopper's asynchronous instructions.
struct HopperWork {
  AsyncQueue stores;              // TMA stores
  AsyncQueue products;            // wgmma
  bool registers_fenced = false;  // wgmma.fence since the last wait
  std::size_t issued = 0;  // wgmma so far: as many as every other thread of the warpgroup
  bool shared_fenced = false;     // fence.proxy.async since the last group of TMA stores
};

/// A barrier in shared memory (`mbarrier`). A phase ends when `count` threads have arrived and all announced bytes are
/// there. A copy under way is done when the phase could end and somebody waits for that: as late as may be.
class MBarrier {
 public:
  /// By thread `initialiser`; copies may be told of the barrier when that thread has made it known to them.
  MBarrier(std::size_t count, std::size_t initialiser)
      : count_(count), missing_(count), initialiser_(initialiser) {}
  void make_known(std::size_t t) { known_to_copies_ |= t == initialiser_; }
  bool known_to_copies() const { return known_to_copies_; }
  unsigned phase() const { return phase_; }
  bool all_arrived() const { return missing_ == 0; }

  /// A thread arrives and announces `bytes`. Whether the phase is to end if it can.
  bool arrive(std::size_t bytes) {
    bytes_ += static_cast<std::ptrdiff_t>(bytes);
    --missing_;
    return bytes_ == 0 || !waiting_.empty();
  }
  /// A copy of `bytes` bytes. Whether the phase is to end if it can.
  bool copy(std::size_t bytes, std::function<void()> work) {
    const auto size = static_cast<std::ptrdiff_t>(bytes);
    if (early_copies) {
      work();
      bytes_ -= size;
    } else {
      copies_.emplace_back(size, std::move(work));
    }
    return !waiting_.empty();
  }
  /// Thread `t` waits for the end of this phase.
  void wait(std::size_t t) { waiting_.push_back(t); }

  /// Ends the phase if all threads have arrived and the copies under way are all that were announced: does them, and
  /// returns those who waited.
  std::vector<std::size_t> end_phase() {
    std::ptrdiff_t under_way = 0;
    for (const auto& [size, work] : copies_) under_way += size;
    if (missing_ > 0 || under_way != bytes_) return {};
    for (const auto& [size, work] : copies_) work();
    copies_.clear();
    bytes_ = 0;
    missing_ = count_;
    ++phase_;
    return std::exchange(waiting_, {});
  }

 private:
  std::size_t count_, missing_;  // threads of a phase, and those of this one that have not arrived
  std::size_t initialiser_;
  bool known_to_copies_ = false;
  std::ptrdiff_t bytes_ = 0;     // announced and not yet copied
  unsigned phase_ = 0;
  std::vector<std::pair<std::ptrdiff_t, std::function<void()>>> copies_;  // under way
  std::vector<std::size_t> waiting_;
};

}  // namespace attn::emulator
