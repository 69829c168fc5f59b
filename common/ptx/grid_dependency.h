/// \file
/// Programmatic dependent launch: a kernel that begins while the previous kernel of the stream
/// still runs. CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX
/// ISA, "griddepcontrol" (sm_90). The second kernel is launched with `LaunchAttributes::dependent`.
///
///     first    ...  launch_dependents()   ... its last stores
///     second        loads what no kernel writes | wait_for_launch_before() | reads the results
#pragma once

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// Blocks of the dependent launch may start when all blocks of this one have called it, or ended.
/// It promises nothing about memory.
__device__ __forceinline__ void launch_dependents() {
#ifndef ATTN_EMULATED
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the launch before has ended and all that it wrote is visible. Before it, nothing may
/// be read that the launch before writes, and nothing written that it reads or writes.
__device__ __forceinline__ void wait_for_launch_before() {
#ifdef ATTN_EMULATED
  emulator::Block::current().grid_dependency_wait();
#else
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
