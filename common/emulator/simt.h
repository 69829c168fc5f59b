/// \file
/// The SIMT emulator: runs a CUDA kernel, compiled by the host compiler, on one CPU core.
///
/// Every CUDA thread of a block is a fiber. A scheduler resumes one runnable thread at a time, chosen
/// at random from a seed; a thread runs until it has to wait: at a block barrier, or at a warp
/// collective (a shuffle, a vote, an `mma`) whose other lanes have not arrived. Nothing else makes a
/// thread wait, so a kernel that lacks a barrier reads data that is not there yet, or no longer
/// there, in nearly every order that a seed produces: the race shows as a wrong result.
///
/// Drawn alike, warps go on at about the same pace, and a race of two lines far apart is never lost. So
/// half of the blocks have a late warp: it runs when no other thread can.
///
/// What it does not model: time, caches, and the order in which other threads see a write (every
/// write is visible at once). The names of CUDA (`threadIdx`, `__syncthreads`, ...) are in
/// cuda_names.h; this file is the machine below them.
///
///     run_grid: for each block, in random order
///       Block::run: while a thread lives, resume a random ready one, those of a late warp last
///         kernel(...) -> wait_block / wait_warp -> suspended ... made ready by the last to arrive
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "emulator/async.h"
#include "emulator/fiber.h"

namespace attn::emulator {

/// A three-dimensional index or extent, as CUDA's `uint3` and `dim3`.
struct Index3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr Index3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr std::size_t count() const { return std::size_t{x} * y * z; }
  std::string text() const {
    std::string s = "(";  // "(" + std::string makes GCC 12 warn of memory it does not touch
    return s.append(std::to_string(x)) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
  }
};

/// What CUDA calls `threadIdx` and so on, for the thread that runs now.
inline thread_local constinit Index3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim, gridDim;

inline constexpr std::size_t kWarpSize = 32, kWarpgroupSize = 128;

/// A kernel did something that no order of its threads can make right. `what()` is one line: what,
/// file, line, block and thread.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A place in the source of a kernel.
struct Place {
  const char* file = "";
  int line = 0;
  std::string text() const {  // the folder and the file are enough to find it
    const std::string_view path = file;
    auto cut = path.find_last_of('/');
    if (cut != path.npos && cut > 0) cut = path.find_last_of('/', cut - 1);
    return std::string(cut == path.npos ? path : path.substr(cut + 1)) + ":" + std::to_string(line);
  }
  bool operator==(const Place& other) const {
    return line == other.line && std::strcmp(file, other.file) == 0;
  }
};

/// SplitMix64: small, seedable and good enough to shuffle a schedule.
struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(next() % n); }
};

/// One thread block: its threads, its barriers, its dynamic shared memory and its schedule.
class Block {
 public:
  /// The block that runs now; kernels reach it through cuda_names.h.
  static Block& current() { return *current_; }

  Block(Index3 index, Index3 extent, std::size_t shared_bytes, std::uint64_t seed, Stacks& stacks,
        const std::function<void()>& kernel)
      : index_(index), extent_(extent), random_{seed}, kernel_(kernel),
        shared_bytes_(shared_bytes), threads_(extent.count()),
        warps_((extent.count() + kWarpSize - 1) / kWarpSize),
        registers_((extent.count() + kWarpgroupSize - 1) / kWarpgroupSize) {
    // Fresh shared memory holds whatever the last block left: NaN bytes stand for "anything".
    const std::size_t bytes = shared_bytes + kGuardBytes;
    shared_.reset(new (std::align_val_t{kSharedAlignment}) std::byte[bytes]);
    std::memset(shared_.get(), 0xFF, bytes);
    if (random_.below(2) == 0) late_warp_ = random_.below(warps_.size());
    for (std::size_t t = 0; t < threads_.size(); ++t) {
      const unsigned n = static_cast<unsigned>(t);
      threads_[t].index = {n % extent.x, n / extent.x % extent.y, n / extent.x / extent.y};
      threads_[t].fiber.start(stacks[t], [this, t] { thread_main(threads_[t]); });
      make_ready(t);
    }
  }

  /// Runs every thread to its end. Throws KernelError if some can never go on.
  void run() {
    Block* const outer = std::exchange(current_, this);
    while (!failure_ && exited_ < threads_.size()) {
      std::vector<std::size_t>& ready = ready_.empty() ? late_ : ready_;
      if (ready.empty()) {
        failure_ = std::make_exception_ptr(KernelError(deadlock_text()));
        break;
      }
      std::swap(ready[random_.below(ready.size())], ready.back());
      const std::size_t next = ready.back();
      ready.pop_back();
      resume(next);
    }
    // After a failure the others leave their kernel too: their stacks are used again.
    for (std::size_t t = 0; failure_ && t < threads_.size(); ++t)
      if (threads_[t].state != State::kExited) resume(t);
    current_ = outer;
    if (failure_) std::rethrow_exception(failure_);
    check_shared_guard();
    check_whole_warpgroups();
  }

