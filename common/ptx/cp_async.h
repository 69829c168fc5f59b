/// \file
/// `cp.async`: asynchronous copies from global to shared memory. Source: PTX ISA, "Data movement:
/// non-bulk asynchronous copy" (sm_80 and later).
///
///     cp_async_16(...)  cp_async_16(...)  cp_async_commit()    <- group 0
///     cp_async_16(...)  cp_async_16(...)  cp_async_commit()    <- group 1
///     cp_async_wait<1>()     group 0 is complete, group 1 may still be in flight
///     __syncthreads()        now *other* threads' copies of group 0 are visible, too
#pragma once

#include <cstdint>

#include "attn/kernel.h"
#include "ptx/ldmatrix.h"  // shared_address

namespace attn {
inline namespace ATTN_BACKEND {

/// Issues a copy of 16 bytes that bypasses L1. Both addresses must be 16-byte aligned. Only the
/// first `valid_bytes` (0 to 16) are read; the rest of the destination becomes 0. So the tail of a
/// tile needs no branch: for elements out of range pass 0 and any valid address.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global,
                                            int valid_bytes = 16 ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().require_aligned("cp_async_16", caller, "a destination", shared, 16);
  if (valid_bytes > 0)
    emulator::Block::current().require_aligned("cp_async_16", caller, "a source", global, 16);
  const auto bytes = static_cast<std::size_t>(valid_bytes);
  const auto copy = [=] {  // the emulator may delay it until the wait
    std::memset(shared, 0, 16);
    if (bytes > 0) std::memcpy(shared, global, bytes);
  };
  emulator::Block::current().copy_async("cp_async_16", caller, shared, global, bytes, copy);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid_bytes)
               : "memory");
#endif
}

/// Commits all copies that this thread has issued since the last commit as one group.
__device__ __forceinline__ void cp_async_commit() {
#ifdef ATTN_EMULATED
  emulator::Block::current().copy_commit();
#else
  ATTN_STAMP_BEGIN
  asm volatile("cp.async.commit_group;" ::: "memory");
  ATTN_STAMP_PENDING(copy_group, 0, 0)
#endif
}

/// Waits until at most the newest `kPending` groups of this thread are in flight. Other threads may
/// read the data only after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#ifdef ATTN_EMULATED
  emulator::Block::current().copy_wait(kPending);
#else
  ATTN_STAMP_BEGIN
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  ATTN_STAMP_PENDING(copy_wait, 0, kPending)
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
