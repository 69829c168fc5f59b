// A launch: which blocks are resident, and which of them goes on.
#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "emulator/simt.h"
#include "emulator/timeline.h"

namespace attn::emulator {
namespace {

constexpr std::size_t kAll = ~std::size_t{0};  // threads: until all have ended

// An address that is not mapped ends the thread with a line that says where: mostly an offset of 32
// bits that has overflowed. AddressSanitizer says it itself.
#if !defined(ATTN_ASAN) && defined(__x86_64__)
thread_local constinit const void* fault_address = nullptr;
thread_local constinit const void* fault_code = nullptr;

void lose_thread() {
  Block& block = Block::current();
  const GlobalBuffer* const near = GlobalBuffer::nearest(fault_address);
  block.lose(block.running_name() + " accesses memory that is no buffer's" +
             (near ? ", " + near->place_of(fault_address) + "," : "") + " at " +
             Where(static_cast<const std::byte*>(fault_code) + 1).text());
}

void on_fault(int signal, siginfo_t* info, void* context) {
  if (!running_block) {  // not a kernel's: as without this handler
    ::signal(signal, SIG_DFL);
    return;
  }
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  fault_address = info->si_addr;
  fault_code = reinterpret_cast<const void*>(registers[REG_RIP]);
  // Goes on in lose_thread, on the thread's own stack, below what it uses, as if called.
  registers[REG_RSP] = ((registers[REG_RSP] - 1024) & ~greg_t{15}) - 8;
  registers[REG_RIP] = reinterpret_cast<greg_t>(&lose_thread);
}

// The handler is one for all threads of the host: the first of them that launches sets it, the last
// one that ends puts back what was there.
class CatchFaults {
 public:
  CatchFaults() {
    stack_t stack{};
    stack.ss_sp = stack_.data(), stack.ss_size = stack_.size();
    sigaltstack(&stack, &stack_before_);
    const std::scoped_lock lock(mutex_);
    if (launches_++ > 0) return;
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before_);
  }
  ~CatchFaults() {
    {
      const std::scoped_lock lock(mutex_);
      if (--launches_ == 0) sigaction(SIGSEGV, &before_, nullptr);
    }
    if (!(stack_before_.ss_flags & SS_ONSTACK)) sigaltstack(&stack_before_, nullptr);
  }
  CatchFaults(const CatchFaults&) = delete;

 private:
  static inline thread_local std::array<std::byte, 65536> stack_{};
  stack_t stack_before_{};
  static inline std::mutex mutex_;
  static inline std::size_t launches_ = 0;  // that run now
  static inline struct sigaction before_ {};
};
#else
struct CatchFaults {};
#endif

}  // namespace

