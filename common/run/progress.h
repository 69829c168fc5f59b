/// \file
/// A line on a terminal while something takes long.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace attn {

/// From construction to destruction, after the first second: "v3_prefetch: the reference, 12 s". On
/// standard error, and only if that is a terminal: a file or a pipe holds results and nothing else.
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
