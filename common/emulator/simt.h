/// \file
/// The SIMT emulator: runs a CUDA kernel, compiled by the host compiler, on one CPU core.
///
/// Every CUDA thread is a fiber. A scheduler resumes one runnable thread at a time, chosen at
/// random from a seed; a thread runs until it has to wait: at a barrier (of the block, a named one,
/// an `mbarrier`), at a warp collective (a shuffle, a vote, an `mma`) whose other lanes have not
/// arrived, or for a value in global memory (`wait_until`). So a kernel that lacks a barrier reads
/// data that is not there yet, or no longer there, in nearly every order that a seed produces: the
/// race shows as a wrong result. Besides, races are found as such, with both lines (races.h).
///
/// If all warps were equally likely, they would advance together, and a race between two distant
/// lines would never show. So blocks have a late warp: it runs when no other thread can. And work
/// that goes on by itself (a copy, a product) happens as late as a wait allows, or at once, or
/// either by chance (run/schedule.h).
///
/// Some blocks are resident at a time, and run interleaved; another one starts when one has ended.
/// Before a plain store to global memory (a GlobalBuffer) the scheduler may switch threads, so that
/// concurrent updates are lost, as on a GPU; before an atomic, and at an arrival, as well.
///
/// Not modelled:
///   - time, caches, occupancy, and how many registers a thread needs;
///   - the order in which other blocks see writes to global memory: each is visible at once, fence
///     or not; where races are looked for, a missing fence is one;
///   - warps that go on together: a lane runs alone from one collective to the next;
///   - where races are not looked for: the proxies of memory (but for the fence before a TMA
///     store), registers written after wgmma_fence, what a shuffle does not put in order;
///   - a wgmma without a commit of its own: the next commit takes it, as on a GPU;
///   - what is left in shared memory from an earlier tile: it was written, and is read as such;
///   - where races between blocks are looked for, whoever knows of a block is taken to know of
///     those that were resident in its place before; of the readers of a byte of global memory
///     some are remembered, of shared memory all, of its atomics the last;
///   - races and lost updates under AddressSanitizer; `__launch_bounds__` with Clang;
///   - the copy of a struct that is passed by value straight from shared or global memory: GCC does
///     not instrument it, so its races are not found; pass a reference, or copy it to a variable;
///   - rounding of the fast functions (__expf and so on): they are as exact as the host's;
///   - when a dependent launch begins: it runs after the launch before; what it reads too early is
///     found where races between blocks are looked for;
///   - `__shared__` variables of the other blocks of a cluster: `map_shared` takes dynamic shared
///     memory alone, and refuses them;
///   - that a shuffle may read a lane outside of its mask if the value is not used: the emulator
///     does not see whether it is, and refuses the shuffle;
///   - `mbarrier.inval`: an address has one mbarrier as long as the block runs;
///   - `__shared__` variables of functions that a kernel calls: they are refused at the first
///     write;
///   - the static shared memory of a program without symbols (`strip`): it starts as 0, all
///     resident blocks share one copy, and its races are not found.
///
/// The names of CUDA (`threadIdx`, `__syncthreads`, ...) are in cuda_names.h; this file is the
/// machine below them.
///
///     run_grid: while there are blocks, a resident one, at random
///       Block::step: begins with a random ready thread, those of a late warp last
///         kernel(...) -> wait_block / wait_warp -> suspended: goes on with another one, at random
///         ... made ready by the last to arrive
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "emulator/async.h"
#include "emulator/fiber.h"
#include "emulator/memory.h"
#include "emulator/place.h"
#include "emulator/program.h"
#include "emulator/races.h"

namespace attn::emulator {

/// A three-dimensional index or extent, as CUDA's `uint3` and `dim3`.
struct Index3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr Index3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr std::size_t count() const { return std::size_t{x} * y * z; }
  std::string text() const;  ///< "(1,0,0)"
};

/// The n-th index of an extent, the first dimension first.
constexpr Index3 index_in(Index3 extent, std::uint32_t n) {
  return {n % extent.x, n / extent.x % extent.y, n / extent.x / extent.y};
}

/// What CUDA calls `threadIdx` and so on, for the thread that runs now.
inline thread_local constinit Index3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim, gridDim;

inline constexpr std::size_t kWarpSize = 32, kWarpgroupSize = 128;

