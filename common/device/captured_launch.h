/// \file
/// A launch captured as a CUDA graph once, and replayed with the current contents of its buffers.
#pragma once

#include "attn/step.h"

namespace attn {

class CapturedLaunch {
 public:
  CapturedLaunch() = default;
  ~CapturedLaunch();
  CapturedLaunch(const CapturedLaunch&) = delete;
  /// Captures the work that `launch` queues in a stream, without running it (GPU only).
  Status capture(const Arguments& arguments, LaunchFunction launch);
  /// Launches the graph. It waits for copies queued earlier, but does not wait for the graph to
  /// finish.
  Status replay();

 private:
  void* graph_ = nullptr;   // cudaGraphExec_t
  Stream stream_ = nullptr;
};

}  // namespace attn
