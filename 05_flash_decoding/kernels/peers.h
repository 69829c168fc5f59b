// Writes to the memory of other ranks' GPUs, and the flags that say that they are complete.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include "attn/kernel.h"
#include "kernels/merge.h"
#include "ptx/system_flag.h"

namespace ATTN_BACKEND::ranks {
using namespace attn;

constexpr int kMaxRanks = 16;

// Partial results: parts[n] is the buffer of rank n, [2][world][O rows * d | lse rows]. Launch e
// uses half e % 2: a rank that has begun launch e + 1 may still be read by a slower rank in launch
// e, but not in e - 1, whose flags it has sent before. Flags hold the number of the launch (the
// epoch), so they are never reset.
struct Peers {
  float* parts[kMaxRanks];
  unsigned* flags[kMaxRanks];  // [row blocks][kMaxRanks]: by sender
  int world, rank, rows, head_dim;
  unsigned epoch;
  unsigned long long most_ns;  // a longer wait ends with an error
  unsigned* late;              // of this rank: set by such a wait

  __device__ int64_t size() const { return part_floats(rows, head_dim); }
  __device__ const float* own() const { return parts[rank] + epoch % 2 * world * size(); }
  // Four columns of this rank's partial O, and its lse, to all ranks.
  __device__ void store(int64_t row, int col, const float (&o)[4], float factor, float lse) const {
    for (int n = 0; n < world; ++n) {
      float* const part = parts[n] + (int64_t{epoch % 2} * world + rank) * size();
      store_part(part + row * head_dim + col, o, factor);
      if (col == 0) part[int64_t{rows} * head_dim + row] = lse;
    }
  }
};

// Waits until another rank has set a flag to the number of this launch or a later one; acquires.
__device__ __forceinline__ void wait_for_flag(const unsigned* flag, const Peers& peers) {
#ifdef ATTN_EMULATED
  system_flag_wait(flag, peers.epoch);
#else
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (!flag_has_come(system_flag_load(flag), peers.epoch) && now - begin < peers.most_ns);
  if (now - begin >= peers.most_ns)
    *peers.late = 1;  // no trap: it would end the process's contexts
#endif
}

// Between the last store of a block and its first read of other ranks' parts.
__device__ __forceinline__ void wait_for_peers(const Peers& peers, int row_block) {
  //! [ex05g]
  // One thread per rank. The release covers the stores of the whole block: __syncthreads first.
  __syncthreads();  // all rows of the block are stored
  const int n = static_cast<int>(threadIdx.x);
  if (n < peers.world) {
    const int64_t flag = int64_t{row_block} * kMaxRanks;
    system_flag_store(peers.flags[n] + flag + peers.rank, peers.epoch);
    wait_for_flag(peers.flags[peers.rank] + flag + n, peers);
  }
  __syncthreads();  // the rows of all ranks are visible
  //! [ex05g]
}

// Launches the kernel of one rank. In the emulator a rank cannot run next to others, so rank 0
// launches those of all ranks as one grid: blockIdx.y is the rank.
template <class... Parameters, class... Values>
Status launch_of_rank(void (*kernel)(Parameters...), int rank, dim3 grid, dim3 block,
                      std::size_t shared_bytes, Stream stream,
                      const std::vector<std::tuple<Values...>>& of_ranks) {
#ifdef ATTN_EMULATED
  (void)rank, (void)stream;
  try {
    attn::emulator::run_grid({grid.x, static_cast<unsigned>(of_ranks.size())}, block, shared_bytes,
                             {[&] { std::apply(kernel, of_ranks[blockIdx.y]); },
                              reinterpret_cast<const void*>(kernel), ATTN_INSTRUMENTED});
  } catch (const attn::emulator::KernelError& e) {
    return Status::kernel_error(e.what());
  }
  return Status::success();
#else
  return std::apply(
      [&](auto... values) {
        return launch_kernel(kernel, grid, block, shared_bytes, stream, values...);
      },
      of_ranks[static_cast<std::size_t>(rank)]);
#endif
}

}  // namespace ATTN_BACKEND::ranks