/// The seed of every schedule that follows on this thread of the host.
inline thread_local constinit std::uint64_t schedule_seed = 0;
/// Which blocks have a late warp: half of them, by chance; all; or all, each warp in its turn, for
/// a while, by chance.
enum class LateWarps { half, all, in_turn };
inline thread_local constinit LateWarps late_warps = LateWarps::half;
/// Blocks that run interleaved; more where all of them wait, until there are as many as a GPU holds
/// (0: one of 132 multiprocessors). A kernel that waits for more than that deadlocks, as on a GPU.
inline thread_local constinit std::size_t resident_blocks = 4, most_resident_blocks = 0;
/// Whether races are looked for: in shared memory; then also in global memory, within a block and
/// between blocks.
inline thread_local constinit bool find_races = false, find_global_races = false;
/// Operations of all tensor-core products so far on this thread of the host: what a step's model is
/// compared with.
inline thread_local constinit std::uint64_t tensor_flop = 0;

/// A kernel did something that is wrong in every order of its threads. `what()` is one line: what,
/// file, line, block and thread.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Reads of ordinary code until the running thread has used up its time slice.
inline constexpr int kSlice = 1 << 18;
inline thread_local constinit int reads_left = kSlice;

/// What a launch runs.
struct Kernel {
  std::function<void()> run;       ///< one thread of it
  const void* function = nullptr;  ///< where its code is
  bool instrumented = false;       ///< the compiler reports its accesses to memory
  unsigned cluster = 1;            ///< blocks of a cluster, along x
  bool dependent = false;          ///< may begin before the launch before it has ended
};

class Block;

/// The blocks of a cluster, which start together, and their barrier.
struct Cluster {
  std::vector<Block*> blocks;                    // by rank
  std::size_t arrived = 0, left = 0, phase = 0;  // threads
  Meeting meeting;                               // of those who have arrived
  std::shared_ptr<const Epochs> known = std::make_shared<const Epochs>();  // in the end of a phase
  std::vector<std::pair<Block*, std::size_t>> waiting;                     // threads
};

/// What the blocks of a launch share.
struct Grid {
  const Kernel& kernel;
  std::vector<StaticShared> variables;  ///< the kernel's `__shared__` variables
  ThreadVariables statics;              ///< all of the program's
  /// Of all resident blocks, if those in global memory are looked for, or in clusters; a dependent
  /// launch goes on with those of the launch before it.
  std::shared_ptr<Races> races;
  Stacks& stacks;
  /// What TMA has still to write to global memory when its block has ended: the end of the kernel
  /// alone says that it has.
  std::vector<std::function<void()>> results;
  /// Of a dependent launch: all that the one before it has done.
  std::shared_ptr<const Epochs> before;
  Block* inside = nullptr;  ///< whose bytes the variables hold
  std::size_t spins = 0;    ///< turns in a row that ended before an atomic, and nowhere else
  std::size_t slices = 0;   ///< time slices in a row that have been used up
  std::size_t waiting = 0;  ///< blocks that have not started
  bool wants_more = false;  ///< the resident blocks spin: perhaps for those that have not started
};

/// The block that runs now, or null; and the same if the reads of its threads are looked at.
inline thread_local constinit Block *running_block = nullptr, *reading_block = nullptr;
/// The block whose thread begins, until it is in the kernel: what brings it there reads the
/// kernel's arguments, and is not looked at.
inline thread_local constinit Block* entering_block = nullptr;

/// One thread block: its threads, its barriers, its shared memory and its schedule.
class Block {
 public:
  /// The block that runs now; kernels reach it through cuda_names.h.
  static Block& current() { return *running_block; }

  /// Of the resident blocks it is number `slot`; its threads' numbers begin at `first_number` where
  /// the grid looks for races.
  Block(Index3 index, Index3 extent, std::size_t shared_bytes, std::uint64_t seed, Grid& grid,
        std::size_t slot, std::size_t first_number, std::shared_ptr<Cluster> cluster);
  ~Block();

