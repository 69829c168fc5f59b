/// \file
/// A short name for the code of a step's kernels, so that a measurement can say what it was made
/// on.
#pragma once

#include <filesystem>
#include <map>
#include <string>

namespace attn::report {

/// Grows when keys are made in another way: then those of one way are not compared with those of
/// another.
inline constexpr int kKeyVersion = 1;

/// Steps as "04_flash_v2/v13_tuned".
using Keys = std::map<std::string, std::string>;

/// The key of every step file in the chapters below `root`: 16 hexadecimal digits over what nvcc
/// makes of the step's file, of what it uses of headers that hold device code (its chapter's, ptx/,
/// attn/kernel.h, attn/philox.h, `Shape`; with attn/blas.h how cuBLAS is called) and of the flags
/// in AttnChapter.cmake. Tiles and launches are in the file. The same for the kernels of the GPU
/// tests in common/tests, as chapter "common".
///
/// Comments, white space, the emulator's branches and words of messages are left out, and names
/// that the code itself declares count as the order in which they come: renaming a variable leaves
/// the key alone, calling another function or taking another type does not. It is a lexer that
/// decides what is declared: some renamings it does not see as such, and then the key changes.
Keys kernel_keys(const std::filesystem::path& root);

/// The key of `step`: that of its file, or of the file of its number where several steps share one
/// (v1_half_m is in v1_scalar.cu). "-" where there is none.
std::string key_of(const Keys&, const std::string& chapter, const std::string& step);

/// The same over one text, for tests. `name` is what the step calls itself.
std::string key_of_text(const std::string& text, const std::string& name);

}  // namespace attn::report
