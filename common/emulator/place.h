/// \file
/// Where in a kernel's source something happens.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace attn::emulator {

/// A place in the source of a kernel.
struct Place {
  const char* file = "";
  int line = 0;
  std::string text()
      const;  ///< "04_flash_v2/v3_prefetch.cu:120": the folder and the file are enough to find it
  bool operator==(const Place& other) const {
    return line == other.line && (file == other.file || std::strcmp(file, other.file) == 0);
  }
};

/// The same, or an address in the program's code where the compiler told only that (file is null).
struct Where {
  const char* file = nullptr;
  std::uintptr_t at = 0;  ///< a line, or an address
  Where() = default;
  Where(Place p) : file(p.file), at(static_cast<std::uintptr_t>(p.line)) {}
  explicit Where(const void* code) : at(reinterpret_cast<std::uintptr_t>(code)) {}
  std::string text() const;
  std::uintptr_t key() const { return at ^ reinterpret_cast<std::uintptr_t>(file); }
};

/// "04_flash_v2/v3_prefetch.cu:120" of the last folder and the file of a path.
std::string place_text(const std::string& path, long line);

}  // namespace attn::emulator
