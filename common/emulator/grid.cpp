// A launch: which blocks are resident, and which of them goes on.
#include <algorithm>

#include "emulator/simt.h"

namespace attn::emulator {
namespace {

constexpr std::size_t kAll = ~std::size_t{0};  // threads: until all have ended

}  // namespace

void run_grid(Index3 extent, Index3 block, std::size_t shared_bytes, const Kernel& kernel) {
  static thread_local Stacks stacks;
  constexpr std::size_t kMaxStatic = 48 * 1024, kMaxShared = 227 * 1024,
                        kAllShared = 228 * 1024, kBurst = 512;
  const std::size_t threads = block.count();
  if (const std::size_t most = launch_bounds(kernel.function); most > 0 && threads > most)
    throw KernelError("a launch of " + std::to_string(threads) +
                      " threads a block: __launch_bounds__ of the kernel says " +
                      std::to_string(most));
  Grid grid{kernel, static_shared(kernel.function), thread_variables(), nullptr, stacks, {}};
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
  Random random{schedule_seed};
  std::vector<std::uint32_t> order(extent.count());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  gridDim = extent;
  std::vector<std::unique_ptr<Block>> resident(
      std::min(std::max<std::size_t>(resident_blocks, 1), order.size()));
  GlobalBuffer::forget_accesses();
  std::vector<std::size_t> first_number(resident.size());  // of the threads of each
  if (find_races && find_global_races && kernel.instrumented) {
    grid.races = std::make_unique<Races>([&, block, extent](std::size_t t, std::uint32_t b) {
      const auto first = std::prev(std::upper_bound(first_number.begin(), first_number.end(), t));
      return "thread " + index_in(block, static_cast<std::uint32_t>(t - *first)).text() +
             " of block " + index_in(extent, b).text();
    });
    for (std::size_t& first : first_number) first = grid.races->add_threads(threads);
  }
  std::size_t started = 0, live = 0;
  const auto start = [&](std::size_t slot) {
    resident[slot].reset();
    if (started == order.size()) return;
    const std::uint32_t b = order[started++];
    if (grid.races) grid.races->start_block(first_number[slot], threads, b);
    resident[slot] = std::make_unique<Block>(index_in(extent, b), block, shared_bytes,
                                             random.next(), grid, slot, first_number[slot]);
    ++live;
    grid.waiting = order.size() - started;
    grid.spins = 0;
  };
  for (std::size_t slot = 0; slot < resident.size(); ++slot) start(slot);
  std::size_t idle = 0;  // steps in a row in which nobody could go on
  while (live > 0) {
    const std::size_t slot = idle == 0 ? random.below(resident.size()) : idle % resident.size();
    Block* const now = resident[slot].get();
    if (!now) {
      if (idle > 0) ++idle;
      continue;
    }
    idle = now->step(live == 1 && started == order.size() ? kAll : 1 + random.below(kBurst)) ||
                   now->over()
               ? 0
               : idle + 1;
    if ((idle > 2 * resident.size() || std::exchange(grid.wants_more, false)) &&
        started < order.size() && resident.size() < most_resident) {
      // All wait: as long as a GPU would have room, for blocks that have not started.
      first_number.push_back(grid.races ? grid.races->add_threads(threads) : 0);
      resident.emplace_back();
      start(resident.size() - 1);
      idle = 0;
      continue;
    }
    if (idle > 2 * resident.size())
      now->fail_later(now->deadlock_text() + "; all " + std::to_string(live) +
                      " resident blocks wait, " + std::to_string(order.size() - started) +
                      " have not started");
    if (!now->over()) continue;
    try {
      now->finish();
    } catch (...) {
      for (auto& other : resident)
        if (other && other.get() != now) other->abandon();
      throw;
    }
    --live;
    start(slot);
  }
  for (const auto& write : grid.results) write();
  if (grid.races)
    if (const auto line = grid.races->never_written()) throw KernelError(*line);
}

}  // namespace attn::emulator
