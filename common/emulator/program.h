/// \file
/// What the file of the program or library that holds the kernels says of them (ELF,
/// Linux): the static shared memory of a kernel, its launch bounds, the source line of an address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace attn::emulator {

/// A `__shared__` variable of a kernel. The host compiler makes it a variable of its thread.
struct StaticShared {
  std::string name;
  std::byte* data;
  std::size_t bytes;
};
/// Those of the kernel at `function`, on the calling thread of the host; none where the program has
/// been stripped.
std::vector<StaticShared> static_shared(const void* function);

/// What the program has of its own for the calling thread of the host.
struct ThreadVariables {
  const std::byte* first = nullptr;
  std::size_t bytes = 0;
  bool hold(const void* at) const {
    return static_cast<std::size_t>(static_cast<const std::byte*>(at) - first) < bytes;
  }
};
ThreadVariables thread_variables();
/// The name of the one that holds `at`, if it is a function's: "tile"; else nothing.
std::string local_variable(const void* at);

/// The most threads that `__launch_bounds__` of the kernel at `function` allows, or 0: it has none.
std::size_t launch_bounds(const void* function);

/// The source line before a return address, outside of the emulator and the instructions:
/// "v1_a.cu:5", or an address where the program holds no line numbers or there is no addr2line.
std::string line_of(std::uintptr_t return_address);

}  // namespace attn::emulator
