/// \file
/// A file that an option names: `--json`, `--timeline`.
#pragma once

#include <fstream>
#include <string>

namespace attn {

/// It is written to a temporary name and moved when complete, so that a run that fails keeps the
/// file of an earlier one. Throws InputError, with the option's name, for what cannot be written.
class OutputFile {
 public:
  /// No file if `path` is empty. `option`: "--json".
  OutputFile(std::string option, std::string path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  void write(const std::string& text);

 private:
  std::string option_, path_, part_;
  std::ofstream file_;
};

}  // namespace attn
