// setmaxnreg: the registers of a block's warpgroups.
#include <algorithm>

#include "emulator/simt.h"

namespace attn::emulator {

// Of a thread: its share of the 65536 of an SM, in steps of 8, as __launch_bounds__ of one block an
// SM implies.
unsigned Block::launched_registers() const {
  return static_cast<unsigned>(std::min<std::size_t>(65536 / threads_.size(), 256) / 8 * 8);
}

void Block::registers(const char* what, Place place, unsigned count, bool take) {
  const unsigned all = launched_registers() * static_cast<unsigned>(registers_.size());
  const unsigned mine = registers_[running_ / kWarpgroupSize];
  ++threads_[running_].resized;
  if (const unsigned before = mine == 0 ? launched_registers() : mine;
      take ? count < before : count > before)
    fail(what, place,
         "for " + std::to_string(count) + " registers, and has " + std::to_string(before));
  registers_[running_ / kWarpgroupSize] = count;
  unsigned sum = 0;
  for (const unsigned n : registers_) sum += n == 0 ? 24 : n;
  if (sum > all)
    fail(what, place,
         "for " + std::to_string(count) + " registers: its " + std::to_string(registers_.size()) +
             " warpgroups have " + std::to_string(sum) + " a lane then, and were launched with " +
             std::to_string(all));
}

// At the end of the block: requested registers were granted only if others were released.
void Block::check_registers_given() const {
  unsigned sum = 0;
  bool any = false;
  for (std::size_t g = 0; g < registers_.size(); ++g) {
    const std::size_t first = g * kWarpgroupSize;
    const std::size_t end = std::min(first + kWarpgroupSize, threads_.size());
    for (std::size_t t = first; t < end; ++t)
      if (threads_[t].resized != threads_[first].resized)
        throw KernelError("setmaxnreg: " + thread_name(first) + " called it " +
                          std::to_string(threads_[first].resized) + " times, " + name(t) + " " +
                          std::to_string(threads_[t].resized) +
                          ": all four warps of a warpgroup call it");
    any = any || registers_[g] != 0;
    sum += registers_[g] == 0 ? launched_registers() : registers_[g];
  }
  if (const unsigned all = launched_registers() * static_cast<unsigned>(registers_.size());
      any && sum > all)
    throw KernelError("block " + index_.text() + " has in the end " + std::to_string(sum) +
                      " registers a lane in its " + std::to_string(registers_.size()) +
                      " warpgroups, and was launched with " + std::to_string(all) +
                      ": a GPU would wait for a setmaxnreg_dec that does not come");
}

}  // namespace attn::emulator
