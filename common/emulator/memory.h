/// \file
/// What memory a kernel has: names of what lies in shared memory, and the buffers in global memory.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "emulator/races.h"

namespace attn::emulator {

/// A member of a kernel's `SharedStorage`: where it lies, and its extents if it is an array.
struct Member {
  const char* name;
  std::size_t offset, bytes, element_bytes;
  std::array<std::size_t, 5> extents;  // from the outermost on; 0 behind the last
  /// "sK[1][17][40]" of a byte of it.
  std::string element(std::size_t byte) const;
};
using Members = std::vector<Member>;

template <class T>
Member member_of(const char* name, std::size_t offset) {
  return {name,
          offset,
          sizeof(T),
          sizeof(std::remove_all_extents_t<T>),
          {std::extent_v<T, 0>, std::extent_v<T, 1>, std::extent_v<T, 2>, std::extent_v<T, 3>,
           std::extent_v<T, 4>}};
}

/// A buffer in global memory, from its allocation to its end. Stores there may be overtaken by
/// other threads; the emulator does not see those to other memory of the host.
class GlobalBuffer {
 public:
  GlobalBuffer(std::string name, const void* data, std::size_t bytes, std::size_t guard = 0);
  ~GlobalBuffer();
  GlobalBuffer(GlobalBuffer&&) = delete;

  /// The one that holds `at`, or null.
  static GlobalBuffer* find(const void* at);
  /// Whether the last call of find() has shown that neither a buffer nor a guard band is there.
  static bool known_to_be_none(const void* at);
  /// The nearest one, or null, and where `at` is from there: "16 bytes past the end of q".
  static GlobalBuffer* nearest(const void* at);
  std::string place_of(const void* at) const;
  /// Whether `at` lies in a guard band before or behind it, which is no buffer's.
  bool guards(const void* at) const;
  /// A new launch: what the last one did to any buffer is in order before it.
  static void forget_accesses();
  std::size_t offset(const void* at) const;
  Shadow& shadow() { return shadow_; }
  const Races::Name& byte_name() const { return byte_name_; }

 private:
  std::string name_;
  const std::byte* data_;
  std::size_t bytes_, guard_;  // guard: on each side
  Shadow shadow_{true};
  Races::Name byte_name_;
};

}  // namespace attn::emulator
