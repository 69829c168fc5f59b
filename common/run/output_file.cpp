#include "run/output_file.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "attn/error.h"

namespace attn {

OutputFile::OutputFile(std::string option, std::string path)
    : option_(std::move(option)), path_(std::move(path)), part_(path_ + ".part") {
  if (path_.empty()) return;
  if (std::filesystem::is_directory(path_))
    throw InputError(fmt::format("{} {}: cannot be written (it is a folder)", option_, path_));
  file_.open(part_, std::ios::trunc);
  if (!file_)
    throw InputError(
        fmt::format("{} {}: cannot be written ({})", option_, path_, std::strerror(errno)));
}

OutputFile::~OutputFile() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove(part_, ignored);
}

void OutputFile::write(const std::string& text) {
  if (path_.empty()) return;
  file_ << text << '\n';
  file_.close();
  std::error_code error;
  if (file_) std::filesystem::rename(part_, path_, error);
  if (!file_ || error)
    throw InputError(fmt::format("{} {}: could not be written completely", option_, path_));
}

}  // namespace attn
