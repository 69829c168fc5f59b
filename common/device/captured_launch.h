/// \file
/// A launch as a CUDA graph: captured once, replayed with whatever its buffers hold by then.
#pragma once

#include "attn/step.h"

namespace attn {

class CapturedLaunch {
 public:
  CapturedLaunch() = default;
  ~CapturedLaunch();
  CapturedLaunch(const CapturedLaunch&) = delete;
  /// Queues what `launch` queues in a stream that records it, without running it (GPU only).
  Status capture(const Arguments& arguments, LaunchFunction launch);
  /// Launches what was captured. It waits for copies that were queued before, not for its own end.
  Status replay();

 private:
  void* graph_ = nullptr;   // cudaGraphExec_t
  Stream stream_ = nullptr;
};

}  // namespace attn