  /// Up to `turns` turns of threads, each until it waits. Whether there was any.
  bool step(std::size_t turns);
  /// From the signal that an address is not mapped: the thread stops for good.
  [[noreturn]] void lose(const std::string& line) noexcept;
  /// From the compiler: a function has been entered, the kernel or what calls it.
  void entered(const void* code) noexcept;
  /// "thread (3,0,0) of block (1,0,0)"
  std::string thread_name(std::size_t t) const { return name(t) + " of block " + index_.text(); }
  bool over() const { return failure_ || exited_ == threads_.size(); }
  /// finish() has been called.
  bool ended() const { return ended_; }
  /// After the last step: throws KernelError if something was wrong.
  void finish();
  /// Lets every thread leave its kernel: the stacks are used again.
  void abandon();
  /// "deadlock: thread (0,0,0) of block (0,0,0) waits in ... at ..."
  std::string deadlock_text() const;
  std::string waits_text() const;
  /// "deadlock: ... spins on atomicAdd at ..."
  std::string spin_text(std::size_t t) const;

  void* shared() { return shared_.get(); }
  std::size_t shared_bytes() const { return shared_bytes_; }
  /// What lies in dynamic shared memory, for messages.
  void name_shared(const Members* members) { members_ = members; }
  std::size_t lane() const { return running_ % kWarpSize; }

  // ---- barriers ---------------------------------------------------------------------------------
  /// Waits until all threads of the block are here (`__syncthreads`).
  void wait_block(const char* what, Place place);
  /// Arrives at named barrier `id` (`bar.arrive`, `bar.sync`). It opens when `count` threads have
  /// arrived, from whatever places; a thread that is to `wait` goes on then, the others at once.
  void named_barrier(const char* what, Place place, std::size_t id, std::size_t count, bool wait);
  /// `mbarrier.init`: a phase ends when `count` threads have arrived and all expected bytes are
  /// there.
  void mbarrier_init(const char* what, Place place, const void* at, std::size_t count);
  /// `fence.mbarrier_init`: copies know the barriers that this thread has initialised.
  void mbarrier_init_fence();
  /// `mbarrier.arrive`, after it was told of `bytes` that copies will bring in this phase.
  void mbarrier_arrive(const char* what, Place place, const void* at, std::size_t bytes);
  /// A copy of `bytes` bytes to `to` in shared memory that the barrier is told of when it is done.
  /// It is done when the phase could end and a thread waits for that: as late as possible.
  /// `source(visit)` calls visit(first, bytes) for what it reads of global memory.
  using Visit = std::function<void(const void* first, std::size_t bytes)>;
  using BlockList = std::function<void(const Visit&)>;
  void mbarrier_copy(const char* what, Place place, const void* at, void* to, std::size_t bytes,
                     std::function<void()> work, const BlockList& source);
  /// `mbarrier.try_wait.parity` until it says yes: waits for the end of the last phase that has
  /// this parity.
  void mbarrier_wait(const char* what, Place place, const void* at, unsigned parity);
  /// Waits until `there` says yes: for what another block does to global memory.
  void wait_until(const char* what, Place place, const std::function<bool()>& there);
  /// Waits until all lanes of `mask` are here with their operands, which live on their stacks. The
  /// last one computes the result of every lane: `finish(operands)`, indexed by lane. Lanes of
  /// `mask` that have exited count, and so are waited for, or do not (CUDA C++ Programming Guide,
  /// "Warp Shuffle Functions", "Synchronization Functions": all non-exited threads named in mask).
  enum class Exited { count, do_not_count };
  template <class Operands, class Finish>
  void wait_warp(const char* what, Place place, unsigned mask, Operands& mine, Finish finish,
                 Exited exited = Exited::count) {
    meet_warp(
        what, place, mask, &mine,
        [&](const std::array<void*, kWarpSize>& lanes) {
          std::array<Operands*, kWarpSize> all{};
          for (std::size_t l = 0; l < kWarpSize; ++l) all[l] = static_cast<Operands*>(lanes[l]);
          finish(all);
        },
        exited);
  }
  /// `__syncwarp`: alone among the collectives it puts accesses to memory in order.
  void wait_syncwarp(Place place, unsigned mask);
  /// The lanes of the calling thread's warp that exist: a block need not be a multiple of 32.
  unsigned full_mask() const;

