/// \file
/// `--timeline`: one launch on a modelled clock, recorded for ui.perfetto.dev.
///
/// While a thread of the host has a Timeline, the emulator's schedule is a discrete-event
/// simulation: the ready thread with the lowest clock runs next. Instructions advance the clock of
/// their lane by the costs below, which are those of an H100 or H200. It is a model, not a
/// measurement. Nothing is random, so the same launch gives the same bytes.
///
/// | what | model |
/// |---|---|
/// | ordinary code | one cycle per read of an array or of memory; quarters of an SM share it out |
/// | exponential, logarithm | special-function unit of the quarter: 4 lanes per cycle |
/// | `wgmma` m64nNk16 | tensor core of the quarter: N / 2 cycles, in order; a queue of 5 per warp |
/// | `mma` m16n8k16 | tensor core of the quarter: 6 cycles (2/3 of wgmma's rate) |
/// | TMA, `cp.async`, loads | latency, and bytes over the SM's share of L2 bandwidth, in order |
/// | barriers | end at the last arrival or the last byte, plus a latency |
///
/// Not modelled: cache misses, bank conflicts, instruction latencies and dependencies, registers,
/// the time to launch, and clocks that change.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator/memory.h"
#include "emulator/shared_trace.h"
#include "emulator/trace.h"

namespace attn::emulator {

/// Costs in cycles, and rates per cycle.
namespace costs {
inline constexpr Cycles kExponential = 8;      // per warp: 16 lanes per SM and cycle
inline constexpr Cycles kMma = 6;              // 2048 multiply-adds at 2/3 of 512 per cycle
inline constexpr Cycles kWgmmaLatency = 32;    // from the last product to the wait
// Products in the tensor core's queue, per warp: fitted to waits recorded on an H200 (06 v5 to v8).
inline constexpr Cycles kWgmmaQueue = 5;
inline constexpr Cycles kIssue = 4;            // of an asynchronous instruction
inline constexpr Cycles kShuffle = 24, kLdmatrix = 12, kVote = 12, kSyncwarp = 4;
inline constexpr Cycles kArrive = 8;           // an arrival at a barrier
inline constexpr Cycles kBarrier = 24;         // from the last arrival to those who wait
inline constexpr Cycles kTma = 700, kLoad = 600, kAtomic = 700, kSharedAtomic = 40;
inline constexpr Cycles kFlag = 700;           // until another block sees a word
inline constexpr Cycles kNextBlock = 500;      // from the end of a block to the next one
inline constexpr double kSmBytes = 64;         // L2 to one SM, per cycle
inline constexpr double kL2Bytes = 3100;       // L2 to all SMs, per cycle: 5.4 TB/s
inline constexpr std::size_t kSms = 132;
}  // namespace costs

/// "sK[1]" of a byte of shared memory: the member, with its first index if it has several. Empty
/// if it has no name.
std::string tile_name(const Members* members, std::size_t byte);
/// Adds a name to a list like "sQ[0], sK[1]", unless it is empty or there.
void add_name(std::string& list, const std::string& name);

/// The model's clocks and units during one step's launches, and what is recorded of them. A thread
/// is named by the slot of its block among the resident ones and its number in the block.
class Timeline {
 public:
  /// `shared`: also records what happens to shared memory; may be null.
  explicit Timeline(Trace& trace, SharedTrace* shared = nullptr)
      : trace_(trace), shared_(shared) {}
  ~Timeline() { end_blocks(); }
  Timeline(const Timeline&) = delete;

  // ---- launches and blocks ----------------------------------------------------------------------
  /// A launch of `blocks` blocks, of which `per_sm` fit on an SM and `resident` run at a time.
  void begin_launch(std::size_t blocks, std::size_t per_sm, std::size_t resident);
  void end_launch();
  void begin_block(std::size_t slot, const std::string& index, std::size_t threads);
  void exited(std::size_t slot, std::size_t t);
  /// Most threads that are resident in the model: fewer SMs are modelled than a GPU has.
  static constexpr std::size_t kMostThreads = 16384;

  // ---- schedule ---------------------------------------------------------------------------------
  struct Next {
    std::size_t slot, t;
  };
  void ready(std::size_t slot, std::size_t t);
  /// The thread to run next; nothing if all threads wait for each other.
  std::optional<Next> next();
  /// Removes it from the queue: it runs.
  void begin();
  const Next& running() const { return running_; }
  /// Before an instruction that others may see: spends the time of the ordinary code before it.
  /// True if the caller has to suspend its thread, and ask again when it goes on.
  bool turn(std::size_t slot, std::size_t t);
  /// Threads that poll global memory; the clock at which one sees a change.
  std::size_t polling = 0;
  void sees(std::size_t slot, std::size_t t);

  /// The instruction at which the thread has arrived: what is recorded next is its.
  void arrived_at(std::size_t slot, std::size_t t, Place place) { lane(slot, t).place = place; }

