#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace attn {

/// Calls `body(i)` for i in [0, count), on all cores of the host. `body` must not throw.
template <class Body>
void parallel_for(int64_t count, Body body) {
  // Queried once: each query reads system files.
  static const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i; (i = next++) < count;) body(i);
  };
  std::vector<std::jthread> others;
  for (int64_t t = 1; t < std::min(cores, count); ++t) others.emplace_back(work);
  work();
}

}  // namespace attn