void run_grid(Index3 extent, Index3 block, std::size_t shared_bytes, const Kernel& kernel) {
  static thread_local Stacks stacks;
  constexpr std::size_t kMaxStatic = 48 * 1024, kMaxShared = 227 * 1024, kAllShared = 228 * 1024,
                        kBurst = 512;
  const std::size_t threads = block.count();
  if (const std::size_t most = launch_bounds(kernel.function); most > 0 && threads > most)
    throw KernelError("a launch of " + std::to_string(threads) +
                      " threads a block: __launch_bounds__ of the kernel says " +
                      std::to_string(most));
  // A dependent launch may overlap with the one before it, whose accesses are remembered for that.
  static thread_local std::shared_ptr<Races> last;
  Grid grid{kernel, static_shared(kernel.function), thread_variables(), nullptr, stacks, {}, {}};
  const unsigned cluster = kernel.cluster;
  if (threads == 0 || threads > 1024 || extent.count() == 0)
    throw KernelError("a launch of " + std::to_string(extent.count()) + " blocks of " +
                      std::to_string(threads) + " threads: at least one, of 1 to 1024");
  if (cluster == 0 || cluster > 8 || extent.x % cluster != 0)
    throw KernelError("clusters of " + std::to_string(cluster) + " blocks in a grid of " +
                      extent.text() + ": 1 to 8 along x, which divide it");
  std::size_t bytes = 0;
  std::string variables;
  for (const StaticShared& v : grid.variables) {
    bytes += v.bytes;
    variables += (variables.empty() ? "" : ", ") + v.name + " " + std::to_string(v.bytes);
  }
  if (bytes > kMaxStatic || bytes + shared_bytes > kMaxShared)
    throw KernelError(
        std::to_string(bytes) + " bytes of __shared__ variables (" + variables + ") and " +
        std::to_string(shared_bytes) + " of dynamic shared memory: a block has at most " +
        std::to_string(kMaxStatic) + " of the first, " + std::to_string(kMaxShared) + " in all");

  // What fits on a GPU of 132 multiprocessors: threads, shared memory and blocks of each.
  const std::size_t fit = std::min({2048 / std::max<std::size_t>(threads, 32),
                                    kAllShared / (bytes + shared_bytes + 1024), std::size_t{32}});
  const std::size_t most_resident =
      most_resident_blocks > 0 ? most_resident_blocks : 132 * std::max<std::size_t>(fit, 1);
  [[maybe_unused]] const CatchFaults faults;
  Random random{schedule_seed};
  chance = {~schedule_seed};
  // The blocks of a cluster follow each other, and start together.
  std::vector<std::uint32_t> order(extent.count() / cluster);
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
  for (std::size_t i = order.size(); i > 1 && !timeline; --i)
    std::swap(order[i - 1], order[random.below(i)]);
  gridDim = extent;
  const std::size_t at_a_time =
      timeline ? std::min(most_resident, Timeline::kMostThreads / threads) : resident_blocks;
  std::vector<std::unique_ptr<Block>> resident(
      std::min(std::max<std::size_t>(at_a_time / cluster, 1), order.size()) * cluster);
  if (timeline) timeline->begin_launch(extent.count(), fit, resident.size());
  const bool overlaps = kernel.dependent && last && find_global_races;
  if (!overlaps) GlobalBuffer::forget_accesses();
  std::vector<std::size_t> first_number(resident.size());  // of the threads of each
  if (find_races && (find_global_races || cluster > 1) && kernel.instrumented) {
    grid.races = overlaps ? last : std::make_shared<Races>();
    if (overlaps) grid.before = last->order().of_last_launch();
    grid.races->order().begin_launch();
    grid.races->name_threads([block, extent](std::size_t t, std::uint32_t b) {
      return "thread " + index_in(block, static_cast<std::uint32_t>(t)).text() + " of block " +
             index_in(extent, b).text();
    });
    for (std::size_t& first : first_number) first = grid.races->add_threads(threads);
  }
  last = grid.races;
  std::size_t started = 0, live = 0;
  // Starts a cluster in the slots from `first` on, or leaves them empty.
  const auto start = [&](std::size_t first) {
    for (std::size_t slot = first; slot < first + cluster; ++slot) resident[slot].reset();
    if (started == order.size()) return;
    const std::uint32_t number = order[started++];
    const auto together = std::make_shared<Cluster>();
    for (std::size_t slot = first; slot < first + cluster; ++slot) {
      const auto b = static_cast<std::uint32_t>(number * cluster + (slot - first));
      if (grid.races) grid.races->start_block(first_number[slot], threads, b);
      resident[slot] =
          std::make_unique<Block>(index_in(extent, b), block, shared_bytes, random.next(), grid,
                                  slot, first_number[slot], together);
      ++live;
    }
    grid.waiting = (order.size() - started) * cluster;
    grid.spins = grid.slices = 0;
  };
  for (std::size_t slot = 0; slot < resident.size(); slot += cluster) start(slot);
  std::size_t idle = 0;  // steps in a row in which no thread could run
  while (live > 0) {
    // A block that polls looks at what has changed; then the thread with the lowest clock runs.
    if (timeline && timeline->polling > 0)
      for (auto& other : resident)
        if (other && !other->ended()) other->step(0);
    const auto next = timeline ? timeline->next() : std::nullopt;
    const std::size_t slot = next        ? next->slot
                             : idle == 0 ? random.below(resident.size())
                                         : idle % resident.size();
    Block* const now = resident[slot].get();
    if (!now || now->ended()) {
      if (idle > 0) ++idle;
      continue;
    }
    const bool to_the_end = timeline || (live == 1 && started == order.size());
    idle = now->step(to_the_end ? kAll : 1 + random.below(kBurst)) ||
                   now->over()
               ? 0
               : idle + 1;
    if ((idle > 2 * resident.size() || std::exchange(grid.wants_more, false)) &&
        started < order.size() && resident.size() < most_resident) {
      // All wait, perhaps for blocks that have not started: twice as many, while a GPU has room.
      const std::size_t more =
          std::min({resident.size(), most_resident - resident.size(), grid.waiting}) / cluster;
      for (std::size_t n = 0; n < std::max<std::size_t>(more, 1); ++n) {
        const std::size_t first = resident.size();
        for (unsigned i = 0; i < cluster; ++i) {
          first_number.push_back(grid.races ? grid.races->add_threads(threads) : 0);
          resident.emplace_back();
        }
        start(first);
      }
      idle = 0;
      continue;
    }
    if (idle > 2 * resident.size())
      now->fail_later(now->deadlock_text() + "; all " + std::to_string(live) +
                      " resident blocks wait, " + std::to_string(grid.waiting) +
                      " have not started");
    if (!now->over()) continue;
    try {
      now->finish();
    } catch (...) {
      for (auto& other : resident)
        if (other && other.get() != now) other->abandon();
      last = nullptr;
      throw;
    }
    --live;
    const std::size_t first = slot - slot % cluster;
    bool all = true;  // of the cluster have ended: until then others may look into its memory
    for (std::size_t i = first; i < first + cluster; ++i) all = all && resident[i]->ended();
    if (all) start(first);
  }
  if (timeline) timeline->end_launch();
  for (const auto& write : grid.results) write();
  if (grid.races)
    if (const auto line = grid.races->never_written()) throw KernelError(*line);
}

}  // namespace attn::emulator