  // ---- ordinary code ----------------------------------------------------------------------------
  /// Accounts for what the running thread has done since the last call; or drops it, since it was
  /// the emulation of an instruction.
  void account();
  void drop();
  void count_special() { ++special_; }
  void count_global(std::size_t bytes, bool reads) { (reads ? read_ : written_) += bytes; }
  void spend(std::size_t slot, std::size_t t, Cycles cycles) { lane(slot, t).clock += cycles; }
  /// An atomic access, whose result the lane waits for.
  void atomic(std::size_t slot, std::size_t t, const char* what, bool shared);

  // ---- barriers: any of them, by the address of its state ---------------------------------------
  void arrive(const void* barrier, std::size_t slot, std::size_t t, const std::string& name);
  /// All have arrived: what waits goes on at the clock of the last, or of the last byte.
  void complete(const void* barrier);
  /// A thread that waits is to go on.
  void resume(const void* barrier, std::size_t slot, std::size_t t);
  /// A thread that waited, or found the phase complete, goes on.
  void end_wait(const void* barrier, std::size_t slot, std::size_t t, const std::string& name);
  /// All lanes of `mask` have met in `what`: they go on together.
  void meet(std::size_t slot, std::size_t warp, unsigned mask, const char* what);

  // ---- work in flight ---------------------------------------------------------------------------
  /// A copy to shared memory of the block in `owner`, which `barrier` counts.
  void copy(const void* barrier, std::size_t slot, std::size_t t, std::size_t owner,
            std::size_t bytes, const std::string& name, const std::string& tile,
            std::optional<std::size_t> to);
  void copy_async(std::size_t slot, std::size_t t, std::size_t bytes, Place place,
                  const std::string& tile, std::optional<std::size_t> to);
  void copy_commit(std::size_t slot, std::size_t t);
  void copy_wait(std::size_t slot, std::size_t t, std::size_t pending);
  /// `ranges`: what it reads of shared memory.
  void store(std::size_t slot, std::size_t t, std::size_t bytes, const std::string& tiles,
             std::vector<SharedTrace::Range> ranges);
  void store_commit(std::size_t slot, std::size_t t);
  void store_wait(std::size_t slot, std::size_t t, std::size_t pending, bool written);
  /// A product of this thread's warp with `columns` columns.
  void product(std::size_t slot, std::size_t t, std::size_t columns, Place place);
  void product_reads(std::size_t slot, std::size_t t, const std::string& tile,
                     std::optional<std::size_t> first, std::size_t bytes) {
    add_name(lane(slot, t / 32 * 32).products_details.reads, tile);
    if (shared_ && first) lane(slot, t / 32 * 32).products_ranges.emplace_back(*first, bytes);
  }
  void product_commit(std::size_t slot, std::size_t t);
  void product_wait(std::size_t slot, std::size_t t, std::size_t pending);

  // ---- shared memory: bytes of the __shared__ variables, then of dynamic shared memory ----------
  void shared_access(std::size_t slot, std::size_t t, Kind kind, const char* what,
                     const Where& where, std::size_t byte, std::size_t bytes);
  /// What lies there: before the block ends.
  void shared_layout(std::size_t slot, const std::vector<StaticShared>& variables,
                     std::size_t dynamic_bytes, const Members* members) {
    if (shared_) shared_->layout(block(slot).number, variables, dynamic_bytes, members);
  }
  /// The running thread's access makes a race. Threads by their indices in their blocks.
  void race(SharedTrace::Race race);

  // ---- marks ------------------------------------------------------------------------------------
  std::size_t open_marks() { return lane(running_.slot, running_.t).marks.size(); }
  void begin_mark(const char* name);
  void end_marks(std::size_t open);
  void end_mark(const char* name);

