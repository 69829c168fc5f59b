/// \file
/// Bulk copies and reductions of contiguous bytes, without a tensor map. PTX ISA, "cp.async.bulk"
/// and "cp.reduce.async.bulk" (sm_90). Addresses and sizes are multiples of 16 bytes.
///
///     load       one thread: arrive_expect_tx(bar, n)  bulk_load(...)      all: mbarrier_wait(bar)
///     reduction  all: write the slab, fence_proxy_async(), a barrier
///                one thread: bulk_reduce_add(...)  tma_store_commit()
///                    tma_store_wait<0>()    the slab may be overwritten
///                    bulk_wait_group<0>()   the sums are in global memory: now tell another block
#pragma once

#include <cstdint>

#include "attn/kernel.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// Issues the copy of `bytes` bytes from global to shared memory. `barrier` must expect them in the
/// current phase. One thread calls it.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes,
                                          uint64_t* barrier ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block& block = emulator::Block::current();
  const auto size = static_cast<std::size_t>(bytes);
  block.require_aligned("bulk_load", caller, "a destination", shared, 16);
  block.require_aligned("bulk_load", caller, "a source", global, 16);
  if (bytes <= 0 || bytes % 16 != 0)
    block.fail("bulk_load", caller,
               "with " + std::to_string(bytes) + " bytes, not a multiple of 16");
  block.mbarrier_copy(
      "bulk_load", caller, barrier, shared, size, [=] { std::memcpy(shared, global, size); },
      [=](const emulator::Block::Visit& reads) { reads(global, size); });
#else
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

#ifdef ATTN_EMULATED
ATTN_UNRECORDED inline void touch_unrecorded(const volatile float* at) { static_cast<void>(*at); }
#endif

/// Issues the addition of `count` floats from shared memory to global memory, each of them atomic:
/// their order is not defined. The same thread calls it, tma_store_commit() and the wait.
__device__ __forceinline__ void bulk_reduce_add(float* global, const float* shared,
                                                int count ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block& block = emulator::Block::current();
  const auto bytes = static_cast<std::size_t>(count) * sizeof(float);
  block.require_aligned("bulk_reduce_add", caller, "a source", shared, 16);
  block.require_aligned("bulk_reduce_add", caller, "a destination", global, 16);
  if (count <= 0 || count % 4 != 0)
    block.fail("bulk_reduce_add", caller,
               "with " + std::to_string(count) + " floats, not a multiple of 4");
  // Touched here: it is written when no thread runs that a message could name.
  touch_unrecorded(global);
  touch_unrecorded(global + count - 1);
  block.require_shared("bulk_reduce_add", caller, "a source", shared, bytes);
  block.store_async(
      "bulk_reduce_add", caller,
      [=]() -> emulator::Block::Write {
        return [global, slab = std::vector<float>(shared, shared + count)] {
          for (std::size_t i = 0; i < slab.size(); ++i) global[i] += slab[i];
        };
      },
      emulator::Kind::atomic, [=](const emulator::Block::Visit& reads) { reads(shared, bytes); },
      [=](const emulator::Block::Visit& writes) { writes(global, bytes); });
#else
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
      "r"(shared_address(shared)), "r"(count * 4)
      : "memory");
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