  // ---- clusters ---------------------------------------------------------------------------------
  unsigned cluster_rank() const { return rank_; }
  unsigned cluster_size() const { return static_cast<unsigned>(cluster_->blocks.size()); }
  /// The address in the shared memory of block `rank` of the cluster that `at` is in this block's
  /// (`mapa`).
  void* map_shared(const char* what, Place place, const void* at, unsigned rank) const;
  /// An instruction accesses the shared memory of any block of the cluster.
  void access_cluster(Kind kind, const char* what, Place place, const void* at, std::size_t bytes);
  /// `barrier.cluster.arrive` and `.wait`: what its threads did before they arrived is known after.
  void cluster_arrive(const char* what, Place place);
  void cluster_wait(const char* what, Place place);
  /// The same as of this block's own barriers, of any block of the cluster.
  void mbarrier_arrive_cluster(const char* what, Place place, const void* at);
  /// A copy to the shared memory of block `rank`, whose barrier counts it.
  void mbarrier_copy_to(unsigned rank, const char* what, Place place, const void* at, void* to,
                        std::size_t bytes, std::function<void()> work, const BlockList& source);

  // ---- dependent launches -----------------------------------------------------------------------
  /// `griddepcontrol.wait`: from here on this thread knows all of the launch before.
  void grid_dependency_wait();

  // ---- work in flight ---------------------------------------------------------------------------
  /// `cp.async` of 16 bytes to `to`, of which the first `bytes` come from `from`; `work` does it.
  /// Then `commit` and `wait` as of the instructions.
  void copy_async(const char* what, Place place, void* to, const void* from, std::size_t bytes,
                  std::function<void()> work);
  void copy_commit();
  void copy_wait(std::size_t pending);
  /// A TMA store, or a bulk reduction (`results_kind` atomic): what it reads of shared memory, and
  /// what it writes to global memory. `read` reads, and returns what writes.
  using Write = std::function<void()>;
  void store_async(const char* what, Place place, std::function<Write()> read, Kind results_kind,
                   const BlockList& operands, const BlockList& results);
  void store_commit();
  /// Until all but the newest `pending` groups have read shared memory (`wait_group.read`) or, if
  /// `written`, have also written global memory.
  void store_wait(std::size_t pending, bool written);
  /// `fence.proxy.async`
  void fence_proxy(Space space);
  /// `wgmma`, this thread's part of it: `work` multiplies. It writes the accumulators `d`, adding
  /// to them or not, and reads the registers `a`, if any. `operands`: what the whole warpgroup's
  /// reads of shared memory.
  struct Registers {
    void* at = nullptr;
    std::size_t bytes = 0;
  };
  void product_async(Place place, Registers d, bool accumulate, Registers a,
                     std::function<void()> work, const BlockList& operands);
  void product_fence();
  void product_commit();
  void product_wait(std::size_t pending, Place place);
  /// `setmaxnreg`: from here on the calling warpgroup has `count` registers a thread. Who takes
  /// more waits until others have given them; on a GPU forever, if what all have in the end is more
  /// than the block was launched with. A warpgroup that has not called yet may still give all but
  /// 24.
  void registers(const char* what, Place place, unsigned count, bool take);