 private:
  // Ordinary code of a warp between two instructions; its lanes run it at the same time.
  struct Batch {
    Cycles ordinary = 0, special = 0, end = 0;
    Cycles from = 0, begin = 0, code = 0;  // of its first lane; `begin`: after its global loads
    std::size_t warp = 0;
    bool done = false;
    std::vector<Next> waiting;
  };
  struct Group {  // of copies or stores of a lane, or of products of a warp
    Cycles read = 0, end = 0;
    Source source;
  };
  struct Lane {
    Cycles clock = 0, wait_begin = 0;
    Cycles ordinary = 0, special = 0;
    Place place;  // of its instruction, if that is known
    std::size_t read = 0, written = 0;
    std::size_t batch = 0;  // the next of its warp's
    std::shared_ptr<Batch> running;
    std::size_t copied = 0;  // bytes of cp.async since the last commit
    Cycles copies_began = 0;
    Place copies_place;  // of the first
    std::string copies_tiles;
    std::size_t copy_groups = 0, product_groups = 0;  // committed
    Cycles products = 0;                              // since the last commit
    Cycles products_began = 0;
    Details products_details;
    std::vector<SharedTrace::Range> products_ranges;
    Group open_stores;
    std::vector<Group> stores;
    std::vector<std::pair<const char*, Cycles>> marks;
  };
  struct Warp {
    std::vector<std::shared_ptr<Batch>> batches;
    std::vector<Group> copies, products;  // products of the warpgroup, in its first warp
    Cycles last_wait = 0, last_arrival = 0;  // their ends
    const void* arrived_at = nullptr;
  };
  struct Running {
    std::size_t number = 0, sm = 0, lanes_left = 0;  // of the trace's blocks
    bool ended = false;
    std::vector<Lane> lanes;
    std::vector<Warp> warps;
  };
  // Serves the warps that ask for it in turn, some cycles each.
  struct Unit {
    struct Work {
      std::size_t slot, warp;
      std::shared_ptr<Batch> batch;
      Cycles left;
    };
    bool special = false, busy = false, recorded = false;
    std::deque<Work> ring;
  };
  struct Sm {
    std::array<Unit, 4> ordinary, special;  // of each quarter
    std::array<Cycles, 4> tensor_free{};
    Cycles memory_free = 0;
  };
  struct Sync {
    Cycles last = 0, ended = 0;
    std::uint64_t number = 0;  // of its last completion, among those of all barriers
    Source source, ended_by;
  };
  struct At {
    Cycles clock;
    std::size_t slot, t;
    auto operator<=>(const At&) const = default;
  };
  struct Event {
    Cycles clock;
    std::size_t number;
    std::function<void()> happens;
    bool operator>(const Event& other) const {
      return std::pair(clock, number) > std::pair(other.clock, other.number);
    }
  };

  Running& block(std::size_t slot) { return *blocks_[slot]; }
  Lane& lane(std::size_t slot, std::size_t t) { return blocks_[slot]->lanes[t]; }
  Warp& warp(std::size_t slot, std::size_t t) { return blocks_[slot]->warps[t / 32]; }
  static std::string warpgroup_name(std::size_t warp);
  std::vector<Group>& products_of(std::size_t slot, std::size_t t) {
    return warp(slot, t / 128 * 128).products;
  }
  std::size_t lanes_of(std::size_t slot, std::size_t t);
  bool others_first(Cycles clock);
  void after(Cycles clock, std::function<void()> happens) {
    events_.push({clock, ++event_, std::move(happens)});
  }
  void end_block(Running& b);
  void end_blocks();
  void passed(std::size_t slot, std::size_t t, const Sync& barrier) {
    if (shared_ && barrier.number > 0) shared_->passed(block(slot).number, t, 2 * barrier.number);
  }
  bool start_batch(std::size_t slot, std::size_t t);
  void go_on(std::size_t slot, const std::shared_ptr<Batch>& batch, Cycles now);
  void submit(Unit& unit, Unit::Work work, Cycles now);
  void serve(Unit& unit, Cycles now);
  std::pair<Cycles, Cycles> transfer(std::size_t slot, std::size_t bytes, Cycles from);
  std::pair<Cycles, Cycles> multiply(std::size_t slot, std::size_t t, Cycles cycles, Cycles from);
  void wait_for(std::size_t slot, std::size_t t, Cycles until, const char* what,
                const Source& source);
  void record_wait(std::size_t slot, std::size_t t, const std::string& name, const Source& source);

  Trace& trace_;
  SharedTrace* shared_;
  std::vector<std::unique_ptr<Running>> blocks_;  // by slot
  std::vector<Cycles> slot_free_;
  std::vector<std::unique_ptr<Sm>> sms_;
  std::unordered_map<const void*, Sync> syncs_;
  std::priority_queue<At, std::vector<At>, std::greater<>> ready_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  Next running_{};
  std::size_t event_ = 0, launch_ = 0;
  std::uint64_t completions_ = 0, meetings_ = 0;
  Cycles now_ = 0, launch_begin_ = 0, end_ = 0;
  double bytes_per_cycle_ = costs::kSmBytes;
  std::size_t special_ = 0, read_ = 0, written_ = 0;  // of the thread that runs
};

/// The one of this thread of the host, or null: no time is modelled.
inline thread_local constinit Timeline* timeline = nullptr;

/// In a method of Block: accounts for the ordinary code before it. What the method itself reads is
/// none: functions of the standard library may be the kernels' copies, which are instrumented.
struct Uncounted {
  Uncounted() {
    if (timeline) timeline->account();
  }
  ~Uncounted() {
    if (timeline) timeline->drop();
  }
};

/// One of the accesses of a race: by thread `index` of its block, the running one or not.
SharedTrace::RaceSide race_side(const Races::Facts& access, std::size_t index, bool in_block);

/// Marks of the thread that runs, as attn/span.h has them.
std::size_t open_marks();
void begin_mark(const char* name);
void end_marks(std::size_t open);
void end_mark(const char* name);

}  // namespace attn::emulator
