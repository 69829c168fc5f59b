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

/// The dependent grid may start once every block of this grid has executed this (one thread is
/// enough) or ended; without it, at the end of the grid. It gives no visibility of memory.
__device__ __forceinline__ void launch_dependents() {
#ifndef ATTN_EMULATED
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the previous grid has completed and its writes are visible. Before it, nothing may
/// be read that the previous grid writes, and nothing written that it reads or writes. Every thread
/// of a dependent kernel executes it, even if it reads nothing: otherwise the end of this kernel
/// does not imply the end of the previous one. Without the launch attribute it returns at once.
__device__ __forceinline__ void wait_for_launch_before() {
#ifdef ATTN_EMULATED
  emulator::Block::current().grid_dependency_wait();
#else
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
