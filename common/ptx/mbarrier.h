/// \file
/// `mbarrier`: a barrier in shared memory at which threads arrive, and bytes. PTX ISA, "Parallel synchronization and
/// communication instructions: mbarrier" (as used here sm_90).
///
/// A barrier goes through phases 0, 1, 2, ... A phase ends when its threads have arrived and as
/// many bytes have been copied as were announced. Who waits names the parity of the phase: parity 0
/// waits for the end of phase 0, or 2, ... Parity 1 in the beginning does not wait: a phase before
/// the first is over.
///
///     producer   wait(empty, 1)  expect(full, n)  copies ...   wait(empty, 0)  expect(full, n)  copies ...
///     consumer   wait(full, 0)   reads   arrive(empty)         wait(full, 1)   reads   arrive(empty)
#pragma once

#include <cstdint>

#include "attn/kernel.h"
#include "ptx/ldmatrix.h"  // shared_address

namespace attn {
inline namespace ATTN_BACKEND {

/// By one thread, for `threads` arrivals a phase; then mbarrier_init_fence(), then __syncthreads().
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

/// Makes barriers that this thread has initialised known to the unit that copies.
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
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}

/// Arrives, and announces `bytes` that copies will bring in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier,
                                                          int bytes ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().mbarrier_arrive("mbarrier_arrive_expect_tx", caller, barrier,
                                             static_cast<std::size_t>(bytes));
#else
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

/// Waits until the last phase of this parity (0 or 1) has ended. What was copied, and what the
/// threads wrote that have arrived, is seen after it.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().mbarrier_wait("mbarrier_wait", caller, barrier,
                                           static_cast<unsigned>(parity));
#else
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
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
