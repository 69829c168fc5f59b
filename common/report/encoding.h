/// \file
/// Decodes text files of other programs: byte order marks, and the UTF-16 of PowerShell's `>`.
#pragma once

#include <string>

namespace attn::report {

/// `bytes` as UTF-8 without byte order marks, including marks that concatenation left at the start
/// of a later line. UTF-16 is recognised by its mark, or by the zero bytes of its ASCII characters.
/// Throws InputError, with one line that begins with `file`, for any other encoding.
std::string utf8_text(const std::string& bytes, const std::string& file);

}  // namespace attn::report
