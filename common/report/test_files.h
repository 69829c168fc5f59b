// Shared by the tests of attn_report: fixtures, the committed evidence, temporary files.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "attn/error.h"

namespace attn::report::test {

namespace fs = std::filesystem;

inline fs::path fixture(const char* name) {
  return fs::path(ATTN_SOURCE_DIR) / "common/report/fixtures" / name;
}

// A fixed run of chapter 01 on an H200, independent of new measurements.
inline fs::path recorded(const std::string& name) {
  return fs::path(ATTN_SOURCE_DIR) / "common/report/fixtures/h200" / name;
}

inline fs::path evidence(const std::string& name) {
  return fs::path(ATTN_SOURCE_DIR) / "docs/reports/h200" / name;
}

inline std::string read_all(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// A file of this process alone: CTest runs the cases of this program in parallel.
class TemporaryFile {
 public:
  TemporaryFile() {
    std::string name = (fs::temp_directory_path() / "attn_report_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~TemporaryFile() { fs::remove_all(folder_); }
  fs::path path() const { return folder_ / "damaged.json"; }
  const fs::path& write(const std::string& bytes, const std::string& name = "damaged.json") {
    std::ofstream(path_ = folder_ / name, std::ios::binary) << bytes;
    return path_;
  }

 private:
  fs::path folder_, path_;
};

/// The message with which `action` refuses its input, or "".
template <class Action>
std::string refusal_of(const Action& action) {
  try {
    (void)action();
    return "";
  } catch (const InputError& e) {
    return e.what();
  }
}

}  // namespace attn::report::test