  // ---- memory -----------------------------------------------------------------------------------
  /// The thread that runs reads or writes memory; `where` as far as it is known. From the compiler:
  /// must not throw.
  void access(Kind kind, const char* what, const Where& where, const void* at,
              std::size_t bytes) noexcept {
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(at) - shared_.get());
    if (offset < shared_bytes_)
      access_shared(kind, what, where, at, variables_.size() + offset, bytes);
    else if (on_stack(at)) {
      if (watches_registers_) access_register(kind, where, at, bytes);
    } else if (looks_closer_ || kind != Kind::read) {
      access_other(kind, what, where, at, bytes);
    }
  }
  /// An instruction that takes addresses of whole `bytes` only: a GPU faults, or reads elsewhere.
  void require_aligned(const char* what, Place place, const char* which, const void* at,
                       std::size_t bytes) const;
  /// Shared memory has to hold all of it.
  void require_shared(const char* what, Place place, const char* which, const void* at,
                      std::size_t bytes) const;
  /// Whether it is memory of the kernel: shared, or a buffer.
  bool is_kernels(const void* at) const;
  /// Before an atomic access: others may come first. `releases`, `acquires`: as of the instructions
  /// of that name.
  void atomic(const char* what, Place place, const void* at, std::size_t bytes,
              bool releases = false, bool acquires = false);
  /// The same of a word in global memory, and the access itself.
  template <class Access>
  void flag(const char* what, Place place, const unsigned* at, Access access, bool releases,
            bool acquires) {
    atomic(what, place, at, sizeof(unsigned), releases, acquires);
    const Internal internal(internal_);
    access();
  }
  /// `__threadfence`, `__threadfence_block`
  void fence(Races::Scope scope);
  /// From the compiler: the running thread has read so often that others get a turn. It `waits` if
  /// it has read the same few words again and again.
  void end_slice(const void* caller, bool waits) noexcept;

  std::string running_name() const { return thread_name(running_); }
  [[noreturn]] void fail(const char* what, Place place, const std::string& why) const;
  /// The same where nothing may be thrown: the kernel goes on to its next barrier.
  void fail_later(const std::string& line) noexcept;

 private:
  // Whose shared memory of the cluster's holds `at`.
  Block& owner_of(const char* what, Place place, const void* at) const;
  void leave_cluster();

  enum class State { kReady, kWaiting, kPolling, kExited, kLost };
  struct alignas(64) Thread {  // what every change of threads needs lies in one line of the cache
    Fiber fiber;
    const std::byte* stack = nullptr;
    Index3 index;
    State state = State::kReady;
    const char* what = "";                         // what it waits for
    Place place;                                   // and where
    Where slice;                                   // where it has used up its time slice
    const std::function<bool()>* there = nullptr;  // when it polls
    const void* barrier = nullptr;                 // the mbarrier that it waits at
    std::size_t resized = 0;                       // calls of setmaxnreg
    std::size_t cluster_phase = 0;                 // in which it has arrived, from 1 on; 0: not
    AsyncWork work;
  };
  struct Collective {
    const char* what;
    Place place;
    unsigned mask, arrived;
    std::array<void*, kWarpSize> operands;
    Exited exited;
    bool orders;  // what the lanes did before it
    const std::function<void(const std::array<void*, kWarpSize>&)>* finish;  // of one that waits
  };
  struct Named {
    std::size_t count = 0, arrived = 0;
    std::vector<std::size_t> waiting;
    std::vector<std::uint8_t> arrivals;  // of each thread
    std::vector<Place> places;           // where each warp has arrived first
    Meeting meeting;
  };
  // While there is one, accesses are the machine's own. No thread is suspended meanwhile.
  struct Internal {
    explicit Internal(bool& flag) : flag_(flag) { flag_ = true; }
    ~Internal() { flag_ = false; }
    bool& flag_;
  };
  struct Abandoned {};  // thrown in a thread whose block has failed
  using Finish = std::function<void(const std::array<void*, kWarpSize>&)>;

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

  // After a failure threads leave: those who waited here before are gone, and so is what they
  // brought.
  void leave_if_failed() const {
    if (failure_) throw Abandoned{};
  }
  void thread_main(Thread& self);
  void resume(std::size_t t);
  bool choose();
  void begin_turn();
  Fiber& end_turn();
  void stop();
  void suspend(const char* what, Place place);
  void let_others_run(const char* what, Place place);
  void pause();
  void make_ready(std::size_t t);
  void poll();
  void meet_warp(const char* what, Place place, unsigned mask, void* mine, const Finish& finish,
                 Exited exited = Exited::count, bool orders = false);
  std::vector<Collective>::iterator open_collective(std::size_t warp,
                                                    std::vector<Collective>::iterator which,
                                                    std::size_t last);
  bool complete(std::size_t warp, const Collective& c) const;
  void lane_exited();
  void bring_variables();
  void change_late_warp();
  std::shared_ptr<const Epochs> open_block_barrier();
  void require_whole_warps(const char* what, Place place, const Named& barrier) const;

  MBarrier& mbarrier_of(const char* what, Place place, const void* at);
  void end_phase(Block& owner, MBarrier& barrier);
  void end_cluster_phase();
  unsigned launched_registers() const;
  std::size_t round_up_to_warps() const { return warps_.size() * kWarpSize; }
  std::string name(std::size_t t) const { return "thread " + threads_[t].index.text(); }
  void check_shared_guard() const;
  void check_whole_warpgroups() const;
  void check_same_product(Place place, std::size_t operands);
  void check_barriers() const;
  void check_unawaited() const;
  void check_registers_given() const;
  std::string barrier_text(const void* at) const;

  // Locals of the thread that runs: no other thread has them.
  bool on_stack(const void* at) const {
    return static_cast<std::size_t>(static_cast<const std::byte*>(at) - stack_) < Stacks::kBytes;
  }
  void access_shared(Kind kind, const char* what, const Where& where, const void* at,
                     std::size_t byte, std::size_t bytes) noexcept;
  void access_register(Kind kind, const Where& where, const void* at, std::size_t bytes) noexcept;
  void access_other(Kind kind, const char* what, const Where& where, const void* at,
                    std::size_t bytes) noexcept;
  std::string shared_name(std::size_t byte) const;
  std::string word_name(std::size_t byte) const;
  std::optional<std::size_t> shared_byte(const void* at) const;
  Races::Access async(std::size_t& who, std::uint32_t epoch, Kind kind, const char* what,
                      Place place);
  void async_access(Races::Access& access, const void* at, std::size_t bytes);
  void check_registers(Kind kind, const Where& where, const void* at, std::size_t bytes);
  // Among all resident threads.
  std::size_t global_number(std::size_t t) const { return slot_ * threads_.size() + t; }
  std::size_t number(std::size_t t) const { return first_number_ + t; }
  void arrive(Meeting& meeting, std::size_t t) {
    if (races_) races_->order().give(number(t), meeting);
  }
  void go_on(const std::shared_ptr<const Epochs>& known, std::size_t t) {
    if (races_) races_->order().take(number(t), known);
  }

  Index3 index_, extent_;
  Random random_;
  Grid& grid_;
  std::size_t slot_, first_number_;
  std::shared_ptr<Cluster> cluster_;
  unsigned rank_;
  std::size_t shared_bytes_;
  std::unique_ptr<std::byte[], FreeShared> shared_;
  std::vector<Thread> threads_;
  std::vector<std::vector<Collective>> warps_;  // of each warp, those that wait for more lanes
  std::vector<std::size_t> barrier_;            // threads that wait at the block barrier
  Meeting meeting_;                             // what they know
  std::array<Named, 16> named_;
  // Of a thread of each warpgroup, by setmaxnreg; 0: not called yet.
  std::vector<unsigned> registers_;
  std::map<const void*, MBarrier> mbarriers_;
  std::map<const void*, Meeting> shared_words_;  // known to whoever acquires one by an atomic
  // Of each warpgroup, where its wgmma are: the first of its warps says it, the others follow.
  struct Product {
    Place place;
    std::size_t operands;  // a hash of their addresses, and of whether D is added
  };
  std::vector<std::vector<Product>> products_;
  std::size_t late_warp_ = ~std::size_t{0};  // no such warp: none is late
  std::vector<std::size_t> ready_, late_;    // threads that can go on, and those of the late warp
  std::vector<std::size_t> polling_;         // threads that wait for global memory
  std::size_t running_ = 0, exited_ = 0;
  std::size_t fences_ = 0;            // of the proxy, by any thread
  const std::byte* stack_ = nullptr;  // of the thread that runs
  std::exception_ptr failure_;

  // Of this block's __shared__ variables, while another one runs.
  std::vector<std::byte> variables_;
  const Members* members_ = nullptr;
  std::vector<std::size_t> product_numbers_;  // of each warp's products (order.h)
  unsigned atomic_yields_ = 0;  // since the late warp last ran
  bool ended_ = false;
  int entries_ = 0;                 // functions that the thread which begins has entered
  bool paused_ = false;             // the thread that ran last has let others run
  bool spins_ = false;              // it has come back from an atomic to no barrier
  bool slice_ = false;              // it has used up its time slice
  bool internal_ = false;           // the machine itself copies or multiplies
  bool looks_closer_ = false;       // reads outside of dynamic shared memory may matter
  bool watches_registers_ = false;  // of the thread that runs: its locals may be wgmma's operands
  Races* races_ = nullptr;          // the block's, or the grid's; null: they are not looked for
  std::unique_ptr<Races> own_races_;
  Races::Name shared_name_;
  Shadow shadow_{false};                // of the variables, then of dynamic shared memory
  std::vector<unsigned> exited_lanes_;  // of each warp, a bit each
  Fiber host_;                          // who has called step()
  std::size_t turns_ = 0;               // left of this step
};

/// Runs `kernel` once for every thread of every block. Throws KernelError.
void run_grid(Index3 grid, Index3 block, std::size_t shared_bytes, const Kernel& kernel);

}  // namespace attn::emulator
