/// \file
/// Progress line on a terminal during long operations.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace attn {

/// Shows a line such as "v3_prefetch: the reference, 12 s" from one second after construction until
/// destruction. It goes to standard error, and only to a terminal, so that files and pipes hold
/// results only.
class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace attn
