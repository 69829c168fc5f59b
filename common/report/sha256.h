/// \file
/// SHA-256 (FIPS 180-4), for page checksums.
#pragma once

#include <string>
#include <string_view>

namespace attn::report {

/// 64 hexadecimal digits, as sha256sum prints them.
std::string sha256(std::string_view bytes);

}  // namespace attn::report
