/// \file
/// Reads the numbers of an exercise's probe one by one; shared by the judges of index exercises.
/// The numbers come from the student's process, so they may have any value.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

namespace attn {

inline constexpr const char* kIncomplete = "the probe found something else than it should";

class Numbers {
 public:
  explicit Numbers(const std::vector<float>& all) : all_(all) {}

  bool has(int64_t count) const {
    return count >= 0 && static_cast<uint64_t>(count) <= all_.size();
  }
  /// The next number; -1 if it is not an integer in the range of int32, or if there is none.
  int whole() {
    if (all_.empty()) return -1;
    const float x = take(1).front();
    return std::abs(x) < 0x1p30f ? static_cast<int>(x) : -1;
  }
  /// The next `count` numbers, all of which must exist.
  std::vector<int> whole(int count) {
    std::vector<int> some(static_cast<std::size_t>(count));
    for (int& x : some) x = whole();
    return some;
  }
  std::span<const float> take(int count) {
    const auto some = all_.first(static_cast<std::size_t>(count));
    all_ = all_.subspan(static_cast<std::size_t>(count));
    return some;
  }

 private:
  std::span<const float> all_;
};

}  // namespace attn