  void* shared() { return shared_.get(); }
  std::size_t shared_bytes() const { return shared_bytes_; }
  AsyncQueue& async() { return threads_[running_].async; }
  /// What the thread that runs now has under way on Hopper (async.h).
  HopperWork& hopper() { return threads_[running_].hopper; }
  std::size_t lane() const { return running_ % kWarpSize; }

  /// Waits until all threads of the block are here (`__syncthreads`).
  void wait_block(const char* what, Place place) {
    if (!barrier_.empty() && !(threads_[barrier_.front()].place == place))
      fail(what, place, "while " + name(barrier_.front()) + " waits in another one, at " +
                            threads_[barrier_.front()].place.text() + ": a divergent barrier");
    if (barrier_.size() + 1 < threads_.size()) {
      barrier_.push_back(running_);
      suspend(what, place);
    } else {
      for (std::size_t t : barrier_) make_ready(t);
      barrier_.clear();
    }
  }

  /// Arrives at named barrier `id` (`bar.arrive`, `bar.sync`). It opens when `count` threads have arrived, from
  /// whatever places; a thread that is to `wait` goes on then, the others at once.
  void named_barrier(const char* what, Place place, std::size_t id, std::size_t count, bool wait) {
    if (id >= named_.size() || count % kWarpSize != 0 || count == 0 || count > round_up_to_warps())
      fail(what, place, "with barrier " + std::to_string(id) + " and " + std::to_string(count) +
                            " threads: 16 barriers, a multiple of 32 up to the block's threads");
    Named& barrier = named_[id];
    if (barrier.arrived > 0 && barrier.count != count)
      fail(what, place, "for " + std::to_string(count) + " threads, while others wait there for " +
                            std::to_string(barrier.count));
    barrier.count = count;
    if (++barrier.arrived < count) {
      if (!wait) return let_others_run(what, place);
      barrier.waiting.push_back(running_);
      return suspend(what, place);
    }
    for (std::size_t t : barrier.waiting) make_ready(t);
    barrier = {};
    if (!wait) let_others_run(what, place);
  }

  /// `mbarrier.init`: a phase ends when `count` threads have arrived and all expected bytes are there.
  void mbarrier_init(const char* what, Place place, const void* at, std::size_t count) {
    if (reinterpret_cast<std::uintptr_t>(at) % 8 != 0 || count == 0)
      fail(what, place, "for " + std::to_string(count) + " threads: at least one, at a multiple of 8 bytes");
    mbarriers_.insert_or_assign(at, MBarrier(count, running_));
  }
  /// `fence.mbarrier_init`: copies know the barriers that this thread has initialised.
  void mbarrier_init_fence() {
    for (auto& [at, barrier] : mbarriers_) barrier.make_known(running_);
  }

  /// `mbarrier.arrive`, after it was told of `bytes` that copies will bring in this phase.
  void mbarrier_arrive(const char* what, Place place, const void* at, std::size_t bytes) {
    MBarrier& barrier = mbarrier_of(what, place, at);
    if (barrier.all_arrived()) end_phase(barrier);
    if (barrier.all_arrived()) fail(what, place, "once more than the barrier counts in a phase");
    if (barrier.arrive(bytes)) end_phase(barrier);
    let_others_run(what, place);
  }

  /// A copy of `bytes` bytes that the barrier is told of when it is done. It is done when the phase could end and
  /// somebody waits for that: as late as may be.
  void mbarrier_copy(const char* what, Place place, const void* at, std::size_t bytes, std::function<void()> work) {
    MBarrier& barrier = mbarrier_of(what, place, at);
    if (!barrier.known_to_copies()) fail(what, place, "on a barrier without mbarrier_init_fence since its mbarrier_init");
    if (barrier.copy(bytes, std::move(work))) end_phase(barrier);
  }

  /// `mbarrier.try_wait.parity` until it says yes: waits for the end of the last phase that has this parity.
  void mbarrier_wait(const char* what, Place place, const void* at, unsigned parity) {
    MBarrier& barrier = mbarrier_of(what, place, at);
    while (barrier.phase() % 2 == parity) {
      end_phase(barrier);
      if (barrier.phase() % 2 != parity) return;
      barrier.wait(running_);
      suspend(what, place);
    }
  }

