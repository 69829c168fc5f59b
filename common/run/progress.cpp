#include "run/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <utility>

namespace attn {

Progress::Progress(std::string what) {
  if (!isatty(STDERR_FILENO)) return;
  thread_ = std::thread([this, what = std::move(what)] {
    std::unique_lock lock(mutex_);
    int seconds = 0;
    while (!changed_.wait_for(lock, std::chrono::seconds(1), [this] { return done_; }))
      fmt::print(stderr, "\r{}, {} s\033[K", what, ++seconds), std::fflush(stderr);
    if (seconds > 0) fmt::print(stderr, "\r\033[K"), std::fflush(stderr);
  });
}

Progress::~Progress() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

}  // namespace attn
