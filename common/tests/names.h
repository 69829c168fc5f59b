/// \file
/// What the wrappers of common/ptx were called when small kernels outside of this repository were
/// written against them: for probes of the emulator that keep the older names.
#pragma once

#include "attn/kernel.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"

namespace attn {
inline namespace ATTN_BACKEND {

inline void shared_write_fence() { fence_proxy_async(); }
inline void mbarrier_arrive_expect(uint64_t* barrier, int bytes ATTN_CALLER) {
  mbarrier_arrive_expect_tx(barrier, bytes, caller);
}
inline SmemDescriptor wgmma_operand(const void* tile, int panel_bytes = 16) {
  return smem_descriptor(tile, panel_bytes);
}

}  // namespace ATTN_BACKEND
}  // namespace attn