  /// `setmaxnreg`: from here on the calling warpgroup has `count` registers a thread. Who takes more waits until others
  /// have given them; in the machine for ever, if what all have in the end is more than the block was launched with.
  /// A warpgroup that has not called yet may still give all but 24.
  void registers(const char* what, Place place, unsigned count, bool take) {
    const unsigned all = launched_registers() * static_cast<unsigned>(registers_.size());
    const unsigned mine = registers_[running_ / kWarpgroupSize];
    if (const unsigned before = mine == 0 ? launched_registers() : mine; take ? count < before : count > before)
      fail(what, place, "for " + std::to_string(count) + " registers, and has " + std::to_string(before));
    registers_[running_ / kWarpgroupSize] = count;
    unsigned sum = 0;
    for (const unsigned n : registers_) sum += n == 0 ? 24 : n;
    if (sum > all)
      fail(what, place, "for " + std::to_string(count) + " registers: its " + std::to_string(registers_.size()) +
                            " warpgroups have " + std::to_string(sum) + " a lane then, and were launched with " +
                            std::to_string(all));
  }

  /// Waits until all lanes of `mask` are here with their operands, which live on their stacks. The
  /// last one computes the result of every lane: `finish(operands)`, indexed by lane.
  template <class Operands, class Finish>
  void wait_warp(const char* what, Place place, unsigned mask, Operands& mine, Finish finish) {
    const std::size_t warp = running_ / kWarpSize;
    mask &= full_mask();
    if (!(mask >> lane() & 1)) fail(what, place, "with a mask that does not name its lane");
    std::vector<Collective>& open = warps_[warp];
    // Lanes of a smaller mask may meet while the rest already waits for them further on. What can
    // never end is two lanes that wait for each other in different places.
    auto it = std::find_if(open.begin(), open.end(), [&](const Collective& c) {
      return c.mask == mask && c.place == place && std::strcmp(c.what, what) == 0;
    });
    if (it == open.end()) {
      for (const Collective& c : open)
        if ((c.mask >> lane() & 1) && (c.arrived & mask))
          fail(what, place, std::string("while a lane of its warp waits in ") + c.what + " at " +
                                c.place.text() + ": a divergent warp");
      it = open.insert(open.end(), Collective{what, place, mask, 0, {}});
    }
    it->operands[lane()] = &mine;
    it->arrived |= 1u << lane();
    if (it->arrived != mask) return suspend(what, place);
    std::array<Operands*, kWarpSize> all{};
    for (std::size_t l = 0; l < kWarpSize; ++l) {
      all[l] = static_cast<Operands*>(it->operands[l]);
      if (all[l] && l != lane()) make_ready(warp * kWarpSize + l);
    }
    open.erase(it);
    finish(all);
  }

  /// An instruction that takes addresses of whole `bytes` only: a GPU faults, or reads elsewhere.
  void require_aligned(const char* what, Place place, const char* which, const void* at, std::size_t bytes) const {
    if (const std::size_t past = reinterpret_cast<std::uintptr_t>(at) % bytes; past != 0)
      fail(what, place, std::string("with ") + which + " " + std::to_string(past) + " bytes past a multiple of " +
                            std::to_string(bytes));
  }

  [[noreturn]] void fail(const char* what, Place place, const std::string& why) const {
    throw KernelError(name(running_) + " of block " + index_.text() + " calls " + what + " at " +
                      place.text() + " " + why);
  }

  /// The lanes of the calling thread's warp that exist: a block need not be a multiple of 32.
  unsigned full_mask() const {
    const std::size_t first = running_ - lane();
    const std::size_t lanes = std::min(kWarpSize, threads_.size() - first);
    return lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
  }

 private:
  enum class State { kReady, kWaiting, kExited };
  struct Thread {
    Fiber fiber;
    Index3 index;
    State state = State::kReady;
    const char* what = "";  // what it waits for
    Place place;            // and where
    AsyncQueue async;
    HopperWork hopper;
  };
  struct Collective {
    const char* what;
    Place place;
    unsigned mask, arrived;
    std::array<void*, kWarpSize> operands;
  };
  struct Named {
    std::size_t count = 0, arrived = 0;
    std::vector<std::size_t> waiting;
  };
  struct Abandoned {};  // thrown in a thread whose block has failed

  // Under AddressSanitizer the heap has a better guard of its own.
#ifdef ATTN_ASAN
  static constexpr std::size_t kGuardBytes = 0;
#else
  static constexpr std::size_t kGuardBytes = 1024;
#endif
  static constexpr std::size_t kSharedAlignment = 1024;
  struct FreeShared {
    void operator()(std::byte* p) const {
      ::operator delete[](p, std::align_val_t{kSharedAlignment});
    }
  };

  void thread_main(Thread& self) {
    try {
      if (!failure_) kernel_();
    } catch (const Abandoned&) {
    } catch (...) {
      failure_ = std::current_exception();
    }
    self.state = State::kExited;
    ++exited_;
  }

