/// \file
/// Escapes untrusted text for XML and HTML.
#pragma once

#include <string>
#include <string_view>

namespace attn::report {

/// `text` with U+FFFD for bytes that are not UTF-8 and for control characters except line breaks
/// and tabs. Browsers and XML parsers accept the rest unchanged.
inline std::string well_formed(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const auto byte = [&](std::size_t n) {
      return i + n < text.size() ? static_cast<unsigned char>(text[i + n]) : 0u;
    };
    const unsigned first = byte(0);
    const std::size_t length = first < 0x80   ? 1
                               : first < 0xc2 ? 0
                               : first < 0xe0 ? 2
                               : first < 0xf0 ? 3
                               : first < 0xf5 ? 4
                                              : 0;
    bool good = length > 0 && (first >= 0x20 || first == '\n' || first == '\t') && first != 0x7f;
    for (std::size_t n = 1; n < length; ++n) good = good && (byte(n) & 0xc0) == 0x80;
    // An overlong encoding, a surrogate, beyond the last character, or U+FFFE and U+FFFF.
    const unsigned second = byte(1);
    good = good && !(first == 0xe0 && second < 0xa0) && !(first == 0xed && second >= 0xa0) &&
           !(first == 0xf0 && second < 0x90) && !(first == 0xf4 && second >= 0x90) &&
           !(first == 0xef && second == 0xbf && byte(2) >= 0xbe);
    if (!good) {
      out += "\xef\xbf\xbd";
      ++i;
      continue;
    }
    out += text.substr(i, length);
    i += length;
  }
  return out;
}

/// The same with <, >, & and quotes as entities.
inline std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : well_formed(text)) switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  return out;
}

}  // namespace attn::report
