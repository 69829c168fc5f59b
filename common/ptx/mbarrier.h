/// \file
/// `mbarrier`: a barrier object in shared memory that counts thread arrivals and transaction bytes
/// of asynchronous copies. PTX ISA, "Parallel synchronization and communication instructions:
/// mbarrier" (as used here: sm_90).
///
/// A barrier goes through phases 0, 1, 2, ... A phase completes when all expected threads have
/// arrived and all expected bytes have been copied. A waiting thread names the parity of a phase:
/// parity 0 waits for the completion of phase 0, 2, ... A wait for parity 1 on a new barrier
/// returns at once, because the phase before phase 0 counts as complete.
///
///     producer   wait(empty, 1)  expect_tx(full, n)  copies   wait(empty, 0)  expect_tx(full, n)
///     consumer   wait(full, 0)   reads  arrive(empty)         wait(full, 1)   reads  arrive(empty)
#pragma once

#include <cstdint>

#include "attn/kernel.h"
#include "ptx/ldmatrix.h"  // shared_address

namespace attn {
inline namespace ATTN_BACKEND {

/// Initialises a barrier for `threads` arrivals per phase. One thread calls it, then
/// mbarrier_init_fence(); __syncthreads() must follow.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int threads ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().mbarrier_init("mbarrier_init", caller, barrier,
                                           static_cast<std::size_t>(threads));
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(threads)
               : "memory");
#endif
}

/// Makes barriers that this thread has initialised visible to the async proxy (TMA).
__device__ __forceinline__ void mbarrier_init_fence() {
#ifdef ATTN_EMULATED
  emulator::Block::current().mbarrier_init_fence();
#else
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().mbarrier_arrive("mbarrier_arrive", caller, barrier, 0);
#else
  ATTN_STAMP_BEGIN
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
  ATTN_STAMP_END(mbarrier_arrive, barrier)
#endif
}

/// Arrives and expects `bytes` more transaction bytes in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier,
                                                          int bytes ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().mbarrier_arrive("mbarrier_arrive_expect_tx", caller, barrier,
                                             static_cast<std::size_t>(bytes));
#else
  ATTN_STAMP_BEGIN
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
  ATTN_STAMP_END(mbarrier_arrive, barrier)
#endif
}

/// Waits until the last phase of this parity (0 or 1) has completed. The copied data, and all
/// stores that the arrived threads did before they arrived, are visible afterwards.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().mbarrier_wait("mbarrier_wait", caller, barrier,
                                           static_cast<unsigned>(parity));
#else
  ATTN_STAMP_BEGIN
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
      "@ended bra done;\n"
      "bra again;\n"
      "done:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
  ATTN_STAMP_END(mbarrier_wait, barrier)
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