  void resume(std::size_t t) {
    running_ = t;
    threadIdx = threads_[t].index;
    blockIdx = index_;
    blockDim = extent_;
    threads_[t].fiber.resume();
  }

  void suspend(const char* what, Place place) {
    Thread& self = threads_[running_];
    self.what = what;
    self.place = place;
    self.state = State::kWaiting;
    self.fiber.suspend();
    if (failure_) throw Abandoned{};
  }

  // Who arrives somewhere and goes on may be overtaken by those who waited for that, or not.
  void let_others_run(const char* what, Place place) {
    if (random_.below(2) == 0) return;
    make_ready(running_);
    suspend(what, place);
  }

  void make_ready(std::size_t t) {
    threads_[t].state = State::kReady;
    (t / kWarpSize == late_warp_ ? late_ : ready_).push_back(t);
  }

  MBarrier& mbarrier_of(const char* what, Place place, const void* at) {
    const auto it = mbarriers_.find(at);
    if (it == mbarriers_.end()) fail(what, place, "on a barrier that nobody has initialised");
    return it->second;
  }

  void end_phase(MBarrier& barrier) {
    for (std::size_t t : barrier.end_phase()) make_ready(t);
  }

  // Of a thread: its share of the 65536 of an SM, in steps of 8, as __launch_bounds__ of one block an SM implies.
  unsigned launched_registers() const {
    return static_cast<unsigned>(std::min<std::size_t>(65536 / threads_.size(), 256) / 8 * 8);
  }

  std::size_t round_up_to_warps() const { return warps_.size() * kWarpSize; }

  std::string name(std::size_t t) const { return "thread " + threads_[t].index.text(); }

  std::string deadlock_text() const {
    const auto waits = [](const Thread& t) { return t.state == State::kWaiting; };
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

  void check_shared_guard() const {
    for (std::size_t i = 0; i < kGuardBytes; ++i)
      if (shared_[shared_bytes_ + i] != std::byte{0xFF})
        throw KernelError("block " + index_.text() + " wrote at offset " +
                          std::to_string(shared_bytes_ + i) + " of its " +
                          std::to_string(shared_bytes_) + " bytes of dynamic shared memory");
  }

  // wgmma is one instruction of 128 threads: what some of them leave out, the others wait for.
  void check_whole_warpgroups() const {
    for (std::size_t first = 0; first < threads_.size(); first += kWarpgroupSize) {
      const std::size_t end = std::min(first + kWarpgroupSize, threads_.size());
      for (std::size_t t = first; t < end; ++t) {
        const std::size_t mine = threads_[t].hopper.issued, other = threads_[first].hopper.issued;
        if (mine != other || (mine > 0 && end - first < kWarpgroupSize))
          throw KernelError("wgmma: " + name(first) + " of block " + index_.text() + " ran " + std::to_string(other) + ", " +
                            name(t) + " " + std::to_string(mine) + ": all four warps of a warpgroup multiply together");
      }
    }
  }

  static inline thread_local Block* current_ = nullptr;
  Index3 index_, extent_;
  Random random_;
  const std::function<void()>& kernel_;
  std::size_t shared_bytes_;
  std::unique_ptr<std::byte[], FreeShared> shared_;
  std::vector<Thread> threads_;
  std::vector<std::vector<Collective>> warps_;  // of each warp, those that wait for more lanes
  std::vector<std::size_t> barrier_;            // threads that wait at the block barrier
  std::array<Named, 16> named_;
  std::vector<unsigned> registers_;             // of a thread of each warpgroup, by setmaxnreg; 0: not called yet
  std::map<const void*, MBarrier> mbarriers_;
  std::size_t late_warp_ = ~std::size_t{0};     // of a warp that there is not: nobody is late
  std::vector<std::size_t> ready_, late_;       // threads that can go on, and those of the late warp
  std::size_t running_ = 0, exited_ = 0;
  std::exception_ptr failure_;
};

/// The seed of every schedule that follows on this thread of the host.
inline thread_local constinit std::uint64_t schedule_seed = 0;

/// Operations of all tensor-core products so far on this thread of the host: what a step's model is compared with.
inline thread_local constinit std::uint64_t tensor_flop = 0;

/// Runs `kernel` once for every thread of every block. Throws KernelError.
inline void run_grid(Index3 grid, Index3 block, std::size_t shared_bytes,
                     const std::function<void()>& kernel) {
  static thread_local Stacks stacks;
  Random random{schedule_seed};
  std::vector<std::uint32_t> order(grid.count());
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  gridDim = grid;
  for (const std::uint32_t b : order) {
    const Index3 index{b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    Block(index, block, shared_bytes, random.next(), stacks, kernel).run();
  }
}

}  // namespace attn::emulator
